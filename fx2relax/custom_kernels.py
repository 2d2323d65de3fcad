"""A user's kernel in each of the languages it may be written in, as a converter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from fx2relax.compat import BlockBuilder, Expr, TensorType, is_prim_expr, relax, tirx, type_of
from fx2relax.converters.common import Unsupported, dtype, emit, shape, te_call
from fx2relax.extern import ExternFunction, Kernel
from fx2relax.rules import Seen, match
from fx2relax.spec import Tensor

LANGUAGES = ("te", "tir", "relax", "torch")
_NUMBERS = ("float", "int", "bool", "number", "Scalar", "SymInt")


class Signature:
    """The arguments of an operator, as its schema has them."""

    def __init__(self, name: str, schema: Any) -> None:
        self.name = name
        self.schema = schema
        #: What a kernel is called in Relax.
        self.hint = name.replace("::", "_").replace(".", "_")
        self.names = [a.name for a in schema.arguments]
        kinds = inspect.Parameter
        #: The same as Python has it.
        self.python = inspect.Signature(
            [
                kinds(
                    a.name,
                    kinds.KEYWORD_ONLY if a.kwarg_only else kinds.POSITIONAL_OR_KEYWORD,
                    default=a.default_value if a.has_default_value() else kinds.empty,
                )
                for a in schema.arguments
            ]
        )

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """One value an argument, in the schema's order, defaults filled in."""
        if not kwargs and len(args) == len(self.names):
            return list(args)
        bound = self.python.bind(*args, **kwargs)
        bound.apply_defaults()
        return [bound.arguments[name] for name in self.names]

    def split(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The positional and the keyword-only ones of what `bind` returned."""
        pairs = list(zip(self.schema.arguments, values, strict=True))
        return (
            [v for a, v in pairs if not a.kwarg_only],
            {a.name: v for a, v in pairs if a.kwarg_only},
        )

    def known(self, values: Sequence[Any]) -> None:
        """Raise Unsupported for a number that is known only while a program runs."""
        for argument, value in zip(self.schema.arguments, values, strict=True):
            kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
            if kind in _NUMBERS and isinstance(value, Expr) and not is_prim_expr(value):
                raise Unsupported(f"{argument.name}, which is known only at run time")


class Implementation(Protocol):
    """A kernel as an operator has it."""

    @property
    def rules(self) -> Sequence[ExternFunction] | None:
        """What it takes and gives, where it says so itself."""

    def convert(self, signature: Signature, values: Sequence[Any]) -> Any:
        """The call in the Relax function that is being imported."""


class InTE:
    """A function of `te.Tensor` that returns one, or a tuple of them."""

    rules: Sequence[ExternFunction] | None = None

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def convert(self, signature: Signature, values: Sequence[Any]) -> Any:
        """The kernel that TE makes of it."""
        args, kwargs = signature.split(values)
        return te_call(self.function, *args, **kwargs, primfunc_name_hint=signature.hint)


class InRelax:
    """A function of Relax expressions that returns one, or a tuple of them."""

    rules: Sequence[ExternFunction] | None = None

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def convert(self, signature: Signature, values: Sequence[Any]) -> Any:
        """What it returns."""
        args, kwargs = signature.split(values)
        result = self.function(*args, **kwargs)
        return tuple(result) if isinstance(result, list) else result


class InTIR:
    """PrimFuncs of the inputs' buffers, then the outputs'.

    Args:
        kernel: a PrimFunc; several, of which the arguments' dtypes choose; or a function of the
            operator's arguments, tensors among them as `spec.Tensor`, that returns one.
        inputs: how many tensors the operator takes, where all its arguments are tensors.
    """

    def __init__(self, kernel: Any, inputs: int) -> None:
        self.make: Callable[..., Any] | None = None
        self.functions: list[Any] = []
        if isinstance(kernel, tirx.PrimFunc):
            self.functions = [kernel]
        elif isinstance(kernel, Mapping):
            self.functions = list(kernel.values())
        elif isinstance(kernel, (list, tuple)):
            self.functions = list(kernel)
        else:
            self.make = kernel
        self.rules: list[ExternFunction] | None = None
        if self.functions:
            self.rules = [rule_of(f, inputs) for f in self.functions]

    def convert(self, signature: Signature, values: Sequence[Any]) -> Any:
        """A call of it."""
        tensors = [v for v in values if isinstance(v, Expr) and not is_prim_expr(v)]
        tensors = [emit(t) for t in tensors]
        functions, rules = self.functions, self.rules
        if self.make is not None:
            args, kwargs = signature.split([_spec(v) for v in values])
            functions = [self.make(*args, **kwargs)]
            rules = [rule_of(functions[0], len(tensors))]
        assert rules is not None
        views = [Seen(tuple(shape(t)), dtype(t)) for t in tensors]
        names = [f"tensor {i}" for i in range(len(tensors))]
        if self.make is None:
            names = signature.names
        found = match(rules, views, signature.name, names)
        function = next(f for f, r in zip(functions, rules, strict=True) if r is found.rule)
        builder = BlockBuilder.current()
        for place, sizes in found.doubts.items():
            kind = TensorType(sizes, dtype(tensors[place]))
            tensors[place] = builder.match_cast(tensors[place], kind)
        # A name that is fixed would be taken by the next such kernel, or is by the graph itself.
        function = function.without_attr("global_symbol")
        callee = builder.add_func(function, signature.hint)
        kinds = [TensorType([*r.shape], r.dtype) for r in found.results()]
        return relax.call_tir(callee, tensors, out_ty=kinds[0] if len(kinds) == 1 else kinds)


class InObject:
    """A kernel of an object file."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.rules = list(kernel.rules.values())

    def convert(self, signature: Signature, values: Sequence[Any]) -> Any:
        """A call of its symbol."""
        return self.kernel.emit(values, signature.name, signature.names)


def rule_of(function: Any, inputs: int) -> ExternFunction:
    """What a PrimFunc takes and gives, as its buffers say.

    Raises:
        ValueError: it has parameters that are no buffers, or none left for a result.
    """
    buffers = [type_of(p) for p in function.params]
    if not all(hasattr(b, "shape") for b in buffers):
        raise ValueError("a PrimFunc that is a kernel takes buffers alone")
    if len(buffers) <= inputs:
        raise ValueError(f"a PrimFunc of {len(buffers)} buffers has none for a result")
    tensors = [Tensor(tuple(_plain(s) for s in b.shape), str(b.dtype)) for b in buffers]
    results = tensors[inputs:]
    return ExternFunction(tensors[:inputs], results[0] if len(results) == 1 else results)


def _plain(size: Any) -> Any:
    return int(size.value) if isinstance(size, tirx.IntImm) else size


def _spec(value: Any) -> Any:
    if isinstance(value, Expr) and not is_prim_expr(value):
        return Tensor(tuple(shape(value)), dtype(value))
    return value


def implementation(kernel: Any, language: str, schema: Any) -> Implementation | None:
    """A kernel as an operator has it; None for one that PyTorch runs.

    Raises:
        ValueError: a kernel that is not of the language.
    """
    tensors = sum(isinstance(a.type, torch.TensorType) for a in schema.arguments)
    if isinstance(kernel, Kernel):
        return InObject(kernel)
    if isinstance(kernel, (tirx.PrimFunc, Mapping, list, tuple)) or language == "tir":
        fixed = not callable(kernel) or isinstance(kernel, tirx.PrimFunc)
        if fixed and tensors != len(schema.arguments):
            raise ValueError(
                "a PrimFunc takes tensors alone; for other arguments give a function of them that "
                "returns one"
            )
        return InTIR(kernel, tensors)
    if not callable(kernel):
        raise ValueError(f"{kernel!r} is no kernel")
    if language == "te":
        return InTE(kernel)
    return InRelax(kernel) if language == "relax" else None
