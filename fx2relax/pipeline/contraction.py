"""Products that are rounded before they are added, as eager rounds them.

TVM lets LLVM contract any product and sum into one fused multiply-add, which rounds once: in one
kernel ``x * y - z`` would be the rounding error where eager gives 0, and a number where eager's
product is infinite. Sums over an axis stay contracted, as they are in PyTorch's libraries.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from .tir import Call, Rewriter, TensorLoad


def _adds_products(node: Any) -> bool:
    return _is_float(node) and (_may_be_product(node.a) or _may_be_product(node.b))


#: Where `Rounded` may find a sum of products.
SUMS = dict.fromkeys((tirx.Add, tirx.Sub), _adds_products)


class Rounded(Rewriter):
    """Puts LLVM's arithmetic fence, which costs no instruction, around products in sums.

    Comes before functions are made polynomials, whose own products and sums are contracted.
    """

    def visit_BufferStore(self, node: Any) -> Any:
        """A store; in that of a running sum the last addition is left as it is."""
        value = node.value
        if not _accumulates(node):
            return self.store(node)
        new = type(value)(self.expr(value.a), self.expr(value.b))
        return tirx.BufferStore(node.buffer, new, list(node.indices))

    def leave(self, node: Any) -> Any:
        """A sum or difference of floats."""
        if type(node) not in (tirx.Add, tirx.Sub) or not _is_float(node):
            return node
        a, b = _fenced(node.a), _fenced(node.b)
        return node if a is node.a and b is node.b else type(node)(a, b)


def _is_float(node: Any) -> bool:
    return str(node.ty.dtype).startswith("float")


def _accumulates(node: Any) -> bool:
    value = node.value
    if type(value) is not tirx.Add:
        return False
    return any(type(v) is TensorLoad and v.source.same_as(node.buffer) for v in (value.a, value.b))


def _fenced(node: Any) -> Any:
    if not _may_be_product(node):
        return node
    return tirx.call_llvm_pure_intrin(str(node.ty.dtype), "llvm.arithmetic.fence", node)


def _may_be_product(node: Any) -> bool:
    """Whether a value may be a product once functions are polynomials."""
    if isinstance(node, tirx.Let):
        return _may_be_product(node.body)
    if isinstance(node, tirx.Select):
        return _may_be_product(node.true_value) or _may_be_product(node.false_value)
    # The functions that become polynomials are operators of tirx; calls by name are opaque.
    return isinstance(node, tirx.Mul) or (
        isinstance(node, Call) and len(node.args) == 1 and node.op.name.startswith("tirx.")
    )
