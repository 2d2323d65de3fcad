"""The memory that `as_strided` counts in: that of its operand, or of what that is a view of.

Where the elements named are not all the operand's own, they are taken from the whole memory as a
flat tensor: what a node of the graph filled it with, or an input's storage, handed over whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx2relax.compat import op, shape_expr
from fx2relax.complexes import Complex
from fx2relax.errors import ImportFailure, source_line
from fx2relax.layouts import (
    concrete,
    dense_permutation,
    inverse,
    is_compact,
    overlaps,
    same_storage,
)
from fx2relax.params import InputSpec
from fx2relax.promotion import fake_value
from fx2relax.registry import lookup

Node = torch.fx.Node

aten = torch.ops.aten
_SCATTER = aten.as_strided_scatter.default
_STRIDED = {aten.as_strided.default, aten.as_strided_copy.default, _SCATTER}


def whole_inputs(graph: torch.fx.Graph, specs: Sequence[InputSpec]) -> None:
    """Have inputs handed over as their whole storage where an `as_strided` counts in it."""
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    given = dict(zip(placeholders, specs, strict=False))
    for node in graph.nodes:
        if node.target not in _STRIDED:
            continue
        spec = given.get(_root(node.args[0]))
        if spec is None or spec.storage is not None or spec.val.is_complex() or _own(node):
            continue
        count = _elements(spec.val)
        if isinstance(count, int) and _counted(spec.val) and _reaches(node, count):
            spec.storage, spec.permutation = count, None
            # A weight's memory is not the program's to keep.
            spec.kind = "user"


def logical(spec: InputSpec, flat: Any) -> Any:
    """The input itself, from its storage."""
    return _view(spec.val, flat)


class Storages:
    """The memory of a graph's tensors as flat tensors, by the node that made it.

    Args:
        importer: its environment holds what the nodes before are bound to.
    """

    def __init__(self, importer: Any) -> None:
        self.importer = importer
        self.flat: dict[Node, tuple[Any, Any]] = {}

    def give(self, node: Node, flat: Any, count: Any) -> None:
        """Remember the memory of a node, and how many elements it holds."""
        self.flat[node] = flat, count

    def call(self, node: Node, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """What an `as_strided` gives.

        Raises:
            ImportFailure: it counts in memory that the graph does not hold.
        """
        place: torch.Tensor = fake_value(node.args[0])
        scatter = node.target is _SCATTER
        if _own(node):
            self._starts(place)
            permutation = dense_permutation(concrete(place.shape), concrete(place.stride()))
            if permutation is None:
                return function(*args, **kwargs)
            result = function(_permuted(args[0], permutation), *args[1:], **kwargs)
            return _permuted(result, inverse(permutation)) if scatter else result
        flat, count = self._flat(node, place)
        sizes, strides, offset = (self.importer.symbols.shape(v) for v in _arguments(node))
        source = args[1:2] or [kwargs["src"]] if scatter else []
        result = function(flat, *source, sizes, strides, offset[0])
        if not scatter:
            return result
        result = self.importer.builder.emit(result, node.name)
        # PyTorch's result is such a view of a copy of the whole memory.
        self.give(node, result, count)
        return _view(place, result)

    def _starts(self, val: torch.Tensor) -> None:
        """Have the input of which a tensor is a part begin where its storage does."""
        for spec in self.importer.inputs:
            if spec.storage is None and same_storage(spec.val, val):
                spec.at_start |= concrete([spec.val.storage_offset()]) == [0]

    def _flat(self, node: Node, place: torch.Tensor) -> tuple[Any, Any]:
        """The memory that an `as_strided` counts in."""
        root = _root(node.args[0])
        if place.is_complex():
            root = None
        found = None if root is None else self.flat.get(root) or self._filled(root)
        if found is not None and _counted(place) and _reaches(node, found[1]):
            assert root is not None
            if root.meta["val"].dtype is place.dtype:
                return found
        raise ImportFailure(f"{node.target} of a view, at {source_line(node)}")

    def _filled(self, root: Node) -> tuple[Any, Any] | None:
        """The memory of a node, if its value is all of it that the graph holds."""
        val: torch.Tensor = root.meta["val"]
        if not _fills(val):
            return None
        permutation = dense_permutation(concrete(val.shape), concrete(val.stride()))
        flat = self.importer.env[root]
        flat = flat if permutation is None else op.permute_dims(flat, permutation)
        flat = self.importer.builder.emit(op.reshape(flat, shape_expr([-1])))
        self.give(root, flat, val.numel())
        self._starts(val)
        return self.flat[root]


def _permuted(value: Any, axes: Sequence[int]) -> Any:
    if isinstance(value, Complex):
        return value.map(lambda part: op.permute_dims(part, axes))
    return op.permute_dims(value, axes)


def is_strided(node: Node) -> bool:
    """Whether a node names elements by their place in memory."""
    return node.target in _STRIDED


def _view(val: torch.Tensor, flat: Any) -> Any:
    """A tensor of fixed sizes as it lies in a flat memory."""
    converter = lookup(aten.as_strided.default)
    assert converter is not None
    places = list(val.shape), list(val.stride()), int(val.storage_offset())
    return converter.function(flat, *places)


def _root(value: Any) -> Node | None:
    """The node that made the memory of a value: the last in a chain of views."""
    node = value
    while isinstance(node, Node):
        val = node.meta.get("val")
        bases = [n for n in node.all_input_nodes if same_storage(n.meta.get("val"), val)]
        if len(bases) != 1:
            return None if bases else node
        node = bases[0]
    return None


def _elements(val: torch.Tensor) -> Any:
    """How many elements the memory of a tensor holds."""
    size: Any = val.untyped_storage().nbytes()
    return size // val.element_size()


def _counted(val: torch.Tensor) -> bool:
    """Whether sizes, strides and offset are numbers, and the bits are the values."""
    numbers = (*val.shape, *val.stride(), val.storage_offset())
    return all(isinstance(n, int) for n in numbers) and not val.is_neg() and not val.is_conj()


def _fills(val: torch.Tensor) -> bool:
    """Whether a tensor is dense, and begins where its memory does."""
    at_start = concrete([val.storage_offset()]) == [0]
    return at_start and (is_compact(val) or 0 in concrete(val.shape))


def _own(node: Node) -> bool:
    """Whether an `as_strided` names elements of its operand alone, which is dense."""
    val: torch.Tensor = fake_value(node.args[0])
    return _fills(val) and _reaches(node, val.numel())


def _reaches(node: Node, count: Any) -> bool:
    """Whether every element that an `as_strided` names is one of the first `count`."""
    if node.target is _SCATTER and overlaps(fake_value(node.args[0])):
        return False  # PyTorch copies the elements, and not the memory
    sizes, strides, (offset,) = _arguments(node)
    if 0 in concrete(sizes):
        return True
    last = offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    return bool(statically_known_true(last < count))


def _arguments(node: Node) -> tuple[list[Any], list[Any], list[Any]]:
    """The sizes, strides and offset of an `as_strided`; the last as a list of one."""
    names = ("size", "stride", "storage_offset")
    first = 2 if node.target is _SCATTER else 1
    given: dict[str, Any] = {**dict(zip(names, node.args[first:], strict=False)), **node.kwargs}
    sizes, strides = ([fake_value(v) for v in given[name]] for name in names[:2])
    offset = given.get("storage_offset")
    place: torch.Tensor = fake_value(node.args[0])
    return sizes, strides, [place.storage_offset() if offset is None else fake_value(offset)]
