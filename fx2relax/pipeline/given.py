"""Results in memory that the caller gives.

A Relax function allocates what it returns, and TVM's memory is foreign to PyTorch: it comes
through DLPack, cannot be resized, and goes back to a pool of TVM's. Here a function takes the
memory of its results as parameters wherever their sizes are known before the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tvm import relax, tirx

from ..calling import Calling, Given, Size
from ..compat import ShapeType, TensorType, Var, shape_values, type_of
from ..runtime.heap import KEPT
from .in_place import Places, in_its_place
from .lifted import size_of as bytes_of
from .packing import returns_its_own
from .tir import NotHandled

_SIGNS = {
    tirx.Add: "({} + {})",
    tirx.Sub: "({} - {})",
    tirx.Mul: "({} * {})",
    tirx.FloorDiv: "({} // {})",
    tirx.FloorMod: "({} % {})",
    tirx.Min: "min({}, {})",
    tirx.Max: "max({}, {})",
}


def give_results(mod: Any, name: str, leading: int, into: Mapping[int, int]) -> tuple[Any, Calling]:
    """Let a function of a module take the memory of its results.

    Args:
        mod: kernels are called with the memory that they write to, which `alloc_tensor` makes.
        name: the function's; its body is one straight line and returns a tuple.
        leading: how many parameters stand left of the weights.
        into: results that may lie in the memory of a parameter, which is what the caller is to
            find there afterwards: by the result's place, the parameter's.

    Returns:
        the module with the function changed, and how it is called. A result that is a parameter,
        a constant, in the memory of another result, or of a size that depends on data stays as
        it is.
    """
    function = mod[name]
    return _Giver(mod, name, function, leading, into).give()


class _Giver:
    def __init__(
        self, mod: Any, name: str, function: Any, leading: int, into: Mapping[int, int]
    ) -> None:
        self.mod = mod.clone()
        self.into = into
        self.name = name
        self.function = function
        self.bindings = [b for block in function.body.blocks for b in block.bindings]
        self.values = {b.var: b.value for b in self.bindings}
        self.shown = _shown(function.params[:leading])
        self.weights = function.params[leading:]
        self.names = {symbol: f"n{k}" for k, symbol in enumerate(self.shown)}

    def give(self) -> tuple[Any, Calling]:
        end = self.function.body.body
        # What returns nothing of its own has no bindings.
        results = end if isinstance(end, relax.Tuple) else self.values.get(end)
        if not isinstance(results, relax.Tuple):
            raise ValueError(f"{self.name} does not return a tuple")
        changed = self._changed(results)
        given, known, left = [], [], []
        memory: dict[Any, Any] = {}  # what a result's memory was bound to, by the variable
        outputs = []
        for index, result in enumerate(results.fields):
            shape = self._sizes(self._shape(result))
            if shape is None:
                left.append(result)
            elif isinstance(type_of(result), ShapeType):
                known.append((index, shape))
            else:
                # TVM and PyTorch give a tensor of no elements other strides.
                origin = None if 0 in shape else self._origin(result)
                if origin is None or origin in memory:
                    left.append(result)
                    continue
                output = relax.Var(f"result_{index}", type_of(result))
                memory[origin] = _placed(output, type_of(origin))
                outputs.append(output)
                on_the_way = changed.get(index)
                for before in on_the_way or ():
                    memory[before] = _placed(output, type_of(before))
                param = None if on_the_way is None else self.into[index]
                given.append(Given(index, shape, str(type_of(result).dtype), param))
        implied = self._implied(results)
        params = [p for i, p in enumerate(self.function.params) if i not in dict(implied)]
        function = self._function([*params, *outputs], memory, left)
        calling = Calling(
            results=len(results.fields),
            given=tuple(given),
            known=tuple(known),
            symbols=tuple((self.names[s], *where) for s, where in self.shown.items()),
            implied=tuple((i, *where) for i, where in implied),
            kernel=None if left else self._only_kernel(function),
            weights=_tensors(self.weights),
            allocated=sum(self._allocated()),
        )
        self.mod[self.name] = function
        return self.mod, calling

    def _changed(self, results: Any) -> dict[int, list[Any]]:
        """Results that may lie in a parameter's memory, and what else does, on the way to it."""
        origins = [self._origin(r) for r in results.fields]
        params = self.function.params
        wanted = {
            index: (origins[index], params[place])
            for index, place in self.into.items()
            if origins[index] is not None and alike(results.fields[index], params[place])
        }
        made = [origin for origin in origins if origin is not None]
        chains = Places(self.mod, self.function).changed(wanted, made)
        links = [link for chain in chains.values() for link in chain]
        try:
            for kernel, copies in {(link.kernel, link.copies) for link in links}:
                self.mod[kernel] = in_its_place(self.mod[kernel], copies)
        except NotHandled:  # what TVM's own passes may have made of one
            return {}
        return {index: [link.memory for link in chain[1:]] for index, chain in chains.items()}

    def _function(self, params: list[Any], memory: dict[Any, Any], left: list[Any]) -> Any:
        """The function with those parameters, that returns what is left of its results."""
        returned = relax.Var("returned", relax.TupleType([type_of(r) for r in left]))
        end = self.function.body.body
        blocks = []
        for block in self.function.body.blocks:
            kept = [
                relax.VarBinding(b.var, memory[b.var]) if b.var in memory else b
                for b in block.bindings
                if b.var != end
            ]
            blocks.append(relax.BindingBlock(kept))
        blocks.append(relax.BindingBlock([relax.VarBinding(returned, relax.Tuple(left))]))
        body = relax.SeqExpr(blocks, returned)
        old = self.function
        return relax.Function(params, body, type_of(returned), old.is_pure, old.attrs)

    def _origin(self, value: Any) -> Any | None:
        """The variable of the memory that a result is, or is a view of, if the function made it."""
        while True:
            if isinstance(value, relax.TupleGetItem):
                whole = value.tuple_value
                while isinstance(whole, Var):
                    whole = self.values.get(whole)
                if not isinstance(whole, relax.Tuple):
                    return None
                value = whole.fields[value.index]
                continue
            if not isinstance(value, Var) or value not in self.values:
                return None
            var, value = value, self.values[value]
            kind = getattr(getattr(value, "op", None), "name", "")
            if kind == "relax.builtin.alloc_tensor":
                return var
            if kind == "relax.reshape":
                value = value.args[0]

    def _shape(self, value: Any) -> Any:
        """The sizes of a result, or the shape that it is; None where they are unknown."""
        kind = type_of(value)
        if isinstance(kind, ShapeType):
            return kind.values
        shape = kind.shape if isinstance(kind, TensorType) else None
        return shape.values if isinstance(shape, relax.ShapeExpr) else None

    def _allocated(self) -> Iterator[int]:
        """How many bytes the library allocates in the C library's heap, call by call."""
        for binding in self.bindings:
            size = bytes_of(type_of(binding.var)) if returns_its_own(binding.value) else None
            if isinstance(size, int) and size <= KEPT:
                yield size

    def _sizes(self, values: Any) -> tuple[Size, ...] | None:
        if values is None:
            return None
        sizes = [size_of(v, self.names) for v in values]
        return None if any(s is None for s in sizes) else tuple(s for s in sizes if s is not None)

    def _implied(self, results: Any) -> list[tuple[int, tuple[int, int]]]:
        """Parameters that are a size which a tensor shows, and that nothing else needs."""
        used = {v for b in self.bindings for v in relax.analysis.free_vars(b.value)}
        found = []
        for index, param in enumerate(self.function.params):
            kind = type_of(param)
            if not isinstance(kind, ShapeType) or param in used or kind.values is None:
                continue
            if len(kind.values) == 1 and kind.values[0] in self.shown:
                where = self.shown[kind.values[0]]
                if where[0] != index:
                    found.append((index, where))
        return found

    def _only_kernel(self, function: Any) -> tuple[str, tuple[int, ...]] | None:
        """The kernel that a function calls with what it takes, if it does nothing else."""
        places = {param: index for index, param in enumerate(function.params)}
        call = None
        for binding in (b for block in function.body.blocks for b in block.bindings):
            value = binding.value
            if isinstance(value, Var) and value in places:
                places[binding.var] = places[value]
            elif call is None and isinstance(value, relax.Call) and self._is_kernel(value.op):
                call = value
            elif not isinstance(value, (Var, relax.Tuple, relax.TupleGetItem)):
                return None
        if call is None or not all(isinstance(a, Var) and a in places for a in call.args):
            return None
        return call.op.name_hint, tuple(places[a] for a in call.args)

    def _is_kernel(self, callee: Any) -> bool:
        return isinstance(callee, relax.GlobalVar) and isinstance(self.mod[callee], tirx.PrimFunc)


