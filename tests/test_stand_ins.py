"""What stands in for weights while a program is on trial has their sizes, and takes no memory."""

from __future__ import annotations

import torch

from fx2relax.runtime.stand_ins import StandIns


def _ready(
    kinds: list[tuple[tuple[int, ...], str]], weights: list[torch.Tensor]
) -> list[torch.Tensor]:
    return [torch.from_dlpack(tensor) for tensor in StandIns(kinds).get(weights)]


def test_each_is_the_memory_of_another_weight() -> None:
    weights = [torch.randn(8, 32), torch.randn(4, 64), torch.randn(16)]
    packed = _ready([((2, 32, 4), "float32"), ((4, 4, 16), "float32"), ((16,), "float32")], weights)
    assert [tuple(p.shape) for p in packed] == [(2, 32, 4), (4, 4, 16), (16,)]
    addresses = {p.data_ptr() for p in packed}
    assert addresses == {w.data_ptr() for w in weights}
    again = _ready([((8, 32), "float32")] * 3, weights[:2])
    assert len({p.data_ptr() for p in again}) == 2, "both are used before one is used again"


def test_what_has_no_memory_is_made_once() -> None:
    weights = [torch.randn(8, 32)]
    kinds = [((9, 32), "float32"), ((9, 32), "float32"), ((8, 32), "float64")]
    one, other, double = _ready(kinds, weights)
    assert one.data_ptr() == other.data_ptr() != weights[0].data_ptr()
    assert double.dtype == torch.float64
    assert (one > 0).all(), "of zeros the system keeps one page"


def test_indices_stay_in_range() -> None:
    weights = [torch.full((16,), 99), torch.randn(16)]
    index, mask = _ready([((16,), "int64"), ((4,), "bool")], weights)
    assert index.tolist() == [0] * 16
    assert mask.tolist() == [False] * 4


def test_a_view_is_used_from_where_it_begins() -> None:
    whole = torch.randn(64)
    (found,) = _ready([((4, 8), "float32")], [whole[32:]])
    assert torch.equal(found.flatten(), whole[32:])
    (made,) = _ready([((5, 8), "float32")], [whole[32:]])
    assert made.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
