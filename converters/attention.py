"""Scaled dot-product attention: forward for the library's flash kernel, backward by products."""

from __future__ import annotations

import math
from typing import Any

import torch

from fx2relax.bounds import equal, simple, wide

from .common import Unsupported, const, converts, dtype, emit, op, shape, te, te_call, tirx
from .linear_algebra import matmul, transposed

aten = torch.ops.aten

_HEADS_LAST = [0, 2, 1, 3]  # (batch, heads, length, width) to R.nn.attention's order and back


@converts(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> tuple[Any, Any]:
    """Attention and the logarithm of each row's sum; a row that sees nothing gives zeros.

    A causal mask starts at the top left corner, whatever the lengths of query and key are.
    """
    if dropout_p:
        raise Unsupported("dropout_p")
    key, value = _repeated(key, shape(query)[1]), _repeated(value, shape(query)[1])
    bias = attn_mask
    if bias is not None:
        bias = emit(bias)
        rows = shape(bias)
        if len(rows) < 4:
            bias = emit(op.reshape(bias, (*[1] * (4 - len(rows)), *rows)))
    result = op.nn.attention(
        op.permute_dims(query, _HEADS_LAST),
        op.permute_dims(key, _HEADS_LAST),
        op.permute_dims(value, _HEADS_LAST),
        bias=bias,
        scale=None if scale is None else tirx.FloatImm("float32", scale),
        causal_mask="TopLeft" if is_causal else None,
    )
    scores = _scores(query, key, is_causal, bias, scale)
    return op.permute_dims(result, _HEADS_LAST), _log_sum_exp(scores)


@converts(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def flash_attention_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> tuple[Any, Any, Any]:
    """Gradients of query, key and value, from the forward's result and logarithms."""
    if dropout_p:
        raise Unsupported("dropout_p")
    heads, kv_heads = shape(query)[1], shape(key)[1]
    wide = [emit(_widened(t)) for t in (grad_out, query, key, value, out)]
    grad, q, k, v, result = wide
    k, v = _repeated(k, heads), _repeated(v, heads)
    scores = _scores(q, k, is_causal, attn_mask, scale)
    weights = emit(te_call(_te_weights, scores, logsumexp, primfunc_name_hint="weights"))
    grad_value = op.matmul(transposed(weights), grad)
    # The gradient of a row of scores is what its weights' own gradients exceed their mean by.
    mean = op.sum(op.multiply(grad, result), axis=-1, keepdims=True)
    grad_weights = op.matmul(grad, transposed(v))
    factor = _scale(q, scale)
    grad_scores = emit(op.multiply(op.multiply(weights, op.subtract(grad_weights, mean)), factor))
    grad_query = op.matmul(grad_scores, k)
    grad_key = op.matmul(transposed(grad_scores), q)
    narrow = dtype(query)
    results = [grad_query, _collected(grad_key, kv_heads), _collected(grad_value, kv_heads)]
    results = [emit(g) for g in results]
    if dtype(results[0]) != narrow:
        results = [op.astype(g, narrow) for g in results]
    return results[0], results[1], results[2]


def _scale(query: Any, scale: float | None) -> Any:
    """The factor of the scores as a 0-d tensor: one over the root of the heads' width."""
    width = shape(query)[-1]
    if scale is None and isinstance(width, int):
        scale = 1.0 / math.sqrt(width) if width else 0.0
    return const(scale, query) if scale is not None else te_call(_te_scale, query)


def _te_scale(query: Any) -> Any:
    root = tirx.rsqrt(query.shape[3].astype(str(query.dtype)))
    return te.compute((), lambda *_: root, name="scale")


def _repeated(x: Any, heads: Any) -> Any:
    """Each head of a key or value as often as queries share it."""
    own = shape(x)[1]
    if equal(own, heads):
        return x
    if isinstance(own, int) and isinstance(heads, int):
        return emit(op.repeat(x, heads // own, axis=1))
    return emit(te_call(_te_repeated, x, wide(heads), primfunc_name_hint="repeat_heads"))


def _te_repeated(x: Any, heads: Any) -> Any:
    times = tirx.floordiv(heads, x.shape[1])
    batch, _, *rest = x.shape
    return te.compute(
        (batch, heads, *rest), lambda b, h, *i: x(b, tirx.floordiv(h, times), *i), name="repeated"
    )


def _collected(gradient: Any, heads: Any) -> Any:
    """The sum of the gradients of the copies that `_repeated` made."""
    gradient = emit(gradient)
    batch, copies, *rest = shape(gradient)
    if equal(copies, heads):
        return gradient
    split = op.reshape(gradient, (batch, heads, simple(copies // heads), *rest))
    return op.sum(split, axis=2)


def _widened(x: Any) -> Any:
    return op.astype(x, "float32") if dtype(x) in ("float16", "bfloat16") else x


def _scores(query: Any, key: Any, is_causal: bool, bias: Any, scale: float | None) -> Any:
    """Scaled and masked products of queries and keys, in float32 for half precision."""
    query, key = emit(_widened(query)), emit(_widened(key))
    product = matmul(query, transposed(key))
    scores = emit(op.multiply(product, _scale(query, scale)))
    if bias is not None:
        scores = emit(op.add(scores, _widened(bias)))
    if is_causal:
        scores = te_call(_te_causal, scores, primfunc_name_hint="causal_mask")
    return scores


def _te_causal(scores: Any) -> Any:
    """Minus infinity where a key comes after the query."""
    hidden = tirx.const(float("-inf"), str(scores.dtype))
    return te.compute(
        scores.shape,
        lambda b, h, i, j: tirx.Select(j <= i, scores(b, h, i, j), hidden),
        name="causal",
    )


def _log_sum_exp(scores: Any) -> Any:
    """log(sum(exp(row))); minus infinity for a row that is hidden throughout."""
    largest = te_call(_te_largest, scores, primfunc_name_hint="largest")
    shifted = op.exp(op.subtract(scores, largest))
    total = op.log(op.sum(shifted, axis=-1))
    return op.add(total, op.squeeze(largest, [3]))


def _te_largest(scores: Any) -> Any:
    """The largest finite element of each row, 0 where there is none."""
    dtype_ = str(scores.dtype)
    k = te.reduce_axis((0, scores.shape[3]), "k")
    rows = (*scores.shape[:3], 1)
    largest = te.compute(
        rows, lambda b, h, i, _: te.max(scores(b, h, i, k), axis=k), name="largest"
    )
    return te.compute(
        rows,
        lambda *i: tirx.Select(
            largest(*i) > tirx.min_value(dtype_), largest(*i), tirx.const(0, dtype_)
        ),
        name="finite",
    )


def _te_weights(scores: Any, logsumexp: Any) -> Any:
    """exp(score - logsumexp); 0 in a row that is hidden throughout."""
    dtype_ = str(scores.dtype)

    def weight(b: Any, h: Any, i: Any, j: Any) -> Any:
        total = logsumexp(b, h, i).astype(dtype_)
        seen = total > tirx.const(float("-inf"), dtype_)
        safe = tirx.Select(seen, total, tirx.const(0, dtype_))
        return tirx.exp(scores(b, h, i, j) - safe)

    return te.compute(scores.shape, weight, name="weights")
