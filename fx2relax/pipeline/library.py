"""Products, convolutions and attention as calls of PyTorch's own kernels.

A product takes its surroundings along: a transpose of either operand, a bias added to it, and for
half precision the cast of the float32 sum. `runtime.library` holds what is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from .. import onednn
from ..compat import const_int
from ..runtime import library as _callbacks
from .flow import name_of, result_of

#: What describes the library call for each kind of call.
Roots = dict[str, Callable[[Any, "_Uses"], "_Product | None"]]

PREFIX = _callbacks.PREFIX
HALF = ("float16", "bfloat16")
_DTYPES = ("float32", "float64", *HALF)
CONVOLUTIONS = {
    f"relax.nn.conv{n}d{kind}": (n, bool(kind)) for n in (1, 2, 3) for kind in ("", "_transpose")
}
# Scores of as many elements fit no cache.
_LONG = 8 << 20
_SPACE = {1: "W", 2: "HW", 3: "DHW"}
# Their kernels take a bias along for nothing, so a bias before one of them stays outside.
_POINTWISE = frozenset(
    f"relax.{name}"
    for name in (
        *("add", "subtract", "multiply", "divide", "power", "maximum", "minimum", "where"),
        *("astype", "exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "erf", "negative", "abs"),
        *("clip", "square", "nn.relu", "nn.gelu", "nn.gelu_tanh", "nn.silu", "nn.leakyrelu"),
    )
)


def computes_in_half(*dtypes: str) -> bool:
    """Whether there is one dtype, of half precision, and oneDNN computes in it here."""
    return len(dtypes) == 1 and dtypes[0] in HALF and onednn.computes_in(dtypes[0])


def use_library(mod: Any) -> Any:
    """Replace what the library does well; the rest of the module stays as it is."""
    return _replaced(mod, _ROOTS)


def use_long_attention(mod: Any) -> Any:
    """Replace attention whose scores would fill memory: the library never holds all of them."""
    return _replaced(mod, dict.fromkeys(_ATTENTION, _long_attention))


def _replaced(mod: Any, roots: Roots) -> Any:
    mod = mod.clone()
    for name, func in list(mod.functions_items()):
        if isinstance(func, relax.Function):
            uses = _Uses(func)
            if uses.candidates:
                mod[name] = _Calls(mod, uses, roots).visit_expr(func)
    return relax.transform.DeadCodeElimination()(mod) if len(mod.functions) else mod


@dataclass
class _Product:
    """A call of the library that is being put together."""

    name: str
    operands: list[Any]
    bias_axis: int  # counted from the end
    settings: list[Any] = field(default_factory=list)
    bias: Any = None


class _Uses:
    """Where each variable of a function comes from and who reads it."""

    def __init__(self, func: Any) -> None:
        self.values: dict[Any, Any] = {}
        self.readers: dict[Any, list[Any]] = {}
        self.candidates = False

        def visit(node: Any) -> None:
            if isinstance(node, relax.VarBinding):
                self.values[node.var] = node.value

        relax.analysis.post_order_visit(func, visit)
        for block in _blocks(func):
            for binding in block.bindings:
                value = binding.value
                if isinstance(binding, relax.VarBinding):
                    self.values[binding.var] = value
                    self.candidates = self.candidates or name_of(value) in _ROOTS
                for var in relax.analysis.free_vars(value):
                    self.readers.setdefault(var, []).append(value)
        for var in relax.analysis.free_vars(result_of(func)):
            self.readers.setdefault(var, []).append(None)

    def only_reader(self, var: Any) -> Any:
        """The one expression that reads a variable, once; None if there are more or fewer."""
        readers = self.readers.get(var, [])
        if len(readers) != 1 or readers[0] is None:
            return None
        value = readers[0]
        if isinstance(value, tvm.ir.Call) and sum(_same(a, var) for a in value.args) == 1:
            return value
        return None


def _same(a: Any, b: Any) -> bool:
    return isinstance(a, relax.Var) and bool(a.same_as(b))


def _blocks(func: Any) -> list[Any]:
    body = func.body
    return list(body.blocks) if isinstance(body, relax.SeqExpr) else []


def _sizes(x: Any) -> list[Any] | None:
    shape = getattr(x.ty, "shape", None)
    return None if shape is None or not isinstance(shape, relax.ShapeExpr) else list(shape.values)


def _dtype(x: Any) -> str:
    return str(x.ty.dtype)


@mutator
class _Calls(PyExprMutator):  # type: ignore[misc]
    """Rewrites the calls of one function."""

    def __init__(self, mod: Any, uses: _Uses, roots: Roots) -> None:
        super().__init__(mod)
        self.uses, self.roots = uses, roots

    def visit_call_(self, call: Any) -> Any:
        """A library call where there is one, the call itself otherwise."""
        product = self.describe(call)
        if product is None:
            return self.visit_expr_post_order(call)
        operands = [self.visit_expr(x) for x in product.operands]
        if product.bias is not None:
            operands.append(self.visit_expr(product.bias))
        arguments = [*operands, *product.settings]
        return relax.call_dps_packed(
            PREFIX + product.name,
            relax.Tuple(arguments),
            out_ty=relax.TensorType(_sizes(call), _dtype(call)),
        )

    def describe(self, value: Any) -> _Product | None:
        """The library call that computes this expression."""
        name = name_of(value)
        if name in self.roots:
            return self.roots[name](value, self.uses)
        if name == "relax.add":
            return self._with_bias(value)
        if name == "relax.astype" and _dtype(value) in HALF:
            inner = self._inside(value.args[0], whole=True)
            if inner is not None and all(_dtype(x) == _dtype(value) for x in inner.operands):
                return inner if _fast_in_half(inner, value) else None
        return None

    def _inside(self, var: Any, whole: bool) -> _Product | None:
        """The library call behind a variable that only one expression reads."""
        value = self.uses.values.get(var) if isinstance(var, relax.Var) else None
        if value is None or self.uses.only_reader(var) is None:
            return None
        name = name_of(value)
        if name in self.roots:
            return self.roots[name](value, self.uses)
        return self._with_bias(value, whole) if name == "relax.add" else None

    def _with_bias(self, value: Any, whole: bool = False) -> _Product | None:
        if not whole and not self._ends_here(value):
            return None
        for product_var, bias in (value.args, reversed(list(value.args))):
            inner = self._inside(product_var, whole=False)
            if inner is None or inner.bias is not None or not inner.bias_axis:
                continue
            vector = self._bias(bias, value, inner)
            if vector is not None:
                inner.bias = vector
                return inner
        return None

    def _ends_here(self, value: Any) -> bool:
        """Whether the sum is read by something that could not have added the bias for nothing."""
        return not any(name_of(r) in _POINTWISE for r in self._readers(value))

    def _readers(self, value: Any) -> Iterator[Any]:
        """What reads a value, or a reshape of it."""
        var = next((v for v, x in self.uses.values.items() if x.same_as(value)), None)
        for reader in self.uses.readers.get(var, []):
            if name_of(reader) == "relax.reshape":
                yield from self._readers(reader)
            elif reader is not None:
                yield reader

    def _bias(self, bias: Any, value: Any, product: _Product) -> Any:
        """The vector behind a bias that only varies along the product's bias axis."""
        wanted, sizes = _sizes(value), _sizes(bias)
        if not isinstance(bias, relax.Var) or wanted is None or sizes is None or not wanted:
            return None
        length = wanted[len(wanted) - product.bias_axis]
        if len(sizes) > len(wanted) or not _ones(sizes, product.bias_axis):
            return None
        source, own = bias, _dtype(product.operands[0])
        # Autocast rounds a float32 bias, and what is rounded is widened for the sum.
        while len(_sizes(source) or ()) != 1 or _dtype(source) != own:
            inner: Any = self.uses.values.get(source)
            if name_of(inner) not in ("relax.reshape", "relax.expand_dims", "relax.astype"):
                return None
            source = inner.args[0]
            if not isinstance(source, relax.Var):
                return None
        (flat,) = _sizes(source) or (None,)
        return source if _equal(flat, length) else None


