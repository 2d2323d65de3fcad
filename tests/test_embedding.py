"""Embeddings and bags of them: rows by index, sums, means and maxima, and the table's gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fx2relax
from fx2relax.testing import assert_matches_eager

TABLE = torch.randn(10, 6, generator=torch.Generator().manual_seed(0))
INDICES = torch.tensor([1, 2, 2, 9, 0, 3, 3])
OFFSETS = torch.tensor([0, 2, 2, 5])  # the second bag is empty
SHARES = torch.rand(7, generator=torch.Generator().manual_seed(1))
MODES = ("sum", "mean", "max")


def rows(table, indices):
    return (
        F.embedding(indices, table),
        F.embedding(indices.view(7, 1), table, padding_idx=2),
        F.embedding(indices.view(1, 7), table, padding_idx=-1, scale_grad_by_freq=True),
    )


def bags(mode):
    def run(table, indices, offsets):
        closed = torch.cat([offsets, offsets.new_tensor([7])])
        return (
            F.embedding_bag(indices, table, offsets, mode=mode),
            F.embedding_bag(indices, table, offsets, mode=mode, padding_idx=3),
            F.embedding_bag(indices, table, closed, mode=mode, include_last_offset=True),
            F.embedding_bag(indices[:6].view(2, 3), table, mode=mode),
        )

    return run


def test_rows():
    assert_matches_eager(rows, TABLE, INDICES, grad=True)


def test_rows_of_symbolic_sizes():
    assert_matches_eager(
        lambda t, i: (F.embedding(i, t), F.embedding(i, t, padding_idx=2)),
        *(TABLE, INDICES.view(1, 7)),
        dynamic=True,
        grad=True,
    )


@pytest.mark.parametrize("mode", MODES)
def test_bags(mode):
    assert_matches_eager(bags(mode), TABLE, INDICES, OFFSETS, grad=True)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("grad", [False, True])
def test_bags_of_strided_tables(mode, grad):
    """What eager keeps for the gradient depends on the table's strides."""
    fx2relax.reset_stats()
    wide = TABLE.repeat(1, 2)[:, ::2]
    assert_matches_eager(bags(mode), wide, INDICES, OFFSETS, grad=grad)
    assert_matches_eager(bags(mode), TABLE.mT.contiguous().mT, INDICES, OFFSETS, grad=grad)
    assert fx2relax.stats()["nodes_fallback"] == 0


@pytest.mark.parametrize("mode", MODES)
def test_bags_of_symbolic_sizes(mode):
    def run(table, indices, offsets):
        return F.embedding_bag(indices, table, offsets, mode=mode)

    assert_matches_eager(run, TABLE, INDICES, OFFSETS, dynamic=True, grad=True)


def test_weighted_samples():
    def run(table, indices, offsets, shares):
        plain = F.embedding_bag(indices, table, offsets, mode="sum", per_sample_weights=shares)
        padded = F.embedding_bag(
            indices, table, offsets, mode="sum", per_sample_weights=shares, padding_idx=2
        )
        return plain, padded

    assert_matches_eager(run, TABLE, INDICES, OFFSETS, SHARES, grad=True)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_gradients_by_frequency(mode):
    """Eager divides by another row's frequency; so do we."""

    def run(table, indices, offsets):
        return F.embedding_bag(indices, table, offsets, mode=mode, scale_grad_by_freq=True)

    assert_matches_eager(run, TABLE, INDICES, OFFSETS, grad=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes(dtype):
    def run(table, indices, offsets):
        found = [F.embedding_bag(indices, table, offsets, mode=mode) for mode in MODES]
        return (F.embedding(indices, table), *found)

    assert_matches_eager(run, TABLE.to(dtype), INDICES.int(), OFFSETS.int())


def test_no_index_at_all():
    def run(table, indices, offsets):
        return F.embedding_bag(indices, table, offsets), F.embedding(indices, table)

    assert_matches_eager(run, TABLE, INDICES[:0], torch.tensor([0, 0]), grad=True)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_rows_that_are_too_long_are_shortened_in_place(norm_type):
    def run(table, indices, offsets):
        settings = {"max_norm": 1.5, "norm_type": norm_type}
        row = F.embedding(indices[:2], table, **settings)
        return row, F.embedding_bag(indices[3:], table, offsets[:2], mode="sum", **settings)

    assert_matches_eager(run, TABLE, INDICES, OFFSETS)


def test_sparse_gradients_are_pytorchs():
    """TVM has no sparse tensors: their making is a call into PyTorch."""
    bag, embedding = nn.EmbeddingBag(10, 6, sparse=True), nn.Embedding(10, 6, sparse=True)
    assert_matches_eager(bag, INDICES, OFFSETS, grad=True, torch_calls=True)
    assert_matches_eager(embedding, INDICES, grad=True, torch_calls=True)


@pytest.mark.parametrize("index", [10, -1])
def test_an_index_outside_of_the_table(index):
    row = torch.compile(lambda t, i: F.embedding(i, t), backend="relax")
    bag = torch.compile(lambda t, i, o: F.embedding_bag(i, t, o), backend="relax")
    wrong = torch.tensor([1, index])
    row(TABLE, INDICES[:2])
    with pytest.raises(IndexError, match="index out of range in self"):
        row(TABLE, wrong)
    bag(TABLE, INDICES[:2], torch.tensor([0]))
    with pytest.raises(RuntimeError, match="expected an index within the table"):
        bag(TABLE, wrong, torch.tensor([0]))


@pytest.mark.parametrize("offsets", [[1, 2], [0, 8]])
def test_offsets_that_make_no_bags(offsets):
    run = torch.compile(lambda t, i, o: F.embedding_bag(i, t, o, mode="sum"), backend="relax")
    with pytest.raises(RuntimeError):
        F.embedding_bag(INDICES, TABLE, torch.tensor(offsets), mode="sum")
    with pytest.raises(RuntimeError, match="offsets"):
        run(TABLE, INDICES, torch.tensor(offsets))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("padding", [-1, 3])
@pytest.mark.parametrize("mode", [0, 1, 2], ids=MODES)
def test_what_is_kept_for_gradients(mode, padding):
    """As check compares it."""

    def kept(table, indices, offsets):
        arguments = table, indices, offsets, False, mode, False, None, False, padding
        return torch.ops.aten._embedding_bag(*arguments)

    assert_matches_eager(kept, TABLE, INDICES, OFFSETS)
    bag = nn.EmbeddingBag(10, 6, mode=MODES[mode])
    assert fx2relax.check(bag, INDICES, OFFSETS, grad=True).right
