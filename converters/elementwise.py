"""Kernels of one expression per element, and the expressions that several families share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fx2relax.compat import const_int, const_number, dtype_of

from .common import cast, dtype, is_float, op, te, te_call, tirx
from .indices import broadcast_sizes, is_one

__all__ = [
    "copysign",
    "elementwise",
    "extern",
    "immediate",
    "is_floating",
    "let",
    "logical_not",
    "nan_max",
    "nan_min",
    "negated",
    "not_equal",
    "number",
    "select",
]


def elementwise(name: str, body: Callable[..., Any], *operands: Any) -> Any:
    """A kernel whose every element is ``body(*elements)``; operands broadcast as in PyTorch.

    Args:
        name: the kernel's name in the module.
        body: from TIR scalars, one per operand, to a TIR scalar.
        operands: Relax tensors; a constant of one element is written into the kernel.
    """
    constants = [immediate(x) for x in operands]
    tensors = [x for x, known in zip(operands, constants, strict=True) if known is None]

    def kernel(*given: Any) -> Any:
        sizes = broadcast_sizes([_sizes(t) for t in given])

        def element(*at: Any) -> Any:
            values = (t(*_at(t, at, sizes)) for t in given)
            return body(*[next(values) if known is None else known for known in constants])

        return te.compute(sizes, element, name=name)

    return te_call(kernel, *tensors, primfunc_name_hint=name)


def _sizes(tensor: Any) -> list[Any]:
    return [const_int(size) for size in tensor.shape]


def _at(tensor: Any, at: tuple[Any, ...], whole: list[Any]) -> list[Any]:
    """Where an element of a result of sizes `whole` reads a tensor.

    What is not broadcast keeps its index, of size 1 or not: TVM fuses only what follows a product
    or a convolution element by element, which a read at 0 is not to it.
    """
    sizes = _sizes(tensor)
    before = len(at) - len(sizes)
    return [
        tirx.const(0, "int64") if is_one(size) and not is_one(full) else index
        for size, full, index in zip(sizes, whole[before:], at[before:], strict=True)
    ]


def immediate(x: Any) -> Any:
    """A 0-d Relax constant as a TIR constant, None for any other operand."""
    value = const_number(x)
    return None if value is None else tirx.const(value, dtype_of(x))


def is_floating(x: Any) -> bool:
    """Whether a TIR scalar is a floating-point number."""
    return "float" in str(x.ty.dtype)


def number(value: bool | int | float, like: Any) -> Any:
    """A TIR constant of the dtype of a TIR scalar."""
    return tirx.const(value, str(like.ty.dtype))


def select(condition: Any, yes: Any, no: Any) -> Any:
    """``yes`` where the condition holds; both are computed."""
    return tirx.Select(condition, yes, no)


def let(value: Any, body: Callable[[Any], Any]) -> Any:
    """``body(value)`` with the value computed once."""
    if isinstance(value, (tirx.IntImm, tirx.FloatImm)):
        return body(value)
    var = tirx.Var("t", str(value.ty.dtype))
    return tirx.Let(var, value, body(var))


def extern(name: str, *args: Any) -> Any:
    """A function of C's maths library by its double-precision name; CUDA has the same."""
    dtype = str(args[0].ty.dtype)
    return tirx.call_pure_extern(dtype, name + ("f" if dtype == "float32" else ""), *args)


def negated(condition: Any) -> Any:
    """The logical not.

    Not `tirx.Not`: TVM turns the not of a comparison into the opposite comparison, which NaN
    does not satisfy either, and its "not equal" is false for NaN.
    """
    return tirx.Select(condition, tirx.const(False, "bool"), tirx.const(True, "bool"))


def logical_not(x: Any) -> Any:
    """The logical not of a boolean tensor, right for comparisons with NaN too."""
    return elementwise("logical_not", negated, x)


def not_equal(a: Any, b: Any) -> Any:
    """Whether two promoted tensors differ; NaN differs from everything."""
    if dtype(a) == "bool":
        return op.logical_xor(a, b)
    if not is_float(a):
        return op.not_equal(a, b)
    if same_tensor(a, b):
        return is_nan(a)
    return elementwise("not_equal", lambda x, y: negated(tirx.EQ(x, y)), a, b)


def is_nan(x: Any) -> Any:
    """Whether each element is NaN; TVM takes ``x == x`` for true."""
    return op.isnan(cast(x, "float32") if dtype(x) in ("float16", "bfloat16") else x)


def same_tensor(a: Any, b: Any) -> bool:
    """Whether two operands are one tensor, or the same cast of one."""
    if a.same_as(b):
        return True
    calls = all(getattr(getattr(v, "op", None), "name", "") == "relax.astype" for v in (a, b))
    return calls and bool(a.args[0].same_as(b.args[0]))


def copysign(magnitude: Any, sign: Any) -> Any:
    """The magnitude of the one, the sign bit of the other."""
    return tirx.copysign(magnitude, sign)


def nan_max(a: Any, b: Any) -> Any:
    """The larger of two; NaN if either is, the first of two zeros."""
    if str(a.ty.dtype) == "bool":
        return tirx.Or(a, b)
    if not is_floating(a):
        return tirx.max(a, b)
    if isinstance(b, tirx.FloatImm) and b.value == b.value:
        return select(a < b, b, a)
    return select(a >= b, a, select(b > a, b, a + b))


def nan_min(a: Any, b: Any) -> Any:
    """The smaller of two; NaN if either is, the first of two zeros."""
    if str(a.ty.dtype) == "bool":
        return tirx.And(a, b)
    if not is_floating(a):
        return tirx.min(a, b)
    if isinstance(b, tirx.FloatImm) and b.value == b.value:
        return select(a > b, b, a)
    return select(a <= b, a, select(b < a, b, a + b))