def _ones(sizes: list[Any], axis: int) -> bool:
    place = len(sizes) - axis
    return place >= 0 and all(_equal(s, 1) for n, s in enumerate(sizes) if n != place)


def _fast_in_half(product: _Product, value: Any) -> bool:
    """Whether a product is faster in half precision than widened.

    Where oneDNN does not compute in this dtype, PyTorch's product of 128 rows in float16 took four
    times as long as the widened one; that of one row is a loop of its own.
    """
    if not product.name.startswith("matmul") or onednn.computes_in(_dtype(value)):
        return True
    return all(_equal(size, 1) for size in (_sizes(value) or ())[:-1])


def _equal(a: Any, b: Any) -> bool:
    return bool(tvm.sym.Analyzer().can_prove_equal(a, b))


def _operands_fit(call: Any, count: int) -> bool:
    types = {_dtype(x) for x in call.args[:count]}
    wanted = _dtype(call)
    if len(types) != 1 or not types <= set(_DTYPES) or _sizes(call) is None:
        return False
    return wanted in types or (wanted == "float32" and types <= set(HALF))


def _matmul(call: Any, uses: _Uses) -> _Product | None:
    if not _operands_fit(call, 2):
        return None
    operands, flags = [], ""
    for x in call.args:
        source = _untransposed(x, uses)
        flags += "n" if source is None else "t"
        operands.append(x if source is None else source)
    matrix = len(_sizes(call.args[1]) or ()) > 1
    return _Product(f"matmul_{flags}", operands, bias_axis=1 if matrix else 0)


