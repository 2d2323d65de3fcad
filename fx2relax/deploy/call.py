"""One call of a function of an artifact: arguments in, checked, and results out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tvm_ffi

from fx2relax.errors import ArgumentError

from . import arrays, structure
from .arrays import spelled
from .bound import Weights
from .machine import Machines
from .manifest import Function, Manifest, Parameter, Size
from .sizes import Shown, Unsolved, parse, solve
from .states import States
from .structure import At, Constant, SizeOf

_MISSING = object()


class Callee:
    """A function of a loaded artifact. Made by `load`.

    Calling it takes its arguments by position or name, as NumPy arrays or tensors with DLPack
    (ints for sizes, and tuples, lists and dicts of these where it was exported so), and returns
    what the exported function returned. Arguments that the function writes to are written in
    place. Several threads may call it at once; calls that write states wait for each other.

    Raises:
        ArgumentError: (a ValueError) an argument is missing, unknown or of another shape or
            dtype, or sizes disagree; says which.
    """

    def __init__(
        self,
        function: Function,
        manifest: Manifest,
        weights: Weights,
        states: States,
        machines: Machines,
        device: Any,
        out: Callable[[Any], Any],
    ) -> None:
        self._function = function
        self._sizes = {size.name: size for size in manifest.sizes}
        self._weights = weights
        self._names = [weights.canonical(name) for name in function.weights]
        self._states = states
        self._machines = machines
        self._device = device
        self._align = manifest.alignment
        self._out = out
        self._symbol = function.symbol or function.name
        self._expected = [name for name, _ in function.arguments]
        named = {
            leaf.index: name
            for name, node in function.arguments
            for leaf in structure.leaves(node)
            if isinstance(leaf, At)
        }
        self._given = sorted(named)
        self._stateful = any(p.kind == "state" for p in function.parameters) or any(
            r.state is not None for r in function.results
        )
        self._written = {r.argument for r in function.results if r.argument is not None}
        self.__name__ = function.name
        self.__doc__ = repr(self)

    def __repr__(self) -> str:
        function = self._function
        parts = [f"{n}: {_shown(node, function.parameters)}" for n, node in function.arguments]
        output = _shown(function.output, function.results)
        return f"{function.name}({', '.join(parts)}) -> {output}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function; see the class."""
        values, names = self._taken(args, kwargs)
        tensors, shown = self._checked(values, names)
        bound = self._weights.current()
        sizes = self._solved(shown, bound.sizes)
        ready = bound.ready(self._function, self._names, self._machines, self._device)
        with self._states.lock if self._stateful else contextlib.nullcontext():
            given = [self._parameter(n, p, tensors, sizes) for n, p in self._parameters()]
            with self._machines.take() as machine:
                found = machine[self._symbol](*given, *ready)
                results = _flat(found, self._function)
            self._own(results, [*given, *ready])
            self._write(results, values, names)
        return structure.put_together(
            self._function.output, lambda node: self._leaf(node, results, values, sizes)
        )

    def _parameters(self) -> Any:
        return enumerate(self._function.parameters)

    def _taken(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[dict[int, Any], dict[int, str]]:
        """The values of the parameters that the caller gives, and what they are called."""
        name = self._function.name
        if len(args) > len(self._expected):
            raise ArgumentError(
                f"{name} takes {len(self._expected)} arguments, and was given {len(args)}"
            )
        given = dict(zip(self._expected, args, strict=False))
        for key, value in kwargs.items():
            if key not in self._expected:
                raise ArgumentError(
                    f"{name} has no argument {key!r}; it takes {', '.join(self._expected)}"
                )
            if key in given:
                raise ArgumentError(f"{name} was given the argument {key!r} twice")
            given[key] = value
        values: dict[int, Any] = {}
        names: dict[int, str] = {}

        def put(index: int, where: str, value: Any) -> None:
            values[index], names[index] = value, where

        for key, node in self._function.arguments:
            value = given.get(key, _MISSING)
            if value is not _MISSING:
                structure.take_apart(node, value, key, put)
            elif not isinstance(node, Constant):
                raise ArgumentError(f"{name}: the argument {key!r} is missing")
        return values, names

    def _checked(
        self, values: Mapping[int, Any], names: Mapping[int, str]
    ) -> tuple[dict[int, Any], list[Shown]]:
        """The arguments as TVM takes them, and the sizes that they show."""
        found: dict[int, Any] = {}
        shown: list[Shown] = []
        for index in self._given:
            parameter, value = self._function.parameters[index], values.get(index)
            name = names.get(index, parameter.name)
            if parameter.kind == "tensor":
                found[index] = self._tensor(index, parameter, value, name, shown)
            elif parameter.kind == "size":
                number = _number(value, name)
                found[index] = tvm_ffi.Shape((number,))
                shown.append(Shown(parse(parameter.shape[0]), number, f"argument {name!r}"))
            else:
                found[index] = value
        return found, shown

    def _tensor(
        self, index: int, parameter: Parameter, value: Any, name: str, shown: list[Shown]
    ) -> Any:
        what = f"argument {name!r}"
        tensor = arrays.given(value, what, self._align)
        shape, dtype = tuple(tensor.shape), str(tensor.dtype)
        wanted = parameter.shape
        fits = len(shape) == len(wanted) and all(
            not isinstance(a, int) or a == b for a, b in zip(wanted, shape, strict=True)
        )
        if not fits or dtype != parameter.dtype:
            expected = spelled(wanted, parameter.dtype)
            raise ArgumentError(f"{what}: expected {expected}, got {spelled(shape, dtype)}")
        if index in self._written and not getattr(getattr(value, "flags", None), "writeable", True):
            raise ArgumentError(f"{what}: the function writes to it, and it cannot be written to")
        for axis, (size, given) in enumerate(zip(wanted, shape, strict=True)):
            if not isinstance(size, int):
                shown.append(Shown(parse(size), int(given), f"axis {axis} of {what}"))
        return arrays.on_device(tensor, self._device)

    def _solved(self, shown: Sequence[Shown], known: Mapping[str, int]) -> dict[str, int]:
        try:
            sizes = solve(shown, known)
        except Unsolved as error:
            raise ArgumentError(str(error)) from None
        for name, value in sizes.items():
            wrong = _limits(self._sizes[name], value)
            if wrong:
                raise ArgumentError(f"size {name!r} is {value}, and has to be {wrong}")
        return sizes

    def _parameter(
        self, index: int, parameter: Parameter, found: Mapping[int, Any], sizes: Mapping[str, int]
    ) -> Any:
        if index in found:
            return found[index]
        if parameter.kind == "state":
            return self._states.get(parameter.name)
        return tvm_ffi.Shape(tuple(_value(size, sizes, parameter.name) for size in parameter.shape))

    def _own(self, results: list[Any], given: Sequence[Any]) -> None:
        """Copy the results that lie in the memory of an argument, a weight or another result."""
        seen = {t.data_ptr() for t in given if isinstance(t, tvm_ffi.Tensor) and t.numel()}
        for index, result in enumerate(results):
            if not isinstance(result, tvm_ffi.Tensor) or not result.numel():
                continue
            if result.data_ptr() in seen:
                fresh = arrays.empty(result.shape, str(result.dtype), result.device)
                arrays.copy(result, fresh)
                results[index] = fresh
            seen.add(result.data_ptr())

    def _write(
        self, results: Sequence[Any], values: Mapping[int, Any], names: Mapping[int, str]
    ) -> None:
        for result, spec in zip(results, self._function.results, strict=True):
            if spec.state is not None:
                self._states.tensors[spec.state] = result
            if spec.argument is not None and spec.argument in values:
                name = f"argument {names[spec.argument]!r}"
                arrays.write_back(result, values[spec.argument], name)

    def _leaf(
        self, node: Any, results: Sequence[Any], values: Mapping[int, Any], sizes: Mapping[str, int]
    ) -> Any:
        if isinstance(node, SizeOf):
            return _value(node.text, sizes, "result")
        if not isinstance(node, At):
            return values[node.index]
        kind, value = self._function.results[node.index].kind, results[node.index]
        if kind == "size":
            return int(value[0])
        return self._out(value) if kind == "tensor" else value


def _flat(found: Any, function: Function) -> list[Any]:
    alone = isinstance(found, (tvm_ffi.Tensor, tvm_ffi.Shape))
    return [found] if alone and len(function.results) == 1 else list(found)


def _number(value: Any, name: str) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentError(f"argument {name!r}: expected an int, got {type(value).__name__}")
    return int(value.__index__())


def _value(size: Any, sizes: Mapping[str, int], name: str) -> int:
    expression = parse(size)
    unknown = sorted(expression.names - sizes.keys())
    if unknown:
        raise ArgumentError(f"no argument tells the size {unknown[0]!r}, which {name!r} needs")
    try:
        return expression.value(sizes)
    except ZeroDivisionError:
        raise ArgumentError(f"{name!r}: {expression.text} divides by 0") from None


def _limits(size: Size, value: int) -> str:
    """What a size has to be, in words, if it is not so."""
    top = "" if size.max is None else f" and at most {size.max}"
    if value < size.min or (size.max is not None and value > size.max):
        return f"at least {size.min}{top}"
    return f"a multiple of {size.multiple_of}" if value % size.multiple_of else ""


def _shown(node: Any, parts: Sequence[Any]) -> str:
    """A structure in a function's signature."""
    if isinstance(node, structure.Several):
        inner = ", ".join(_shown(item, parts) for item in node.items)
        return f"[{inner}]" if node.kind == "list" else f"({inner})"
    if isinstance(node, structure.Keyed):
        return "{" + ", ".join(f"{key!r}: {_shown(item, parts)}" for key, item in node.items) + "}"
    if isinstance(node, Constant):
        return repr(node.value)
    if isinstance(node, SizeOf):
        return node.text
    if isinstance(node, structure.Argument):
        return "an argument"
    part = parts[node.index]
    if part.kind == "size":
        return f"int {part.shape[0]}" if part.shape else "int"
    return spelled(part.shape, part.dtype) if part.kind == "tensor" else "object"
