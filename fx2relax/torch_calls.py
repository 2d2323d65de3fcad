"""Nodes that run in PyTorch, as calls of packed functions in the Relax program."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from fx2relax.as_they_lie import Order, lies_freely, order_of, source_of
from fx2relax.collectives import is_collective
from fx2relax.compat import (
    AnyType,
    Expr,
    ShapeType,
    TupleType,
    is_prim_expr,
    op,
    relax,
)
from fx2relax.complexes import Complex, held_type, is_complex
from fx2relax.errors import source_line, target_name
from fx2relax.layouts import concrete, inverse
from fx2relax.ordered import draws, is_ordered
from fx2relax.routes import flat_arguments, is_held, is_leaf
from fx2relax.scalars import as_operand

Node = torch.fx.Node
#: The names of packed functions that are calls of PyTorch's begin so.
PREFIX = "fx2relax.torch."


def _reads_strides(target: Any) -> bool:
    """Whether an operator refuses operands that lie otherwise than in the graph."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    exact = torch.Tag.needs_exact_strides in target.tags
    return exact or target._schema.name == "aten::_grouped_mm"


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory: what a draw fills first, and what it fills once.

    Attributes:
        order: the axes from outermost to innermost.
        expanded: the axes along which all elements are one.
    """

    order: tuple[int, ...]
    expanded: tuple[int, ...]

    @classmethod
    def of(cls, val: Any) -> Layout | None:
        """The layout of a fake tensor; None where it is that of a compact tensor."""
        if not isinstance(val, torch.Tensor) or not is_held(val):
            return None
        strides = concrete(val.stride())
        axes = [axis for axis, size in enumerate(concrete(val.shape)) if size != 1]
        expanded = tuple(axis for axis in axes if strides[axis] == 0)
        order = sorted(axes, key=lambda axis: -strides[axis])
        if order == axes and not expanded:
            return None
        # An axis of size 1 stands where it has no say.
        ones = [axis for axis in range(val.dim()) if axis not in axes]
        return cls((*ones, *order), expanded)

    def given(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a tensor, laid out so."""
        shape = tensor.shape
        for axis in self.expanded:
            tensor = tensor.narrow(axis, 0, min(1, shape[axis]))
        return tensor.permute(self.order).contiguous().permute(inverse(self.order)).expand(shape)


