"""Vector loops in pieces, cut where the answer to a condition changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from tvm import tirx

from fx2relax.pipeline.pieces import Pieces
from fx2relax.pipeline.tir import TensorLoad, is_guard
from fx2relax.pipeline.vector import VECTOR
from fx2relax.testing import assert_matches_eager


def _loop(length: int, value: object) -> object:
    """`for i in length: out[i] = value(i, a, b)` with the mark of a vector loop."""
    i = tirx.Var("i", "int64")
    a, b, out = (tirx.decl_buffer((length,), "float32", name) for name in ("a", "b", "out"))
    zero, turns = tirx.const(0, "int64"), tirx.const(length, "int64")
    store = tirx.BufferStore(out, value(i, a, b), [i])  # type: ignore[operator]
    return tirx.For(i, zero, turns, tirx.ForKind.SERIAL, store, None, {VECTOR: 1})


def _flat(stmt: object) -> list[tirx.For]:
    return [x for s in stmt.seq for x in _flat(s)] if isinstance(stmt, tirx.SeqStmt) else [stmt]


def _pieces(loop: object) -> list[tuple[int, object]]:
    """The lengths of the loops that it becomes, and the values that they store."""
    loops = _flat(Pieces().stmt(loop))
    assert all(VECTOR in loop.annotations for loop in loops)
    return [(int(loop.extent.value), loop.body.value) for loop in loops]


def _between(i: tirx.Var, low: int, high: int) -> object:
    return tirx.all(tirx.const(low, "int64") <= i, i < tirx.const(high, "int64"))


@pytest.mark.parametrize("choose", [tirx.if_then_else, tirx.Select])
@pytest.mark.parametrize("seam", ["i < 5", "i <= 4", "5 > i", "4 >= i", "!(i >= 5)", "!(i > 4)"])
def test_one_seam(choose: object, seam: str) -> None:
    def value(i: tirx.Var, a: object, b: object) -> object:
        number = tirx.const
        condition = {
            "i < 5": i < number(5, "int64"),
            "i <= 4": i <= number(4, "int64"),
            "5 > i": number(5, "int64") > i,
            "4 >= i": number(4, "int64") >= i,
            "!(i >= 5)": tirx.Not(i >= number(5, "int64")),
            "!(i > 4)": tirx.Not(i > number(4, "int64")),
        }[seam]
        yes, no = tirx.BufferLoad(a, [i]), tirx.BufferLoad(b, [i - 5])
        return choose(condition, yes, no)  # type: ignore[operator]

    (first, yes), (second, no) = _pieces(_loop(12, value))
    assert (first, second) == (5, 7)
    assert (yes.source.name, no.source.name) == ("a", "b")  # type: ignore[attr-defined]
    assert isinstance(no.indices[0], tirx.Var)  # type: ignore[attr-defined]


def test_both_ends() -> None:
    def value(i: tirx.Var, a: object, b: object) -> object:
        return tirx.if_then_else(
            _between(i, 2, 9), tirx.BufferLoad(a, [i - 2]), tirx.const(0.0, "float32")
        )

    pieces = _pieces(_loop(11, value))
    assert [length for length, _ in pieces] == [2, 7, 2]
    assert [isinstance(value, TensorLoad) for _, value in pieces] == [False, True, False]


def test_what_is_not_known_is_asked_still() -> None:
    row = tirx.Var("row", "int64")

    def value(i: tirx.Var, a: object, b: object) -> object:
        inside = tirx.all(_between(i, 2, 9), row < tirx.const(3, "int64"))
        return tirx.if_then_else(inside, tirx.BufferLoad(a, [i - 2]), tirx.const(0.0, "float32"))

    pieces = _pieces(_loop(11, value))
    assert [length for length, _ in pieces] == [2, 7, 2]
    assert [is_guard(value) for _, value in pieces] == [False, True, False]


def test_a_condition_of_a_choice_is_cut_where_the_choice_has_been_made() -> None:
    """A mirrored border: the place is a choice, and whether it is inside depends on that place."""

    def value(i: tirx.Var, a: object, b: object) -> object:
        place = tirx.Select(i < tirx.const(3, "int64"), 3 - i, i - 3)
        inside = place < tirx.const(6, "int64")
        return tirx.if_then_else(inside, tirx.BufferLoad(a, [place]), tirx.BufferLoad(b, [i]))

    pieces = _pieces(_loop(12, value))
    found = [(length, value.source.name) for length, value in pieces]  # type: ignore[attr-defined]
    assert found == [(3, "a"), (6, "a"), (3, "b")]


def test_what_has_no_seam_stays() -> None:
    row = tirx.Var("row", "int64")

    def value(i: tirx.Var, a: object, b: object) -> object:
        beyond = tirx.const(12, "int64") <= i
        moved = row < i
        return tirx.if_then_else(
            tirx.any(beyond, moved), tirx.BufferLoad(a, [i]), tirx.BufferLoad(b, [i])
        )

    loop = _loop(12, value)
    assert Pieces().stmt(loop) is loop


def test_what_is_read_is_asked_still() -> None:
    """Numbers that are read may overflow, which TVM's simplifier leaves out of account."""

    def value(i: tirx.Var, a: object, b: object) -> object:
        number = tirx.Cast("int64", tirx.BufferLoad(a, [i]))
        more = number < number + i - 5
        return tirx.if_then_else(more, tirx.BufferLoad(a, [i]), tirx.BufferLoad(b, [i]))

    loop = _loop(12, value)
    assert Pieces().stmt(loop) is loop


SIZES = [(1, 1), (32, 32), (5, 40, 3), (17, 1, 16), tuple(range(1, 22))]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"{len(s)} of {sum(s)}")
def test_joined_along_the_last_axis(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    seeded = torch.Generator().manual_seed(0)
    parts = [(torch.randn(3, 4, n, generator=seeded) * 9).to(dtype) for n in sizes]
    assert_matches_eager(lambda *x: torch.cat(x, -1), *parts)
    assert_matches_eager(lambda *x: torch.cat([y + 1 for y in x], -1) * 2, *parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_and_turned(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 5, 38, generator=torch.Generator().manual_seed(0)).to(dtype)

    def turned(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * 3 + torch.cat([-right, left], -1) * 0.5

    assert_matches_eager(turned, x, grad=True)
    for pad in ((1, 1), (0, 17), (20, 3, 1, 0), (-2, 5)):
        assert_matches_eager(lambda x, pad=pad: F.pad(x, pad, value=2.5) + 1, x)
    assert_matches_eager(lambda x: F.pad(x, (3, 4, 1, 0), mode="reflect"), x)


def test_bits_of_nan_stay() -> None:
    x = torch.arange(0x7F81, 0x7F81 + 64, dtype=torch.int32).to(torch.int16).view(2, 32)
    x = x.view(torch.bfloat16)
    joined = torch.compile(lambda x, y: torch.cat([x, y], -1), backend="relax", fullgraph=True)
    expected = torch.cat([x, x], -1).view(torch.int16)
    assert torch.equal(joined(x, x.clone()).view(torch.int16), expected)
