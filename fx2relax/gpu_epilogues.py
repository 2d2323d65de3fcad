"""What follows products and convolutions on a GPU, in the same call: bias, sum, ReLU, GELU.

`fx2relax.runtime.guarded` holds the calls. Only results that nothing else reads are left out, and
only weights that are frozen are looked at: a graph that trains stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from fx2relax.gpu_graphs import Rewrite, only_user, target_of, val_of
from fx2relax.runtime import guarded as guarded  # registers what is called

Node = torch.fx.Node
_aten = torch.ops.aten
_ADDMM = torch.ops.fx2relax.addmm_activation.default
_CONVOLUTION = torch.ops.fx2relax.convolution_relu.default
#: What the libraries' fused kernels take.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)


def join_products(rewrite: Rewrite) -> None:
    """``mm`` and a bias as ``addmm``; that and ReLU or the tanh GELU as one call.

    A product of rows with leading axes is one of a matrix, between two views: both are looked
    through.
    """
    for node in rewrite.nodes(_aten.mm.default):
        _with_bias(rewrite, node)
    for node in rewrite.nodes(_aten.addmm.default):
        _with_activation(rewrite, node)


def _viewed(node: Node) -> Node:
    """A product, or the view of it that alone reads it."""
    user = only_user(node)
    val, whole = val_of(node), val_of(user)
    if user is None or target_of(user) not in _VIEWS or val is None or whole is None:
        return node
    kept = whole.dim() > 0 and _equal(whole.shape[-1], val.shape[-1])
    return user if kept and user.args[0] is node else node


def _with_bias(rewrite: Rewrite, product: Node) -> None:
    end = _viewed(product)
    total, val = only_user(end), val_of(product)
    if total is None or target_of(total) is not _aten.add.Tensor or val is None:
        return
    if not _plain_sum(total) or product.args[1] not in rewrite.weights:
        return
    (bias,) = (a for a in total.args if a is not end)
    vector = val_of(bias)
    if bias not in rewrite.weights or vector is None or not _is_bias(vector, val, 1):
        return
    if val_of(total).dtype != val.dtype:  # type: ignore[union-attr]
        return
    with rewrite.graph.inserting_before(total):
        new = rewrite.emit(total, _aten.addmm.default, bias, *product.args)
        _finish(rewrite, total, end, product, new)


def _with_activation(rewrite: Rewrite, product: Node) -> None:
    end = _viewed(product)
    after, val = only_user(end), val_of(product)
    gelu = _activation(after)
    if after is None or gelu is None or val is None or product.kwargs:
        return
    bias, mat1, mat2 = product.args
    vector = val_of(bias)
    if mat2 not in rewrite.weights or vector is None or not _is_bias(vector, val, 1):
        return
    with rewrite.graph.inserting_before(after):
        new = rewrite.emit(
            after, _ADDMM, bias, mat1, mat2, gelu, val=rewrite.like(val, val.shape, (0, 1))
        )
        _finish(rewrite, after, end, product, new)


def _finish(rewrite: Rewrite, last: Node, end: Node, product: Node, new: Node) -> None:
    """Put a product in the place of what followed another one, behind the same view."""
    if end is not product:
        new = rewrite.emit(last, end.target, new, end.args[1], val=last.meta["val"])
    else:
        new.meta["val"] = last.meta["val"]
    rewrite.replace(last, new)


def _activation(node: Node | None) -> bool | None:
    """Whether a node is the tanh GELU, or ReLU; None for anything else."""
    if target_of(node) is _aten.relu.default:
        return False
    if node is not None and target_of(node) is _aten.gelu.default:
        given = node.kwargs.get("approximate", node.args[1] if len(node.args) > 1 else "none")
        return True if given == "tanh" else None
    return None


def _plain_sum(node: Node) -> bool:
    """Whether a node adds two different tensors as they are."""
    tensors = [a for a in node.args if isinstance(a, Node)]
    return not node.kwargs and len(node.args) == 2 and len(set(tensors)) == 2


def _is_bias(bias: torch.Tensor, val: torch.Tensor, axis: int) -> bool:
    """Whether a tensor is one number for each index along an axis of another one."""
    fits = bias.dim() == 1 and bias.dtype == val.dtype and val.dtype in DTYPES
    return fits and _equal(bias.shape[0], val.shape[axis])


def _equal(a: Any, b: Any) -> bool:
    """Whether sizes are equal for certain, without a guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return (
        isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt) and a.node.expr == b.node.expr
    )


def join_convolutions(rewrite: Rewrite) -> None:
    """A convolution with a bias and what follows it: ReLU, or a sum and then ReLU."""
    for node in rewrite.nodes(_aten.relu.default):
        before = node.args[0]
        if isinstance(before, Node) and only_user(before) is node:
            _join(rewrite, node, before)


def _join(rewrite: Rewrite, relu: Node, before: Node) -> None:
    convolution, z = before, None
    if target_of(before) is _aten.add.Tensor:
        found = _summand(rewrite, before)
        if found is None:
            return
        convolution, z = found
    if not _fits(rewrite, convolution):
        return
    x, weight, bias, stride, padding, dilation, _, _, groups = convolution.args
    window = stride, padding, dilation, groups
    with rewrite.graph.inserting_before(relu):
        new = rewrite.emit(relu, _CONVOLUTION, x, weight, bias, z, *window, val=relu.meta["val"])
        rewrite.replace(relu, new)


def _summand(rewrite: Rewrite, total: Node) -> tuple[Node, Node] | None:
    """The convolution of a sum that nothing else reads, and what is added to it."""
    if not _plain_sum(total):
        return None
    whole = val_of(total)
    for convolution, z in (total.args, total.args[::-1]):
        val, other = val_of(convolution), val_of(z)
        if whole is None or val is None or other is None:
            continue
        if val.dtype != other.dtype or val.dim() != other.dim():
            continue
        same = all(_equal(a, b) for a, b in zip(val.shape, other.shape, strict=True))
        assert isinstance(convolution, Node)
        assert isinstance(z, Node)
        if same and only_user(convolution) is total and _fits(rewrite, convolution):
            return convolution, z
    return None


def _fits(rewrite: Rewrite, node: Node) -> bool:
    """Whether a node is a convolution that cuDNN may have with ReLU inside."""
    if target_of(node) is not _aten.convolution.default:
        return False
    _, weight, bias, _, _, _, transposed, _, groups = node.args
    val, window, vector = val_of(node), val_of(weight), val_of(bias)
    if transposed or val is None or window is None or vector is None:
        return False
    if weight not in rewrite.weights or val.dim() not in (4, 5) or not _is_bias(vector, val, 1):
        return False
    # Each channel by itself: PyTorch has kernels of its own for them.
    return bool(groups == 1 or window.shape[1] != 1)
