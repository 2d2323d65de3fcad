"""The strides that eager gives the result of an elementwise operator, those of size 1 included.

Fake tensors reckon them by another rule, which agrees wherever a stride places anything. This is
the order of ``TensorIterator`` (aten/src/ATen/TensorIterator.cpp), for sizes that are known.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from fx2relax.layouts import dense_strides

Ints = tuple[int, ...]
_aten = torch.ops.aten
# Laid out as the tensor is, if its elements fill their memory.
_LIKE = {
    _aten.clone.default,
    _aten.fill.Scalar,
    _aten.fill.Tensor,
    _aten.frexp.Tensor,
    _aten.full_like.default,
    _aten.ones_like.default,
    _aten.zeros_like.default,
    _aten._to_copy.default,
}
# Row by row, however its operands lie: fake tensors and the tag say otherwise.
_IN_ORDER = {_aten.masked_fill.Scalar, _aten.masked_fill.Tensor}
# One that PyTorch has not tagged.
_POINTWISE = {_aten.floor_divide.default}
# Overloads named "Scalar" that make a tensor of their number; the others have one operand.
_BINARY = {
    "__and__",
    "__lshift__",
    "__or__",
    "__rshift__",
    "__xor__",
    "add",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "copysign",
    "div",
    "eq",
    "floor_divide",
    "fmod",
    "ge",
    "gt",
    "le",
    "lt",
    "mul",
    "ne",
    "remainder",
    "rsub",
    "sub",
}


def eager_strides(node: torch.fx.Node) -> Ints | None:
    """The strides of a node's value in eager; None where they are unknown, or it is no tensor."""
    return _strides(node, {})


def _strides(node: torch.fx.Node, known: dict[torch.fx.Node, Ints | None]) -> Ints | None:
    if node not in known:
        known[node] = _found(node, known)
    return known[node]


def _found(node: torch.fx.Node, known: dict[torch.fx.Node, Ints | None]) -> Ints | None:
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.layout is not torch.strided:
        return None
    if node.target in _IN_ORDER:
        return val.new_empty(val.shape).stride()
    if not all(isinstance(n, int) for n in (*val.shape, *val.stride())):
        return None
    if node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return val.stride()
    if target in _LIKE:
        if node.kwargs.get("memory_format") not in (None, torch.preserve_format):
            return val.stride()
        source = node.args[0]
        assert isinstance(source, torch.fx.Node)
        strides = _strides(source, known)
        fills = strides is not None and _fills(tuple(val.shape), strides)
        return strides if fills else val.stride()
    if torch.Tag.pointwise not in target.tags and target not in _POINTWISE:
        return val.stride()
    operands = _operands(node, known)
    return val.stride() if operands is None else elementwise_strides(tuple(val.shape), operands)


def _operands(
    node: torch.fx.Node, known: dict[torch.fx.Node, Ints | None]
) -> list[tuple[Ints, Ints]] | None:
    """Shapes and strides of what an elementwise operator computes with; None if unclear."""
    target: Any = node.target
    name, overload = target._schema.name.split("::")[1], target._overloadname
    found = []
    for parameter, value in zip(target._schema.arguments, node.args, strict=False):
        if isinstance(value, torch.fx.Node) and isinstance(value.meta["val"], torch.Tensor):
            strides = _strides(value, known)
            if strides is None:
                return None
            found.append((tuple(value.meta["val"].shape), strides))
        elif "Tensor" in str(parameter.type) and isinstance(value, (bool, int, float)):
            found.append(((), ()))
        elif isinstance(value, (list, tuple)):
            return None
    if overload == "Scalar" and name in _BINARY:
        found.append(((), ()))
    return found


def elementwise_strides(shape: Ints, operands: Sequence[tuple[Ints, Ints]]) -> Ints:
    """The strides of the result of an elementwise operator.

    Args:
        shape: the result's.
        operands: shape and strides of each, in order; a number is a tensor without axes.
    """
    if operands and all(sizes == shape for sizes, _ in operands):
        if all(strides_match(shape, strides, dense_strides(shape)) for _, strides in operands):
            return dense_strides(shape)
        last = _channels_last(shape) if len(shape) == 4 else None
        if last and all(strides_match(shape, strides, last) for _, strides in operands):
            return last
        first = operands[0][1]
        if all(strides == first for _, strides in operands) and _fills(shape, first):
            return first
    order = _order(shape, [_spread(shape, *operand) for operand in operands])
    if order == list(reversed(range(len(shape)))):
        return dense_strides(shape)
    strides, step = [0] * len(shape), 1
    for axis in order:
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def _order(shape: Ints, operands: list[Ints]) -> list[int]:
    """The axes from the innermost to the outermost, by an insertion sort that may not decide."""
    order = list(reversed(range(len(shape))))
    for start in range(1, len(order)):
        moving = start
        for other in range(start - 1, -1, -1):
            decided = _compare(shape, operands, order[other], order[moving])
            if decided > 0:
                order[other], order[moving] = order[moving], order[other]
                moving = other
            elif decided < 0:
                break
    return order


def _compare(shape: Ints, operands: list[Ints], inner: int, outer: int) -> int:
    """Above 0 where two axes are to be swapped, below where not, 0 where nothing decides."""
    for strides in operands:
        a, b = strides[inner], strides[outer]
        if 0 in (a, b):
            continue
        if a != b:
            return 1 if a > b else -1
        if shape[inner] > shape[outer]:
            return 1
    return 0


def _spread(shape: Ints, sizes: Ints, strides: Ints) -> Ints:
    """The strides of an operand along the result's axes: 0 where it is repeated."""
    missing = len(shape) - len(sizes)
    own = [
        0 if size == 1 and whole != 1 else stride
        for size, stride, whole in zip(sizes, strides, shape[missing:], strict=True)
    ]
    return (0,) * missing + tuple(own)


def _channels_last(shape: Ints) -> Ints:
    _, channels, height, width = (max(n, 1) for n in shape)
    return channels * height * width, 1, width * channels, channels


def strides_match(shape: Ints, strides: Ints, wanted: Ints) -> bool:
    """Whether two strides place the elements of a shape alike."""
    if 0 in shape:
        return True
    return all(n == 1 or a == b for n, a, b in zip(shape, strides, wanted, strict=True))


def _fills(shape: Ints, strides: Ints) -> bool:
    """Whether the elements lie side by side, each in a place of its own, in any order of axes."""
    step = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if stride != step:
            return False
        step *= size
    return True
