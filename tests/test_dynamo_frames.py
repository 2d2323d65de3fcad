"""What Dynamo runs for a graph stands behind no more of its wrappers than it needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

import pytest
import torch

from fx2relax import aot

WRAPPERS: list[int] = []


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


@torch.library.custom_op("fx2relax_frames::seen", mutates_args=())
def seen(x: torch.Tensor) -> torch.Tensor:
    """sin(x); it counts the callers that switch Dynamo off or on."""
    off_or_on = [f for f in _frames() if f.f_code.co_filename.endswith("_dynamo/eval_frame.py")]
    WRAPPERS.append(sum(f.f_code.co_name == "_fn" for f in off_or_on))
    return x.sin()


@seen.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _wrappers(never_slower: bool, dynamic: bool) -> int:
    torch._dynamo.reset()

    def two(x: torch.Tensor) -> torch.Tensor:
        return seen(x) * 2

    options = {"never_slower": never_slower}
    fast = torch.compile(two, backend="relax", options=options, dynamic=dynamic)
    x = torch.randn(16)
    fast(x)
    WRAPPERS.clear()
    for _ in range(8):
        torch.testing.assert_close(fast(x), x.sin() * 2)
    (wrappers,) = set(WRAPPERS)
    return wrappers


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_timed_graph_has_no_more_wrappers(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FX2RELAX_NEVER_SLOWER", "1")
    assert _wrappers(True, dynamic) == _wrappers(False, dynamic)


def test_a_bare_function_is_the_one_that_was_wrapped() -> None:
    def function(x: int) -> int:
        return x + 1

    wrapped = aot.untraced(function)
    assert wrapped is not function
    assert aot.bare(wrapped) is function
    assert aot.bare(function) is function
