"""Matrix products as contractions that the CPU schedule computes in tiles.

A transpose of either factor is read where it is; a factor that is a weight is packed into panels
by work of its own, which `lift` does once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax, te, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from .attentions import attend, is_attention, is_short
from .contractions import CONTRACTION, PANELS
from .convolutions import convolve, geometry
from .flow import expressions, name_of
from .library import _blocks, _dtype, _sizes, _untransposed, _Uses
from .lift import PACKS
from .tiles import lanes_of

_HALF = ("float16", "bfloat16")
_FLOATS = ("float32", "float64", *_HALF)
# TVM's kOutEWiseFusable: what follows element by element joins the kernel.
_FUSES = {"op_pattern": 4}


def use_contractions(mod: Any, target: Any, lifted: bool, library: bool = False) -> Any:
    """Replace what can be computed in tiles; the rest of the module stays as it is.

    Args:
        mod: Relax functions in high-level operators.
        target: the target, whose registers say how weights are packed.
        lifted: whether work on weights alone will be lifted out of the functions.
        library: whether the library is to do what it does as well: all but attention of so few
            queries that its kernel, made for many, is slower.
    """
    if library and not any(is_attention(e) and is_short(e) for e in expressions(mod)):
        return mod
    rewriter = _Products(mod, target, lifted, library)
    for name, func in list(mod.functions_items()):
        if isinstance(func, relax.Function):
            rewriter.builder_.update_func(name, rewriter.rewrite(func))
    mod = rewriter.builder_.get()
    return relax.transform.DeadCodeElimination()(mod) if len(mod.functions) else mod


@mutator
class _Products(PyExprMutator):  # type: ignore[misc]
    """Rewrites the calls of a module's functions."""

    def __init__(self, mod: Any, target: Any, lifted: bool, library: bool) -> None:
        super().__init__(mod)
        self.target, self.lifted, self.library = target, lifted, library

    def rewrite(self, func: Any) -> Any:
        """One function."""
        self.uses = _Uses(func)
        attrs = func.attrs
        count = int(attrs["num_input"]) if self.lifted and attrs and "num_input" in attrs else None
        self.weights = set() if count is None else _on_weights(func, func.params[count:])
        return self.visit_expr(func)

    def visit_call_(self, call: Any) -> Any:
        """Contractions in the place of a product, a convolution or an attention."""
        if is_attention(call) and (is_short(call) or not self.library):
            return attend(self.builder_, call, self.uses, self.visit_expr)
        if self.library:
            return self.visit_expr_post_order(call)
        numbers = geometry(call)
        if numbers is not None:
            x, weight = (self.visit_expr(x) for x in call.args)
            wide = _wide(call)
            return self._narrow(convolve(self.builder_, call, numbers, x, weight, wide), call)
        if name_of(call) == "relax.matmul" and _fits(call):
            return self._narrow(self._product(call), call)
        return self.visit_expr_post_order(call)

    def _narrow(self, result: Any, call: Any) -> Any:
        """A result in the dtype of a call; sums of half precision are float32."""
        if _wide(call) == _dtype(call):
            return result
        return relax.op.astype(self.builder_.emit(result), _dtype(call))

    def _product(self, call: Any) -> Any:
        factors = []
        for x in call.args:
            source = _untransposed(x, self.uses)
            factors.append((x if source is None else source, source is not None))
        (x, x_turned), (y, y_turned) = factors
        wide, build = _wide(call), self.builder_
        packs = len(_sizes(y) or ()) == 2 and y in self.weights and _static(y)
        columns = (_sizes(y) or [])[-2 if y_turned else -1]
        x, y = self.visit_expr(x), self.visit_expr(y)
        names = {"primfunc_name_hint": "matmul", "primfunc_attrs": _FUSES}
        if not packs:
            return build.call_te(product, x, y, x_turned, y_turned, wide, **names)
        lanes = lanes_of(self.target, wide)
        marks = {"primfunc_name_hint": "pack", "primfunc_attrs": {PACKS: 1}}
        packed = build.emit(build.call_te(pack, y, y_turned, lanes, **marks))
        return build.call_te(product_of_panels, x, packed, columns, x_turned, wide, **names)


def _wide(call: Any) -> str:
    return "float32" if _dtype(call) in _HALF else _dtype(call)


