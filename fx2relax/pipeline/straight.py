"""What a function does, as steps that its caller takes without TVM's virtual machine.

On a GPU the virtual machine hands each tensor from TVM to PyTorch and back at every call of
PyTorch's, and asks Python for all memory: the kernels of a small network end sooner than that. Its
caller has Python at hand, and tensors that PyTorch made.

A step is a tuple. What it works on is a place among what the function takes, a name, or Python's
text of a number in brackets. A size is a number, or such a text over the names of
`Calling.symbols`.

    ("take", count)                     how much the function takes: the first step
    ("empty", name, sizes, dtype)       memory, of TVM's name of a dtype
    ("kernel", symbol, operands)        a generated kernel, that writes to some of them
    ("torch", name, call, operands, single)
                                        a call of PyTorch's, by the packed function's name; whether
                                        it returns one tensor
    ("view", name, operand, sizes)
    ("item", name, operand, place)      of what a call has returned
    ("return", operands)                what the function returns besides what it was given

Names that begin with a "c" are constants, of which ``<name>_constants`` returns all.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tvm
from tvm import relax, tirx

from ..calling import CONSTANTS, Calling, Size
from ..compat import ShapeType, TensorType, TupleType, Var, is_prim_expr, type_of
from ..torch_calls import PREFIX
from .flow import name_of
from .given import size_of
from .tir import NotHandled


def straight(mod: Any, name: str, calling: Calling) -> tuple[Any, Calling]:
    """Write down what a function does, where it is one line of steps on tensors whose sizes can be
    told from those of its parameters.

    Args:
        mod: its kernels are called with the memory that they write to.
        name: the function's.
        calling: how it is called so far.

    Returns:
        the module, with the function of the constants where there are any, and how it is called.
    """
    line = _Line(mod, mod[name], _names(mod[name], calling))
    try:
        steps = line.steps()
    except NotHandled:
        return mod, calling
    if line.constants:
        mod = mod.clone()
        mod[name + CONSTANTS] = _constants(name + CONSTANTS, list(line.constants))
    return mod, dataclasses.replace(calling, line=steps)


class _Line:
    def __init__(self, mod: Any, function: Any, names: dict[Any, str]) -> None:
        self.mod, self.function, self.names = mod, function, names
        self.held: dict[Any, Any] = {param: i for i, param in enumerate(function.params)}
        self.constants: dict[Any, str] = {}
        self.made: list[tuple[Any, ...]] = []
        self.count = 0

    def steps(self) -> tuple[Any, ...]:
        for param in self.function.params:
            if not isinstance(type_of(param), TensorType):
                raise NotHandled("an argument that is no dense tensor")
            self._sizes(param)
        for block in self.function.body.blocks:
            for binding in block.bindings:
                if isinstance(binding, relax.MatchCast):
                    raise NotHandled("a size that is looked at")
                self.held[binding.var] = self._value(binding.value)
        returned = self.held[self.function.body.body]
        if not isinstance(returned, tuple) or any(isinstance(r, tuple) for r in returned):
            raise NotHandled("a result that is no list of tensors")
        return (("take", len(self.function.params)), *self.made, ("return", returned))

    def _value(self, value: Any) -> Any:
        if is_prim_expr(value):
            return f"({self._size(value)})"
        if isinstance(value, Var):
            return self.held[value]
        if isinstance(value, tvm.ir.GenericConst):
            self._sizes(value)
            return self.constants.setdefault(value, f"c{len(self.constants)}")
        if isinstance(value, relax.Tuple):
            return tuple(map(self._value, value.fields))
        if isinstance(value, relax.TupleGetItem):
            whole = self._value(value.tuple_value)
            if isinstance(whole, tuple):
                return whole[value.index]
            self._sizes(value)
            return self._made("item", whole, int(value.index))
        if isinstance(value, relax.ShapeExpr) and len(value.values) == 1:
            return f"({self._size(value.values[0])})"
        if isinstance(value, relax.Call):
            return self._call(value)
        raise NotHandled(f"a {type(value).__name__}")

    def _call(self, call: Any) -> Any:
        name = name_of(call)
        if name == "relax.builtin.alloc_tensor":
            return self._made("empty", self._sizes(call), str(type_of(call).dtype))
        if name == "relax.reshape":
            return self._made("view", self._value(call.args[0]), self._sizes(call))
        if isinstance(call.op, relax.GlobalVar):
            if not isinstance(self.mod[call.op], tirx.PrimFunc):
                raise NotHandled("a function that is called")
            self.made.append(("kernel", call.op.name_hint, self._operands(call.args)))
            return ()
        if isinstance(call.op, relax.ExternFunc):
            symbol = str(call.op.global_symbol)
            if symbol.startswith(PREFIX):
                self._sizes(call)
                single = isinstance(type_of(call), TensorType)
                return self._made("torch", symbol, self._operands(call.args), single)
        raise NotHandled(f"a call of {name or call.op}")

    def _operands(self, args: Any) -> tuple[Any, ...]:
        found = tuple(map(self._value, args))
        if any(isinstance(value, tuple) for value in found):
            raise NotHandled("a tuple that is taken whole")
        return found

    def _sizes(self, expr: Any) -> tuple[Size, ...]:
        """The sizes of a tensor, which has elements; none of what is no tensor."""
        return self._sizes_of(type_of(expr))

    def _sizes_of(self, kind: Any) -> tuple[Size, ...]:
        if isinstance(kind, TupleType):
            for field in kind.fields:
                self._sizes_of(field)
            return ()
        if isinstance(kind, ShapeType):
            raise NotHandled("a size that is looked at")
        if not isinstance(kind, TensorType):
            return ()
        if not isinstance(kind.shape, relax.ShapeExpr):
            raise NotHandled("sizes that are not known")
        return tuple(map(self._size, kind.shape.values))

    def _size(self, value: Any) -> Size:
        size = size_of(value, self.names)
        # TVM and PyTorch give a tensor of no elements other strides.
        if size is None or size == 0:
            raise NotHandled("a size that is not known, or zero")
        return size

    def _made(self, kind: str, *what: Any) -> str:
        name = f"t{self.count}"
        self.count += 1
        self.made.append((kind, name, *what))
        return name


def _names(function: Any, calling: Calling) -> dict[Any, str]:
    """The symbols that parameters show, with their names."""
    gone = {param for param, *_ in calling.implied}
    names = {}
    for name, param, axis in calling.symbols:
        left = function.params[param - sum(other < param for other in gone)]
        names[type_of(left).shape.values[axis]] = name
    return names


def _constants(symbol: str, constants: list[Any]) -> Any:
    """A function that returns the constants."""
    made = relax.Var("made", TupleType([type_of(c) for c in constants]))
    binding = relax.VarBinding(made, relax.Tuple(constants))
    body = relax.SeqExpr([relax.BindingBlock([binding])], made)
    function = relax.Function([], body, type_of(made))
    return function.with_attr("global_symbol", symbol)
