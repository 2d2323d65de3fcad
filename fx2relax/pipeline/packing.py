"""Library calls where the native helper knows a faster one: few rows, packed weights, no copy.

It is the last of the passes on a module, so that none of the others sees a packed weight: an
object that ``<name>_transform_params`` makes once, and that a function takes for the weight
itself. Where a weight lies packed, the function no longer holds it as it was.

Packed calls, all of them `call_pure_packed` (`settings` is that of the plain convolution):

    pack_conv(weight, settings, sizes of x) -> object
    packed_conv(x, object[, bias], settings) -> output
    pack_conv_nhwc, packed_conv_nhwc      the same with the channels of weight, x and output last
    pack_linear(weight, (turned, rows)) -> object     turned: (n, k), else (k, n)
    packed_linear(x, object[, bias]) -> output
    pack_linear_mkl                       the same in MKL's order, for just as many rows
    packed_linear_mkl(x, object[, bias], (rows, n, k)) -> output
    pack_lstm(weight, (which, features, size, reverse, biased[, time, batch])) -> object
    packed_lstm(x, object, object, biases, states, settings) -> outputs and states
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import Any

import torch
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from .. import onednn
from ..runtime import native
from ..runtime.heap import KEPT, leaves_room_for
from .flow import Added, bindings, dtype_of, name_of, result_of, sizes_of
from .library import PREFIX, computes_in_half
from .lift import TRANSFORM, is_transform

_FEW_ROWS, _FEW_ROWS_WIDE = 16, 32
# A large weight is read for as many rows at the speed of memory.
_READS = 8
# MKL packs a weight at each call, unless it is given packed: of Intel's processors, products of up
# to 256 rows gained from a tenth to a third, of 512 rows a tenth, of 1024 a twentieth. oneDNN's
# packed products gained where they had few rows and made more columns than they took.
_MOST_ROWS_MKL, _LEAST_MKL = 512, 1 << 16
_MOST_ROWS, _LEAST_WEIGHT = 256, 1 << 20
# In half precision oneDNN reorders an unpacked weight at each call, to the same digits: packed,
# products of 128 rows took 0.92 of the time, of one row half of it.
_LEAST_HALF = 1 << 14
# An unpacked convolution reorders its weight at each call, which shows where the weight is large
# and is used at few places.
_MOST_PLACES = 1024
_LEAST_KERNEL = 1 << 16
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv2d_nhwc")
_GRADIENTS = ("conv1d_weight", "conv2d_weight", "conv3d_weight")
_PRODUCTS = ("matmul_nn", "matmul_nt")
_LSTM = "new_lstm"
# What returns a tensor of its own. The plain ones are given memory.
_FRESH = (f"{PREFIX}new_", f"{PREFIX}packed_")
# How functions are called that pack a product's weight, and that take one.
_ONEDNN, _MKL = "linear", "linear_mkl"


def pack(mod: Any) -> Any:
    """Use the native helper's calls in place of the library's plain ones.

    Args:
        mod: functions with library calls; weights right of ``num_input``, where there are any.
            It is not changed.

    Returns:
        the module; the same one where there is no helper.
    """
    if not native.use():
        return mod
    mod = mod.clone()
    for name, func in list(mod.functions_items()):
        if not isinstance(func, relax.Function) or is_transform(name.name_hint, func):
            continue
        calls = _Calls(mod, func)
        if not calls.useful:
            continue
        changed = calls.visit_expr(func)
        if calls.packed:
            changed = _packed_weights(mod, name.name_hint, changed, calls)
        mod[name] = changed
    return mod


def few_rows(turned: bool) -> int:
    """Up to how many rows the helper's own kernel (rows.h) is faster than the library's.

    More with the registers of AVX-512, of weights that lie (n, k).
    """
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return _FEW_ROWS_WIDE if turned and wide else _FEW_ROWS


def _packing_allowed() -> bool:
    return onednn.usable() and not torch.are_deterministic_algorithms_enabled()


def _order(half: bool, rows: int | None, n: int, k: int) -> str:
    """In whose order a product's weight is packed: oneDNN's, MKL's, or in none (empty)."""
    if half:
        return _ONEDNN if n * k >= _LEAST_HALF else ""
    if rows is None:
        return ""
    if _mkl_packs():
        return _MKL if rows <= _MOST_ROWS_MKL and n * k >= _LEAST_MKL else ""
    return _ONEDNN if rows <= _MOST_ROWS and n * k >= _LEAST_WEIGHT and n >= 2 * k else ""