class TorchCall:
    """One node that runs in PyTorch, as a packed function of the Relax program.

    Attributes:
        name: the packed function's name, unique among all processes: programs are kept on disk.
        where: the user's source line.
        ordered: whether it must run, and in order; see `ordered.is_ordered`.
        collective: whether other processes make it too.
        library: whether it is a call of the library that is wanted, as for products.
        orders: what `lays` gave for each of the results.
    """

    def __init__(self, node: Node, library: bool = False) -> None:
        self.library = library
        self.target = node.target
        self.op_name = target_name(node.target)
        self.name = f"{PREFIX}{_plain_name(self.op_name)}.{uuid.uuid4().hex}"
        self.where = source_line(node)
        self.ordered = is_ordered(node)
        self.collective = is_collective(node.target)
        self.extra_operands = 0
        self._raised: dict[int, Exception] = {}
        self.leaves = flat_arguments(node)
        self.structure = pytree.tree_structure(
            (list(node.args), dict(node.kwargs)), is_leaf=is_leaf
        )
        self.val = node.meta.get("val")
        # A draw fills memory in its order, so that its numbers depend on its operands' strides; so
        # do the strides of what Relax has no type for, which is returned as it is. Some products
        # are only made of matrices that lie in a certain way.
        strided = (
            draws(node)
            or _reads_strides(node.target)
            or not all(
                is_held(v) for v in pytree.tree_leaves(self.val) if isinstance(v, torch.Tensor)
            )
        )
        self._layouts: list[Layout | None] = [
            Layout.of(leaf.meta.get("val")) if strided else None
            for leaf in self.leaves
            if isinstance(leaf, Node)
        ]
        # A float that is known only at run time is a tensor in Relax, and none to the operator.
        self._floats = [
            isinstance(leaf.meta.get("val"), torch.SymFloat)
            for leaf in self.leaves
            if isinstance(leaf, Node)
        ]
        self._bound: list[Any] = []
        self._constants: dict[int, Any] = {}
        self._complex: set[int] = set()
        self.free = lies_freely(node, library) and not strided
        self._turned: dict[int, Order] = {}
        self.orders: list[Order | None] = []

    def raised(self, error: Exception) -> None:
        """Remember what the operator raised in this thread."""
        self._raised[threading.get_ident()] = error

    def take_error(self) -> Exception | None:
        """What the operator raised in this thread when it was last run, forgotten at once."""
        return self._raised.pop(threading.get_ident(), None)

    def paired(self, bound: Complex) -> Any:
        """The pairs of the next operand, a complex tensor."""
        self._complex.add(len(self._bound))
        return bound.pairs

    def takes(self, bound: Any) -> bool:
        """Whether a bound value is passed at run time; other values are remembered here."""
        index = len(self._bound)
        self._bound.append(bound)
        if isinstance(bound, Expr):
            return True
        self._constants[index] = bound
        return False

    def operand(self, bound: Any, builder: Any) -> Any:
        """The value that `takes` took as an argument of the packed function.

        A size travels as a shape, and a transpose as what it is one of.
        """
        if is_prim_expr(bound):
            return as_operand(bound)
        place = len(self._bound) - 1
        if not self.free or place in self._complex:
            return bound
        source, order = source_of(builder, bound)
        if order is not None:
            self._turned[place] = order
        return source

    def lays(self, val: Any) -> Order | None:
        """The order of axes in which the packed function returns one of its results."""
        order = order_of(val) if self.free else None
        self.orders.append(order)
        return order

    @property
    def is_plain(self) -> bool:
        """Whether operands are passed on as they are, but for the order of their axes."""
        return not (self._complex or self.collective or any(self._floats) or any(self._layouts))

    def results(self, found: Any) -> Any:
        """What the operator returned, with the axes of its tensors in the order of `lays`."""
        if not any(self.orders):
            return found
        leaves, structure = pytree.tree_flatten(found)
        laid = [
            v.permute(order).contiguous() if order and isinstance(v, torch.Tensor) else v
            for v, order in zip(leaves, self.orders, strict=True)
        ]
        return pytree.tree_unflatten(laid, structure)

    def example(self) -> tuple[list[Any], dict[str, Any]]:
        """The node's arguments, with nodes in the place of operands."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self.structure)
        return args, kwargs

    def state(self) -> dict[str, Any]:
        """All that is not said by the node: see `restore`."""
        layouts = [layout and [layout.order, layout.expanded] for layout in self._layouts]
        return {
            "name": self.name,
            "library": self.library,
            "where": self.where,
            "extra_operands": self.extra_operands,
            "computes": self.val is not None,
            "layouts": layouts,
            "bound": len(self._bound),
            "constants": self._constants,
            "complex": sorted(self._complex),
            "turned": [[place, order] for place, order in self._turned.items()],
            "orders": self.orders,
        }

    @classmethod
    def restore(cls, node: Node, state: dict[str, Any]) -> TorchCall:
        """The call that had this state, of a node of the same target and arguments."""
        call = cls(node, state["library"])
        call.name, call.where = state["name"], state["where"]
        call.extra_operands = state["extra_operands"]
        call.val = () if state["computes"] else None
        call._layouts = [layout and Layout(*layout) for layout in state["layouts"]]
        call._bound = [None] * state["bound"]
        call._constants = state["constants"]
        call._complex = set(state["complex"])
        call._turned = {place: tuple(order) for place, order in state["turned"]}
        call.orders = [order and tuple(order) for order in state["orders"]]
        return call

    def arguments(self, operands: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The operator's own arguments, from what the packed function was given."""
        given = iter(operands)
        values = [
            self._constants[i] if i in self._constants else next(given)
            for i in range(len(self._bound))
        ]
        for i in self._complex:
            values[i] = torch.view_as_complex(values[i])
        for i, order in self._turned.items():
            values[i] = values[i].permute(order)
        for i, number in enumerate(self._floats):
            if number and isinstance(values[i], torch.Tensor):
                values[i] = values[i].item()
        nodes = (
            v if layout is None else layout.given(v)
            for v, layout in zip(values, self._layouts, strict=True)
        )
        filled = [next(nodes) if isinstance(v, Node) else v for v in self.leaves]
        args, kwargs = pytree.tree_unflatten(filled, self.structure)
        return args, kwargs


