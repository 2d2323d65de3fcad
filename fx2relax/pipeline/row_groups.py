"""Groups of kernels that run by the same rows as one kernel.

`FuseOps` keeps a mean, a softmax or a layer norm apart from the element-wise work that it alone
reads, and a sum apart from what reads the sums: each is written to memory and read again. A CPU
thread does all of it for one row after the other, in cache.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.relax.utils import copy_with_new_vars

from ..compat import TensorType, type_of
from .blocks import SPATIAL, Block, row_axes
from .flow import bindings, name_of, sizes_of
from .inline import inline_steps
from .loops import worth
from .places import shorten
from .rows import common_rows, in_strips

_log = logging.getLogger(__name__)

_ROW_BYTES = 1 << 20  # what a row reads and writes: within a second-level cache
_SHORT_ROW = 32  # elements; of fewer, a good part is left after whole vectors
_COSTLY = 8  # a step that costs more takes longer one by one than memory does
_LONGEST_NAME = 80
_FUSED = "fused_"
_PRIMITIVE = "Primitive"
_CALL = "relax.call_tir"
_WRITES = ("relax.call_tir_inplace", "relax.call_inplace_packed")
# What a kernel may say of itself and be scheduled by rows.
_PLAIN = {"global_symbol", "op_pattern", "s_tir", "tirx.noalias"}


def join_rows(mod: Any, target: Any) -> Any:
    """Put kernels that run by the same rows into one group, in a module that `FuseOps` grouped.

    Args:
        mod: Relax functions; kernels of symbolic sizes stay as they are.
        target: the CPU that the kernels are for.
    """
    joined = _Joined(mod, target)
    for name, func in mod.functions_items():
        if isinstance(func, relax.Function) and not _is_group(func):
            joined.visit(name, func)
    return joined.module()


@dataclass
class _Group:
    """Kernels that are called one after the other, with sizes that are known.

    Attributes:
        params: what they take, as variables of the group.
        args: what stands for these where the group is called.
        steps: variables and the calls of kernels that they hold; the last is the result.
    """

    params: list[Any]
    args: list[Any]
    steps: list[tuple[Any, Any]]

    @property
    def type(self) -> Any:
        return type_of(self.steps[-1][0])

    @property
    def kernels(self) -> list[Any]:
        """The variables of its kernels."""
        return [call.args[0] for _, call in self.steps]

    @property
    def name(self) -> str:
        """As `FuseOps` makes it, but of no more than some kernels."""
        names = [k.name_hint.removeprefix(_FUSED) for k in self.kernels]
        while len(names) > 2 and len("_".join(names)) > _LONGEST_NAME:
            names.pop(len(names) // 2)
        return _FUSED + "_".join(names)

    def before(self, other: _Group, result: Any) -> _Group:
        """Another group with this one in front, whose result it knows as `result`."""
        known = {result: self.steps[-1][0]}
        known.update(
            (arg, param)
            for arg, param in zip(self.args, self.params, strict=True)
            if isinstance(arg, relax.Var)
        )
        inner, params, args = {}, list(self.params), list(self.args)
        for arg, param in zip(other.args, other.params, strict=True):
            if isinstance(arg, relax.Var) and arg in known:
                inner[param] = known[arg]
            else:
                params.append(param)
                args.append(arg)
        steps = [(var, _with(call, inner)) for var, call in other.steps]
        return _Group(params, args, [*self.steps, *steps])

    def function(self) -> Any:
        """It as a function for `FuseTIR`."""
        *inner, (last, result) = self.steps
        made = [relax.VarBinding(var, call) for var, call in inner]
        made.append(relax.VarBinding(last, result))
        body = relax.SeqExpr([relax.DataflowBlock(made)], last)
        function = relax.Function(self.params, body, type_of(last), True)
        return copy_with_new_vars(function.with_attr(_PRIMITIVE, True))


@dataclass
class _Shape:
    """What a group would be as one kernel.

    Attributes:
        steps: how many are left when those that cost little are computed where they are read.
        rows: how many leading dimensions they share.
        strips: whether vectors run across sums, so that a strip of columns stands for a row.
        turns: how many rows that makes.
        row: how many elements of the result each has.
        touched: the bytes that a row reads and writes, from one step to the next included.
        work: a rough cost of all.
        cost: that of an element of the costliest step.
    """

    steps: int
    rows: int
    strips: bool
    turns: int
    row: int
    touched: float
    work: float
    cost: int


class _Joined:
    """The groups of one module, as they grow."""

    def __init__(self, mod: Any, target: Any) -> None:
        self.mod = mod
        self.threads = int(target.attrs.get("num-cores", 0)) or 1
        self.builder = relax.BlockBuilder(mod)
        self.changed = False
        self._suited: dict[Any, tuple[bool, bool]] = {}
        self._shapes: dict[int, list[tuple[Any, _Shape | None]]] = defaultdict(list)

    def module(self) -> Any:
        """The module with the groups that it calls now."""
        if not self.changed:
            return self.mod
        return relax.transform.DeadCodeElimination()(self.builder.finalize())

    def visit(self, name: Any, func: Any) -> None:
        """Join the groups of a function."""
        if not isinstance(func.body, relax.SeqExpr):
            return
        readers: dict[Any, set[Any]] = defaultdict(set)
        for binding in bindings(func):
            for var in relax.analysis.free_vars(binding.value):
                readers[var].add(binding.var)
        for var in relax.analysis.free_vars(func.body.body):
            readers[var].add(None)
        blocks = [
            self._joined(block, readers) if isinstance(block, relax.DataflowBlock) else block
            for block in func.body.blocks
        ]
        if any(new is not old for new, old in zip(blocks, func.body.blocks, strict=True)):
            body = relax.SeqExpr(blocks, func.body.body)
            new = relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
            self.builder.update_func(name, new)
            self.changed = True

    def _joined(self, block: Any, readers: dict[Any, set[Any]]) -> Any:
        groups: dict[Any, _Group] = {}  # those that may move down, by what holds their results
        gone, grown = set(), {}
        for binding in block.bindings:
            var, value = binding.var, binding.value
            if name_of(value) in _WRITES:
                groups.clear()  # what was read before is not read after
                continue
            group = self._group(var, value)
            if group is None:
                continue
            while (found := self._with_one_more(var, group, groups, readers)) is not None:
                group, arg = found
                for read in groups.pop(arg).args:
                    if isinstance(read, relax.Var):
                        readers[read].discard(arg)
                        readers[read].add(var)
                gone.add(arg)
                grown[var] = group
            groups[var] = group
        if not gone:
            return block
        made = []
        for binding in block.bindings:
            if binding.var in grown:
                made.append(relax.VarBinding(binding.var, self._call(grown[binding.var])))
            elif binding.var not in gone:
                made.append(binding)
        return relax.DataflowBlock(made)

    def _with_one_more(
        self, var: Any, group: _Group, groups: dict[Any, _Group], readers: dict[Any, set[Any]]
    ) -> tuple[_Group, Any] | None:
        """A group with one that it alone reads in front, and what held that one's result."""
        for arg in group.args:
            if isinstance(arg, relax.Var) and arg in groups and readers[arg] == {var}:
                both = groups[arg].before(group, arg)
                if self._is_better(groups[arg], group, both):
                    return both, arg
        return None

    def _group(self, var: Any, value: Any) -> _Group | None:
        """What a binding calls; None if it is no kernel whose sizes are known."""
        if not isinstance(value, tvm.ir.Call) or not _is_static(var):
            return None
        if name_of(value) == _CALL and len(value.args) == 2:
            args: list[Any] = []
            for arg in value.args[1].fields:
                if not any(arg.same_as(a) for a in args):
                    args.append(arg)
            params = [relax.Var(f"x{n}", type_of(arg)) for n, arg in enumerate(args)]
            inner = dict(zip(args, params, strict=True))
            group = _Group(params, args, [(relax.Var(var.name, var.ty), _with(value, inner))])
        elif isinstance(value.op, tvm.ir.GlobalVar) and _is_group(self.mod[value.op]):
            function = copy_with_new_vars(self.mod[value.op])
            steps = [(b.var, b.value) for b in bindings(function)]
            if not all(name_of(call) == _CALL and len(call.args) == 2 for _, call in steps):
                return None
            group = _Group(list(function.params), list(value.args), steps)
        else:
            return None
        return group if all(_is_static(p) for p in group.params) else None

    def _is_better(self, first: _Group, second: _Group, both: _Group) -> bool:
        """Whether two groups are one kernel of rows, or the first is computed where it is read."""
        if not all(fits for fits, _ in map(self._suits, both.kernels)):
            return False
        summed = any(sums for _, sums in map(self._suits, first.kernels))
        if not summed and not any(sums for _, sums in map(self._suits, second.kernels)):
            return False
        alone, whole = self._shape(second), self._shape(both)
        if alone is None or whole is None or whole.rows < alone.rows:
            return False
        if whole.steps == alone.steps:
            return True
        if not summed and whole.row < _SHORT_ROW:
            front = self._shape(first)
            if front is None or front.cost > _COSTLY:
                return False  # apart, it runs in vectors over all rows
        if whole.rows == 0 or whole.touched > _ROW_BYTES or (summed and whole.strips):
            return False
        return whole.turns >= 4 * self.threads or not worth(whole.work, self.threads)

    def _suits(self, kernel: Any) -> tuple[bool, bool]:
        """Whether rules for rows may take a kernel, and whether it sums."""
        if kernel not in self._suited:
            self._suited[kernel] = _suits(self.mod[kernel])
        return self._suited[kernel]

    def _shape(self, group: _Group) -> _Shape | None:
        function = group.function()
        known = self._shapes[tvm_ffi.structural_hash(function)]
        for other, shape in known:
            if tvm_ffi.structural_equal(other, function):
                return shape
        shape = None
        try:
            shape = _shape(self._fused(group, function))
        except Exception as error:
            # TVM's errors have no common class; apart, the kernels are valid.
            _log.debug("%s stays apart: %s", group.name, str(error)[:500])
        known.append((function, shape))
        return shape

    def _fused(self, group: _Group, function: Any) -> Any:
        """The kernel that a group becomes."""
        builder = relax.BlockBuilder(tvm.IRModule({k: self.mod[k] for k in group.kernels}))
        params = [relax.Var(f"x{n}", type_of(p)) for n, p in enumerate(group.params)]
        called = relax.Call(builder.add_func(function, "group"), params)
        with builder.function("main", params):
            with builder.dataflow():
                made = builder.emit_output(called)
            builder.emit_func_output(made)
        fused = relax.transform.FuseTIR()(builder.finalize())
        return fused[next(bindings(fused["main"])).value.args[0]]

    def _call(self, group: _Group) -> Any:
        return relax.Call(self.builder.add_func(group.function(), group.name), group.args)


