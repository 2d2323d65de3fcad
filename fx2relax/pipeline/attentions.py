"""Attention as two contractions and a softmax between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax, te, tirx

from ..compat import const_int
from .contractions import CONTRACTION
from .flow import name_of
from .library import _dtype, _equal, _heads_first, _sizes

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


def is_short(call: Any) -> bool:
    """Whether an attention has one query, for which PyTorch's kernel, made for many, is slow.

    Of two queries on it was as fast or faster; of one it took 1.1 to 1.5 times as long in float32,
    and five times in bfloat16.
    """
    return _is_one((_sizes(call.args[0]) or [None, None])[1])


def attend(builder: Any, call: Any, uses: Any, visit: Callable[[Any], Any]) -> Any:
    """The calls that compute an attention: (batch, length, heads, width), a row of no keys 0."""
    q, q_first = _lies(call.args[0], uses, parts=False)
    kept = [_lies(x, uses) for x in call.args[1:3]]
    kind = _dtype(call.args[0])
    wide = "float32" if kind in ("float16", "bfloat16") else kind
    attrs, bias = call.attrs, [visit(b) for b in call.args[3:4]]
    scale = None if attrs.scale is None else float(attrs.scale.value)
    corner = _MASKS[str(attrs.causal_mask)]
    keys = call.args[1].ty.shape.values[1]
    q, shared = visit(q), _shared(call, uses) if corner is None else None
    if shared is not None:
        # The heads that share keys are as many queries of one head.
        kept = [_lies(x, uses, first=True) for x in shared]
        q_first = True
        batch, heads, _, width = shared[0].ty.shape.values
        q = builder.emit(relax.op.reshape(q, (batch, heads, -1, width)))
        bias = [builder.emit(relax.op.reshape(b, _of_shared(b, heads))) for b in bias]
    (k, k_first), (v, v_first) = ((visit(x), first) for x, first in kept)

    def scores(q: Any, k: Any, keys: Any, *bias: Any) -> Any:
        product = _scores(q, k, keys, q_first, k_first, wide)
        return _masked(product, q.shape[-1], scale, corner, *bias)

    def values(p: Any, v: Any) -> Any:
        return _values(p, v, v_first, wide, shared is not None)

    fuses = {"op_pattern": 4}
    raw = builder.emit(
        builder.call_te(
            scores,
            q,
            k,
            keys,
            *bias,
            primfunc_name_hint="attention_scores",
            primfunc_attrs=fuses,
        )
    )
    weights = builder.emit(builder.call_te(_softmax, raw, primfunc_name_hint="attention_weights"))
    result = builder.call_te(
        values, weights, v, primfunc_name_hint="attention_values", primfunc_attrs=fuses
    )
    if shared is not None:
        result = relax.op.reshape(builder.emit(result), _sizes(call))
    return result if kind == wide else relax.op.astype(builder.emit(result), kind)


def _lies(x: Any, uses: Any, *, first: bool = False, parts: bool = True) -> tuple[Any, bool]:
    """What queries, keys or values are read from, and whether their heads come first there.

    With `parts`, what begins where its whole does is read there: the places are the same.
    """
    while isinstance(x, relax.Var):
        value = uses.values.get(x)
        source = _heads_first(x, uses)
        if source is not None:
            first = not first
        elif parts and value is not None and _begins(value):
            source = value.args[0]
        if not isinstance(source, relax.Var) or _sizes(source) is None:
            break
        x = source
    return x, first


def _begins(value: Any) -> bool:
    """Whether a slice is the first places of a few axes, the last axis not among them."""
    if name_of(value) != "relax.strided_slice" or len(value.args) != 5:
        return False
    axes, first, _, steps = ([const_int(v) for v in a.fields] for a in value.args[1:])
    plain = all(isinstance(axis, int) and 0 <= axis < 3 for axis in axes)
    return plain and set(first) == {0} and set(steps) == {1}


def _shared(call: Any, uses: Any) -> list[Any] | None:
    """Keys and values, heads first, that as many heads of one query share; None where none do."""
    if not is_short(call):
        return None
    found = [_repeated(_heads_first(x, uses), uses) for x in call.args[1:3]]
    if None in found:
        return None
    key, value = (_sizes(x) or [] for x in found)
    return found if _equal(key[1], value[1]) else None


def _repeated(x: Any, uses: Any) -> Any:
    """What `x` is with each of its heads, axis 1, repeated; None where it is something else."""
    made = uses.values.get(x) if isinstance(x, relax.Var) else None
    source = wide = None
    if made is not None and name_of(made) == "relax.repeat" and made.attrs.axis is not None:
        source = made.args[0] if int(made.attrs.axis) == 1 else None
    elif made is not None and name_of(made) == "relax.reshape":
        # As models write it: x[:, :, None].expand(...).reshape(...)
        wide = made.args[0]
        spread = uses.values.get(wide)
        if spread is not None and name_of(spread) == "relax.broadcast_to":
            lifted = uses.values.get(spread.args[0])
            if lifted is not None and name_of(lifted) == "relax.expand_dims":
                source = lifted.args[0] if [int(a) for a in lifted.attrs.axis] == [2] else None
    before, after = (_sizes(v) if isinstance(v, relax.Var) else None for v in (source, x))
    if before is None or after is None or (len(before), len(after)) != (4, 4):
        return None
    shown = [*before[:2], after[1] // before[1], *before[2:]]
    spread_to = shown if wide is None else _sizes(wide) or []
    same = len(spread_to) == len(shown) and all(map(_equal, spread_to, shown))
    kept = all(_equal(before[axis], after[axis]) for axis in (0, 2, 3))
    return source if same and kept else None


def _of_shared(bias: Any, heads: Any) -> list[Any]:
    """The sizes of a bias of one query as one of the heads that share keys."""
    batch, own, _, keys = bias.ty.shape.values
    return [batch, 1, 1, keys] if _is_one(own) else [batch, heads, -1, keys]


def _at(x: Any, first: bool, b: Any, i: Any, h: Any, d: Any, dtype: str) -> Any:
    value = x(b, h, i, d) if first else x(b, i, h, d)
    return value if str(x.dtype) == dtype else tirx.Cast(dtype, value)


def _length(x: Any, first: bool) -> Any:
    return x.shape[2] if first else x.shape[1]


def _scores(q: Any, k: Any, keys: Any, q_first: bool, k_first: bool, dtype: str) -> Any:
    """Products of queries and so many keys: (batch, heads, queries, keys)."""
    heads = q.shape[1] if q_first else q.shape[2]
    sizes = (q.shape[0], heads, _length(q, q_first), keys)
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


def _values(weights: Any, v: Any, first: bool, dtype: str, heads_first: bool) -> Any:
    """Weighted sums of values: (batch, queries, heads, width), or with the heads first."""
    batch, heads, queries, keys = weights.shape
    j = te.reduce_axis((0, keys), "j")
    middle = (heads, queries) if heads_first else (queries, heads)

    def element(b: Any, m: Any, n: Any, d: Any) -> Any:
        h, i = (m, n) if heads_first else (n, m)
        return te.sum(weights(b, h, i, j) * _at(v, first, b, j, h, d, dtype), axis=j)

    marks = {CONTRACTION: 1}
    return te.compute((batch, *middle, v.shape[3]), element, name="values", attrs=marks)
