"""A function over a module's weights as a functional ATen graph."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import sympy
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.traceback import get_current_meta
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._sympy.value_ranges import bound_sympy

from fx2relax.capture import Captured, trace
from fx2relax.capture_inputs import Inputs, Maker, add_leaves, fake_mode, is_pair
from fx2relax.capture_source import fake_weight, named_weights
from fx2relax.errors import Fx2RelaxError, ImportFailure
from fx2relax.kept import keep_inside
from fx2relax.module_view import functional_call
from fx2relax.registry import Converter
from fx2relax.shapes import SymbolTable

_TORCH = os.path.dirname(torch.__file__)


class Arguments:
    """What a function is to be called with, by its own signature.

    Args:
        function: what is called.
        given: by parameter; what ``**kwargs`` takes by its own names.

    Raises:
        ValueError: a name that the function does not have, or a parameter without a value.
    """

    def __init__(self, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
        self.signature = inspect.signature(function)
        parameters = self.signature.parameters
        kinds = {p.kind: name for name, p in parameters.items()}
        self.rest = kinds.get(inspect.Parameter.VAR_KEYWORD)
        unknown = [n for n in given if n not in parameters or n == self.rest]
        if unknown and self.rest is None:
            known = _listed(parameters)
            raise ValueError(f"it has no parameter {_listed(unknown)}; it has {known}")
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        missing = [
            name
            for name, p in parameters.items()
            if name not in given and p.default is p.empty and p.kind not in variable
        ]
        if missing:
            raise ValueError(f"there is no spec for its parameter {_listed(missing)}")
        own = [n for n in parameters if n in given and n != self.rest]
        #: The parameters that are given, in the function's own order.
        self.names = [*own, *unknown]
        self.values = [given[name] for name in self.names]

    def bind(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Values in the order of `names`, as the function takes them."""
        bound = inspect.BoundArguments(self.signature, OrderedDict())
        others = {}
        for name, value in zip(self.names, values, strict=True):
            if name in self.signature.parameters and name != self.rest:
                bound.arguments[name] = value
            else:
                others[name] = value
        if others:
            assert self.rest is not None
            bound.arguments[self.rest] = others
        return bound.args, bound.kwargs


