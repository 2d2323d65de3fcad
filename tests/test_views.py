"""Shapes and axes: views, slices, joins, copies, and what they alias."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fx2relax.testing import assert_matches_eager

Many = tuple[torch.Tensor, ...]


def _ordered(*shape: int) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    return torch.arange(float(count)).view(shape)


def _shapes(x: torch.Tensor) -> Many:
    """Of a tensor of 2 x 3 x 4: each result is computed with, so that none is an alias."""
    return (
        x.view(-1, 4) * 2,
        x.reshape(3, -1) * 2,
        x.flatten(1) * 2,
        x.unflatten(-1, (2, -1)) * 2,
        x.permute(2, 0, 1) * 2,
        x.transpose(0, -1) * 2,
        x.movedim(0, -1) * 2,
        x.swapaxes(1, 2) * 2,
        x.mT * 2,
        x[:, None, ..., None].squeeze() * 2,
        x.unsqueeze(-1).squeeze(-1) * 2,
        x[:1].squeeze(0).squeeze(0) * 2,
        x[:1, :1].squeeze((0, -1)) * 2,
        x[:1].expand(5, -1, 4) * 2,
        x[0].expand(2, 3, 4) * 2,
        x.unfold(-1, 2, 1) * 2,
        x.diagonal(1, -2, -1) * 2,
        x.diagonal(-1, 0, 2) * 2,
        x.ravel() * 2,
        x.view_as(x) * 2,
        torch.atleast_3d(x[0, 0]) * 2,
        x.as_strided((2, 2), (5, 3), 1) * 2,
    )


def _copies(x: torch.Tensor) -> Many:
    return (
        x.repeat(2, 1, 3),
        x.repeat(2, 1, 1, 2),
        x.tile(2),
        x.tile(2, 1, 1, 1),
        x.repeat_interleave(2, 1),
        x.repeat_interleave(3),
        x.roll(1),
        x.roll((1, -5), (0, -1)),
        x.flip(0, -1),
        x.fliplr() + x.flipud(),
        x.rot90(1, (1, 2)),
        x.rot90(-1, (0, 2)),
        torch.diag(x[0, 0]),
        torch.diag(x[0], 1),
        torch.diag_embed(x[0], 1, 0, -1),
        torch.block_diag(x[0], x[1], x[0, 0]),
        torch.cartesian_prod(x[0, 0], x[0, 1]),
        *torch.meshgrid(x[0, 0], x[:, 0, 0], indexing="xy"),
        x.clone(memory_format=torch.contiguous_format),
        torch.tril(x, -1),
        torch.triu(x, 1),
    )


def _parts(x: torch.Tensor) -> Many:
    return (
        *(p * 2 for p in x.split(3, -1)),
        *(p * 2 for p in x.split([1, 2], 1)),
        *(p * 2 for p in x.chunk(3, 2)),
        *(p * 2 for p in x.tensor_split(3, -1)),
        *(p * 2 for p in x.tensor_split((1, 2), 1)),
        *(p * 2 for p in x.unbind(1)),
        *(p * 2 for p in x.hsplit(3)),
        x.narrow(1, -2, 2) * 2,
        x.select(-1, -2) * 2,
        x[1] * 2,
        x[-1, ..., 0] * 2,
        x[:, 1:] * 2,
        x[:, -2:-1] * 2,
        x[..., ::2] * 2,
        x[..., 1:100:3] * 2,
        x[5:] * 2,
        x[:, 2:1] * 2,
        x[:, None, 1, None] * 2,
    )


def _joins(x: torch.Tensor) -> Many:
    return (
        torch.cat([x, x * 2, x[:, :1]], 1),
        torch.cat([x, x], -1),
        torch.cat([x[:0], x]) * 2,
        torch.cat([x.new_zeros(0), x]) * 2,
        torch.stack([x, x * 3], -1),
        torch.stack([x, x], 1),
        torch.hstack([x, x]),
        torch.vstack([x[0], x[1]]),
        torch.dstack([x, x]),
        torch.column_stack([x[:, 0], x[:, 1]]),
        torch.concat([x[0].half(), x[1]]),
    )


FAMILIES: list[Callable[[torch.Tensor], Many]] = [_shapes, _copies, _parts, _joins]


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients(family: Callable[[torch.Tensor], Many]) -> None:
    assert_matches_eager(family, _ordered(2, 3, 4), grad=True)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
def test_other_dtypes(family: Callable[[torch.Tensor], Many], dtype: torch.dtype) -> None:
    assert_matches_eager(family, _ordered(2, 3, 4).to(dtype))


@pytest.mark.parametrize("family", [_copies, _parts, _joins])
def test_other_layouts(family: Callable[[torch.Tensor], Many]) -> None:
    assert_matches_eager(family, _ordered(4, 3, 2).permute(2, 1, 0))
    assert_matches_eager(family, _ordered(2, 4, 9)[:, 1:, ::2][..., 1:])


@pytest.mark.parametrize("family", [_copies, _joins])
def test_symbolic_sizes(family: Callable[[torch.Tensor], Many]) -> None:
    assert_matches_eager(family, _ordered(2, 3, 4), dynamic=True)


def test_views_with_symbolic_sizes() -> None:
    def function(x: torch.Tensor, n: int) -> Many:
        rows, columns = x.shape
        return (
            x.view(-1)[n:] * 2,
            x.view(columns, rows) * 2,
            x[:, n:] + 1,
            x[:, -n:] + 1,
            x[: rows - 1, n - 1 :: 2] + 1,
            x[:, :n].expand(rows, n) + 1,
            x.t().reshape(-1, rows, 1).squeeze(-1) * 2,
            x.unfold(1, n, 1) * 2,
            x.flip(0)[:n] * 2,
            x.repeat(n, 1),
            x[n - 1] + x[-1],
            torch.cat([x, x[:, :n]], 1),
        )

    assert_matches_eager(function, _ordered(4, 6), 2, dynamic=True, grad=True)
    assert_matches_eager(lambda x, n: (x[n:] + 1, x[:n] + 1, x[n] + 1), _ordered(4, 6), -2)


def test_numbers_and_empty_tensors() -> None:
    def function(x: torch.Tensor, e: torch.Tensor) -> Many:
        return (
            x.view(1, 1) * 2,
            x.unsqueeze(0).expand(3) * 2,
            x.repeat(2, 2),
            x.flip(0) if x.dim() else x.flip(()),
            x.roll(1),
            torch.stack([x, x]),
            x.squeeze() * 2,
            x.t() * 2,
            x.permute(()) * 2,
            e.view(3, 0, 2) * 2,
            e.reshape(0) * 2,
            e.transpose(0, 1) * 2,
            e.repeat(2, 2),
            e.flip(0, 1),
            e.roll(1, 1),
            e.unfold(1, 2, 1) * 2,
            e.sum(0)[None].expand(2, 3) * 2,
            *(p * 2 for p in e.split(2, 1)),
        )

    assert_matches_eager(function, torch.tensor(3.0), torch.ones(0, 3))


def test_results_that_are_views_of_the_input() -> None:
    def function(x: torch.Tensor) -> Many:
        return (
            x.view(-1),
            x.t(),
            x[1:, ::2],
            x[0],
            x.expand(2, 4, 6),
            x.diagonal(),
            x.unfold(0, 2, 1),
            *x.unbind(1)[:2],
            x.detach(),
            x.as_strided((2, 2), (1, 2), 3),
        )

    assert_matches_eager(function, _ordered(4, 6))
    assert_matches_eager(lambda x: (x[1:], x.mT), _ordered(2, 4, 6)[:, :3])
    assert_matches_eager(lambda x: (x.view(-1)[3:], x.t()), _ordered(4, 6), dynamic=True)


def test_results_that_are_views_of_each_other() -> None:
    def function(x: torch.Tensor) -> Many:
        y = x * 2
        return y, y.t(), y[1:], y.view(-1), y[:, ::2], x + 1

    assert_matches_eager(function, _ordered(4, 6))
    assert_matches_eager(lambda x: (x * 2).expand(3, 4, 6), _ordered(4, 6))
    assert_matches_eager(lambda x: ((x * 2)[:, 1:], (x * 2).t()), _ordered(4, 6))


def test_bits_seen_as_another_dtype() -> None:
    def function(x: torch.Tensor) -> Many:
        return x.view(torch.int32) + 1, x.view(torch.int32).view(torch.float32) * 2

    assert_matches_eager(function, _ordered(4, 6) - 9)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.float64], ids=str)
def test_bits_of_an_input_or_a_result_beside_it(dtype: torch.dtype) -> None:
    def of_a_result(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        v = x * 2
        return v, v.view(dtype), v[1:].view(dtype)

    x = torch.randn(4, 6)
    assert_matches_eager(of_a_result, x, torch_calls=True)
    assert_matches_eager(lambda x: (x.view(dtype), x[1:].view(dtype), x + 1), x, torch_calls=True)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    "windows",
    [((3, 3), 1, 1, 1), ((2, 3), (3, 2), (0, 4), (1, 2)), ((9, 11), 1, 0, 1), (4, 1, (5, 0), 7)],
    ids=str,
)
def test_columns_of_windows(windows: Many) -> None:
    def columns(*inputs: torch.Tensor) -> Many:
        return tuple(F.unfold(x, *windows) for x in inputs)

    inputs = [_ordered(*shape) for shape in ((2, 3, 9, 11), (1, 3, 9, 11), (3, 9, 11))]
    assert_matches_eager(columns, *inputs, grad=True)
    assert_matches_eager(columns, inputs[0].bfloat16(), _ordered(0, 3, 9, 11))
    assert_matches_eager(columns, inputs[0], dynamic=True)


def test_windows_that_do_not_fit() -> None:
    f = torch.compile(lambda x: F.unfold(x, 5), backend="relax")
    with pytest.raises(RuntimeError, match="sliding blocks"):
        f(torch.ones(1, 2, 4, 9))


def test_pixels_and_channels() -> None:
    def function(x: torch.Tensor) -> Many:
        return (
            F.pixel_shuffle(x, 2),
            F.pixel_unshuffle(x, 2),
            F.channel_shuffle(x, 2),
            F.unfold(x, (2, 3), 2, 1, 1),
            F.fold(F.unfold(x, 2, padding=1), (4, 6), 2, padding=1),
        )

    assert_matches_eager(function, _ordered(2, 8, 4, 6), grad=True)
    assert_matches_eager(function, _ordered(2, 8, 4, 6).to(memory_format=torch.channels_last))
    assert_matches_eager(lambda x: F.unfold(x, 2), _ordered(2, 8, 4, 6), dynamic=True)
    for shuffle in (F.pixel_shuffle, F.pixel_unshuffle):
        assert_matches_eager(lambda x, f=shuffle: f(x, 2), _ordered(2, 4, 6, 6), dynamic=True)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: torch.outer(x.flatten(), x.flatten()[:3]).flip(-1),
        lambda x: x.roll(1, 0).flatten().flip(0),
        lambda x: x.rot90().reshape(8, 2).flip(0).flip(1).reshape(-1),
        lambda x: x.flatten().unfold(0, 5, 2).flip(1).sum(0),
    ],
    ids=["outer", "roll", "rot90", "unfold"],
)
def test_indices_that_run_backwards(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    # TVM's map of iterators loses where such an index starts.
    assert_matches_eager(view, torch.randn(4, 4, dtype=torch.float64))


def test_windows_of_one_batch_for_many():
    def fn(grad):
        return torch.ops.aten.unfold_backward(grad, [5, 20], 1, 10, 2)

    assert_matches_eager(fn, torch.randn(1, 6, 10))
    assert_matches_eager(fn, torch.randn(5, 6, 10))


def test_what_is_left_of_no_elements():
    def fn(x, y):
        return x.reshape(-1) * 2, y.view(-1, 3) + 1, y.flatten() + 1, y[:, :, 1:].reshape(-1)

    assert_matches_eager(fn, torch.zeros(5, 0), torch.zeros(5, 0, 3), dynamic=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_gradient_of_a_view_of_an_expanded_leaf(dynamic: bool) -> None:
    """The elements that share memory are still elements of their own to autograd."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.erf(x), x.expand_as(x), x[:, 1:].transpose(0, 1)

    compiled = torch.compile(fn, backend="relax", dynamic=dynamic)
    for n in (3, 4):
        grads = []
        for run in (fn, compiled):
            torch.manual_seed(n)
            x = torch.randn(2, 1, n).expand(2, 3, n).detach().requires_grad_()
            sum((y * torch.randn(y.shape)).sum() for y in run(x)).backward()
            grads.append(x.grad)
        torch.testing.assert_close(grads[1], grads[0])


