"""A user's module in eager and compiled: results compared, calls timed in turns."""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib.util
import math
import statistics
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import fx2relax
from fx2relax.closeness import difference
from fx2relax.demo.measure import largest_error, time_in_turns

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
EAGER = "eager"
OURS = "relax"


class NoModel(Exception):
    """What was named gives no module and inputs."""


@dataclass
class Side:
    """One way to run the module.

    Attributes:
        name: ``eager`` or the backend's name.
        compile_seconds: the first call, tracing included.
        ms, least_ms: the median and the least time of a call.
        error: the largest difference from eager of all that the call returns or writes.
        wrong: what differs by more than it may; empty where nothing does.
        failed: what was raised; empty where nothing was.
        stats: `fx2relax.stats()` of its calls, ours alone.
    """

    name: str
    compile_seconds: float = 0.0
    ms: float = math.nan
    least_ms: float = math.nan
    error: float = math.nan
    wrong: str = ""
    failed: str = ""
    stats: dict[str, Any] = field(default_factory=dict)
    call: Callable[[], Any] | None = field(default=None, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """All but the function, as JSON can spell it."""
        self_without = copy.copy(self)
        self_without.call = None
        found = asdict(self_without)
        del found["call"]
        return found


def read(named: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The module and its arguments that a function in a file returns.

    Args:
        named: ``FILE.py:function``; the function takes nothing, and returns a module (or any
            callable) and its inputs: a tensor, a sequence of arguments or a dict of them by name.

    Raises:
        NoModel: there is no such file or function, it raises, or it returns something else.
    """
    file, _, function = named.rpartition(":")
    if Path(named).is_file():  # no function is named
        file, function = named, ""
    path = Path(file)
    if not file or not path.is_file():
        raise NoModel(f"there is no file {file or named!r}; it takes FILE.py:function")
    if not function:
        raise NoModel(f"it takes FILE.py:function, and {named!r} names no function; {_names(path)}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise NoModel(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))  # as Python does for a script
    with _told(f"{path} cannot be imported"):
        spec.loader.exec_module(module)
    make = getattr(module, function, None)
    if not callable(make):
        raise NoModel(f"{path} has no function {function!r}; {_names(path)}")
    with _told(f"{named} fails"):
        made = make()
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
        raise NoModel(f"{named} returns {type(made).__name__}, not (module, inputs)")
    model, inputs = made
    if isinstance(inputs, dict):
        return model, (), inputs
    return model, tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}


@torch.no_grad()
def try_out(named: str, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run a copy of what `read` returned, once, in eager; raises NoModel where it raises."""
    with _told(f"{named} does not run in eager"):
        own_args, own_kwargs = _copied((args, kwargs))
        _copied(model)(*own_args, **own_kwargs)


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """What a user's code raises becomes a NoModel that says where, in one line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        raise NoModel(f"{what}: {said}{_place(error)}") from error


def _place(error: BaseException) -> str:
    """The innermost line of the user's, as far as there is one."""
    if isinstance(error, SyntaxError):  # which says it itself
        return ""
    installed = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
    own = str(Path(fx2relax.__file__).parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*installed, own, "<")):
            return f", at {frame.filename}:{frame.lineno}"
    return ""


def _names(path: Path) -> str:
    """Which functions of a file may be named."""
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (SyntaxError, ValueError) as error:
        return f"it is no Python file: {error}"
    found = []
    for each in body:
        if isinstance(each, ast.FunctionDef):
            given = each.args
            needed = len(given.posonlyargs) + len(given.args) - len(given.defaults)
            if not needed and None not in given.kw_defaults:
                found.append(f"{path}:{each.name}")
    if not found:
        return "it has none that takes nothing; write one that returns (module, inputs)"
    return f"those that take nothing are {', '.join(found)}"


class Bench:
    """A module, its arguments, and the sides that are compared.

    Args:
        model: a module or another callable; each side gets a copy.
        args, kwargs: its arguments; each side gets a copy, too.
        dtype: what floating-point weights and inputs are cast to first.
    """

    def __init__(
        self,
        model: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        given = (args, kwargs or {})
        self._model: Any = model
        self._given: Any = given
        if dtype is not None:
            self._model, self._given = _cast(model, given, dtype)
        self._expected: list[Any] = []
        self._exact: list[Any] = []

    @torch.no_grad()
    def reference(self) -> Side:
        """Run in eager, and in float64 where the module allows it; the first of the sides."""
        side = Side(EAGER, error=0.0)
        side.call, run = self._calls(self._model, self._given)
        self._expected = run()
        try:
            wide, given = _cast(self._model, self._given, torch.float64)
            self._exact = self._calls(wide, given)[1]()
        except Exception:  # a kernel for one dtype, say: then eager's numbers have to do
            self._exact = []
        return side

    @torch.no_grad()
    def compiled(self, backend: str) -> Side:
        """Compile, run once, and compare with the reference."""
        side = Side(backend)
        fx2relax.reset_stats()
        torch._dynamo.reset()
        try:
            side.call, run = self._calls(
                self._model, self._given, lambda model: torch.compile(model, backend=backend)
            )
            start = time.perf_counter()
            got = run()
            side.compile_seconds = time.perf_counter() - start
        except Exception as error:
            side.failed, side.call = f"{type(error).__name__}: {error}", None
            return side
        if backend == OURS:
            side.stats = fx2relax.stats()
        self._judge(side, got)
        return side

    def _calls(
        self, model: Any, given: Any, compile: Callable[[Any], Any] = lambda model: model
    ) -> tuple[Callable[[], Any], Callable[[], list[Any]]]:
        """A call that is timed, and one that gives all that it returns and writes."""
        own = _copied(model)
        args, kwargs = _copied(given)
        function = compile(own)

        def run() -> list[Any]:
            torch.manual_seed(0)
            first_args, first_kwargs = _copied(given)
            result = function(*first_args, **first_kwargs)
            # A buffer may be written by the next call, and an output may share its memory.
            return [_copied(x) for x in leaves((result, first_args, first_kwargs))]

        return lambda: function(*args, **kwargs), run

    def _judge(self, side: Side, got: list[Any]) -> None:
        if len(got) != len(self._expected):
            side.wrong = f"{len(got)} values, expected {len(self._expected)}"
            return
        exact = self._exact if len(self._exact) == len(got) else [None] * len(got)
        side.error = 0.0
        for place, (ours, theirs, real) in enumerate(zip(got, self._expected, exact, strict=True)):
            if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
                wrong = difference(ours, theirs, real)
                if ours.is_floating_point():
                    finite = theirs.isfinite()
                    error = (
                        largest_error(ours[finite], theirs[finite])
                        if ours.shape == theirs.shape
                        else math.inf
                    )
                    side.error = max(side.error, error if ours.numel() else 0.0)
            else:
                wrong = None if _equal(ours, theirs) else f"{ours!r}, expected {theirs!r}"
            if wrong and not side.wrong:
                side.wrong = f"value {place}: {wrong}"

    @torch.no_grad()
    def time(
        self, sides: Sequence[Side], budget: float, step: Callable[[], None] = lambda: None
    ) -> None:
        """Fill in the times of those that run: the sides take turns.

        Args:
            sides: what `reference` and `compiled` gave.
            budget: seconds for all of them together, more or less.
            step: called between rounds.
        """
        running = [side for side in sides if side.call is not None]
        fx2relax.reset_stats()
        times = time_in_turns([s.call for s in running if s.call is not None], budget, step)
        for side, taken in zip(running, times, strict=True):
            side.ms = 1000 * statistics.median(taken)
            side.least_ms = 1000 * min(taken)
            if side.name == OURS:  # which graphs run in eager is known by now
                side.stats["graphs_slower"] = fx2relax.stats()["graphs_slower"]


def _cast(model: Any, given: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    def cast(value: Any) -> Any:
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if floats else value

    own = _copied(model)
    return (own.to(dtype) if isinstance(own, torch.nn.Module) else own), pytree.tree_map(
        cast, given
    )


def _copied(value: Any) -> Any:
    """A copy of a module, or of arguments, that shares no memory; functions are themselves."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, torch.nn.Module):
        return copy.deepcopy(value)
    if isinstance(value, (tuple, list, dict)):
        return pytree.tree_map(_copied_leaf, value)
    return value


def _copied_leaf(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    # A cache of keys and values, say, which a call writes to.
    return copy.deepcopy(value) if _holds(value) else value


_PLAIN = (str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device)


def leaves(value: Any) -> list[Any]:
    """The tensors and plain values of a nest, those that objects hold in attributes included."""
    found: list[Any] = []
    seen: set[int] = set()
    left = [value]
    while left:
        for leaf in pytree.tree_leaves(left.pop()):
            if isinstance(leaf, (Tensor, *_PLAIN)):
                found.append(leaf)
            elif _holds(leaf) and id(leaf) not in seen:
                seen.add(id(leaf))
                left.append(list(vars(leaf).values()))
    return found


def _holds(value: Any) -> bool:
    """Whether it is an object with attributes, and no function, class or module."""
    return hasattr(value, "__dict__") and not callable(value)


def _equal(ours: Any, theirs: Any) -> bool:
    return type(ours) is type(theirs) and (ours == theirs or (ours != ours and theirs != theirs))