def _mkl_packs() -> bool:
    """Whether MKL's packed products are there, and its kernels are for this processor."""
    there = torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")
    return bool(there and _is_intel())


@functools.cache
def _is_intel() -> bool:
    try:
        processor = Path("/proc/cpuinfo").read_text()
    except OSError:
        processor = platform.processor()
    return "GenuineIntel" in processor


@mutator
class _Calls(PyExprMutator):  # type: ignore[misc]
    """Rewrites the library calls of one function.

    Attributes:
        packed: by weight, the variable of its packed object and the call that makes it, as the
            packed function's name and its settings.
    """

    def __init__(self, mod: Any, func: Any) -> None:
        super().__init__(mod)
        self.packed: dict[Any, tuple[Any, str, list[list[int]]]] = {}
        self.useful = any(_library_name(b.value) for b in bindings(func))
        count = func.attrs.get("num_input") if func.attrs is not None else None
        weights = func.params[int(count or 0) :]
        allowed = count is not None and _packing_allowed()
        # A model that hardly fits is not to fail for a second copy of it.
        allowed = allowed and leaves_room_for(sum(map(_bytes, weights)))
        self._weights = set(weights) if allowed else set()

    def visit_call_(self, call: Any) -> Any:
        """A call of the helper's where there is a better one."""
        name = _library_name(call)
        if name in _PRODUCTS:
            return self._product(name, call)
        if name in _CONVOLUTIONS:
            return self._convolution(name, call)
        if name == _LSTM:
            return self._lstm(call)
        if name in _GRADIENTS:
            operands = list(call.args[1].fields)
            if len({dtype_of(v) for v in (*operands[:2], call)}) == 1:
                return _pure(f"new_{name}", operands, call.ty)
        return self.visit_expr_post_order(call)

    def _product(self, name: str, call: Any) -> Any:
        operands = list(call.args[1].fields)
        x, weight = operands[:2]
        sizes, matrix = sizes_of(x), sizes_of(weight)
        dtypes = {dtype_of(v) for v in (*operands, call)}
        if len(dtypes) != 1 or not sizes or matrix is None or len(matrix) != 2:
            return call
        rows = _product_of(sizes[:-1])
        half = computes_in_half(*dtypes)
        if not half and dtypes != {"float32"}:
            return call
        turned = name == "matmul_nt"
        # Where the number of rows is a symbol, the helper looks again at each call.
        if not half and (rows is None or rows <= few_rows(turned)):
            other = f"{PREFIX}rows_{name[-2:]}"
            return relax.call_dps_packed(other, relax.Tuple(operands), out_ty=call.ty)
        n, k = matrix if turned else reversed(matrix)
        if len(sizes) < 2 or not (isinstance(n, int) and isinstance(k, int)):
            return call
        order = _order(half, rows, n, k)
        packed = None
        if order:
            packed = self._pack(weight, f"pack_{order}", [[int(turned), rows or _MOST_ROWS]])
        if packed is None:
            return call
        last = [relax.ShapeExpr([rows, n, k])] if order == _MKL else []
        return _pure(f"packed_{order}", [x, packed, *operands[2:], *last], call.ty)

    def _convolution(self, name: str, call: Any) -> Any:
        *operands, settings = call.args[1].fields
        x, weight = operands[:2]
        if len({dtype_of(v) for v in (*operands, call)}) != 1:
            return call
        values = [int(v.value) for v in settings.values]
        sizes, kernel, out = sizes_of(x), sizes_of(weight), sizes_of(call)
        last = name.endswith("_nhwc")
        dtype = dtype_of(weight)
        if sizes and kernel and out and self._pays(values, dtype, sizes, kernel, out, last):
            ending = "_nhwc" if last else ""
            logical = [sizes[0], sizes[-1], *sizes[1:-1]] if last else sizes
            packed = self._pack(weight, f"pack_conv{ending}", [values, logical])
            if packed is not None:
                arguments = [x, packed, *operands[2:], settings]
                return _pure(f"packed_conv{ending}", arguments, call.ty)
        if last and self._multiplied(values, kernel, out, call):
            return call
        return _pure(f"new_{name}", [*operands, settings], call.ty)

    def _lstm(self, call: Any) -> Any:
        _, x, *weights, _, _, h, _, settings = call.args
        sizes, state = sizes_of(x), sizes_of(h)
        if not sizes or not state or not all(isinstance(s, int) for s in (sizes[2], state[2])):
            return call
        last = [sizes[2], state[2], *(int(v.value) for v in settings.values)]
        last += sizes[:2] if all(isinstance(s, int) for s in sizes) else []
        packed = [self._pack(w, "pack_lstm", [[i, *last]]) for i, w in enumerate(weights)]
        if all(p is None for p in packed):
            return call
        given = [w if p is None else p for w, p in zip(weights, packed, strict=True)]
        return _pure("packed_lstm", [x, *given, *call.args[4:]], call.ty)

    @staticmethod
    def _multiplied(values: list[int], kernel: Any, out: Any, call: Any) -> bool:
        """Whether the plain call is a product in memory that is planned, and that is worth it.

        Larger results are mapped anew each time. Faulting in the pages of one of 38 MB took 9 ms,
        the convolution 1.
        """
        strides, padding = values[0:2], values[2:4]
        groups, transposed = values[-2:]
        if (strides, padding, groups, transposed) != ([1, 1], [0, 0], 1, 0):
            return False
        if not kernel or list(kernel[1:3]) != [1, 1] or not out:
            return False
        return _bytes(call) > KEPT

    def _pays(
        self, values: list[int], dtype: str, sizes: Any, kernel: Any, out: Any, last: bool
    ) -> bool:
        groups, transposed = values[-2:]
        if transposed or groups != 1 or not all(isinstance(s, int) for s in (*sizes, *kernel)):
            return False
        if len(kernel) == 3:  # PyTorch packs no weight of one dimension of space
            return False
        places = _product_of([out[0], *(out[1:-1] if last else out[2:])])
        weight = _product_of(kernel)
        if not places or weight is None:
            return False
        if computes_in_half(dtype):
            return weight >= _LEAST_HALF
        return dtype == "float32" and places <= _MOST_PLACES and weight >= _LEAST_KERNEL

    def _pack(self, weight: Any, function: str, settings: list[list[int]]) -> Any:
        """The variable of a packed weight, if it may be packed so: a weight is packed one way."""
        if weight not in self._weights:
            return None
        made = self.packed.get(weight)
        if made is None:
            var = relax.Var(f"{weight.name}_packed", relax.AnyType())
            made = self.packed[weight] = var, function, settings
        return made[0] if made[1:] == (function, settings) else None


