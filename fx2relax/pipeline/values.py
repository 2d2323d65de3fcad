"""Work on weights alone, each distinct computation once, over all functions of a module.

Functions of one module compute with the same weights. `Values` reads one function after the
other and gives equal computations one `Value`, whatever the variables and the kernels are called
and in whatever order they are bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from ..compat import ShapeType, TensorType, TupleType, Var, is_prim_expr, type_of
from .flow import CALLBACKS, bindings, name_of

_HELD = "relax.builtin.stop_lift_params"
_MUTATES = ("relax.call_tir_inplace", "relax.call_py_func")
# Packed functions of TVM's virtual machine itself, which only look at memory in another way.
_PLAIN = "vm.builtin."


@dataclass(eq=False)
class Value:
    """One computation on weights.

    Attributes:
        var: what stands for it in other values' expressions.
        expr: the computation, over the variables of weights and of other values; for a
            `match_cast` what it looks at.
        ty: its type.
        cast: whether it is a `match_cast`.
        sources: places of the weights that it is made of; none for a constant.
        why: why it must not be computed once for many calls; empty if it may be.
        functions: the functions that compute it.
    """

    var: Any
    expr: Any
    ty: Any
    cast: bool
    sources: frozenset[int]
    why: str = ""
    functions: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The variable's."""
        return str(self.var.name)

    @property
    def operator(self) -> str:
        """Short name of what it calls: ``permute_dims``, a kernel's name, ``[0]`` of a tuple."""
        if isinstance(self.expr, relax.TupleGetItem):
            return f"[{self.expr.index}]"
        name = name_of(self.expr)
        if name.startswith("relax.call_"):
            callee = self.expr.args[0]
            return str(getattr(callee, "name_hint", getattr(callee, "global_symbol", name)))
        if not name and isinstance(self.expr, tvm.ir.Call):
            return str(getattr(self.expr.op, "name_hint", "call"))
        return name.removeprefix("relax.") or type(self.expr).__name__.lower()


