"""Which tensors of a convolution net lie with their channels last.

The library's convolutions on CPU work on channels that lie side by side: they copy other tensors
twice. Each tensor of three to five axes, the last two those of space, may lie as it is written
(label 0) or with the axes of space in front of the channels (label 1). A convolution gains where
both its tensors have label 1; a tensor of one label that is read as the other is transposed.
`Labels` finds the cheapest choice for a whole function at once, so that layouts change where it
costs least, and nowhere if nothing is gained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm import relax
from tvm.ir import Call, GlobalVar
from tvm.sym import Analyzer

from .cut import Labels
from .flow import Flow, bindings, dtype_of, name_of, sizes_of
from .library import PREFIX, computes_in_half
from .permuted import Order, inverse, permuted, sums

#: The axes of a tensor of label 1 as they lie in memory, by how many there are.
LAST: dict[int, Order] = {3: (0, 2, 1), 4: (0, 2, 3, 1), 5: (0, 3, 4, 1, 2)}
CONVOLUTION = PREFIX + "conv2d"
# Nanoseconds an element, on one core. What a convolution spends on reordering one of its tensors,
# what a transposition costs, what is lost by joining channels that lie side by side.
_REORDER = 0.5
_TRANSPOSE = 0.7
_JOIN = 0.2
# Sizes that are not known: batches, and all others.
_BATCH, _SIZE = 4, 32


@dataclass
class Plan:
    """The choice for one function.

    Attributes:
        last: the variables that get label 1.
        kinds: how each variable is made: "conv", "kernel", "reshape", "permute" or "concat".
        moves: convolutions that run on label 1.
        kernels: every kernel with other orders of axes that was asked for.
    """

    last: set[Any]
    kinds: dict[Any, str]
    moves: set[Any]
    kernels: Kernels


class Kernels:
    """The kernels of a module with other orders of axes, each made once."""

    def __init__(self, mod: Any) -> None:
        self.mod = mod
        self.made: dict[Any, Any] = {}

    def get(self, gvar: Any, chosen: list[Order | None]) -> Any:
        """A kernel, see `permuted`."""
        key = gvar, tuple(chosen)
        if key not in self.made:
            func = self.mod[gvar]
            plain = all(order is None for order in chosen)
            self.made[key] = func if plain else permuted(func, chosen)
        return self.made[key]


def plan(flow: Flow, mod: Any) -> Plan:
    """Choose layouts for a function.

    Args:
        flow: the function, all of whose operators but reshapes, transpositions and concatenations
            around its convolutions are calls of kernels.
        mod: the module that holds the kernels.
    """
    made = _Planner(flow, mod)
    labels, _ = made.labels.cheapest()
    last = {thing for thing in labels if isinstance(thing, relax.Var)}
    moves = {thing[1] for thing in labels if isinstance(thing, tuple)}
    return Plan(last if moves else set(), made.kinds, moves, made.kernels)


def is_convolution(value: Any) -> bool:
    """Whether an expression is a library call that may run with channels last."""
    if name_of(value) != "relax.call_dps_packed" or sizes_of(value) is None:
        return False
    if str(getattr(value.args[0], "global_symbol", "")) != CONVOLUTION:
        return False
    dtypes = {dtype_of(value), *(dtype_of(x) for x in value.args[1].fields[:2])}
    return dtypes == {"float32"} or computes_in_half(*dtypes)


def kept_space(before: list[Any], after: list[Any]) -> bool:
    """Whether a reshape of a tensor of label 1 is one of its memory, as one of label 1."""
    if len(before) not in LAST or len(after) not in LAST:
        return False
    if not _same(before[0], after[0]):
        return False
    space = [sizes[-1:] if len(sizes) == 3 else sizes[-2:] for sizes in (before, after)]
    if len(before) == 3 and len(after) == 3:
        return False
    if len(before) > 3 and len(after) > 3:
        return all(_same(a, b) for a, b in zip(*space, strict=True))
    if not {len(before), len(after)} <= {3, 4} or not _same(before[1], after[1]):
        return False
    counts = [s[0] if len(s) == 1 else s[0] * s[1] for s in space]
    return _same(*counts)


def reads_as_is(value: Any, func: Any) -> bool:
    """Whether a kernel of a plain result sums over space, in whichever order it lies."""
    return len(sizes_of(value) or ()) < 3 and sums(func)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(Analyzer().can_prove_equal(a, b))


def elements(x: Any) -> float:
    """How many elements a tensor has, a guess where sizes are not known."""
    sizes = sizes_of(x) or []
    return math.prod(
        s if isinstance(s, int) else (_SIZE if n else _BATCH) for n, s in enumerate(sizes)
    )


class _Planner:
    """Puts a function into costs of labels."""

    def __init__(self, flow: Flow, mod: Any) -> None:
        self.flow = flow
        self.kernels = Kernels(mod)
        self.labels = Labels()
        self.kinds: dict[Any, str] = {}
        for var in flow.func.params:
            self.labels.cost(var, 1, math.inf)
        for binding in bindings(flow.func):
            if binding.var not in flow.weights:
                self.add(binding.var, binding.value)
        for var in relax.analysis.free_vars(flow.func.body.body):
            self.plainly(var)

    def add(self, var: Any, value: Any) -> None:
        """Count what a binding costs with each choice of labels."""
        kind = self.kind(var, value)
        if kind:
            self.kinds[var] = kind
            getattr(self, kind)(var, value)
            return
        self.labels.cost(var, 1, math.inf)
        for operand in relax.analysis.free_vars(value):
            self.plainly(operand)

    def kind(self, var: Any, value: Any) -> str:
        """Which kind of step a binding is; empty for one that takes plain tensors alone."""
        inside = isinstance(var, relax.DataflowVar) and isinstance(value, Call)
        if not inside or sizes_of(var) is None:
            return ""
        if is_convolution(value):
            return "conv"
        name = name_of(value)
        if name == "relax.call_tir":
            known = isinstance(value.args[0], GlobalVar) and isinstance(value.args[1], relax.Tuple)
            return "kernel" if known else ""
        kinds = {"reshape": "reshape", "permute_dims": "permute", "concat": "concat"}
        kind = kinds.get(name.removeprefix("relax."), "")
        return "" if kind == "concat" and not isinstance(value.args[0], relax.Tuple) else kind

    def plainly(self, operand: Any) -> None:
        """A tensor is read as it is written."""
        if self.may(operand):
            self.labels.cost(operand, 1, _TRANSPOSE * elements(operand))

    def may(self, operand: Any) -> bool:
        """Whether a tensor has a label at all."""
        if not isinstance(operand, relax.Var) or operand in self.flow.weights:
            return False
        return len(sizes_of(operand) or ()) in LAST

    def together(self, operand: Any, var: Any) -> None:
        """A tensor is read in the layout of another one, or transposed first."""
        if self.may(operand):
            self.labels.differ(operand, var, _TRANSPOSE * elements(operand))

    def conv(self, var: Any, value: Any) -> None:
        """A convolution, which gains by label 1."""
        x, kernel = value.args[1].fields[:2]
        thing = "conv", var
        # Weights that are not frozen would be permuted at every call.
        if x in self.flow.weights or not self.flow.on_weights(kernel):
            self.labels.cost(thing, 1, math.inf)
        self.together(x, thing)
        self.labels.differ(var, thing, _TRANSPOSE * elements(var))
        self.labels.cost(thing, 0, _REORDER * (elements(x) + elements(var)))

    def kernel(self, var: Any, value: Any) -> None:
        """A kernel, in the layout of its result; what it reads has to agree."""
        gvar = value.args[0]
        operands = [x for x in value.args[1].fields if self.may(x)]
        rank = len(sizes_of(var) or ())
        fits = rank == 4 and all(len(sizes_of(x) or ()) == rank for x in operands)
        if not fits or self.kernels.get(gvar, orders(value, 1, self.flow)) is None:
            self.labels.cost(var, 1, math.inf)
        as_is = reads_as_is(value, self.kernels.mod[gvar])
        for operand in operands:
            chosen = orders(value, 0, self.flow, {operand})
            if not as_is or self.kernels.get(gvar, chosen) is None:
                self.together(operand, var)

    def reshape(self, var: Any, value: Any) -> None:
        """The same memory in both layouts, or a result as it is written."""
        x = value.args[0]
        before, after = sizes_of(x), sizes_of(var)
        if before is not None and after is not None and kept_space(before, after):
            self.together(x, var)
            return
        self.labels.cost(var, 1, math.inf)
        self.plainly(x)

    def permute(self, var: Any, value: Any) -> None:
        """A transposition, which may be what a change of layout is."""
        x, axes = value.args[0], permutation(value)
        rank, cost = len(axes), _TRANSPOSE * elements(var)
        if rank not in LAST or not self.may(x):
            self.labels.cost(var, 1, math.inf)
            self.plainly(x)
        elif to_plain(x, axes, self.flow):
            self.labels.cost(x, 0, cost)
            self.labels.cost(var, 1, math.inf)
        elif axes == inverse(LAST[rank]):
            self.labels.cost(var, 0, cost)
            self.plainly(x)
        elif axes[0] == 0 and axes[-2:] == (rank - 2, rank - 1):
            # A shuffle of channels: whole planes move, or single elements where they come last.
            self.labels.cost(var, 1, cost)
            self.together(x, var)
        else:
            self.labels.cost(var, 1, math.inf)
            self.plainly(x)

    def concat(self, var: Any, value: Any) -> None:
        """Tensors joined, in the layout of the result."""
        rank = len(sizes_of(var) or ())
        if rank not in LAST:
            self.labels.cost(var, 1, math.inf)
        elif int(value.attrs.axis) % rank == 1:
            self.labels.cost(var, 1, _JOIN * elements(var))
        for operand in value.args[0].fields:
            self.together(operand, var)


def to_plain(x: Any, axes: Order, flow: Flow) -> bool:
    """Whether a transposition gives the memory of a tensor of label 1 as it lies."""
    if axes != LAST[len(axes)]:
        return False
    # Of three axes the other way round is the same: this one if space was flattened before.
    return len(axes) != 3 or name_of(flow.values.get(x)) == "relax.reshape"


def permutation(value: Any) -> Order:
    """The axes of a `permute_dims`."""
    rank = len(sizes_of(value.args[0]) or ())
    axes = value.attrs.axes
    return tuple(reversed(range(rank))) if axes is None else tuple(int(a) % rank for a in axes)


def orders(value: Any, label: int, flow: Flow, as_is: set[Any] | None = None) -> list[Order | None]:
    """The order of axes of each of a kernel's tensors, the result included.

    Args:
        value: the call.
        label: that of the result, and of all that it is computed from.
        flow: tells weights from other tensors.
        as_is: operands of label 1 beside a result of label 0.
    """
    rank = len(sizes_of(value) or ())
    found: list[Order | None] = []
    for operand in value.args[1].fields:
        own = len(sizes_of(operand) or ())
        weight = flow.on_weights(operand)
        if as_is and not weight and operand in as_is:
            found.append(LAST[own])
        elif label == 0 or own < 3:
            found.append(None)
        elif weight and own == rank - 1:
            found.append((1, 2, 0) if own == 3 else None)
        else:
            found.append(LAST.get(own))
    return [*found, LAST[rank] if label else None]