def _is_group(func: Any) -> bool:
    return isinstance(func, relax.Function) and _PRIMITIVE in (func.attrs or {})


def _is_static(var: Any) -> bool:
    sizes = sizes_of(var) if isinstance(type_of(var), TensorType) else None
    return sizes is not None and all(isinstance(size, int) and size > 0 for size in sizes)


def _with(call: Any, inner: dict[Any, Any]) -> Any:
    """A call of a kernel with other arguments."""
    fields = [inner.get(arg, arg) for arg in call.args[1].fields]
    args = [call.args[0], relax.Tuple(fields)]
    return relax.Call(call.op, args, call.attrs, call.ty_args, call.span)


def _suits(func: Any) -> tuple[bool, bool]:
    if not isinstance(func, tirx.PrimFunc) or not _PLAIN.issuperset((func.attrs or {}).keys()):
        return False, False
    if getattr(getattr(func.body, "block", None), "name_hint", "") != "root":
        return False, False  # written by hand
    sch = s_tir.Schedule(tvm.IRModule({"main": func}), error_render_level="none")
    try:
        root = sch.get_sblock("root")
    except s_tir.schedule.ScheduleError:
        return False, False  # there is another of this name inside
    blocks = [Block(sch, rv) for rv in sch.get_child_blocks(root)]
    fits = bool(blocks) and all(block.regular and _is_straight(block) for block in blocks)
    return fits, fits and any(block.reduces for block in blocks)