class Values:
    """The work on weights of several functions.

    Args:
        mod: the module, for the kernels that are called.
        weights: one variable for each weight; their sizes' symbols are those of every function
            that is read.
        any_call: take every call to be pure, as in a function that transforms weights.

    Attributes:
        all: the values in the order in which they were met, each behind what it is made of.
        of: each value by its variable.
        symbols: the sizes that the weights show.
    """

    def __init__(self, mod: Any, weights: Sequence[Any], *, any_call: bool = False) -> None:
        self.mod, self.weights, self.any_call = mod, list(weights), any_call
        self.places = {w: n for n, w in enumerate(self.weights)}
        self.all: list[Value] = []
        self.of: dict[Any, Value] = {}
        self.symbols = {s for w in weights for s in relax.analysis.tir_vars_in_type(type_of(w))}
        self._found: dict[int, list[Value]] = {}
        self._kernels: dict[Any, Any] = {}
        self._equal_kernels: dict[int, list[Any]] = {}

    def read(self, name: str, func: Any, known: dict[Any, Any]) -> dict[Any, Any]:
        """Find a function's work on weights.

        Args:
            name: the function's.
            func: in normal form.
            known: what its parameters stand for: variables of `weights`, or expressions.

        Returns:
            `known`, and for each of its variables that depends on weights alone what it stands
            for: a variable of a weight or a value, or a tuple of such.
        """
        env = dict(known)
        for binding in bindings(func):
            found = self._value(name, binding, env)
            if found is not None:
                env[binding.var] = found
        return env

    def sources(self, expr: Any) -> frozenset[int]:
        """The places of the weights that an expression over values is made of."""
        found: set[int] = set()
        for var in relax.analysis.free_vars(expr):
            if var in self.places:
                found.add(self.places[var])
            elif var in self.of:
                found |= self.of[var].sources
        return frozenset(found)

    def parts(self, value: Value) -> Iterator[Any]:
        """The variables of weights and values that a value's expression reads."""
        for var in relax.analysis.free_vars(value.expr):
            if var in self.places or var in self.of:
                yield var

    def text(self, var: Any, depth: int = 4) -> str:
        """How a value comes about, readable: ``permute_dims(concat(gate.weight, up.weight))``."""
        value = self.of.get(var)
        if value is None or depth == 0:
            return str(var.name)
        if isinstance(value.expr, relax.TupleGetItem):
            return f"{self.text(value.expr.tuple_value, depth)}{value.operator}"
        parts = [self.text(v, depth - 1) for v in self.parts(value)]
        return f"{value.operator}({', '.join(parts)})" if parts else value.operator

    def renamed(self, expr: Any, env: dict[Any, Any]) -> Any:
        """An expression over what its variables stand for; None if `env` lacks one of them.

        A kernel is replaced by the first of the module's functions that does the same.
        """
        if isinstance(expr, relax.Tuple):
            fields = [self.renamed(f, env) for f in expr.fields]
            return None if any(f is None for f in fields) else relax.Tuple(fields)
        if isinstance(expr, relax.TupleGetItem):
            whole = self.renamed(expr.tuple_value, env)
            if isinstance(whole, relax.Tuple):
                return whole.fields[expr.index]
            return None if whole is None else relax.TupleGetItem(whole, expr.index)
        if isinstance(expr, tvm.ir.GlobalVar):
            return self._kernel(expr)
        if is_prim_expr(expr) or isinstance(expr, _LEAVES):
            return expr
        if isinstance(expr, Var):
            return env.get(expr)
        if not isinstance(expr, tvm.ir.Call) or isinstance(expr.op, Var):
            return None
        op = self._kernel(expr.op) if isinstance(expr.op, tvm.ir.GlobalVar) else expr.op
        args = [self.renamed(a, env) for a in expr.args]
        if any(a is None for a in args):
            return None
        return relax.Call(op, args, expr.attrs, expr.ty_args)

    def writer(self, builder: Any, params: Any) -> Callable[[Any], Any]:
        """What binds a weight or a value, by its variable, once, behind what it is made of.

        Args:
            builder: inside a dataflow block of a function.
            params: that function's parameter, the tuple of the weights.
        """
        env: dict[Any, Any] = {}

        def make(var: Any) -> Any:
            if var in env:
                return env[var]
            value = self.of.get(var)
            if value is None:
                expr: Any = relax.TupleGetItem(params, self.places[var])
            else:
                for part in self.parts(value):
                    make(part)
                expr = self.renamed(value.expr, env)
            if value is not None and value.cast:
                env[var] = builder.match_cast(expr, value.ty)
                return env[var]
            expr = builder.normalize(expr)
            env[var] = relax.DataflowVar(str(var.name), expr.ty)
            builder.emit_normalized(relax.VarBinding(env[var], expr))
            return env[var]

        return make

    def _value(self, name: str, binding: Any, env: dict[Any, Any]) -> Any:
        """What a binding's variable stands for; None if it does not depend on weights alone."""
        cast = isinstance(binding, relax.MatchCast)
        ty = binding.ty if cast else type_of(binding.var)
        expr = self.renamed(binding.value, env)
        if expr is None or not self.symbols.issuperset(relax.analysis.tir_vars_in_type(ty)):
            return None
        if not self.symbols.issuperset(relax.analysis.free_symbolic_vars(expr)):
            return None
        if not cast and isinstance(expr, (Var, relax.Tuple)):
            return expr
        value = self._known(expr, ty, cast)
        if value is None:
            why = "" if self.any_call or cast else _why(expr, ty)
            var = Var(str(binding.var.name), ty)
            value = Value(var, expr, ty, cast, self.sources(expr), why)
            self.all.append(value)
            self.of[var] = value
            self._found.setdefault(_hash(expr), []).append(value)
        value.functions.add(name)
        return value.var

    def _known(self, expr: Any, ty: Any, cast: bool) -> Value | None:
        for value in self._found.get(_hash(expr), ()):
            if value.cast != cast or not tvm_ffi.structural_equal(value.expr, expr):
                continue
            if not cast or tvm_ffi.structural_equal(value.ty, ty):
                return value
        return None

    def _kernel(self, name: Any) -> Any:
        """The first of the module's functions that does the same."""
        if name not in self._kernels:
            func = self.mod[name]
            plain = func.without_attr("global_symbol")
            equal = self._equal_kernels.setdefault(_hash(plain), [])
            for other, known in equal:
                if tvm_ffi.structural_equal(plain, known):
                    self._kernels[name] = other
                    break
            else:
                equal.append((name, plain))
                self._kernels[name] = name
        return self._kernels[name]


_LEAVES = (tvm.ir.GenericConst, relax.ShapeExpr, relax.ExternFunc, tvm.ir.StringImm)


def _hash(expr: Any) -> int:
    return int(tvm_ffi.structural_hash(expr))


def _why(expr: Any, ty: Any) -> str:
    """Why a call must not be done once for many calls; empty if it may be."""
    if isinstance(expr, tvm.ir.Call):
        name = name_of(expr)
        if name == _HELD:
            return "held by stop_lift_params"
        if name in CALLBACKS:
            symbol = str(getattr(expr.args[0], "global_symbol", ""))
            if not symbol.startswith(_PLAIN):
                return f"{symbol} may draw random numbers or have an effect"
        elif name in _MUTATES or not _pure(expr):
            return "it has an effect"
    return "" if _known_size(ty) else "its size depends on data"


def _pure(call: Any) -> bool:
    if isinstance(call.op, tvm.ir.Op):
        return bool(call.op.has_attr("FPurity") and call.op.get_attr("FPurity"))
    return bool(getattr(type_of(call.op), "purity", False))


def _known_size(ty: Any) -> bool:
    if isinstance(ty, TupleType):
        return all(_known_size(f) for f in ty.fields)
    if isinstance(ty, TensorType):
        return isinstance(ty.shape, relax.ShapeExpr)
    return isinstance(ty, ShapeType) or hasattr(ty, "dtype")
