"""Attention as two contractions and a softmax between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax, te, tirx

from .contractions import CONTRACTION
from .flow import name_of
from .library import _dtype, _heads_first, _sizes

_FLOATS = ("float32", "float64", "float16", "bfloat16")
_MASKS = {"None": None, "TopLeft": False, "BottomRight": True}


def is_attention(call: Any) -> bool:
    """Whether a call is an attention over whole sequences, of floats and not of nothing."""
    if name_of(call) not in ("relax.nn.attention", "relax.nn.attention_bias"):
        return False
    kinds = {_dtype(x) for x in call.args[:3]}
    sizes = [_sizes(x) for x in call.args]
    if len(kinds) != 1 or not kinds <= set(_FLOATS) or None in sizes:
        return False
    if any(isinstance(n, tirx.IntImm) and int(n) == 0 for s in sizes for n in s or ()):
        return False
    return call.attrs.window_size is None and str(call.attrs.causal_mask) in _MASKS


def attend(builder: Any, call: Any, uses: Any, visit: Callable[[Any], Any]) -> Any:
    """The calls that compute an attention: (batch, length, heads, width), a row of no keys 0."""
    factors = []
    for x in call.args[:3]:
        source = _heads_first(x, uses)
        factors.append((visit(x if source is None else source), source is not None))
    (q, q_first), (k, k_first), (v, v_first) = factors
    kind = _dtype(call.args[0])
    wide = "float32" if kind in ("float16", "bfloat16") else kind
    attrs, bias = call.attrs, call.args[3:4]
    scale = None if attrs.scale is None else float(attrs.scale.value)
    corner = _MASKS[str(attrs.causal_mask)]

    def scores(q: Any, k: Any, *bias: Any) -> Any:
        product = _scores(q, k, q_first, k_first, wide)
        return _masked(product, q.shape[-1], scale, corner, *bias)

    def values(p: Any, v: Any) -> Any:
        return _values(p, v, v_first, wide)

    fuses = {"op_pattern": 4}
    raw = builder.emit(
        builder.call_te(
            scores,
            q,
            k,
            *(visit(b) for b in bias),
            primfunc_name_hint="attention_scores",
            primfunc_attrs=fuses,
        )
    )
    weights = builder.emit(builder.call_te(_softmax, raw, primfunc_name_hint="attention_weights"))
    result = builder.call_te(
        values, weights, v, primfunc_name_hint="attention_values", primfunc_attrs=fuses
    )
    return result if kind == wide else relax.op.astype(builder.emit(result), kind)


def _at(x: Any, first: bool, b: Any, i: Any, h: Any, d: Any, dtype: str) -> Any:
    value = x(b, h, i, d) if first else x(b, i, h, d)
    return value if str(x.dtype) == dtype else tirx.Cast(dtype, value)


def _length(x: Any, first: bool) -> Any:
    return x.shape[2] if first else x.shape[1]


def _scores(q: Any, k: Any, q_first: bool, k_first: bool, dtype: str) -> Any:
    """Products of queries and keys: (batch, heads, queries, keys)."""
    heads = q.shape[1] if q_first else q.shape[2]
    sizes = (q.shape[0], heads, _length(q, q_first), _length(k, k_first))
    d = te.reduce_axis((0, q.shape[3]), "d")
    return te.compute(
        sizes,
        lambda b, h, i, j: te.sum(
            _at(q, q_first, b, i, h, d, dtype) * _at(k, k_first, b, j, h, d, dtype), axis=d
        ),
        name="scores",
        attrs={CONTRACTION: 1},
    )


def _masked(scores: Any, width: Any, scale: float | None, corner: bool | None, *bias: Any) -> Any:
    """Scaled scores plus a bias; minus infinity where a key comes after the query.

    `corner` says from which corner the queries see their keys: the last query all of them (True),
    or the first query the first key (False).
    """
    dtype = str(scores.dtype)
    factor = tirx.const(scale, dtype) if scale is not None else tirx.rsqrt(tirx.Cast(dtype, width))
    hidden = tirx.const(float("-inf"), dtype)
    offset = scores.shape[3] - scores.shape[2] if corner else 0

    def element(b: Any, h: Any, i: Any, j: Any) -> Any:
        value = scores(b, h, i, j) * factor
        for x in bias:
            places = zip((b, h, i, j), x.shape, scores.shape, strict=True)
            own = [0 if _is_one(n) and not _is_one(m) else at for at, n, m in places]
            added = x(*own)
            value = value + (added if str(x.dtype) == dtype else tirx.Cast(dtype, added))
        return value if corner is None else tirx.Select(j <= i + offset, value, hidden)

    return te.compute(scores.shape, element, name="masked")


def _is_one(size: Any) -> bool:
    return isinstance(size, tirx.IntImm) and int(size) == 1


def _softmax(scores: Any) -> Any:
    """The weights of each row; 0 in a row that is hidden throughout."""
    dtype = str(scores.dtype)
    j = te.reduce_axis((0, scores.shape[3]), "j")
    n = te.reduce_axis((0, scores.shape[3]), "n")
    rows = scores.shape[:3]
    zero, lowest = tirx.const(0, dtype), tirx.min_value(dtype)
    top = te.compute(rows, lambda *i: te.max(scores(*i, j), axis=j), name="top")

    def raised(*i: Any) -> Any:
        *row, column = i
        # The neutral element of the maximum is finite: no row is below it.
        shift = tirx.Select(top(*row) > lowest, top(*row), zero)
        return tirx.exp(scores(*row, column) - shift)

    exps = te.compute(scores.shape, raised, name="exps")
    total = te.compute(rows, lambda *i: te.sum(exps(*i, n), axis=n), name="total")

    def weight(*i: Any) -> Any:
        *row, _ = i
        # A row of zeros stays one; NaN is not 0.
        return exps(*i) / tirx.Select(total(*row) == zero, tirx.const(1, dtype), total(*row))

    return te.compute(scores.shape, weight, name="weights")


def _values(weights: Any, v: Any, first: bool, dtype: str) -> Any:
    """Weighted sums of values: (batch, queries, heads, width)."""
    batch, heads, queries, keys = weights.shape
    j = te.reduce_axis((0, keys), "j")
    return te.compute(
        (batch, queries, heads, v.shape[3]),
        lambda b, i, h, d: te.sum(weights(b, h, i, j) * _at(v, first, b, j, h, d, dtype), axis=j),
        name="values",
        attrs={CONTRACTION: 1},
    )
