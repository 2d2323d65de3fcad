"""Remainders of floats by one division, where the quotient is not too large."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from .polynomials import WORDS, bind, copysign

# Up to here a rounded quotient is off by less than one whole number.
_QUOTIENT = {"float32": 2.0**22, "float64": 2.0**51}


def beyond(x: Any, y: Any) -> Any:
    """Whether `fmod` does not hold: no number as the rest, an infinite `y`, a large quotient."""
    kind = str(x.ty.dtype)
    most, inf = tirx.const(_QUOTIENT[kind], kind), tirx.const(float("inf"), kind)
    usual = tirx.And(tirx.abs(x) < tirx.abs(y) * most, tirx.abs(y) < inf)
    # Not `tirx.Not`, which TVM turns into comparisons that NaN does not satisfy either.
    return tirx.Select(usual, tirx.const(False, "bool"), tirx.const(True, "bool"))


def fmod(x: Any, y: Any) -> Any:
    """What is left of `x` after whole multiples of `y`, exactly; the sign is that of `x`."""
    kind = str(x.ty.dtype)
    word = WORDS[kind]
    zero = tirx.const(0, kind)

    def of(v: Any, b: Any) -> Any:
        whole = tirx.trunc(v / b)
        # Rounded once, and there is nothing to round: the rest has no more digits than `x` or `y`.
        rest = tirx.call_llvm_pure_intrin(kind, "llvm.fma", zero - whole, b, v)
        sign = tirx.reinterpret(word, v) & tirx.min_value(word)
        upright = tirx.reinterpret(kind, tirx.reinterpret(word, rest) ^ sign)
        near = bind(upright, lambda r: tirx.Select(r < zero, r + tirx.abs(b), r))
        return copysign(near, v)

    return bind(x, lambda v: bind(y, lambda b: of(v, b)))