def _plain_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._" else "_" for c in name)


class TorchCalls:
    """The torch calls of one graph.

    Attributes:
        made: the calls by the name of their packed function.
        order: the results of the calls that must run, and in order.
        held: the results of assertions that have converters.
    """

    def __init__(self, importer: Any) -> None:
        self.importer = importer
        self.made: dict[str, TorchCall] = {}
        self.order: list[Any] = []
        self.held: list[Any] = []

    def effects(self) -> list[Any]:
        """The values that must be computed though nothing uses them."""
        return [*self.held, *self.order[-1:]]

    def emit(self, node: Node, library: bool = False) -> Any:
        """Emit the call of one node; its value for the environment."""
        call = TorchCall(node, library)
        self.made[call.name] = call
        operands: list[Any] = []
        for value in flat_arguments(node):
            if not isinstance(value, Node):
                continue
            bound = self.importer.env[value]
            if isinstance(bound, Complex):
                bound = call.paired(bound)
            if call.takes(bound):
                operands.append(call.operand(bound, self.importer.builder))
        if call.ordered and self.order:
            # Draws, assertions, collectives keep their order: each takes the one before as operand.
            operands.append(self.order[-1])
            call.extra_operands = 1
        val = node.meta.get("val")
        orders = [
            call.lays(v) if self._known(v) else call.lays(None) for v in pytree.tree_leaves(val)
        ]
        result = self.importer.builder.emit(
            op.call_pure_packed(call.name, *operands, ty_args=[self._type(val, iter(orders))]),
            node.name,
        )
        if call.ordered:
            self.order.append(result)
        return self._result(val, result, node.name, iter(orders))

    def _known(self, val: Any) -> bool:
        return isinstance(val, torch.Tensor) and self._bound(val)

    def _type(self, val: Any, orders: Iterator[Order | None]) -> Any:
        if isinstance(val, (tuple, list)):
            return TupleType([self._type(v, orders) for v in val])
        order = next(orders)
        if isinstance(val, torch.Tensor) and is_held(val):
            sizes = self._sizes(val) if self._bound(val) else None
            if order is not None and sizes is not None:
                sizes = [sizes[axis] for axis in order]
            return held_type(val, sizes)
        if isinstance(val, torch.SymInt):
            return ShapeType(ndim=1)
        return AnyType()

    def _sizes(self, val: torch.Tensor) -> list[Any]:
        return list(self.importer.symbols.shape(val.shape))

    def _bound(self, val: torch.Tensor) -> bool:
        return all(
            isinstance(s, int) or s.node.expr.free_symbols <= self.importer.symbols.vars.keys()
            for s in val.shape
        )

    def _result(self, val: Any, result: Any, name: str, orders: Iterator[Order | None]) -> Any:
        emit = self.importer.builder.emit
        if isinstance(val, (tuple, list)):
            return tuple(
                self._result(v, emit(relax.TupleGetItem(result, i)), name, orders)
                for i, v in enumerate(val)
            )
        order = next(orders)
        if order is not None:
            return emit(op.permute_dims(result, list(inverse(order))), name)
        if isinstance(val, torch.SymInt):
            size = self.importer.symbols.size(val)
            self.importer.builder.match_cast(result, ShapeType([size]), name)
            return size
        if isinstance(val, torch.Tensor) and is_held(val):
            if not self._bound(val):
                wanted = held_type(val, self._sizes(val))
                result = self.importer.builder.match_cast(result, wanted, name)
            return Complex(pairs=result) if is_complex(val) else result
        return result
