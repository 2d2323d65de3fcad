"""Nodes whose calls must all happen, in their order, and those that can be repeated."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from fx2relax.collectives import is_collective

Node = torch.fx.Node

_IMPURE = frozenset(
    {
        "aten::_assert_async",
        "aten::_assert_scalar",
        "aten::_assert_tensor_metadata",
        "aten::_linalg_check_errors",
        "aten::sym_constrain_range",
        "aten::sym_constrain_range_for_size",
        "aten::_print",
    }
)


def _is_random(target: Any) -> bool:
    """Whether an operator draws random numbers."""
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in target.tags
    )


def is_ordered(node: Node) -> bool:
    """Whether such calls must all happen, in order.

    Random draws, assertions, and what other processes make together with this one.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return isinstance(target, torch._ops.HigherOrderOperator)
    if draws(node) or is_collective(target):
        return True
    return target._schema.is_mutable or target._schema.name in _IMPURE


def is_repeatable(node: Node) -> bool:
    """Whether a node can run a second time, and leave no more behind than its random draws."""
    if node.op != "call_function" or not is_ordered(node):
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is torch.ops.higher_order.cond
    if is_collective(target) or target._schema.is_mutable:
        return False
    return draws(node) or target._schema.name in _IMPURE - {"aten::_print"}


def draws(node: Node) -> bool:
    """Whether a call draws random numbers: attention without dropout does not."""
    if not _is_random(node.target):
        return False
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    place = next((i for i, a in enumerate(arguments) if a.name == "dropout_p"), None)
    if place is None:
        return True
    given = node.kwargs.get("dropout_p", arguments[place].default_value)
    return bool((node.args[place] if place < len(node.args) else given) != 0)