class MethodSource:
    """A function that reads a module's weights, to be traced.

    Args:
        model: the module.
        function: one of its methods, or any function that uses it.
        arguments: what it is called with.
        shapes: makes a fake tensor for a weight of symbolic sizes; None for another weight.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        function: Callable[..., Any],
        arguments: Arguments,
        shapes: Callable[[str, torch.Tensor], torch.Tensor | None],
    ) -> None:
        self.model, self.function, self.arguments = model, function, arguments
        self.shapes = shapes

    def weights(self) -> dict[str, tuple[str, torch.Tensor]]:
        """The module's weights."""
        return named_weights(self.model)

    def fake(self, mode: FakeTensorMode, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor for a weight; one that has no data yet is on the CPU."""
        made = self.shapes(name, tensor)
        if made is not None:
            return made
        if tensor.is_meta:
            with mode:
                return torch.empty(tensor.shape, dtype=tensor.dtype)
        return fake_weight(mode, tensor)

    def call(self, inputs: Inputs, args: Sequence[Any], weights: Mapping[str, Any]) -> Any:
        """Run the function with other weights."""
        state = {f"model.{name}": value for name, value in weights.items()}
        given, named = self.arguments.bind(args)
        return functional_call(_Runner(self), state, given, named)


class _Runner(torch.nn.Module):
    """The function as a module whose weights can be swapped."""

    def __init__(self, source: MethodSource) -> None:
        super().__init__()
        self.model = source.model
        self.function = source.function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = dict(self._tensors())
        with _Located(), _unlocated_compilation():
            result = self.function(*args, **kwargs)
        self._written(before)
        return result

    def _tensors(self) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
        """Every tensor that a module holds, as a weight or as an attribute."""
        for path, module in self.model.named_modules():
            held = {**vars(module), **module._buffers, **module._parameters}
            for name, value in held.items():
                if isinstance(value, torch.Tensor):
                    yield (path, name), value

    def _written(self, before: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Let a buffer that was set to another tensor be written to; refuse other attributes."""
        for (path, name), value in list(self._tensors()):
            old = before.get((path, name))
            if value is old or not isinstance(value, FunctionalTensor):
                continue
            module = self.model.get_submodule(path)
            if name not in module._buffers:
                delattr(module, name)
                if old is not None:
                    setattr(module, name, old)
                raise ImportFailure(
                    f"it sets {'.'.join(filter(None, (path, name)))}, which is no buffer: register "
                    "it with register_buffer, so that the export can hold it"
                )
            if old is None or old.shape != value.shape or old.dtype != value.dtype:
                raise ImportFailure(
                    f"it sets the buffer {'.'.join(filter(None, (path, name)))} to a tensor of "
                    "another shape or dtype"
                )
            old.copy_(value)


class _Located(TorchFunctionMode):
    """Notes the line of the model that calls PyTorch on the nodes that come of it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
            frame = frame.f_back
        if frame is not None and frame.f_code.co_filename != __file__:
            name, line = frame.f_code.co_filename, frame.f_lineno
            code = linecache.getline(name, line).strip()
            where = f'File "{name}", line {line}, in {frame.f_code.co_name}\n    {code}'
            get_current_meta()["stack_trace"] = where
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _unlocated_compilation() -> Iterator[None]:
    """`torch.cond` has Dynamo take its branches, which cannot follow what looks for lines."""
    original = torch.compile

    def compile(*args: Any, **kwargs: Any) -> Any:
        compiled: Callable[..., Any] = original(*args, **kwargs)

        def call(*values: Any, **named: Any) -> Any:
            with _pop_mode_temporarily():
                return compiled(*values, **named)

        return call

    with mock.patch.object(torch, "compile", compile):
        yield


@dataclass(frozen=True)
class Called:
    """What a captured function takes.

    Attributes:
        names: of its arguments, in order.
        spec: the structure of the list of them.
        static: the leaves that are no inputs of the graph, by position: constants.
    """

    names: list[str]
    spec: pytree.TreeSpec
    static: dict[int, Any]


def capture_method(
    model: torch.nn.Module,
    function: Callable[..., Any],
    given: Mapping[str, Any],
    make: Callable[[Inputs], Maker],
    *,
    shapes: Mapping[str, Sequence[Any]],
    decompositions: Mapping[Any, Callable[..., Any]],
    converters: Mapping[Any, Converter],
) -> tuple[Captured, Called]:
    """Turn a function over a module's weights into a functional ATen graph.

    Args:
        model: the module.
        function: a method of it, or any function that uses it.
        given: an entry for each parameter, see `capture.capture`; `spec.Tensor` stands for a
            tensor too.
        make: a maker of fake values for these inputs.
        shapes: the symbolic shapes of weights, by name.
        decompositions: ATen overload -> decomposition, applied while tracing.
        converters: those of functions, methods and modules, whose calls stay whole.

    Returns:
        the graph, and what the function takes.

    Raises:
        ImportFailure: the function does not run on these inputs, or works only for some values of
            a size that was given as symbolic.
        ValueError: a parameter without a value or the other way round.
    """
    arguments = Arguments(function, given)
    inputs = Inputs(fake_mode(), SymbolTable())
    maker = make(inputs)
    leaves, inputs.spec = pytree.tree_flatten(arguments.values, is_leaf=is_pair)
    add_leaves(inputs, arguments.values, arguments.names, [maker.value(leaf) for leaf in leaves])

    def weight(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if name not in shapes:
            return None
        sizes = [maker.size(s) for s in shapes[name]]
        with inputs.mode:
            return torch.empty(sizes, dtype=tensor.dtype)

    source = MethodSource(model, function, arguments, weight)
    try:
        with keep_inside([model], converters), _exporting(inputs.mode.shape_env):
            captured = trace(source, inputs, decompositions)
    except Fx2RelaxError:
        raise
    except Exception as error:
        text = inputs.with_names(str(error))
        raise ImportFailure(f"{type(error).__name__}: {text}") from error
    _refuse_narrower(inputs, maker)
    assert inputs.spec is not None
    return captured, Called(arguments.names, inputs.spec, dict(inputs.static))


@contextlib.contextmanager
def _exporting(env: Any) -> Iterator[None]:
    """Let models see that they are traced, as they do under `torch.export`."""
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    select = torch._C._select_conv_backend

    def unguarded(*args: Any, **kwargs: Any) -> Any:
        # Which of its kernels PyTorch would take for so many images is nothing to ours.
        with env.suppress_guards():
            return select(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch._C, "_select_conv_backend", unguarded))
        for flag in flags:
            if hasattr(torch.compiler, flag):
                stack.enter_context(mock.patch.object(torch.compiler, flag, True))
        yield


def _refuse_narrower(inputs: Inputs, maker: Maker) -> None:
    """Raise if the function took a way that it takes for some values of a size only."""
    fault = inputs.specialised()
    if fault:
        raise ImportFailure(f"{fault}. Give that size as an int, or change the model")
    env: Any = inputs.mode.shape_env
    for guard in env.guards:
        expr = env.simplify(guard.expr)
        if expr in (sympy.true, True) or expr in maker.assumed:
            continue
        symbols = expr.free_symbols & set(inputs.sizes)
        if not symbols or bound_sympy(expr, maker.bounds).lower is sympy.true:
            continue
        if _idle(guard):
            continue
        names = ", ".join(sorted(inputs.sizes[s] for s in symbols))
        raise ImportFailure(
            f"the size {names} is symbolic, and the way through the model holds only where "
            f"{inputs.with_names(str(expr))}, because of {guard.sloc}\n"
            f'Say so in the spec, as in fx2relax.Dim("{names.split(", ")[0]}", min=..., max=..., '
            "multiple_of=...), or change the model so that it works for every size."
        )


def _idle(guard: Any) -> bool:
    """Whether a guard changes nothing.

    PyTorch itself asks if a size is 0 or 1, which it takes none for while it traces.
    """
    place = getattr(guard.sloc.framework_loc, "filename", "")
    asked = isinstance(guard.expr, (sympy.Ne, sympy.Gt)) and guard.expr.rhs in (0, 1)
    asked |= isinstance(guard.expr, sympy.Ge) and guard.expr.rhs in (1, 2)
    return asked and place.startswith(_TORCH)


def _listed(names: Any) -> str:
    return ", ".join(repr(str(n)) for n in names) or "none"
