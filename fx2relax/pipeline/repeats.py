"""A kernel for all calls of an operator that are alike.

TVM makes each in TE, half a millisecond of Python, before it finds that it has the same one
already; and nets repeat their layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm import relax

from ..compat import Var, const_int, const_number
from .flow import dtype_of, known, name_of, sizes_of

Rule = Callable[[Any, Any], Any]


class Repeats:
    """The kernels of one module, by what they were made for."""

    def __init__(self) -> None:
        self._made: dict[Any, _Made] = {}

    def once(self, rule: Rule) -> Rule:
        """A rule that asks another one for the first of the calls that are alike.

        Args:
            rule: takes a block builder and an operator's call, gives what stands in its place.
        """

        def asked_once(builder: Any, call: Any) -> Any:
            described = _Described(call)
            key = described.key()
            if key is None:
                return rule(builder, call)
            made = self._made.get(key)
            if made is not None:
                return made.call(described.tensors)
            result = rule(builder, call)
            made = _Made.of(result, described.tensors)
            if made is not None:
                self._made[key] = made
            return result

        return asked_once


class _Made:
    """A call of a kernel.

    Attributes:
        result: the call.
        places: the operator's tensors that the kernel takes, by their places among these.
    """

    def __init__(self, result: Any, places: list[int]) -> None:
        self.result, self.places = result, places

    @classmethod
    def of(cls, result: Any, tensors: list[Any]) -> _Made | None:
        """None where the call takes anything else, as what was computed beside it."""
        if name_of(result) != "relax.call_tir" or len(result.args) != 2:
            return None
        places = []
        for field in result.args[1].fields:
            found = [n for n, x in enumerate(tensors) if x.same_as(field)]
            if not found:
                return None
            places.append(found[0])
        return cls(result, places)

    def call(self, tensors: list[Any]) -> Any:
        """The same kernel, called with other tensors."""
        result = self.result
        operands = relax.Tuple([tensors[n] for n in self.places])
        return relax.Call(result.op, [result.args[0], operands], result.attrs, result.ty_args)


class _Described:
    """What decides the kernel of a call.

    Attributes:
        tensors: the variables among its arguments, each once.
    """

    def __init__(self, call: Any) -> None:
        self.operator = call
        self.tensors: list[Any] = []

    def key(self) -> Any:
        """Equal for calls that are alike; None where that cannot be said."""
        call = self.operator
        if len(call.ty_args):
            return None
        parts = [self._part(arg) for arg in call.args]
        if None in parts:
            return None
        attrs = None if call.attrs is None else tvm_ffi.StructuralKey(call.attrs)
        return name_of(call), attrs, tuple(parts)

    def _part(self, arg: Any) -> Any:
        if isinstance(arg, relax.Tuple):
            parts = [self._part(field) for field in arg.fields]
            return None if None in parts else ("tuple", *parts)
        if isinstance(arg, relax.ShapeExpr):
            values = [const_int(size) for size in arg.values]
            return ("shape", *values) if known(values) else None
        if isinstance(arg, Var):
            return self._tensor(arg)
        number = const_number(arg)
        # By its text, where 0.0 and -0.0, 1 and True, NaN and itself are told apart.
        return None if number is None else ("number", dtype_of(arg), repr(number))

    def _tensor(self, var: Any) -> Any:
        sizes = sizes_of(var)
        if sizes is None or not known(sizes):
            return None
        place = next((n for n, x in enumerate(self.tensors) if x.same_as(var)), None)
        if place is None:
            place = len(self.tensors)
            self.tensors.append(var)
        return ("tensor", place, dtype_of(var), *sizes)