def _is_straight(block: Block) -> bool:
    """Whether its accesses follow its axes, and it sums no element of its largest operand twice."""
    assert block.store is not None
    places = {a.var: n for n, a in enumerate(block.axes)}
    turns = math.prod(a.length or 1 for a in block.axes)
    largest = 1
    for source, indices in [
        (block.store.buffer, block.store.indices),
        *((load.source, load.indices) for load in block.operands()),
    ]:
        at = [i for i in indices if not isinstance(i, tirx.IntImm)]
        order = [places.get(i, -1) if isinstance(i, tvm.ir.Var) else -1 for i in at]
        if -1 in order or len(set(order)) < len(order):
            return False
        if not block.reduces and order != sorted(order):
            return False
        largest = max(largest, math.prod(int(s) for s in source.shape))
    return not block.reduces or turns <= largest


def _shape(func: Any) -> _Shape | None:
    sch = s_tir.Schedule(tvm.IRModule({"main": shorten(func)}), error_render_level="none")
    blocks = inline_steps(sch, sch.get_sblock("root"))
    if not all(block.regular for block in blocks):
        return None
    rows = common_rows(blocks)
    last = blocks[-1]
    assert last.store is not None
    axes = [last.axes[n] for n in row_axes(last, last.store.indices)[:rows]]
    turns = math.prod(a.length or 1 for a in axes)
    buffers = {buffer for b in blocks for buffer in (*b.reads, *b.writes)}
    touched = sum(map(_bytes, buffers)) / turns
    strips = rows > 0 and in_strips(blocks, rows)
    row = math.prod(a.length or 1 for a in last.axes if a.kind == SPATIAL) // turns
    work, cost = sum(b.work for b in blocks), max(b.summary.cost for b in blocks)
    return _Shape(len(blocks), rows, strips, turns, row, touched, work, cost)


def _bytes(buffer: Any) -> int:
    width = int(tvm.DataType(buffer.dtype).bits) // 8
    return math.prod(int(s) for s in buffer.shape) * width
