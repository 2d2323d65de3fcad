"""Vector loops whose middle reads in a row what their ends read within borders."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import tvm
from torch import Tensor
from tvm import tirx

from fx2relax.pipeline.interiors import Interiors
from fx2relax.pipeline.tir import Substitute, holds
from fx2relax.pipeline.vector import VECTOR
from fx2relax.testing import assert_matches_eager

NAN, INF = float("nan"), float("inf")


def _number(value: int) -> Any:
    return tirx.const(value, "int64")


def _within(index: Any, size: int, written: str) -> Any:
    """An index moved into 0 to size - 1, in the ways in which the simplifier writes it."""
    if written == "low first":
        return tirx.min(tirx.max(index, _number(0)), _number(size - 1))
    if written == "high first":
        return tirx.max(_number(0), tirx.min(_number(size - 1), index))
    return tirx.max(tirx.min(index + 1, _number(size)), _number(1)) - 1


def _window(
    turns: int, size: int, step: int, before: int, taps: int, spread: int, written: str
) -> Any:
    """`for t in taps: for i in turns: out[i] = x[within(i * step + t * spread - before)]`."""
    i, t = tirx.Var("i", "int64"), tirx.Var("t", "int64")
    x, out = (tirx.decl_buffer((n,), "float32", name) for n, name in ((size, "x"), (turns, "out")))
    index = _within(i * step + t * spread - before, size, written)
    store = tirx.BufferStore(out, tirx.BufferLoad(x, [index]), [i])
    serial = tirx.ForKind.SERIAL
    inner = tirx.For(i, _number(0), _number(turns), serial, store, None, {VECTOR: 1})
    return tirx.For(t, _number(0), _number(taps), serial, inner)


def _loops(outer: Any) -> list[Any]:
    body = outer.body
    return list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]


def _reads(outer: Any, tap: int) -> list[tuple[int, int]]:
    """The turns and what each reads, in order."""
    known, read = tvm.sym.Analyzer(), []
    for loop in _loops(outer):
        assert VECTOR in loop.annotations
        store = loop.body
        for turn in range(int(loop.extent.value)):
            values = {loop.loop_var: _number(turn), outer.loop_var: _number(tap)}
            place, index = (
                int(known.simplify(Substitute(values).expr(e)))
                for e in (store.indices[0], store.value.indices[0])
            )
            read.append((place, index))
    return read


def _clamps(loop: Any) -> bool:
    return holds(loop.body.value, lambda part: isinstance(part, (tirx.Min, tirx.Max)))


SHAPES = list(itertools.product([1, 5, 12], [1, 4, 12, 25], [1, 2, 3], [0, 1, 4], [1, 3], [1, 2]))


@pytest.mark.parametrize("written", ["low first", "high first", "one up"])
def test_every_turn_reads_what_it_read(written: str) -> None:
    for shape in SHAPES:
        loop = _window(*shape, written)
        new, taps = Interiors().stmt(loop), shape[4]
        for tap in range(taps):
            assert _reads(new, tap) == _reads(loop, tap), (shape, tap)


@pytest.mark.parametrize("written", ["low first", "high first", "one up"])
@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        ((112, 112, 1, 1, 3, 1), [1, 110, 1]),
        ((56, 112, 2, 1, 3, 1), [1, 55]),
        ((56, 112, 2, 0, 2, 1), [56]),
        ((20, 20, 1, 4, 5, 2), [4, 12, 4]),
        ((7, 7, 1, 3, 7, 1), [7]),  # no turn of it reads within the borders at all taps
    ],
    ids=str,
)
def test_the_middle_is_the_turns_without_a_border(
    shape: tuple[int, ...], lengths: list[int], written: str
) -> None:
    loops = _loops(Interiors().stmt(_window(*shape, written)))  # type: ignore[arg-type]
    assert [int(loop.extent.value) for loop in loops] == lengths
    longest = max(loops, key=lambda loop: int(loop.extent.value))
    assert _clamps(longest) == (shape[:2] == (7, 7))


def test_borders_that_data_or_no_turn_decide_stay() -> None:
    i = tirx.Var("i", "int64")
    x, at, out = (
        tirx.decl_buffer((9,), dtype, name)
        for dtype, name in (("float32", "x"), ("int64", "at"), ("float32", "out"))
    )
    for index in (
        tirx.max(i + tirx.BufferLoad(at, [i]), _number(0)),
        tirx.max(i - tirx.BufferLoad(at, [_number(0)]), _number(0)),
        tirx.min(i * i, _number(8)),
        tirx.max(_number(8) - i, _number(1)),
        tirx.min(i, _number(8) - i),
        i,
    ):
        store = tirx.BufferStore(out, tirx.BufferLoad(x, [index]), [i])
        loop = tirx.For(i, _number(0), _number(9), tirx.ForKind.SERIAL, store, None, {VECTOR: 1})
        assert Interiors().stmt(loop) is loop


def _pools(x: Tensor) -> list[Tensor]:
    return [
        F.max_pool2d(x, 3, 1, 1),
        F.max_pool2d(x, 3, 2, 1),
        F.max_pool2d(x, 5, 1, 2),
        F.max_pool2d(x, (2, 5), (1, 2), (1, 2), (1, 2), ceil_mode=True),
        *F.max_pool2d(x, 3, 1, 1, return_indices=True),
        F.pad(x, (1, 3, 2, 1), mode="replicate"),
        F.avg_pool2d(x, 3, 1, 1),
    ]


@pytest.mark.parametrize("width", [5, 14, 16, 31, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_windows(width: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 9, width).to(dtype)
    x[0, 0, ::4, ::3], x[0, 1, 3, -1], x[1, 1, :, 0] = NAN, INF, -INF
    assert_matches_eager(_pools, x, options={"never_slower": False})


def test_windows_at_sizes_that_change() -> None:
    compiled = torch.compile(_pools, backend="relax", dynamic=True, fullgraph=True)
    for height, width in ((7, 9), (12, 33), (6, 50)):
        x = torch.randn(1, 2, height, width)
        for result, expected in zip(compiled(x), _pools(x), strict=True):
            torch.testing.assert_close(result, expected)
