"""One program on both sides."""

from __future__ import annotations

import logging
import warnings
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from both_sides import Heard, values

import fx2relax
from fx2relax.testing import assert_matches_eager, assert_same_call, is_further

from .program import SIZES, Program


@dataclass
class Verdict:
    """What became of a program.

    Attributes:
        error: how it differs from eager; empty where it does not.
        upstream: whether it differs so before anything of ours has run.
        torch_calls: operators that ran in PyTorch, with their number.
        recompiled: why Dynamo compiled again for other sizes.
        fallbacks: why a graph, or a call, ran in PyTorch as a whole.
    """

    seed: int
    error: str = ""
    upstream: bool = False
    torch_calls: dict[str, int] = field(default_factory=dict)
    recompiled: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def check(program: Program, dynamic: bool = False) -> Verdict:
    """Run a program compiled and in eager; with `dynamic`, compiled once for all of `SIZES`.

    A difference that is there under ``backend="aot_eager"`` too is of PyTorch's own making.
    """
    verdict = _check(program, dynamic, "relax")
    if verdict.error:
        other = _check(program, dynamic, "aot_eager").error
        verdict.upstream = other[:_SAME] == verdict.error[:_SAME]
    return verdict


# How much of two messages is compared: what differs, not by how much.
_SAME = 40


def _check(program: Program, dynamic: bool, backend: str) -> Verdict:
    verdict = Verdict(program.seed)
    fx2relax.reset_stats()
    heard = Heard()
    loggers = [logging.getLogger(n) for n in ("fx2relax", "torch._dynamo.guards")]
    for logger in loggers:
        logger.addHandler(heard)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (_at_all_sizes if dynamic else _at_one_size)(program, verdict, backend)
    except Exception as error:  # a crash of the compiler is a difference from eager
        verdict.error = f"{type(error).__name__}: {error}"
    finally:
        for logger in loggers:
            logger.removeHandler(heard)
    verdict.torch_calls = dict(fx2relax.stats()["fallback_ops"])
    verdict.fallbacks = heard.texts
    return verdict


def _at_one_size(program: Program, verdict: Verdict, backend: str) -> None:
    arguments = program.arguments(SIZES[0])
    try:
        _compare(program, arguments, None, backend)
    except AssertionError as error:
        _compare(program, arguments, 1e30, backend)
        if _further(program, backend=backend):
            verdict.error = str(error)


def _compare(
    program: Program, arguments: list[torch.Tensor], tol: float | None, backend: str
) -> None:
    assert_matches_eager(
        program.function(),
        *arguments,
        grad=program.grad,
        torch_calls=True,
        fullgraph=False,
        tol=tol,
        backend=backend,
    )


def _at_all_sizes(program: Program, verdict: Verdict, backend: str) -> None:
    torch._dynamo.reset()
    fn = program.function()
    compiled = torch.compile(fn, backend=backend, dynamic=True)
    first = 0
    for index, sizes in enumerate(SIZES):
        arguments = program.arguments(sizes)
        try:
            assert_same_call(compiled, fn, *arguments, grad=program.grad)
        except AssertionError as error:
            assert_same_call(compiled, fn, *arguments, grad=program.grad, tol=1e30)
            if _further(program, sizes, compiled):
                verdict.error = f"at {sizes}: {error}"
                return
        graphs = fx2relax.stats()["graphs"]
        first = first or graphs
        if index and graphs > first:
            verdict.recompiled.append(f"{graphs - first} graphs more at {sizes}")
            first = graphs


def _further(
    program: Program,
    sizes: dict[str, int] = SIZES[0],
    compiled: Any = None,
    backend: str = "relax",
) -> bool:
    """Whether the values are further from float64's than 4 times eager's."""
    fn = program.function()
    if compiled is None:
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend=backend)
    exact = _results(program, program.function(wide=True), program.arguments(sizes, wide=True))
    eager = _results(program, fn, program.arguments(sizes))
    ours = _results(program, compiled, program.arguments(sizes))
    unit = program.rounding(sizes)
    return any(is_further(o, e, x, unit=unit) for o, e, x in zip(ours, eager, exact, strict=True))


def _results(program: Program, fn: Any, arguments: list[torch.Tensor]) -> list[torch.Tensor]:
    outputs, slopes = values(fn(*arguments), arguments, program.grad)
    return [*outputs, *(t.detach() for t in arguments), *slopes]
