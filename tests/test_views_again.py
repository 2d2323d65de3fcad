"""Results that share the memory of an input that is written to, at sizes that change."""

from __future__ import annotations

import pytest
import torch


def half(x):
    part = x[x.size(0) // 2 :]
    part[0] = 1
    return part


def last_chunk(x):
    part = x.chunk(2, 0)[-1]
    part[0] = 1
    return part


def chunk_of_a_written_whole(x):
    """PyTorch's own backends give other elements here."""
    x.add_(1)
    return x.chunk(2, 0)[-1]


def chunk_of_a_diagonal(x):
    part = x.diagonal().chunk(2, 0)[-1]
    part.mul_(2)
    return part, x.sum(0), x.diagonal()


def two_of_one(x):
    first, second = x.tensor_split(2, 1)
    second.add_(1)
    return first.t(), second[None], second.unfold(0, 2, 1)


def bits(x):
    x.mul_(2)
    return x.chunk(2, 0)[-1].view(torch.int32)


WRITING = [half, last_chunk, chunk_of_a_written_whole, chunk_of_a_diagonal, two_of_one, bits]
LAYOUTS = {
    "dense": lambda x: x.clone(),
    "turned": lambda x: x.t().contiguous().t(),
    "every other": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "inner": lambda x: torch.nn.functional.pad(x, (1, 2, 1, 1))[1:-1, 1:-2],
}


def assert_same_views(compiled, fn, make):
    ours, theirs = make(), make()
    results = torch.utils._pytree.tree_leaves(compiled(ours))
    expected = torch.utils._pytree.tree_leaves(fn(theirs))
    assert torch.equal(ours, theirs)
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result, wanted)
        assert result.stride() == wanted.stride()
        assert result.storage_offset() == wanted.storage_offset()
        shares = [a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
                  for a, b in ((result, ours), (wanted, theirs))]  # fmt: skip
        assert shares[0] == shares[1]
        assert result.requires_grad == wanted.requires_grad


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fn", WRITING, ids=lambda fn: fn.__name__)
def test_views_of_a_written_input(fn, layout):
    compiled = torch.compile(fn, backend="relax", dynamic=True)
    for rows, columns in ((6, 4), (4, 6), (8, 10)):
        x = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
        assert_same_views(compiled, fn, lambda x=x: LAYOUTS[layout](x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fn", [half, chunk_of_a_written_whole], ids=lambda fn: fn.__name__)
def test_gradients_of_views_of_a_written_input(fn, layout):
    compiled = torch.compile(fn, backend="relax", dynamic=True)
    for rows, columns in ((6, 4), (4, 6)):
        start, found = torch.randn(rows, columns), []
        for each in (compiled, fn):
            leaf = start.clone().requires_grad_()
            x = LAYOUTS[layout](leaf * 1)
            part = each(x)
            (part.square().sum() + x.sin().sum()).backward()
            found.append((part, x, leaf.grad))
        torch.testing.assert_close(*found)


def test_two_inputs_of_one_memory():
    """AOTAutograd traces one input in their place."""

    def fn(x, y):
        x.add_(1)
        return y.chunk(2, 0)[-1], x.chunk(2, 0)[-1]

    compiled = torch.compile(fn, backend="relax", dynamic=True)
    for rows, columns in ((6, 4), (4, 6)):
        found = []
        for each in (compiled, fn):
            base = torch.arange(float(3 * rows * columns)).reshape(rows, 3 * columns)
            x, y = base[:, ::3], base[:, : 2 * columns : 2]
            found.append((base, *each(x, y)))
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours, theirs)
