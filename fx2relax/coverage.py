"""How each core ATen operator runs: measured by importing one call of it, nothing is compiled."""

from __future__ import annotations

import fnmatch
import functools
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import sympy
import torch
import torch.fx
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils import _pytree as pytree

from fx2relax import decompositions, routes
from fx2relax.capture import capture
from fx2relax.compat import IRModule, relax, tvm
from fx2relax.core_calls import CALLS, Call, number
from fx2relax.imported import Imported
from fx2relax.importer import import_graph
from fx2relax.params import InputSpec
from fx2relax.registry import lookup
from fx2relax.whole import whole_operators

__all__ = ["DTYPES", "ROUTES", "Row", "chosen", "core_overloads", "measure"]

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
ROUTES = CONVERTER, DECOMPOSITION, CONSTANT, TORCH_CALL = (
    "converter",
    "decomposition",
    "constant",
    "torch call",
)
_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass
class Row:
    """What was measured of one overload.

    Attributes:
        name: the overload, ``aten.add.Tensor``.
        call: the example call, in the notation of `core_calls`; empty where there is none.
        route: ``"converter"``, ``"decomposition"``, ``"constant"`` or ``"torch call"``, for the
            first dtype that eager takes. A number out of a tensor (a size, `Tensor.item`) counts
            as converted: the importer makes an expression of it.
        relax: the Relax operators that the imported call consists of.
        kernels: the TIR kernels that it consists of.
        torch: the operators that run in PyTorch when it is called.
        reason: why they may, in a few words; empty where nothing does, or nothing should.
        dtypes: each dtype that eager takes -> whether it is imported without a torch call.
        dynamic: whether it is imported with symbolic sizes: ``"yes"``, ``"torch call"``,
            ``"no"``, or ``"-"`` for a call that has no sizes, or none that can be symbolic.
        gradient: whether the backward graph is imported without a torch call: ``"yes"``,
            ``"torch call"``, ``"no"``, or ``"-"`` where PyTorch has no gradient.
        backward_torch: the operators of the backward graph that run in PyTorch.
        errors: what could not be imported -> why.
    """

    name: str
    call: str = ""
    route: str = ""
    relax: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    torch: list[str] = field(default_factory=list)
    reason: str = ""
    dtypes: dict[str, bool] = field(default_factory=dict)
    dynamic: str = "-"
    gradient: str = "-"
    backward_torch: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The row as plain values, for JSON."""
        return asdict(self)


@functools.cache
def core_overloads() -> tuple[Any, ...]:
    """Every ATen overload that this PyTorch tags as core, by name."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if space != "aten":
            continue
        target = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
        if target is not None and torch.Tag.core in target.tags:
            found.append(target)
    return tuple(sorted(found, key=str))


def chosen(patterns: Sequence[str] = ()) -> list[Any]:
    """The core overloads whose names match one of some shell patterns; all without patterns."""
    return [
        target
        for target in core_overloads()
        if not patterns or any(fnmatch.fnmatchcase(str(target), p) for p in patterns)
    ]


def measure(target: Any, table: dict[Any, Any]) -> Row:
    """Import the example call of one core overload: every dtype, symbolic sizes, the gradient.

    Args:
        target: an overload; one that has no example gets its route alone.
        table: `decompositions.table()`.
    """
    row, call = Row(str(target)), CALLS.get(str(target))
    if call is None:
        row.route = _declared_route(target)
        return row
    row.call = str(call)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of eager's, on calls that nobody wrote
        _Measurement(target, call, table, row).run()
    return row


def _declared_route(target: Any) -> str:
    """The route of an overload without arguments: what is registered for it."""
    if lookup(target) is not None:
        return CONVERTER
    return DECOMPOSITION if decompositions.rule(target) is not None else TORCH_CALL


