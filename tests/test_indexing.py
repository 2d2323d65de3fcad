"""Reading at indices: advanced, boolean, negative and out of range."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fx2relax.testing import assert_matches_eager

Many = tuple[torch.Tensor, ...]
ROWS, COLUMNS = torch.tensor([2, 0, -1, 2]), torch.tensor([[1], [-3], [0]])


def _ordered(*shape: int) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    return torch.arange(float(count)).view(shape)


def _indexed(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> Many:
    """Of a tensor of 3 x 4 x 5, at indices of 4 and of 3 x 1."""
    return (
        x[i],
        x[:, i],
        x[..., i],
        x[i, :3],
        x[i, j],
        x[i[None], :, j],
        x[:, j, i],
        x[i, ..., 0],
        x[j],
        x[i, None, j[0]],
        x[i[:, None], j[:, 0], :],
        x[0, i],
        x[:, 1:, i],
        x[[0, 2]],
        x[[1, -1], [0, 1]],
        x[i.to(torch.int32)],
    )


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_advanced(dtype: torch.dtype) -> None:
    x = _ordered(3, 4, 5).to(dtype)
    assert_matches_eager(_indexed, x, ROWS, COLUMNS, grad=dtype is torch.float32)


def test_advanced_with_symbolic_sizes_and_other_layouts() -> None:
    assert_matches_eager(_indexed, _ordered(3, 4, 5), ROWS, COLUMNS, dynamic=True)
    assert_matches_eager(_indexed, _ordered(5, 4, 3).permute(2, 1, 0), ROWS, COLUMNS)


def _picked(x: torch.Tensor, i: torch.Tensor) -> Many:
    positive = i.abs()
    wide = positive[:, None].expand(4, 4)
    return (
        x.index_select(0, positive),
        x.index_select(-1, positive),
        x.index_select(1, positive[1]),
        x.gather(0, wide),
        x.gather(1, wide[:3]),
        x.gather(-1, wide[:2, :1]),
        x.take(i),
        x.take(wide),
        x.take_along_dim(wide[:3], 1),
        torch.select(x, 0, -1) * 2,
        x[positive],
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_permuted_indices_decide_on_strides(dynamic: bool) -> None:
    def fn(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> Many:
        i, j = i.permute(2, 0, 1), j.permute(2, 0, 1)
        return x[0, 0][j], x[i], x[:, i], x[..., j], x[i, :, j], x[:, i, j]

    i, j = torch.randint(-3, 3, (2, 3, 4)), torch.randint(-5, 5, (2, 3, 4))
    assert_matches_eager(fn, _ordered(3, 5, 5), i, j, grad=True, dynamic=dynamic)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.bool])
def test_picked(dtype: torch.dtype) -> None:
    x = _ordered(3, 4).to(dtype)
    assert_matches_eager(_picked, x, ROWS, grad=dtype is torch.float32)
    assert_matches_eager(_picked, x.T.contiguous().T, ROWS, dynamic=True)


def test_numbers_and_empty_tensors() -> None:
    def function(x: torch.Tensor, v: torch.Tensor, none: torch.Tensor) -> Many:
        zero = none.new_zeros(())
        return (
            x.index_select(0, zero),
            x.gather(0, zero),
            x.take(zero),
            v[none],
            v[:, none],
            v.index_select(1, none),
            v.gather(0, none[None]),
            v.take(none),
            v[:0][none],
        )

    inputs = torch.tensor(2.0), _ordered(3, 4), torch.zeros(0, dtype=torch.int64)
    assert_matches_eager(function, *inputs, grad=True)


OUTSIDE: list[tuple[Callable[..., torch.Tensor], type[Exception]]] = [
    (lambda x, i: x[i], IndexError),
    (lambda x, i: x[:, i], IndexError),
    (lambda x, i: x[i, i], IndexError),
    (lambda x, i: x.index_select(0, i), IndexError),
    (lambda x, i: x.gather(0, i[:, None]), RuntimeError),
    (lambda x, i: x.take(i * 8), IndexError),
    (lambda x, i: torch.nn.functional.embedding(i, x), IndexError),
    (lambda x, i: x.scatter(0, i[:, None], 1.0), RuntimeError),
    (lambda x, i: x.index_add(0, i, x[: len(i)]), IndexError),
    (lambda x, i: x.index_copy(0, i, x[: len(i)]), IndexError),
    (lambda x, i: x.index_fill(0, i, 1.0), IndexError),
    (lambda x, i: x.index_put((i,), x[0]), IndexError),
    (lambda x, i: x.put(i * 8, x[0, : len(i)]), IndexError),
]


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("function", "kind"), OUTSIDE)
@pytest.mark.parametrize("outside", [3, -4])
def test_out_of_range(
    function: Callable[..., torch.Tensor], kind: type[Exception], outside: int
) -> None:
    x, i = _ordered(3, 3), torch.tensor([0, 1])
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="relax")
    torch.testing.assert_close(compiled(x, i), function(x, i))
    wrong = torch.tensor([0, outside])
    with pytest.raises((IndexError, RuntimeError)) as eager:
        function(x, wrong)
    with pytest.raises(eager.type):
        compiled(x, wrong)


def test_a_mask_with_a_known_count() -> None:
    def function(x: torch.Tensor, mask: torch.Tensor) -> Many:
        rest = torch.where(mask, x, -x)
        return x.masked_fill(mask, 7.0), rest, x.masked_scatter(mask, -x), x * mask

    mask = _ordered(3, 4) % 3 == 0
    assert_matches_eager(function, _ordered(3, 4), mask, grad=True)
    assert_matches_eager(function, _ordered(3, 4), mask[0], dynamic=True)
    assert_matches_eager(lambda x, m: x.masked_scatter(m, x), _ordered(3, 4).bfloat16(), mask)


def test_a_source_that_is_too_short() -> None:
    compiled = torch.compile(torch.Tensor.masked_scatter, backend="relax")
    with pytest.raises(RuntimeError, match="number of"):
        compiled(torch.zeros(4), torch.tensor([True] * 4), torch.ones(3))


def test_positions_unravelled() -> None:
    assert_matches_eager(lambda i: torch.unravel_index(i, (3, 4)), torch.tensor([0, 5, 11]))