def _on_weights(func: Any, weights: Sequence[Any]) -> set[Any]:
    """The variables of a function that depend on its weights alone."""
    found = set(weights)
    for block in _blocks(func) if found else ():
        for binding in block.bindings:
            inner = relax.analysis.free_vars(binding.value)
            if inner and isinstance(binding, relax.VarBinding) and found.issuperset(inner):
                found.add(binding.var)
    return found


def _order(call: Any, rank: int) -> list[int]:
    axes = call.attrs.axes
    return [*range(rank)][::-1] if axes is None else [int(a) % rank for a in axes]


def _static(x: Any) -> bool:
    return all(isinstance(s, tirx.IntImm) for s in _sizes(x) or [None])


def _fits(call: Any) -> bool:
    kinds = {_dtype(x) for x in call.args}
    sizes = [_sizes(x) for x in call.args]
    if len(kinds) != 1 or not kinds <= set(_FLOATS) or None in sizes:
        return False
    if any(len(s or ()) < 2 for s in sizes):
        return False
    return not any(isinstance(n, tirx.IntImm) and int(n) == 0 for s in sizes for n in s or ())


def pack(y: Any, turned: bool, lanes: int) -> Any:
    """Panels of so many columns, the last one filled up with zeros: (panels, depth, lanes)."""
    columns, depth = (y.shape[0], y.shape[1]) if turned else (y.shape[1], y.shape[0])
    panels = tirx.floordiv(columns + (lanes - 1), lanes)
    zero = tirx.const(0, y.dtype)

    def element(p: Any, k: Any, j: Any) -> Any:
        column = p * lanes + j
        value = y(column, k) if turned else y(k, column)
        if int(columns) % lanes == 0:
            return value
        return tirx.if_then_else(column < columns, value, zero)

    return te.compute((panels, depth, lanes), element, name="packed")


def product_of_panels(x: Any, packed: Any, columns: Any, turned: bool, dtype: str) -> Any:
    """``x @ y`` of a packed `y`."""
    lanes = int(packed.shape[2])
    *lead, rows, depth = x.shape
    if turned:
        rows, depth = depth, rows
    k = te.reduce_axis((0, depth), "k")

    def element(*at: Any) -> Any:
        *batch, i, j = at
        left = x(*batch, k, i) if turned else x(*batch, i, k)
        right = packed(tirx.floordiv(j, lanes), k, tirx.floormod(j, lanes))
        return te.sum(_as(left, dtype) * _as(right, dtype), axis=k)

    marks = {CONTRACTION: 1, PANELS: lanes}
    return te.compute((*lead, rows, columns), element, name="product", attrs=marks)


def product(x: Any, y: Any, x_turned: bool, y_turned: bool, dtype: str) -> Any:
    """``x @ y``, either turned in its last two axes, the batches broadcast."""
    x_batch, y_batch = list(x.shape[:-2]), list(y.shape[:-2])
    rows, depth = list(x.shape[-2:])[:: -1 if x_turned else 1]
    columns = y.shape[-2 if y_turned else -1]
    batch = _broadcast(x_batch, y_batch)
    k = te.reduce_axis((0, depth), "k")

    def element(*at: Any) -> Any:
        *outer, i, j = at
        left = [*_own(outer, x_batch, batch), *((k, i) if x_turned else (i, k))]
        right = [*_own(outer, y_batch, batch), *((j, k) if y_turned else (k, j))]
        return te.sum(_as(x(*left), dtype) * _as(y(*right), dtype), axis=k)

    return te.compute((*batch, rows, columns), element, name="product", attrs={CONTRACTION: 1})


def _as(value: Any, dtype: str) -> Any:
    return value if str(value.ty.dtype) == dtype else tirx.Cast(dtype, value)


def _is_one(size: Any) -> bool:
    return isinstance(size, tirx.IntImm) and int(size) == 1


def _broadcast(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    rank = max(len(a), len(b))
    one = tirx.const(1, "int64")
    a, b = [one] * (rank - len(a)) + list(a), [one] * (rank - len(b)) + list(b)
    return [n if _is_one(m) else m for m, n in zip(a, b, strict=True)]


def _own(at: Sequence[Any], sizes: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
    """The indices of one factor of a batch in which it may be broadcast."""
    zero = tirx.const(0, "int64")
    last = list(at)[len(at) - len(sizes) :]
    wide = list(batch)[len(batch) - len(sizes) :]
    return [
        zero if _is_one(s) and not _is_one(w) else i
        for i, s, w in zip(last, sizes, wide, strict=True)
    ]
