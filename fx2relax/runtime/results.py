"""The memory of a program's results, and what becomes of them: as lines of Python.

PyTorch allocates each result with the strides that eager gives it, and the program writes there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fx2relax.calling import Calling, Given, Size
from fx2relax.layouts import inverse
from fx2relax.outputs import OutputSpec
from fx2relax.runtime import boundary
from fx2relax.runtime.heap import KEPT, LARGE, in_large_pages

_COMPLEX = {"float16": "complex32", "float32": "complex64", "float64": "complex128"}


@dataclass
class Results:
    """The lines around a program's call that concern its results.

    Attributes:
        before: what allocates them.
        memory: the names of what the program is to write to.
        after: what makes the outputs of them.
        outputs: the expressions of the outputs.
        values: what the lines name besides.
    """

    before: list[str]
    memory: list[str]
    after: list[str]
    outputs: list[str]
    values: dict[str, Any]


def results(calling: Calling, outputs: Sequence[OutputSpec], kind: str = "cpu") -> Results:
    """The lines for a program's results, on the current device of a kind.

    They name the arguments ``a``, the program's own results ``returned``, and the symbols of
    `calling`.
    """
    return _Writer(calling, outputs, kind).write()


def heap_bytes(calling: Calling) -> int:
    """How many bytes of a call's results lie in the C library's heap, where sizes are known."""
    fresh = [given for given in calling.given if given.into is None]
    sizes = [_bytes(given.shape, getattr(torch, given.dtype)) for given in fresh]
    return sum(size for size in sizes if size <= KEPT)


def _bytes(shape: Sequence[Size], dtype: torch.dtype) -> int:
    """How many bytes sizes come to; none where one is a symbol."""
    known = [size for size in shape if isinstance(size, int)]
    return math.prod(known) * dtype.itemsize if len(known) == len(shape) else 0


class _Writer:
    def __init__(self, calling: Calling, outputs: Sequence[OutputSpec], kind: str) -> None:
        self.calling = calling
        self.pages = kind == "cpu"
        # What the graph returns twice is one tensor.
        self.distinct = list({id(spec): spec for spec in outputs}.values())
        self.places = [[id(d) for d in self.distinct].index(id(spec)) for spec in outputs]
        self.given = {given.index: given for given in calling.given}
        self.known = dict(calling.known)
        self.values: dict[str, Any] = {
            "empty": allocator(kind),
            "in_large_pages": in_large_pages,
            "as_real": torch.view_as_real,
            "ready": boundary.ready,
            "result": boundary.result,
            "output": boundary.output,
        }
        self.all = False  # whether a line names the list of all results

    def write(self) -> Results:
        direct = {s.index: s for s in self.distinct if self._is_plain(s)}
        before: list[str] = []
        for given in self.calling.given:
            before += self._allocated(given, direct.get(given.index))
        made = [f"o{k} = {self._made(k, spec, direct)}" for k, spec in enumerate(self.distinct)]
        return Results(
            before,
            [f"p{given.index}" for given in self.calling.given],
            [*self._list(), *made] if self.all else made,
            [f"o{place}" for place in self.places],
            self.values,
        )

    def _is_plain(self, spec: OutputSpec) -> bool:
        """Whether an output is memory that can be allocated as eager would lay it out."""
        if spec.kind != "result" or spec.index not in self.given:
            return False
        odd = spec.conjugate or spec.negated or spec.expanded is not None
        exact = not isinstance(spec.exact, int) or spec.exact in self.known
        return exact and not odd and spec.strides is None

    def _allocated(self, given: Given, spec: OutputSpec | None) -> Iterator[str]:
        """The memory of a result as the program takes it, ``p``, and the output in it, ``r``."""
        name, rank = given.index, len(given.shape)
        if given.into is not None:  # the argument itself, unless it had to be made ready
            yield f"p{name} = r{name} = v{given.into}"
            return
        if spec is None:
            yield f"p{name} = {self._empty(given.shape, strides(given.shape), given.dtype)}"
        else:
            shape, steps, dtype = list(given.shape), strides(given.shape), given.dtype
            if spec.pairs:
                shape, steps, dtype = shape[:-1], strides(shape[:-1]), _COMPLEX[dtype]
            order = inverse(spec.permutation) if spec.permutation is not None else None
            if order is not None:
                shape, steps = [shape[axis] for axis in order], [steps[axis] for axis in order]
            if spec.exact is not None:
                steps = list(self.known[spec.exact] if isinstance(spec.exact, int) else spec.exact)
            yield f"p{name} = r{name} = {self._empty(shape, steps, dtype)}"
            if spec.pairs:
                yield f"p{name} = as_real(r{name})"
            if spec.permutation is not None:
                axes = [*spec.permutation, *([rank - 1] if spec.pairs else [])]
                yield f"p{name} = p{name}.permute({tuple(axes)})"
        if any(isinstance(size, str) for size in given.shape):
            yield f"if not p{name}.numel(): p{name} = ready(p{name})"

    def _empty(self, shape: Sequence[Size], strides: Sequence[Size], dtype: str) -> str:
        self.values[dtype] = kind = getattr(torch, dtype)
        made = f"empty({spelled(shape)}, {spelled(strides)}, {dtype})"
        large = self.pages and _bytes(shape, kind) >= LARGE
        return f"in_large_pages({made})" if large else made

    def _made(self, k: int, spec: OutputSpec, direct: dict[int, OutputSpec]) -> str:
        if direct.get(spec.index) is spec:
            return f"r{spec.index}"
        if spec.kind == "input" and not (spec.conjugate or spec.negated):
            return f"a[{spec.index}]"
        self.all = True
        self.values[f"spec{k}"] = spec
        return f"output(spec{k}, results, a)"

    def _list(self) -> list[str]:
        """A line that makes the list of all results, of those that the program returned as well."""
        items, count = [], 0
        for index in range(self.calling.results):
            if index in self.given:
                items.append(f"p{index}")
            elif index in self.known:
                items.append(spelled(self.known[index]))
            else:
                items.append(f"result(returned[{count}])")
                count += 1
        lines = [f"results = [{', '.join(items)}]"]
        changed = tuple(given.index for given in self.calling.given if given.into is not None)
        return [*lines, f"own(results, a, {changed})"] if count else lines


def strides(shape: Sequence[Size]) -> list[Size]:
    """Those of a compact tensor; a size of 0 counts as 1."""
    found: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        found.insert(0, step)
        if isinstance(size, int) and isinstance(step, int):
            step = step * max(size, 1)
        else:
            factor = f"max({size}, 1)" if isinstance(size, str) else str(size)
            step = factor if step == 1 else f"{step} * {factor}"
    return found


def spelled(sizes: Sequence[Size]) -> str:
    """Python's text of a tuple of sizes."""
    return f"({', '.join(map(str, sizes))},)" if sizes else "()"


def allocator(kind: str) -> Any:
    """What `empty(shape, strides, dtype)` calls: PyTorch's own short way, where it has it."""
    short = getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None)
    if short is None:
        return functools.partial(_empty_strided, kind)
    return short


def _empty_strided(kind: str, shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=kind)