def only_reads(call: Any) -> bool:
    """Whether a library call reads a weight for few rows, as it lies: that is all its time."""
    if _library_name(call) not in ("rows_nn", "rows_nt"):
        return False
    sizes = sizes_of(call.args[1].fields[0])
    rows = None if sizes is None else _product_of(sizes[:-1])
    return rows is not None and rows <= _READS


def _library_name(value: Any) -> str:
    """The library's function that a call is of; empty for all else."""
    if name_of(value) not in ("relax.call_dps_packed", "relax.call_pure_packed"):
        return ""
    symbol = str(getattr(value.args[0], "global_symbol", ""))
    return symbol[len(PREFIX) :] if symbol.startswith(PREFIX) else ""


def _pure(name: str, arguments: list[Any], ty: Any) -> Any:
    return relax.op.call_pure_packed(PREFIX + name, *arguments, ty_args=ty)


def _product_of(sizes: list[Any]) -> int | None:
    product = 1
    for size in sizes:
        if not isinstance(size, int):
            return None
        product *= size
    return product


def returns_its_own(value: Any) -> bool:
    """Whether an expression calls a function of the library's that allocates what it returns."""
    callee = getattr(value, "op", None)
    return isinstance(callee, relax.ExternFunc) and str(callee.global_symbol).startswith(_FRESH)


