"""Writing at indices: replaced, added, multiplied, reduced, filled."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fx2relax.testing import assert_matches_eager

pytestmark = pytest.mark.sweep

Many = tuple[torch.Tensor, ...]
NAN, INF = float("nan"), float("inf")
AT = torch.tensor([[0, 2, 1, 0], [2, 2, 0, 0]])


def _values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    return (x * 3).to(dtype)


def _scattered(x: torch.Tensor, at: torch.Tensor, src: torch.Tensor) -> Many:
    unique = at[:1, :3]
    return (
        x.scatter(0, unique, src[:1, :3]),
        x.scatter(-1, unique.T, src[:3, :1]),
        x.scatter(1, at[:, 1:2], 7),
        x.scatter_add(0, at, src[:2]),
        x.scatter_add(1, at.T[:3], src[:3, :2]),
        x.scatter(0, at, src[:2], reduce="add") if not src.requires_grad else x,
        x.scatter(0, at, 2, reduce="multiply") if not src.requires_grad else x,
    )


@pytest.mark.filterwarnings("ignore:The reduce argument:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_scattered(dtype: torch.dtype) -> None:
    x, src = _values(3, 4, dtype=dtype), _values(4, 4, dtype=dtype)
    assert_matches_eager(_scattered, x, AT, src)
    assert_matches_eager(_scattered, x.T.contiguous().T, AT.T.contiguous().T, src)


@pytest.mark.filterwarnings("ignore:The reduce argument:UserWarning")
def test_scattered_gradients_and_symbolic_sizes() -> None:
    x, src = _values(3, 4).requires_grad_(), _values(4, 4).requires_grad_()
    assert_matches_eager(_scattered, x, AT, src, grad=True)
    assert_matches_eager(_scattered, x.detach(), AT, src.detach(), dynamic=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int32])
@pytest.mark.parametrize("include", [True, False])
def test_reduced(dtype: torch.dtype, include: bool) -> None:
    def function(x: torch.Tensor, at: torch.Tensor, src: torch.Tensor) -> Many:
        kinds = ("sum", "prod", "mean", "amax", "amin")
        return tuple(x.scatter_reduce(0, at, src, k, include_self=include) for k in kinds)

    x, src = _values(3, 4, dtype=dtype), _values(2, 4, dtype=dtype)
    assert_matches_eager(function, x, AT, src)


@pytest.mark.parametrize("kind", ["sum", "prod", "mean", "amax", "amin"])
def test_reduced_gradients(kind: str) -> None:
    def function(x: torch.Tensor, at: torch.Tensor, src: torch.Tensor) -> Many:
        return (
            x.scatter_reduce(0, at, src, kind),
            x.scatter_reduce(0, at, src, kind, include_self=False),
        )

    assert_matches_eager(function, _values(3, 4), AT, _values(2, 4), grad=True)


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
def test_reduced_with_nan_and_infinities() -> None:
    x = torch.tensor([1.0, NAN, 3.0, -INF])
    at = torch.tensor([0, 0, 1, 2, 2, 3, 3])
    src = torch.tensor([NAN, 2.0, 5.0, INF, NAN, 0.0, -0.0])

    def function(x: torch.Tensor, at: torch.Tensor, src: torch.Tensor) -> Many:
        kinds = ("sum", "mean", "amax", "amin")
        return (
            *(x.scatter_reduce(0, at, src, k) for k in kinds),
            *(x.scatter_reduce(0, at, src, k, include_self=False) for k in kinds),
            x.index_reduce(0, at, src, "amax"),
            x.index_reduce(0, at, src, "amin", include_self=False),
        )

    assert_matches_eager(function, x, at, src)


def _written(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> Many:
    """Into 4 x 3, at three indices without and with repetition, what is 3 x 3."""
    again = torch.tensor([1, 1, -4])
    a, b, c = x.clone(), x.clone(), x.clone()
    a[i] = y
    b[i, 1] = y[0]
    c[:, i[1:]] = y[0, 0]
    return (
        a,
        b,
        c,
        x.index_put((i,), y),
        x.index_put((again,), y, accumulate=True),
        x.index_put((again, i.abs() % 3), y[1], accumulate=True),
        x.index_add(0, i.abs(), y, alpha=2),
        x.index_add(1, i.abs() % 3, y[:1].expand(4, 3)),
        x.index_copy(0, i.abs(), y),
        x.index_fill(0, i, 5),
        x.index_fill(-1, again[:2], y[0, 0]),
        x.put(i * 2, y[0]),
        x.put(again, y[0], accumulate=True),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_written(dtype: torch.dtype) -> None:
    inputs = _values(4, 3, dtype=dtype), torch.tensor([3, 0, -2]), _values(3, 3, dtype=dtype)
    assert_matches_eager(_written, *inputs)


def test_written_gradients_and_symbolic_sizes() -> None:
    inputs = _values(4, 3), torch.tensor([3, 0, -2]), _values(3, 3)
    assert_matches_eager(_written, *inputs, grad=True)
    assert_matches_eager(_written, *inputs, dynamic=True)


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.parametrize("kind", ["prod", "mean", "amax", "amin"])
def test_slices_reduced(kind: str) -> None:
    def function(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> Many:
        return (
            x.index_reduce(0, i, y, kind),
            x.index_reduce(0, i, y, kind, include_self=False),
            x.index_reduce(-1, i, y.T[: len(i)].T[[0, 0, 0, 0]], kind),
        )

    i = torch.tensor([1, 1, 0])
    assert_matches_eager(function, _values(4, 3), i, _values(3, 3))
    assert_matches_eager(function, _values(4, 3, dtype=torch.int64), i, _values(3, 3).long())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_masks(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> Many:
        a, b, c, d = x.clone(), x.clone(), x.clone(), x.clone()
        a[mask] = 1
        b[mask[:, 0]] = y[0]
        c[:, mask[0]] = y[0, 0]
        d[mask] = y.flatten()[:12][mask.flatten()]
        return a, b, c, d, x.masked_fill(mask, 1), x.index_put((mask,), y[0, 0])

    x, y = _values(3, 4, dtype=dtype), _values(4, 4, dtype=dtype)
    mask = torch.arange(12).view(3, 4) % 2 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert_matches_eager(function, x, mask, y, grad=dtype is torch.float32)


CHOSEN = torch.tensor([True, False])
MIXED: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (lambda x, m, i: x.__setitem__((m, i), 0.0), (CHOSEN, torch.tensor([-2, 1]))),
    (lambda x, m, i: x.__setitem__((m, i), 0.0), (~CHOSEN | CHOSEN, torch.tensor([-1, 1]))),
    (lambda x, m, i: x.__setitem__((m, i), 0.0), (CHOSEN, torch.tensor([[2], [-2]]))),
    (lambda x, m, i: x.__setitem__((m, i), 0.0), (CHOSEN ^ CHOSEN, torch.tensor([-2]))),
    (lambda x, m, i: x.__setitem__((m, i), 0.0), (CHOSEN, torch.tensor([True, False, True]))),
    (lambda x, i, m: x.__setitem__((i, m), 0.0), (torch.tensor([-2]), torch.tensor([True] * 3))),
    (lambda x, m, y: x.__setitem__(m, y[y > 0]), (CHOSEN | ~CHOSEN, torch.tensor([[0.0, 2, 0]]))),
    (lambda x, m, y: x.__setitem__(m, y), (CHOSEN, torch.tensor(2.5, dtype=torch.float64))),
    (lambda x, m, y: x.__setitem__(m, y), (CHOSEN, torch.ones(1, 1, dtype=torch.int64))),
    (lambda x, m, y: x[:, :0].__setitem__(m, y), (CHOSEN, torch.ones(0))),
    (lambda x, m: x[:, :0].__setitem__(m, x[:, :0][m] + 1), (CHOSEN,)),
    (lambda x, m: x[None].__setitem__((slice(0, 1), m), x[None][:, m] + 1), (~CHOSEN | CHOSEN,)),
    (
        lambda x, m, i, y: x.index_put_((m, i), y, accumulate=True),
        (CHOSEN, torch.tensor([-2, 1]), torch.tensor([3.0, 4.0])),
    ),
]


@pytest.mark.parametrize(("write", "given"), MIXED)
def test_masks_beside_other_indices(write: Callable[..., Any], given: tuple[Any, ...]) -> None:
    def function(x: torch.Tensor, *given: Any) -> torch.Tensor:
        write(x, *given)
        return x

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert_matches_eager(function, _values(2, 3), *given)


WRONG: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (lambda x, m, y: x.__setitem__(m, y), (CHOSEN | ~CHOSEN, torch.ones(3, 3))),
    (lambda x, m, y: x.__setitem__(m, y), (CHOSEN, torch.ones(0, 3))),
    (lambda x, m, y: x.__setitem__(m, y), (CHOSEN | ~CHOSEN, torch.ones(2, 3).double())),
    (lambda x, m, i: x.__setitem__((m, i), 0.0), (CHOSEN | ~CHOSEN, torch.tensor([0, 1, 2]))),
    (lambda x, m, i: x.__setitem__((m, i), 0.0), (CHOSEN, torch.tensor([0, -4]))),
    (lambda x, m: x.__setitem__(m, 0.0), (torch.tensor([True] * 3),)),
    (lambda x, m: x.__setitem__((slice(0, 2), m), torch.ones(1)), (CHOSEN,)),
    (lambda x, i, j: x.__setitem__((i, j), 0.0), (torch.zeros(0).long(), torch.tensor([0, 1]))),
    (lambda x, i: x[:, :0].__setitem__((0, i), 0.0), (torch.tensor([0]),)),
    (
        lambda x, m, i, y: x.index_put_((m, i), y),
        (CHOSEN, torch.tensor([0, 1]), torch.ones(3)),
    ),
]


@pytest.mark.parametrize(("write", "given"), WRONG)
def test_masks_that_do_not_fit(write: Callable[..., Any], given: tuple[Any, ...]) -> None:
    with pytest.raises((IndexError, RuntimeError)) as eager:
        write(_values(2, 3), *given)
    torch._dynamo.reset()
    start = re.split(r" of shape| with| -4|\[", str(eager.value))[0]
    with pytest.raises(eager.type, match=start):
        torch.compile(write, backend="relax")(_values(2, 3), *given)


def test_slices_of_a_tensor_replaced() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Many:
        return (
            x.slice_scatter(y[:2], 0, 1, 3),
            x.slice_scatter(y[:, :2], -1, 0, 4, 2),
            x.select_scatter(y[:, 0], 1, -1),
            x.diagonal_scatter(y[0, :3], 1),
            torch.as_strided_scatter(x, y[:2, :2], (2, 2), (4, 1), 1),
        )

    assert_matches_eager(function, _values(4, 4), _values(4, 4) + 1, grad=True)
    assert_matches_eager(function, _values(4, 4).T, _values(4, 4) + 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, torch.bool])
def test_slices_of_a_tensor_replaced_from_another_dtype(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Many:
        return (
            x.slice_scatter(y[:2], 0, 1, 3),
            x.select_scatter(y[:, 0], 1, -1),
            x.diagonal_scatter(y[0, :3], 1),
            torch.as_strided_scatter(x, y[:2, :2], (2, 2), (4, 1), 1),
        )

    assert_matches_eager(function, _values(4, 4, dtype=dtype), _values(4, 4) + 1)
    assert_matches_eager(function, _values(4, 4), _values(4, 4, dtype=dtype))


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.parametrize(
    "function",
    [
        lambda x, i, y: x.index_add(0, i, y),
        lambda x, i, y: x.index_copy(0, i, y),
        lambda x, i, y: x.index_reduce(0, i, y, "prod"),
        lambda x, i, y: x.index_put((i,), y, accumulate=True),
        lambda x, i, y: x.put(i, y[:, 0]),
    ],
)
def test_a_source_of_another_dtype_is_refused(function: Callable[..., torch.Tensor]) -> None:
    given = _values(4, 3), torch.tensor([0, 2]), _values(2, 3).double()
    torch._dynamo.reset()
    for call in (function, torch.compile(function, backend="relax")):
        with pytest.raises(RuntimeError, match=r"same|match"):
            call(*given)


def test_numbers_and_empty_tensors() -> None:
    def function(x: torch.Tensor, v: torch.Tensor, none: torch.Tensor) -> Many:
        zero = none.new_zeros(())
        return (
            x.scatter(0, zero, 2.0),
            x.scatter_add(0, zero, x),
            x.index_fill(0, zero, 3.0),
            v.scatter(0, none[None], 1.0),
            v.scatter_add(0, none[None], v[:, :0]),
            v.index_add(0, none, v[:0]),
            v.index_put((none,), v[:0]),
            v.index_copy(1, none, v[:, :0]),
            v.put(none, v[0, :0]),
        )

    none = torch.zeros(0, dtype=torch.int64)
    assert_matches_eager(function, torch.tensor(2.0), _values(3, 4), none)


def test_repeated_indices_add_up_over_many_elements() -> None:
    x, i = torch.zeros(5, 64), torch.arange(6000) % 5
    function = lambda x, i, y: (x.index_add(0, i, y), x.index_put((i,), y, True))  # noqa: E731
    assert_matches_eager(function, x, i, torch.ones(6000, 64))