def size_of(expr: Any, names: Mapping[Any, str]) -> Size | None:
    """A size as a number, or as Python's text over the names of symbols; None where neither is."""
    if isinstance(expr, tirx.IntImm):
        return int(expr.value)
    if isinstance(expr, tirx.Cast):
        return size_of(expr.value, names)
    if expr in names:
        return names[expr]
    sign = _SIGNS.get(type(expr))
    if sign is None:
        return None
    a, b = size_of(expr.a, names), size_of(expr.b, names)
    return None if a is None or b is None else sign.format(a, b)


def _shown(params: Sequence[Any]) -> dict[Any, tuple[int, int]]:
    """The symbols that parameters show, with the place: a tensor's, where one does."""
    found: dict[Any, tuple[int, int]] = {}
    for kind in (TensorType, ShapeType):
        for index, param in enumerate(params):
            type_ = type_of(param)
            if not isinstance(type_, kind):
                continue
            for axis, size in enumerate(shape_values(type_) or []):
                if isinstance(size, tirx.Var):
                    found.setdefault(size, (index, axis))
    return found


def _tensors(weights: Sequence[Any]) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Shape and dtype of each weight; none where they are not all tensors of known sizes."""
    found = []
    for weight in weights:
        kind = type_of(weight)
        sizes = shape_values(kind) if isinstance(kind, TensorType) else None
        if sizes is None or not all(isinstance(size, int) for size in sizes):
            return ()
        found.append((tuple(sizes), str(kind.dtype)))
    return tuple(found)


def alike(one: Any, other: Any) -> bool:
    """Whether two values are tensors of one dtype and the same sizes."""
    a, b = type_of(one), type_of(other)
    if not (isinstance(a, TensorType) and isinstance(b, TensorType)) or a.dtype != b.dtype:
        return False
    sizes, others = shape_values(a), shape_values(b)
    if sizes is None or others is None or len(sizes) != len(others):
        return False
    return all(
        a == b if isinstance(a, int) or isinstance(b, int) else a.same_as(b)
        for a, b in zip(sizes, others, strict=True)
    )


def _placed(output: Any, kind: Any) -> Any:
    """The caller's memory as what a kernel writes to: the same sizes, or a view."""
    wanted, got = kind.shape.values, type_of(output).shape.values
    same = map(_equal, wanted, got)
    if len(wanted) == len(got) and all(same):
        return output
    view = relax.op.reshape(output, relax.ShapeExpr(list(wanted)))
    relax.expr._update_type(view, kind)
    return view


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, tirx.IntImm) and isinstance(b, tirx.IntImm):
        return int(a) == int(b)
    return bool(a.same_as(b))
