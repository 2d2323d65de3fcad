"""How much work a node or a kernel is: floating-point operations and bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry


def operations(node: torch.fx.Node) -> int:
    """Floating-point operations of a node: PyTorch's count, or one for each element it makes."""
    target = node.target
    packet = getattr(target, "overloadpacket", None)
    count = flop_registry.get(packet)
    if count is not None:
        args, kwargs = pytree.tree_map(_fake, (node.args, node.kwargs))
        try:
            return int(count(*args, **kwargs, out_val=node.meta.get("val")))
        except (TypeError, ValueError, AssertionError, RuntimeError):
            pass  # sizes that are not known, or another signature
    return elements(node)


def elements(node: torch.fx.Node) -> int:
    """One operation for each floating-point number that a node makes, if it is not moved alone."""
    if _moves_alone(node.target):
        return 0
    values = pytree.tree_leaves(node.meta.get("val"))
    floats = [v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]
    return sum(_elements(v) for v in floats)


def _fake(value: Any) -> Any:
    return value.meta.get("val") if isinstance(value, torch.fx.Node) else value


def _elements(value: torch.Tensor) -> int:
    sizes = [size if isinstance(size, int) else size.node.hint or 1 for size in value.shape]
    return math.prod(sizes)


def _moves_alone(target: Any) -> bool:
    name = getattr(target, "_opname", "")
    moving = ("view", "reshape", "permute", "transpose", "expand", "slice", "clone", "copy", "cat")
    quiet = ("t", "select", "squeeze", "unsqueeze", "embedding", "gather", "index_select", "detach")
    return name in quiet or any(part in name for part in moving)


def bytes_of(types: Iterable[Any], sizes: dict[str, int] | None = None) -> int:
    """The bytes of tensors of these Relax types; those of unknown size do not count."""
    total = 0
    for ty in types:
        for each in getattr(ty, "fields", None) or [ty]:
            shape = getattr(each, "shape", None)
            values = getattr(shape, "values", None)
            dtype = str(getattr(each, "dtype", ""))
            if values is None or not dtype:
                continue
            known = [_size(v, sizes or {}) for v in values]
            if None not in known:
                total += math.prod(n for n in known if n is not None) * _width(dtype)
    return total


def _size(value: Any, sizes: dict[str, int]) -> int | None:
    number = getattr(value, "value", None)
    if isinstance(number, int):
        return number
    return sizes.get(str(getattr(value, "name", "")))


def _width(dtype: str) -> int:
    digits = "".join(c for c in dtype if c.isdigit())
    return max(int(digits) // 8, 1) if digits else 1
