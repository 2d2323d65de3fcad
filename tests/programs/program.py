"""A random program: its text, its inputs, and what running it once tells."""

from __future__ import annotations

import itertools
import linecache
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

# A program runs at each of these; a program that is to compile once sees them one after another.
SIZES: tuple[dict[str, int], ...] = (
    {"a": 3, "b": 4, "c": 5},
    {"a": 6, "b": 2, "c": 7},
    {"a": 2, "b": 8, "c": 3},
)
_numbers = itertools.count()
_NAMES = {"torch": torch, "F": functional}
_CAST = re.compile(r"(?P<made>\w+) = (?P<source>\w+)\.(?:double|float|to|type)\([\w.]*\)")


@dataclass(frozen=True)
class Input:
    """One tensor: sizes by name or number, dtype, how it lies in memory."""

    shape: tuple[str | int, ...]
    dtype: torch.dtype
    layout: str = "dense"

    def make(self, sizes: Mapping[str, int], generator: torch.Generator) -> torch.Tensor:
        """Small whole numbers and fractions that every dtype holds exactly."""
        shape = [sizes[s] if isinstance(s, str) else s for s in self.shape]
        if self.layout == "sliced" and shape:
            shape[-1] *= 2
        if self.layout == "expanded" and shape:
            shape[0] = 1
        if self.layout == "transposed":
            shape.reverse()
        if self.layout == "offset":
            shape = [1 + torch.Size(shape).numel()]
        values = torch.randint(-24, 25, shape, generator=generator)
        if self.dtype is torch.bool:
            made = values > 0
        elif self.dtype.is_floating_point:
            # No two elements are equal by intent; halves and quarters are exact in bfloat16.
            made = (values / 8).to(self.dtype)
        else:
            made = (values // 4).abs().to(self.dtype) if self.dtype is torch.uint8 else values // 4
            made = made.to(self.dtype)
        return self._laid(made, sizes)

    def _laid(self, made: torch.Tensor, sizes: Mapping[str, int]) -> torch.Tensor:
        shape = [sizes[s] if isinstance(s, str) else s for s in self.shape]
        if self.layout == "sliced" and shape:
            return made[..., ::2]
        if self.layout == "expanded" and shape:
            return made.expand(shape)
        if self.layout == "transposed":
            return made.permute(tuple(reversed(range(made.dim()))))
        if self.layout == "offset":
            return made[1:].view(shape)
        return made


@dataclass
class Program:
    """A function of `inputs`; `exact` tells of each variable whether rounding touched it."""

    seed: int
    inputs: list[Input]
    lines: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    exact: dict[str, bool] = field(default_factory=dict)
    grad: bool = False

    def arguments(self, sizes: Mapping[str, int], wide: bool = False) -> list[torch.Tensor]:
        """Inputs at some sizes, always the same; `wide` gives floats as float64."""
        generator = torch.Generator().manual_seed(self.seed)
        found = []
        for given in self.inputs:
            tensor = given.make(sizes, generator)
            if wide and tensor.is_floating_point():
                tensor = tensor.double()
            leaf = self.grad and tensor.is_floating_point() and given.layout != "expanded"
            found.append(tensor.detach().requires_grad_() if leaf else tensor)
        return found

    @property
    def names(self) -> list[str]:
        """The parameters' names."""
        return [f"x{i}" for i in range(len(self.inputs))]

    def rounding(self, sizes: Mapping[str, int]) -> float:
        """A rounding of the largest value on the way, in the coarsest dtype on the way.

        An output may be wider than what it was computed from, or a small difference of it.
        """
        found = variables(self, self.lines, sizes) or {}
        floats = [t.detach() for t in found.values() if t.is_floating_point() and t.numel()]
        largest = max((float(t.abs().max()) for t in floats), default=1.0)
        return max(largest, 1.0) * max((torch.finfo(t.dtype).eps for t in floats), default=0.0)

    def source(self, wide: bool = False) -> str:
        """The function as Python text; `wide` computes in float64 whatever it names."""
        lines = self._casts_that_copy() if wide else self.lines
        body = "".join(f"    {line}\n" for line in lines)
        returned = ", ".join(self.outputs) + ("," if len(self.outputs) == 1 else "")
        text = f"def program({', '.join(self.names)}):\n{body}    return ({returned})\n"
        if wide:
            for name in ("float16", "bfloat16", "float32"):
                text = text.replace(f"torch.{name}", "torch.float64")
            text = text.replace(".float()", ".double()")
        return text

    def _casts_that_copy(self) -> list[str]:
        """The lines; a cast to another dtype copies also where all floats are float64.

        It would give its operand there, and what writes to the one would write to the other.
        """
        found = variables(self, self.lines, SIZES[0]) or {}

        def copied(line: str) -> str:
            cast = _CAST.fullmatch(line)
            if cast and found and found[cast["made"]].dtype is not found[cast["source"]].dtype:
                return f"{line}.clone()"
            return line

        return [copied(line) for line in self.lines]

    def function(self, wide: bool = False) -> Callable[..., Any]:
        """The function; its lines are known to tracebacks."""
        text = self.source(wide)
        path = f"<program {self.seed}.{next(_numbers)}>"
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        space: dict[str, Any] = dict(_NAMES)
        exec(compile(text, path, "exec"), space)
        made: Callable[..., Any] = space["program"]
        return made

    def describe(self) -> str:
        """The program with its inputs, to read."""
        inputs = "\n".join(
            f"# {name}: {list(i.shape)} {i.dtype} {i.layout}"
            for name, i in zip(self.names, self.inputs, strict=True)
        )
        return f"# seed {self.seed}, gradients {self.grad}\n{inputs}\n{self.source()}"


def variables(
    program: Program, lines: Sequence[str], sizes: Mapping[str, int]
) -> dict[str, torch.Tensor] | None:
    """Every tensor after eager has run some lines; None where eager raises or leaves the numbers.

    Values that are infinite, NaN or very large say little afterwards, so such lines are not taken.
    """
    space: dict[str, Any] = dict(zip(program.names, program.arguments(sizes), strict=True))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec("\n".join(lines), dict(_NAMES), space)
    except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
        return None
    found = {k: v for k, v in space.items() if isinstance(v, torch.Tensor)}
    for value in found.values():
        if value.numel() > 4000 or value.dim() > 5:
            return None
        if value.is_floating_point() and value.numel():
            largest = value.detach().double().abs().max()
            if not largest.isfinite() or largest > 1e4:
                return None
    return found
