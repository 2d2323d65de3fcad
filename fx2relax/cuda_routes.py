"""What is generated for a GPU; everything else runs in PyTorch's own kernels there.

A kernel is generated where each of its results depends on a few elements or is a sum, and where it
fuses with what surrounds it. Sorting, scans, scatters, solvers and whatever has a loop that one
thread would run stay with the kernels that NVIDIA and PyTorch have written for them, as products,
convolutions and attention do: in eager's own precision, TF32 included.
"""

from __future__ import annotations

import torch
import torch.fx
from torch.utils import _pytree as pytree

# Softmax, norms and extremes are not among them: TVM's schedules give a row of 384 or 1500 to one
# thread, since one for all threads of a block needs rows of a multiple of 256.
_REDUCTIONS = ("sum", "mean", "all", "any")
_CREATION = (
    *("arange", "empty", "empty_like", "empty_permuted", "empty_strided", "eye", "full"),
    *("full_like", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones"),
    *("ones_like", "scalar_tensor", "zeros", "zeros_like", "_efficientzerotensor"),
)
_MOVES = (
    *("_reshape_copy", "_to_copy", "_unsafe_view", "cat", "constant_pad_nd", "copy", "fill"),
    *("flip", "lift", "lift_fresh_copy", "masked_fill", "repeat", "roll", "select_scatter"),
    *("slice_scatter", "stack", "tril", "triu", "where", "clone", "view_copy", "expand_copy"),
    *("permute_copy", "slice_copy", "select_copy", "squeeze_copy", "unsqueeze_copy", "zero"),
    *("rsub", "select_backward", "slice_backward"),
)
_GENERATED = frozenset(f"aten::{name}" for name in (*_REDUCTIONS, *_CREATION, *_MOVES))
#: They check their operands for zeros and negative exponents as no kernel on a GPU does.
_CHECKED = frozenset(
    f"aten::{name}" for name in ("pow", "div", "floor_divide", "remainder", "fmod", "gcd", "lcm")
)
# Pointwise, and loops here that are written for a processor; so is what begins with "special_".
_LOOPS = frozenset(
    f"aten::{name}" for name in ("digamma", "erfinv", "i0", "igamma", "igammac", "polygamma")
)
# On a GPU alone, so that no converter knows them; the first are those of `runtime.guarded`
# and `recurrent_layers`.
_OF_CUDA = frozenset(
    f"fx2relax::{name}" for name in ("addmm_activation", "convolution_relu", "recurrent_layers")
) | frozenset(
    f"aten::{name}"
    for name in (
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
        *("_scaled_dot_product_cudnn_attention", "_cudnn_rnn", "cudnn_batch_norm"),
        *("_scaled_dot_product_flash_attention_backward", "cudnn_batch_norm_backward"),
        *("_scaled_dot_product_efficient_attention_backward", "_cudnn_rnn_backward"),
        *("_scaled_dot_product_cudnn_attention_backward", "_fused_dropout", "native_dropout"),
        *("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_scaled_mm", "_grouped_mm"),
        *("_thnn_fused_lstm_cell_backward_impl", "_thnn_fused_gru_cell_backward"),
    )
)


def on_cuda(node: torch.fx.Node) -> bool:
    """Whether a node takes or gives a tensor on a GPU of NVIDIA's."""
    values = [node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)]
    return any(isinstance(v, torch.Tensor) and v.is_cuda for v in pytree.tree_leaves(values))


def runs_in_torch(node: torch.fx.Node, converted: bool) -> bool:
    """Whether a node on a GPU is a call of PyTorch's kernel.

    Args:
        node: on a GPU, see `on_cuda`.
        converted: whether it has a converter; what has none may be taken apart.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    schema = target._schema
    if not converted:
        return schema.name in _OF_CUDA
    if schema.name in _CHECKED and not _floating(node):
        return True
    if schema.name in _LOOPS or schema.name.startswith("aten::special_"):
        return True
    if target.namespace in ("prims", "quantized_decomposed"):
        return False
    view = any(value.alias_info is not None for value in schema.returns)
    return not (torch.Tag.pointwise in target.tags or view or schema.name in _GENERATED)


def _floating(node: torch.fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.is_floating_point()
