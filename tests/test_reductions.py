"""Reductions, cumulative operators and histograms, against eager."""

import pytest
import torch
from special_values import FLOATS, INF, INTEGERS, NAN, odd, seeded

from fx2relax.testing import assert_matches_eager

pytestmark = pytest.mark.sweep


def sums(x):
    return (
        [x.sum(), x.sum(1), x.sum((0, -1)), x.sum(-2, keepdim=True), x.sum(0, dtype=torch.float64)],
        [x.prod(), x.prod(1), x.prod(-1, keepdim=True), x.count_nonzero(), x.count_nonzero(1)],
        [x.any(), x.any(-1), x.all(), x.all(0, keepdim=True), torch.any(x, (0, 2))],
    )


def extremes(x):
    return (
        [x.max(), x.min(), x.amax((0, 1)), x.amin(-1, keepdim=True), x.aminmax(dim=1)],
        [x.max(1), x.min(-1, keepdim=True), x.argmax(), x.argmin(0), x.argmax(-1, keepdim=True)],
        [x.cummax(1), x.cummin(-1), x.cumsum(0), x.cumprod(2)],
    )


def moments(x):
    return (
        [x.mean(), x.mean(1), x.mean((0, -1), keepdim=True), x.nansum(1), x.nanmean(0)],
        [x.var(), x.var(1), x.std((0, 2)), x.var(1, correction=0), x.std(-1, keepdim=True)],
        [*torch.var_mean(x, 1), *torch.std_mean(x, (0, 1), correction=2)],
        [x.logsumexp(1), x.logsumexp((0, 2), keepdim=True), x.logcumsumexp(1)],
    )


def norms(x):
    orders = (0, 0.5, 1, 2, 3, INF, -INF, -1)
    return (
        [torch.linalg.vector_norm(x, p, dim=1) for p in orders],
        [x.norm(), x.norm(1), x.norm(dim=(0, 1)), torch.linalg.vector_norm(x, 3)],
        [torch.linalg.matrix_norm(x), torch.linalg.matrix_norm(x, 1), x.norm("fro", dim=(1, 2))],
    )


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool])
def test_sums_and_extremes(dtype):
    x = seeded(3, 4, 5, dtype=dtype)
    assert_matches_eager(sums, x if dtype in (*INTEGERS, torch.bool) else x.clamp(-1, 1))
    if dtype != torch.bool:
        assert_matches_eager(extremes, (x * 2 + torch.arange(60).view(3, 4, 5)).to(dtype))
    else:
        assert_matches_eager(lambda x: (x.max(), x.amin(1), x.max(0), x.cumsum(1)), x)


@pytest.mark.parametrize("dtype", FLOATS)
def test_moments_and_norms(dtype):
    x = seeded(3, 4, 5, dtype=dtype)
    assert_matches_eager(moments, x)
    assert_matches_eager(norms, x, tol=None if dtype != torch.float32 else 3e-5)


@pytest.mark.parametrize("fn", [extremes, moments])
def test_special_values(fn):
    values = odd() if fn is extremes else odd()[:-2]  # eager's running mean of infinities is NaN
    x = torch.stack([values.roll(k) for k in range(4)])[None].repeat(2, 1, 1)
    x[0, 0] = 1.0
    assert_matches_eager(fn, x, tol=(1e-4, 1e-4))


def test_sums_of_special_values():
    x = torch.tensor([[[INF, -INF, 1.0], [INF, 1.0, 0.0], [NAN, 1.0, 2.0], [-0.0, -0.0, -0.0]]])
    assert_matches_eager(sums, x)