def test_strides_of_axes_of_one_element_and_of_nothing() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x + 1).t(), x.sum(0, keepdim=True).t(), (x * 2)[:, None].transpose(0, 2), y.log()

    x, y = torch.randn(1, 3), torch.randn(1, 0, 3)
    for dynamic in (False, True):
        compiled = torch.compile(fn, backend="relax", dynamic=dynamic)(x, y)
        assert [t.stride() for t in compiled] == [t.stride() for t in fn(x, y)]


def _strided_calls() -> list[tuple[Callable[[torch.Tensor], torch.Tensor], list[torch.Tensor]]]:
    big = torch.arange(8.0)
    return [
        (lambda x: x.as_strided((2, 2), (2, 1), 0) * 2, [big[:3]]),
        (lambda x: x.as_strided((4,), (1,), 0) + 0, [torch.arange(4.0), big[2:6]]),
        (lambda x: x.as_strided((2,), (2,)) + 0, [torch.arange(4.0), big[2:6]]),
    ]


@pytest.mark.parametrize("case", range(3))
def test_as_strided_of_more_than_the_tensor(case: int) -> None:
    """What lies beside a view in memory is read as well."""
    fn, calls = _strided_calls()[case]
    compiled = torch.compile(fn, backend="relax")
    for x in calls:
        assert torch.equal(compiled(x), fn(x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_as_strided_out_of_bounds(dynamic: bool) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x * 1).as_strided((4,), (1,), 0)

    compiled = torch.compile(fn, backend="relax", dynamic=dynamic)
    for size in (4, 7):
        assert torch.equal(compiled(torch.ones(size)), fn(torch.ones(size)))
    with pytest.raises(RuntimeError, match="out of bounds"):
        compiled(torch.ones(2))


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x > 1,
        lambda x: (x.sin() + 1) * x,
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: x.int() // 2,
        torch.frexp,
        torch.zeros_like,
        F.mish,
        lambda x: x.unsqueeze(0) + 1,
        lambda x: torch.maximum(x, x.sum()),
    ],
)
@pytest.mark.parametrize(
    "x",
    [
        torch.ones(1, 4).t(),
        torch.ones(2, 1, 3).permute(2, 1, 0),
        torch.empty_permuted([5, 3, 1], [2, 0, 1]).fill_(1),
        torch.ones(1, 1, 3, 4).permute(3, 0, 2, 1),
    ],
    ids=lambda x: str(tuple(x.stride())),
)
def test_elementwise_strides_of_axes_of_one_element(
    fn: Callable[[torch.Tensor], object], x: torch.Tensor
) -> None:
    assert_matches_eager(fn, x, every_stride=True)