def _bytes(tensor: Any) -> int:
    """How many a tensor has; none where its sizes are not known."""
    sizes = sizes_of(tensor)
    count = _product_of(sizes) if sizes is not None else None
    return 0 if count is None else count * tvm.DataType(dtype_of(tensor)).itemsize


def _packed_weights(mod: Any, name: str, func: Any, calls: _Calls) -> Any:
    """Let a function take packed weights, and its transform make them; the function."""
    leading = int(func.attrs["num_input"])
    weights = list(func.params[leading:])
    used = {v for b in bindings(func) for v in relax.analysis.free_vars(b.value)}
    used.update(relax.analysis.free_vars(result_of(func)))
    kept = [i for i, w in enumerate(weights) if w in used or w not in calls.packed]
    packed = [i for i, w in enumerate(weights) if w in calls.packed]
    params = [
        *func.params[:leading],
        *(weights[i] for i in kept),
        *(calls.packed[weights[i]][0] for i in packed),
    ]
    transform = name + TRANSFORM
    before = mod[transform] if transform in [g.name_hint for g in mod.get_global_vars()] else None
    mod[transform] = _transform(transform, before, weights, kept, packed, calls)
    return relax.Function(params, func.body, func.ret_ty, func.is_pure, func.attrs)


def _transform(
    name: str, before: Any, weights: list[Any], kept: list[int], packed: list[int], calls: _Calls
) -> Any:
    """A transform of weights, or one that would return them as they are, that packs some."""
    builder = relax.BlockBuilder()
    bind = Added(builder)
    if before is None:
        made = relax.Var("params", relax.TupleType([w.ty for w in weights]))
        params, blocks = [made], []
    else:
        made, params, blocks = result_of(before), list(before.params), list(before.body.blocks)
    parts = _parts(made, blocks)
    fields = {
        i: parts[i] if parts else bind(weights[i].name, relax.TupleGetItem(made, i))
        for i in (*kept, *packed)
    }
    objects = []
    for i in packed:
        var, function, settings = calls.packed[weights[i]]
        shapes = [relax.ShapeExpr(values) for values in settings]
        call = _pure(function, [fields[i], *shapes], relax.AnyType())
        objects.append(bind(var.name, call))
    result = bind("result", relax.Tuple([*(fields[i] for i in kept), *objects]))
    if parts:
        blocks = [relax.DataflowBlock(_at_once(blocks[0].bindings[:-1], bind.bindings))]
    else:
        blocks.append(relax.BindingBlock(bind.bindings))
    body = builder.normalize(relax.SeqExpr(blocks, result))
    attrs = {"global_symbol": name} if before is None else before.attrs
    function = relax.Function(params, body, result.ty)
    return function.with_attrs(attrs) if attrs else function


def _parts(made: Any, blocks: list[Any]) -> list[Any]:
    """The variables that a transform returns, where it is one block that ends with their tuple."""
    if len(blocks) != 1 or not isinstance(blocks[0], relax.DataflowBlock):
        return []
    last = blocks[0].bindings[-1]
    if not isinstance(last, relax.VarBinding) or not last.var.same_as(made):
        return []
    fields = list(last.value.fields) if isinstance(last.value, relax.Tuple) else []
    own = all(isinstance(f, relax.Var) for f in fields)
    return fields if own and len(blocks[0].bindings) > 1 else []


def _at_once(before: Any, added: list[Any]) -> list[Any]:
    """The bindings of a transform, so that each weight is packed as soon as it is made.

    What it was made of is then let go of before the next one is made.
    """
    *packs, result = added
    waiting: dict[Any, list[Any]] = {}
    for binding in packs:
        waiting.setdefault(binding.value.args[1], []).append(binding)
    ordered: list[Any] = []
    for binding in before:
        ordered += [binding, *waiting.pop(binding.var, [])]
    return [*ordered, *(b for rest in waiting.values() for b in rest), result]