GRADIENTS = {
    "sums": lambda x: (x.sum(1), x.prod(2), x.prod(), x.cumsum(0), x.cumprod(1)),
    "extremes": lambda x: (x.max(), x.amax((0, 1)), x.min(1)[0], x.cummax(1)[0], x.amin(2)),
    "moments": moments,
    "norms": lambda x: (x.norm(), x.norm(1, dim=1), torch.linalg.vector_norm(x, 3, dim=(0, 2))),
    "cumulative": lambda x: (x.logcumsumexp(1), torch.trapezoid(x, dim=1), torch.diff(x, dim=-1)),
    "order": lambda x: (
        x.median(),
        x.median(1)[0],
        x.kthvalue(2, 1)[0],
        x.sort(2)[0],
        x.topk(2)[0],
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name):
    x = seeded(3, 4, 5).clamp(-3, 3)
    assert_matches_eager(GRADIENTS[name], x, grad=True, tol=3e-5)


def test_gradients_of_products_with_zeros():
    x = seeded(3, 4)
    x[0, 1] = x[1, 2] = x[1, 3] = 0
    assert_matches_eager(lambda x: (x.prod(1), x.prod(), x.cumprod(1)), x, grad=True)


def test_gradients_of_equal_extremes():
    x = torch.tensor([[1.0, 1.0, 0.0], [2.0, 2.0, 2.0]])
    assert_matches_eager(lambda x: (x.max(), x.amax(1), x.amin(0), x.max(1)[0]), x, grad=True)


def test_half_precision_is_accumulated_in_float32():
    x = torch.ones(5000, dtype=torch.float16)

    def fn(x):
        return x.sum(), x.mean(), x.cumsum(0)[:100], x.norm(), x.var(), (x * 20).sum(), x.std()

    assert_matches_eager(fn, x)
    assert_matches_eager(fn, seeded(5000, dtype=torch.bfloat16))


@pytest.mark.parametrize("dynamic", [False, True])
def test_equal_values_deviate_by_nothing(dynamic):
    def fn(x):
        rows = (x[:, None] * 1.7).expand(-1, 7)
        return rows.std(1), rows.var((0, 1)), torch.var_mean(rows, 1)

    assert_matches_eager(fn, torch.rand(6) + 0.1, dynamic=dynamic, grad=True, tol=1e-6)


def test_large_means_spoil_no_variance():
    x = seeded(4, 500) + 10_000
    assert_matches_eager(lambda x: (x.var(1), x.std(0), torch.var_mean(x)), x, tol=1e-3)


def test_integers_add_up_in_int64():
    def fn(x, i):
        return x.sum(), x.cumsum(0), x.prod(), i.sum(), i.sum(dtype=torch.int32), i.cumprod(0)

    x = torch.full((20,), 200, dtype=torch.uint8)
    assert_matches_eager(fn, x, torch.full((4,), 2**30, dtype=torch.int32))


EMPTY = {
    "sums": sums,
    "means": lambda x: (x.mean(), x.mean(1), x.var(1), x.std(), x.logsumexp(0), x.nansum()),
    "scans": lambda x: (x.cumsum(1), x.cumprod(0), x.cummax(1), x.logcumsumexp(1)),
    "extremes": lambda x: (x.amax(2), x.argmax(2), x.min(2), x.sort(1), x.topk(0)),
}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
@pytest.mark.parametrize("name", EMPTY)
def test_empty(name):
    assert_matches_eager(EMPTY[name], torch.empty(2, 0, 3))


@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
def test_0d():
    def fn(x):
        return (
            [x.sum(), x.sum(0), x.mean(-1), x.prod(0), x.any(0), x.max(0), x.argmax(), x.amin(-1)],
            [x.var(), x.norm(), x.cumsum(0), x.cummax(0), x.sort(), x.median(), x.logsumexp(0)],
        )

    assert_matches_eager(fn, torch.tensor(2.5), fullgraph=False)


@pytest.mark.parametrize("fn", [sums, extremes, moments])
def test_layouts_and_sizes(fn):
    assert_matches_eager(fn, seeded(4, 5, 6).transpose(0, 2), dynamic=True, tol=3e-5)


def test_sizes_change():
    def fn(x):
        return x.mean(0), x.var(1), x.softmax(0), x.argmax(1), x.cumsum(0)

    compiled = torch.compile(fn, backend="relax", dynamic=True)
    for rows in (3, 8, 2):
        x = seeded(rows, 4)
        for ours, eager in zip(compiled(x), fn(x), strict=True):
            torch.testing.assert_close(ours, eager)


def test_long_rows():
    x = seeded(3, 1037)
    fn = lambda x: (x.sum(1), x.max(1), x.argmin(1), x.var(1), x.logsumexp(1), x.sum(0))  # noqa: E731
    assert_matches_eager(fn, x, tol=1e-4)
    x[1, 900] = NAN
    assert_matches_eager(fn, x, tol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_histograms(dtype):
    # Eager counts in the dtype, and bfloat16 ends at 256 in one thread.
    x = seeded(200, dtype=dtype)

    def fn(x):
        return torch.histc(x), torch.histc(x, 10, -1, 1), torch.histc(x * 0, 5), x[:0].histc(4)

    assert_matches_eager(fn, x)
    if dtype == torch.float32:
        assert_matches_eager(lambda x: torch.histc(x, 4, -1, 1), odd())


def test_a_histogram_of_nan_is_an_error():
    with pytest.raises(RuntimeError, match="not finite"):
        torch.compile(torch.histc, backend="relax")(torch.tensor([NAN, 1.0]))


def test_covariance_and_correlation():
    x, share = seeded(3, 5), seeded(5, seed=1).abs()
    times = torch.tensor([1, 2, 0, 1, 3])

    def fn(x):
        return (
            *(x.cov(), x.corrcoef(), x[0].cov(), torch.cov((x * 10).int())),
            x.cov(correction=0, fweights=times, aweights=share),
            x.cov(aweights=share),
        )

    assert_matches_eager(fn, x, grad=True)
    fn = torch.compile(lambda x: x.cov(fweights=times - 1), backend="relax", fullgraph=True)
    with pytest.raises(RuntimeError, match="fweights cannot be negative"):
        fn(x)
