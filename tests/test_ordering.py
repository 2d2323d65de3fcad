"""Sorting, selecting, searching, and distinct elements, against eager."""

import pytest
import torch
from special_values import FLOATS, INF, INTEGERS, NAN, odd, seeded

from fx2relax.testing import assert_matches_eager

pytestmark = pytest.mark.sweep


@pytest.fixture
def sizes_from_data():
    """Operators whose result's size depends on the data stay in the graph."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def distinct(*shape, dtype):
    """Numbers that are all different, so that no order of equals matters."""
    count = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(0)
    return (torch.randperm(count, generator=generator) - count // 2).view(shape).to(dtype)


def orders(x):
    return (
        [
            x.sort(),
            x.sort(0, descending=True),
            x.sort(dim=-2, stable=True),
            x.argsort(1),
            x.msort(),
        ],
        [x.topk(3), x.topk(2, 1), x.topk(2, 0, largest=False), x.topk(1, -1, sorted=True)],
        [x.kthvalue(2), x.kthvalue(3, 0, keepdim=True), x.median(), x.median(1), x.mode(0)],
    )


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32])
def test_orders(dtype):
    assert_matches_eager(orders, distinct(3, 4, 5, dtype=dtype))


def test_equals_stay_in_order():
    def fn(x):
        return (
            x.sort(dim=0, stable=True),
            x.sort(dim=1, descending=True, stable=True),
            x.argsort(dim=1, stable=True),
        )

    for dtype in (torch.int64, torch.float32, torch.uint8, torch.bool):
        assert_matches_eager(fn, seeded(6, 7, dtype=torch.int64).remainder(3).to(dtype))


def test_nan_is_the_largest():
    x = torch.tensor([[3.0, NAN, 1.0, -INF], [NAN, NAN, 0.0, INF], [1.0, 2.0, -0.5, 0.0]])

    def fn(x):
        return (
            x.sort(dim=1, stable=True),
            x.topk(2)[0],
            x.kthvalue(3),
            x.median(1)[0],
            x.nanmedian(1),
        )

    assert_matches_eager(fn, x)
    assert_matches_eager(lambda x: (x.median(), x.nanmedian(), x.max(), x.argmax()), x)


def test_modes():
    def fn(x):
        return x.mode(), x.mode(0, keepdim=True)

    assert_matches_eager(fn, seeded(5, 9, dtype=torch.int64).remainder(4))
    assert_matches_eager(fn, seeded(5, 9) > 0)


def test_quantiles():
    def fn(x, q):
        return (
            x.quantile(0.3),
            x.quantile(q, 1),
            x.nanquantile(q, 0, keepdim=True),
            x.quantile(q, 1, interpolation="nearest"),
        )

    assert_matches_eager(fn, seeded(5, 7), torch.tensor([0.0, 0.25, 0.9, 1.0]), grad=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8])
def test_searching(dtype):
    edges = torch.tensor([0, 1, 1, 3, 7]).to(dtype)
    values = torch.tensor([[0, 1, 2], [7, 8, 3]]).to(dtype)

    def fn(edges, values):
        rows = torch.stack([edges, edges + 1])
        return (
            [torch.searchsorted(edges, values), torch.searchsorted(rows, values, right=True)],
            [torch.bucketize(values, edges), torch.bucketize(values, edges, right=True)],
            [torch.searchsorted(edges, 2, out_int32=True), torch.bucketize(3, edges)],
        )

    assert_matches_eager(fn, edges, values)


def test_searching_for_nan():
    edges = torch.tensor([-1.0, 0.0, 2.0, INF])
    assert_matches_eager(lambda e, v: torch.searchsorted(e, v), edges, odd())


def test_searching_through_a_sorter():
    def fn(sequence, values):
        return torch.searchsorted(sequence, values, sorter=sequence.argsort())

    assert_matches_eager(fn, torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0.5, 2.5, 9.0]))


def test_membership():
    x = seeded(4, 5, dtype=torch.int64)
    small, large = torch.tensor([1, 3]), seeded(60, dtype=torch.int64)

    def fn(x, small, large):
        return torch.isin(x, small), torch.isin(x, large, invert=True), torch.isin(x, 3)

    assert_matches_eager(fn, x, small, large)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool])
def test_distinct_elements(sizes_from_data, dtype):
    def fn(x):
        return (
            torch.unique(x, return_inverse=True, return_counts=True),
            torch.unique_consecutive(x, return_inverse=True, return_counts=True),
        )

    assert_matches_eager(fn, seeded(3, 6, dtype=torch.int64).remainder(4).to(dtype))
    if dtype.is_floating_point:
        assert_matches_eager(fn, odd(dtype)[[11, 0, 1, 2, 11, 2, 2, 12]])


def test_distinct_elements_of_little(sizes_from_data):
    def fn(a, b):
        return torch.unique(a, return_inverse=True), torch.unique(b, return_counts=True)

    assert_matches_eager(fn, torch.tensor(2.0), torch.empty(0, 3))


def test_distinct_elements_are_used(sizes_from_data):
    assert_matches_eager(lambda x: torch.unique(x) * 2 + 1, seeded(20, dtype=torch.int64))


def test_counting(sizes_from_data):
    def fn(i, w):
        return (
            [i.bincount(), i.bincount(minlength=30), i.bincount(w), i.bincount(w.double())],
            [i.bincount(w.int()), i.to(torch.uint8).bincount(), i[:0].bincount(minlength=3)],
        )

    assert_matches_eager(fn, seeded(40, dtype=torch.int64).abs(), seeded(40))


def test_counting_negative_numbers_is_an_error(sizes_from_data):
    with pytest.raises(RuntimeError, match="non-negative"):
        torch.compile(torch.bincount, backend="relax")(torch.tensor([1, -1]))


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0)])
def test_little(shape):
    def fn(x):
        return x.sort(), x.argsort(0), x.sort(-1, True)

    assert_matches_eager(fn, torch.ones(shape))


def test_layouts_and_sizes():
    def fn(x):
        return x.sort(1), x.topk(2, 0), x.argsort(-1), x.median(0)

    assert_matches_eager(fn, distinct(4, 5, 6, dtype=torch.float32).transpose(0, 2), dynamic=True)


def test_gradients():
    def fn(x):
        return (
            [x.sort(1)[0], x.topk(2, 0)[0], x.kthvalue(2, 1)[0], x.median(), x.nanmedian(0)[0]],
            [x.mode(1)[0], x.quantile(0.4, 1), x.msort()],
        )

    assert_matches_eager(fn, seeded(4, 5), grad=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.bfloat16])
def test_the_same_of_equal_elements_as_eager(dtype):
    x = torch.randint(0, 5, (3, 2000)).to(dtype)
    assert_matches_eager(
        lambda x: (x.sort(1), x.argsort(-1), x.topk(7), x.kthvalue(3), x.median(1), x.mode(1)), x
    )


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_the_library_is_not_needed(dtype):
    x = torch.stack([torch.randperm(40), torch.randperm(40) + 3]).to(dtype)
    if dtype.is_floating_point:
        x[0, 3], x[1, 5], x[1, 6] = NAN, INF, -INF
    assert_matches_eager(
        lambda x: (x.sort(1), x.sort(0, descending=True), x.topk(3), x.kthvalue(2), x.median(1)),
        x,
        options={"library": "none"},
    )