def _untransposed(x: Any, uses: _Uses) -> Any:
    """What `x` is the transpose of, in its last two axes alone."""
    value = uses.values.get(x) if isinstance(x, relax.Var) else None
    if value is None or name_of(value) != "relax.permute_dims" or _sizes(x) is None:
        return None
    rank = len(_sizes(x) or ())
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    axes = value.attrs.axes
    given = swapped if axes is None and rank == 2 else [int(a) % rank for a in axes or ()]
    return value.args[0] if rank >= 2 and given == swapped else None


def _convolution(call: Any, uses: _Uses) -> _Product | None:
    axes, _ = CONVOLUTIONS[name_of(call)]
    settings = settings_of(call)
    if settings is None:
        return None
    return _Product(
        f"conv{axes}d",
        list(call.args[:2]),
        bias_axis=axes + 1,
        settings=[relax.ShapeExpr(settings)],
    )


def settings_of(call: Any) -> list[int] | None:
    """How a convolution is called, see `runtime.library`; None for one that the library has not."""
    axes, transposed = CONVOLUTIONS[name_of(call)]
    attrs = call.attrs
    space = _SPACE[axes]
    layouts = (f"NC{space}", f"IO{space}" if transposed else f"OI{space}")
    given = (str(attrs.data_layout), str(attrs.kernel_layout))
    padding = [int(p) for p in attrs.padding]
    if not _operands_fit(call, 2) or given != layouts or str(attrs.out_layout) != layouts[0]:
        return None
    if padding[:axes] != padding[axes:]:
        return None
    extra = [int(v) for v in attrs.output_padding] if transposed else [0] * axes
    return [
        *(int(v) for v in attrs.strides),
        *padding[:axes],
        *(int(v) for v in attrs.dilation),
        *extra,
        int(attrs.groups),
        int(transposed),
    ]


def _attention(call: Any, uses: _Uses) -> _Product | None:
    attrs = call.attrs
    if not _operands_fit(call, 3) or _dtype(call) != _dtype(call.args[0]):
        return None
    if attrs.window_size is not None:
        return None
    causal = {"None": 0, "TopLeft": 1, "BottomRight": 2}.get(str(attrs.causal_mask))
    if causal is None:
        return None
    head = (_sizes(call.args[0]) or [None])[-1]
    if attrs.scale is not None:
        scale = float(attrs.scale.value)
    elif isinstance(head, tvm.tirx.IntImm):
        scale = float(int(head.value) ** -0.5)
    else:
        return None
    operands, order = [], 0
    for n, x in enumerate(call.args[:3]):
        source = _heads_first(x, uses)
        order |= 0 if source is None else 1 << n
        operands.append(x if source is None else source)
    operands += list(call.args[3:4])
    settings = [
        relax.ShapeExpr([causal, order]),
        relax.prim_value(tvm.tirx.FloatImm("float64", scale)),
    ]
    return _Product("attention", operands, bias_axis=0, settings=settings)


def _long_attention(call: Any, uses: _Uses) -> _Product | None:
    queries, keys = _sizes(call.args[0]), _sizes(call.args[1])
    if queries is None or keys is None:
        return None
    # A size that is not known is not taken to be large.
    counts = [n for n in map(const_int, (*queries[:3], keys[1])) if isinstance(n, int)]
    scores = math.prod(counts)
    return _attention(call, uses) if scores >= _LONG else None


def _heads_first(x: Any, uses: _Uses) -> Any:
    """What `x` swaps the two middle axes of."""
    value = uses.values.get(x) if isinstance(x, relax.Var) else None
    if value is None or name_of(value) != "relax.permute_dims" or value.attrs.axes is None:
        return None
    return value.args[0] if [int(a) for a in value.attrs.axes] == [0, 2, 1, 3] else None


_ATTENTION = ("relax.nn.attention", "relax.nn.attention_bias")
_ROOTS: Roots = {
    "relax.matmul": _matmul,
    **dict.fromkeys(_ATTENTION, _attention),
    **dict.fromkeys(CONVOLUTIONS, _convolution),
}
