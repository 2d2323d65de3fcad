"""Nodes that always make the same small tensor: PyTorch computes them while a graph is compiled."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch._C import _DisableAutocast
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from fx2relax import routes
from fx2relax.registry import lookup, shipped

_log = logging.getLogger(__name__)
# What makes a tensor of more elements out of numbers alone does it as fast as it could be read.
_LARGEST_MADE = 1 << 10
_LARGEST_BYTES = 1 << 20


Value = torch.Tensor | tuple[torch.Tensor, ...]


def folded(nodes: Sequence[Node]) -> dict[Node, Value]:
    """The values of the nodes that depend on no input, on a CPU, each in memory of its own.

    A graph's own results are left to the program, which makes them anew with each call.
    """
    output = next(n for n in reversed(nodes) if n.op == "output")
    results = set(output.all_input_nodes)
    found: dict[Node, Value] = {}
    with _plainly():
        for node in nodes:
            if node not in results and _is_constant(node, found):
                value = _value(node, found)
                if value is not None:
                    found[node] = value
    return found


def _is_constant(node: Node, known: dict[Node, Value]) -> bool:
    target, val = node.target, node.meta.get("val")
    if node.op != "call_function" or not all(n in known for n in node.all_input_nodes):
        return False
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    if target.namespace not in ("aten", "prims") or "empty" in target._opname:
        return False
    converter = lookup(target)
    if converter is not None and not shipped(converter):
        return False
    made = val if isinstance(val, (tuple, list)) else [val]
    return all(_is_small(value, not node.all_input_nodes) for value in made)


def _is_small(val: object, from_nothing: bool) -> bool:
    if not isinstance(val, torch.Tensor) or not routes.is_held(val) or val.device.type != "cpu":
        return False
    if not all(isinstance(size, int) for size in val.shape):
        return False
    if from_nothing and val.numel() > _LARGEST_MADE:
        return False
    return 0 < val.numel() * val.element_size() <= _LARGEST_BYTES


def _value(node: Node, known: dict[Node, Value]) -> Value | None:
    def given(value: object) -> object:
        return known[value] if isinstance(value, Node) else value

    assert callable(node.target)
    try:
        args, kwargs = pytree.tree_map(given, (node.args, node.kwargs))
        value = node.target(*args, **kwargs)
    except Exception as error:  # the call says so
        _log.info("%s is left to the program: %s", node.name, error)
        return None
    expected = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return _own(value) if _is_alike(value, expected) else None
    if isinstance(expected, (tuple, list)) and all(map(_is_alike, value, expected)):
        return tuple(_own(v) for v in value)
    return None


def _is_alike(value: object, expected: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return (value.dtype, value.shape, value.device) == (
        expected.dtype,
        expected.shape,
        expected.device,
    )


def _own(value: torch.Tensor) -> torch.Tensor:
    return value.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()


@contextmanager
def _plainly() -> Iterator[None]:
    """Operators compute, whatever a compiler or its caller has set."""
    with ExitStack() as stack:
        for context in (unset_fake_temporarily(), _disable_current_modes(), torch.no_grad()):
            stack.enter_context(context)
        stack.enter_context(_DisableAutocast())
        yield
