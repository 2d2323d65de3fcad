"""The three outcomes of a node: its converter, PyTorch's decomposition, or a call into PyTorch."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fx2relax import cuda_routes, decompositions, dtypes, eager_kernels, kept
from fx2relax.collectives import is_collective
from fx2relax.complexes import is_complex
from fx2relax.registry import Converter, lookup, lookup_complex, shipped

Node = torch.fx.Node


def is_plain(val: torch.Tensor) -> bool:
    """Whether a tensor can be a Relax tensor: strided, real, of a dtype that TVM has."""
    return (
        val.layout is torch.strided
        and dtypes.has_tvm(val.dtype)
        and not val.is_quantized
        and not val.is_nested
    )


def is_held(val: torch.Tensor) -> bool:
    """Whether Relax tensors can hold a tensor: one, or two where it is complex."""
    return is_plain(val) or is_complex(val)


def plain_node(node: Node) -> bool:
    """Whether every tensor that a node takes and gives can be a Relax tensor."""
    return all(is_plain(v) for v in _tensors(node))


def complex_node(node: Node) -> bool:
    """Whether Relax tensors can hold what a node takes and gives, and some of it is complex."""
    return _some_complex(_tensors(node))


def _some_complex(tensors: list[torch.Tensor]) -> bool:
    return all(is_held(v) for v in tensors) and any(is_complex(v) for v in tensors)


def _tensors(node: Node) -> list[torch.Tensor]:
    values = [v.meta.get("val") for v in flat_arguments(node) if isinstance(v, Node)]
    values.append(node.meta.get("val"))
    return [v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]


def converter_of(node: Node) -> Converter | None:
    """The converter of a node's target for what it takes; None for tensors Relax cannot hold."""
    tensors = _tensors(node)
    if all(is_plain(v) for v in tensors):
        return lookup(node.target)
    return lookup_complex(node.target) if _some_complex(tensors) else None


def flat_arguments(node: Node) -> list[Any]:
    """A node's arguments, positional then keyword, without nesting."""
    leaves: list[Any] = pytree.tree_leaves((list(node.args), dict(node.kwargs)), is_leaf=is_leaf)
    return leaves


def is_leaf(value: Any) -> bool:
    return isinstance(value, (Node, slice)) or value is None


def has_route(node: Node) -> bool:
    """Whether a node can be converted without a call into PyTorch."""
    target = node.target
    if target in (operator.getitem, kept.kept_call, torch.ops.higher_order.cond):
        return True
    val = node.meta.get("val")
    if isinstance(val, (torch.SymInt, torch.SymBool, torch.SymFloat, int, float, bool)):
        return True
    if not plain_node(node):
        return converter_of(node) is not None
    return lookup(target) is not None or _decomposition(target) is not None or constant(node)


_aten = torch.ops.aten
# Which of equal elements they name is up to eager's algorithm: the library's own is called.
_UNSTABLE = {
    _aten.sort.default,
    _aten.topk.default,
    _aten.kthvalue.default,
    _aten.median.dim,
    _aten.nanmedian.dim,
    _aten.mode.default,
}
# Four real products each without it.
_COMPLEX_PRODUCTS = {
    _aten.addmm.default,
    _aten.baddbmm.default,
    _aten.bmm.default,
    _aten.dot.default,
    _aten.mm.default,
    _aten.mv.default,
    _aten.vdot.default,
}
# What it computes as nothing else here does: Fourier transforms, and eigenvalues of what is not
# symmetric, of which order and phase are up to its algorithm.
_ITS_OWN = {
    _aten._fft_c2c.default,
    _aten._fft_c2r.default,
    _aten._fft_r2c.default,
    _aten.linalg_eig.default,
    _aten._linalg_eigvals.default,
}


def library_decides(node: Node, converter: Converter | None) -> bool:
    """Whether only PyTorch's library gives eager's result, and no converter of a user stands.

    Collectives are its calls of the process group.
    """
    if converter is not None and not shipped(converter):
        return False
    if cuda_routes.on_cuda(node):
        held = plain_node(node) or complex_node(node)
        known = converter or lookup(node.target) or lookup_complex(node.target)
        return held and cuda_routes.runs_in_torch(node, known is not None)
    if node.target in _UNSTABLE:
        return plain_node(node)
    if node.target in _ITS_OWN or is_collective(node.target):
        return plain_node(node) or complex_node(node)
    return node.target in _COMPLEX_PRODUCTS and complex_node(node)


def refusal(node: Node, halves: bool) -> str | None:
    """Why eager refuses the call of a node; see `eager_kernels.refusal`."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return eager_kernels.refusal(node.target, args, kwargs, halves=halves)


# More than this is better computed at each call than held.
_LARGEST_CONSTANT = 1 << 16


def constant(node: Node) -> bool:
    """Whether a node makes one small tensor, always the same, out of numbers alone."""
    target, val = node.target, node.meta.get("val")
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in target.tags or not isinstance(val, torch.Tensor):
        return False
    if any(isinstance(v, Node) for v in flat_arguments(node)):
        return False
    return 0 < val.numel() <= _LARGEST_CONSTANT


def _decomposition(target: Any) -> Callable[..., Any] | None:
    if not isinstance(target, torch._ops.OpOverload):
        return None
    found = decompositions.rule(target)
    if found is not None:
        return found
    if target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return target.decompose
    return None


def decompose(node: Node) -> torch.fx.GraphModule | None:
    """Trace PyTorch's decomposition of one node, with the node's fake values.

    Returns None where there is no decomposition, or where it declines these arguments.
    The traced graph takes the node's FX operands, flattened.
    """
    rule = _decomposition(node.target)
    if rule is None:
        return _held(node) if constant(node) else None
    leaves = flat_arguments(node)
    structure = pytree.tree_structure((list(node.args), dict(node.kwargs)), is_leaf=is_leaf)
    operands = [v.meta["val"] for v in leaves if isinstance(v, Node)]

    def call(*values: Any) -> Any:
        remaining = iter(values)
        filled = [next(remaining) if isinstance(v, Node) else v for v in leaves]
        args, kwargs = pytree.tree_unflatten(filled, structure)
        result = rule(*args, **kwargs)
        # A named tuple would be a node of its own.
        return tuple(result) if isinstance(result, tuple) else result

    mode = next((v.fake_mode for v in operands if hasattr(v, "fake_mode")), None)
    try:
        with mode or FakeTensorMode(), torch.no_grad():
            graph = make_fx(call, decomposition_table=decompositions.table())(*operands)
    except NotImplementedError:
        return None
    if any(n.target is node.target for n in graph.graph.nodes):
        return None
    return graph


def _held(node: Node) -> torch.fx.GraphModule:
    """A graph that returns what PyTorch makes of a constant node."""
    assert callable(node.target)
    value = node.target(*node.args, **{**node.kwargs, "device": "cpu"})
    graph = torch.fx.Graph()
    graph.output(graph.get_attr("value"))
    root = torch.nn.Module()
    root.register_buffer("value", value)
    return torch.fx.GraphModule(root, graph)