class _Measurement:
    """Fills the row of one overload."""

    def __init__(self, target: Any, call: Call, table: dict[Any, Any], row: Row) -> None:
        self.target = target
        self.call = call
        self.table = table
        self.row = row

    def run(self) -> None:
        """Measure everything."""
        first = None
        for dtype in self.call.dtypes or DTYPES:
            if not self._eager_takes(dtype):
                continue
            imported = self._imported(dtype, _name(dtype))
            self.row.dtypes[_name(dtype)] = imported is not None and not imported.torch_calls
            if first is None:
                first = dtype
                self._route(dtype, imported)
        if first is None:
            self.row.errors["eager"] = "takes the call with no dtype"
            return
        if self.call.symbols:
            self.row.dynamic = _answer(self._imported(first, "dynamic shapes", symbolic=True))
        self._gradient(first)
        if self.row.route == TORCH_CALL:
            self.row.reason = self._reason()

    def _reason(self) -> str:
        if torch.Tag.nondeterministic_seeded in self.target.tags:
            return "random generators"
        if self.target._schema.name.startswith("aten::_fft_"):
            return "FFT"
        real = [name for name in self.row.dtypes if not name.startswith("complex")]
        return "" if real else "complex numbers"

    def _leaves(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of the operands' values that take gradients, which they then require."""
        pairs = zip(tensors, self.call.operands, strict=True)
        return [tensor.requires_grad_() for tensor, operand in pairs if operand.takes_gradient]

    def _eager(self, dtype: torch.dtype, requires_grad: bool = False) -> tuple[list[Any], Any]:
        """The tensors that require gradients, and what eager returns."""
        tensors = [operand.tensor(dtype) for operand in self.call.operands]
        leaves = self._leaves(tensors) if requires_grad else []
        args, kwargs = self.call.filled(tensors, dtype, number)
        return leaves, self.target(*args, **kwargs)

    def _eager_takes(self, dtype: torch.dtype) -> bool:
        try:
            self._eager(dtype)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return False
        return True

    # -- the forward -------------------------------------------------------------------------

    def _imported(self, dtype: torch.dtype, what: str, symbolic: bool = False) -> Imported | None:
        """The call as a Relax module; None, and a line in the row, where that fails."""
        graph, inputs = _graph(self.target, self.call, dtype, symbolic)
        try:
            captured = capture(graph, inputs, decompositions=self.table)
            return import_graph(captured.gm, captured.specs(), symbols=captured.symbols)
        except Exception as error:
            self.row.errors[what] = f"{type(error).__name__}: {error}"
            return None

    def _route(self, dtype: torch.dtype, imported: Imported | None) -> None:
        if imported is None or imported.torch_calls:
            self.row.route = TORCH_CALL
        elif lookup(self.target) is not None or self._gives_number(dtype):
            self.row.route = CONVERTER
        else:
            made = self._makes_constant()
            self.row.route = CONSTANT if made else DECOMPOSITION
        if imported is not None:
            mod = relax.transform.DeadCodeElimination([imported.name])(imported.mod)
            self.row.relax, self.row.kernels = _used(mod)
            self.row.torch = _torch_operators(imported)

    def _gives_number(self, dtype: torch.dtype) -> bool:
        _, result = self._eager(dtype)
        return isinstance(result, _NUMBERS)

    def _makes_constant(self) -> bool:
        graph, _ = _graph(self.target, self.call, torch.float32)
        node = next(n for n in graph.graph.nodes if n.op == "call_function")
        node.meta["val"] = self._eager(torch.float32)[1]
        return decompositions.rule(self.target) is None and routes.constant(node)

    # -- the gradient ------------------------------------------------------------------------

    def _gradient(self, dtype: torch.dtype) -> None:
        """Import the backward graph that AOTAutograd makes, as `torch.compile` does."""
        if not self._differentiable(dtype):
            return
        graphs: list[torch.fx.GraphModule] = []

        def keep(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
            graphs.append(gm)
            return make_boxed_func(gm.forward)

        def compute(*tensors: torch.Tensor) -> Any:
            args, kwargs = self.call.filled(list(tensors), dtype, number)
            result = self.target(*args, **kwargs)
            # AOTAutograd makes no backward graph for views of inputs.
            return pytree.tree_map_only(torch.Tensor, torch.clone, result)

        tensors = [operand.tensor(dtype) for operand in self.call.operands]
        leaves = self._leaves(tensors)
        try:
            with whole_operators():
                traced = aot_function(
                    compute,
                    fw_compiler=keep,
                    bw_compiler=keep,
                    partition_fn=min_cut_rematerialization_partition,
                    decompositions=self.table,
                )
                _backward(traced(*tensors), leaves)
            _, backward = graphs
            specs = [
                InputSpec(str(node.target), "user", node.meta["val"], position=position)
                for position, node in enumerate(backward.graph.find_nodes(op="placeholder"))
            ]
            imported = import_graph(backward, specs)
        except Exception as error:
            self.row.errors["gradient"] = f"{type(error).__name__}: {error}"
            self.row.gradient = "no"
            return
        self.row.gradient = _answer(imported)
        self.row.backward_torch = _torch_operators(imported)

    def _differentiable(self, dtype: torch.dtype) -> bool:
        if not (dtype.is_floating_point or dtype.is_complex):
            return False
        try:
            leaves, result = self._eager(dtype, requires_grad=True)
            return _backward(result, leaves)
        except RuntimeError:  # PyTorch has no derivative for it, or refuses `out=`
            return False


def _backward(result: Any, leaves: Sequence[torch.Tensor]) -> bool:
    """Run the backward graph of what a call returned; whether there is one."""
    outputs = [
        t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    if not outputs or not leaves:
        return False
    ones = [torch.ones_like(t) for t in outputs]
    return any(g is not None for g in torch.autograd.grad(outputs, leaves, ones, allow_unused=True))


def _graph(
    target: Any, call: Call, dtype: torch.dtype, symbolic: bool = False
) -> tuple[torch.fx.GraphModule, list[Any]]:
    """A graph of one call, and its inputs as `capture` takes them.

    Args:
        target: the overload.
        call: its arguments.
        dtype: of the tensors whose dtype varies.
        symbolic: sizes that have names are symbolic, and inputs where an argument names them.
    """
    graph = torch.fx.Graph()
    inputs: list[Any] = []
    tensors: list[torch.fx.Node] = []
    for operand in call.operands:
        tensors.append(graph.placeholder(f"{operand.kind}{len(tensors)}"))
        shape = [s if isinstance(s, int) else str(s) for s in operand.sizes]
        inputs.append((shape if symbolic else operand.shape, operand.dtype(dtype)))
    size: Any = number
    if symbolic:
        symbols = call.symbols_of_arguments
        proxies = [torch.fx.Proxy(graph.placeholder(str(s))) for s in symbols]
        inputs += [str(s) for s in symbols]
        size = lambda e: sympy.lambdify(symbols, e)(*proxies).node  # noqa: E731
    args, kwargs = call.filled(tensors, dtype, size)
    graph.output(graph.call_function(target, args, kwargs))
    return torch.fx.GraphModule({}, graph), inputs


def _answer(imported: Imported | None) -> str:
    if imported is None:
        return "no"
    return "torch call" if imported.torch_calls else "yes"


def _torch_operators(imported: Imported) -> list[str]:
    return list(dict.fromkeys(call.op_name for call in imported.torch_calls.values()))


def _used(mod: IRModule) -> tuple[list[str], list[str]]:
    """The Relax operators that the functions of a module call, and its TIR kernels."""
    operators: dict[str, None] = {}
    kernels: dict[str, None] = {}

    def visit(expr: Any) -> None:
        if not isinstance(expr, tvm.ir.Call) or not isinstance(expr.op, tvm.ir.Op):
            return
        name = expr.op.name.removeprefix("relax.")
        if name == "call_tir":
            kernels[expr.args[0].name_hint] = None
        elif name != "call_pure_packed":
            operators[name] = None

    for function in mod.functions.values():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    # A kernel that is built for another shape as well has a number behind its name.
    once = [k for k in kernels if k.rstrip("0123456789") not in kernels.keys() - {k}]
    return list(operators), once


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
