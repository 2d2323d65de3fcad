"""Kernels in object files and in C++ or CUDA source.

A kernel takes tensors as ``DLTensor*`` or ``tvm::ffi::TensorView``, its inputs and then the memory
of its results, and is exported by ``TVM_FFI_DLL_EXPORT_TYPED_FUNC(symbol, function)``. All tensors
are compact; an address is a multiple of the size of an element.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fx2relax import dtypes, objects
from fx2relax.compat import BlockBuilder, Expr, TensorType, is_prim_expr, op, relax, tirx
from fx2relax.converters.common import Unsupported, emit
from fx2relax.converters.common import dtype as dtype_of
from fx2relax.converters.common import shape as shape_of
from fx2relax.errors import ArgumentError, BuildFailure, KernelFailure
from fx2relax.locks import own
from fx2relax.rules import ExternFunction, Matched, Seen, key_of, match, seen
from fx2relax.runtime import boundary, loading, toolchain
from fx2relax.spec import Tensor

__all__ = ["ExternFunction", "Kernel", "Kernels", "object", "source"]

Functions = Mapping[str, ExternFunction | Mapping[str, ExternFunction]]
# What makes an object's bytes, with the flags that its linker needs.
Make = Callable[[], tuple[bytes, Sequence[str]]]


# Shapes whose match with the rule is remembered.
_REMEMBERED = 256


class Kernels:
    """The kernels of one object, by name: ``kernels["scale"](x)``.

    Made by `object` or `source`. Nothing is compiled before a kernel is used, or `build` called.
    """

    def __init__(self, name: str, functions: Functions, make: Make) -> None:
        self.name = name
        self._make = make
        self._lock = own(self, "_lock", threading.RLock)
        self._functions: dict[str, Any] = {}
        if not functions:
            raise ValueError(f"{name} needs functions: a shape rule a symbol")
        self._kernels = {n: Kernel(self, n, _table(n, rules)) for n, rules in functions.items()}

    def __getitem__(self, name: str) -> Kernel:
        """The kernel of this name; KeyError lists those that there are."""
        try:
            return self._kernels[name]
        except KeyError:
            names = ", ".join(self._kernels)
            raise KeyError(f"{self.name} has no kernel {name!r}; it has {names}") from None

    def __iter__(self) -> Any:
        """The kernels' names."""
        return iter(self._kernels)

    def __len__(self) -> int:
        return len(self._kernels)

    def __repr__(self) -> str:
        return f"<fx2relax.extern.Kernels {self.name}: {', '.join(self._kernels)}>"

    def build(self) -> Kernels:
        """Compile now, and look for every symbol.

        Returns:
            the same kernels.

        Raises:
            BuildFailure: the source does not compile, a symbol is missing, or is there twice.
        """
        _ = self.file
        return self

    @property
    def file(self) -> objects.ObjectFile:
        """The object file. Raises what `build` raises."""
        with self._lock:
            return self._file

    @functools.cached_property
    def _file(self) -> objects.ObjectFile:
        file = objects.ObjectFile(self.name, *self._make())
        there = file.symbols.functions
        wanted = [symbol for kernel in self._kernels.values() for symbol in kernel.rules]
        missing = sorted(set(wanted) - there)
        if missing:
            raise BuildFailure(
                f"{self.name} exports no {', '.join(map(repr, missing))}; it exports "
                f"{', '.join(map(repr, sorted(there))) or 'nothing'}. A function is exported by "
                f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({missing[0]}, ...)"
            )
        return file

    @functools.cached_property
    def _library(self) -> Any:
        file = self._file
        return loading.load(toolchain.link([(file.data, file.link)], self.name))

    def function(self, symbol: str) -> Any:
        """A function of the object, in this process.

        Args:
            symbol: its name in the object.

        Returns:
            a packed function of TVM FFI: it takes tensors and numbers, and writes its results.

        Raises:
            BuildFailure: see `build`.
        """
        found = self._functions.get(symbol)
        if found is None:
            with self._lock:
                found = self._functions[symbol] = self._library.get_function(symbol)
        return found


class Kernel:
    """One kernel: a symbol, or several of which the arguments' dtypes choose.

    Made by `Kernels`. Called with PyTorch's tensors it runs; called with Relax expressions inside
    a converter it returns an expression, and its object travels with the module.

    Attributes:
        name: what errors call it.
        rules: symbol -> what it takes and gives.
    """

    def __init__(self, owner: Kernels, name: str, rules: dict[str, ExternFunction]) -> None:
        self.owner = owner
        self.name = name
        self.rules = rules
        self._matches: dict[Any, tuple[str, bool, list[Any]]] = {}
        counts = {(len(rule.args), len(rule.results)) for rule in rules.values()}
        if len(counts) != 1:
            raise ValueError(f"{name}: its symbols take and give different numbers of values")

    def __call__(self, *args: Any) -> Any:
        """Run it on tensors, or emit it in Relax; see `run` and `emit`."""
        if any(isinstance(a, Expr) and not is_prim_expr(a) for a in args):
            return self.emit(args)
        return self.run(args)

    def matched(
        self, args: Sequence[Any], what: str, names: Sequence[str] | None = None
    ) -> tuple[str, Matched]:
        """The symbol for some arguments, and their sizes.

        Args:
            args: numbers and None as they are, tensors as `rules.Seen`.
            what: the operator, for errors.
            names: the arguments' names, for errors.

        Returns:
            the symbol, and what the names in its rule stand for.

        Raises:
            ArgumentError: (a ValueError) an argument of the wrong kind, dtype, rank or size.
        """
        rules = list(self.rules.values())
        names = names or [f"{i}" for i in range(len(args))]
        found = match(rules, args, what, names)
        return next(s for s, rule in self.rules.items() if rule is found.rule), found

    def run(
        self, args: Sequence[Any], what: str = "", names: Sequence[str] | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run it.

        Args:
            args: tensors of any strides, numbers, and None for a tensor that is left out.
            what: the operator, for errors; the kernel's name when left out.
            names: the arguments' names, for errors.

        Returns:
            new compact tensors of the rule's shapes and dtypes, on the arguments' device; one, or
            a tuple where the rule has one.

        Raises:
            ArgumentError: (a ValueError) a wrong argument.
            BuildFailure: see `Kernels.build`.
            KernelFailure: it raised.
        """
        what = what or self.name
        symbol, single, results = self._remembered(args, what, names)
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        if any(t.device != device for t in tensors):
            raise ArgumentError(f"{what}: tensors on several devices")
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in results]
        given = [boundary.ready(a) if isinstance(a, torch.Tensor) else a for a in args]
        function = self.owner.function(symbol)
        try:
            function(*given, *made)
        except Exception as error:
            raise KernelFailure.of([what], error) from error
        return made[0] if single else tuple(made)

    def _remembered(
        self, args: Sequence[Any], what: str, names: Sequence[str] | None
    ) -> tuple[str, bool, list[Any]]:
        """The symbol, whether it has one result, and the results' shapes and dtypes."""
        key = key_of(args)
        known = self._matches.get(key)
        if known is None:
            symbol, found = self.matched([seen(a) for a in args], what, names)
            results = [(r.shape, dtypes.to_torch(r.dtype)) for r in found.results()]
            known = (symbol, isinstance(found.rule.ret, Tensor), results)
            if len(self._matches) >= _REMEMBERED:
                self._matches.clear()
            self._matches[key] = known
        return known

    def emit(self, args: Sequence[Any], what: str = "", names: Sequence[str] | None = None) -> Any:
        """Call it in the Relax function that is being imported.

        Args:
            args: Relax tensors, numbers, sizes and None.
            what: see `run`.
            names: see `run`.

        Returns:
            an expression, or a tuple of them where the rule has one.

        Raises:
            ArgumentError, BuildFailure: see `run`.
            Unsupported: a number that is known only at run time and is no size.
        """
        what = what or self.name
        values = [_bound(a) for a in args]
        for value, arg in zip(values, next(iter(self.rules.values())).args, strict=False):
            if isinstance(_seen(value), Seen) and not isinstance(arg, Tensor):
                raise Unsupported("a number that is known only at run time")
        symbol, found = self.matched([_seen(v) for v in values], what, names)
        builder = BlockBuilder.current()
        for place, shape in found.doubts.items():
            kind = TensorType(shape, dtype_of(values[place]))
            values[place] = builder.match_cast(values[place], kind)
        kinds = [TensorType([*r.shape], r.dtype) for r in found.results()]
        single = isinstance(found.rule.ret, Tensor)
        passed = [_operand(v, a) for v, a in zip(values, found.rule.args, strict=True)]
        objects.used(self.owner.file, symbol, what)
        call = relax.call_dps_packed(symbol, passed, out_ty=kinds[0] if len(kinds) == 1 else kinds)
        whole = builder.emit(call, symbol)
        if len(kinds) == 1:
            return whole if single else (whole,)
        return tuple(relax.TupleGetItem(whole, i) for i in range(len(kinds)))


def _table(
    name: str, rules: ExternFunction | Mapping[str, ExternFunction]
) -> dict[str, ExternFunction]:
    return {name: rules} if isinstance(rules, ExternFunction) else dict(rules)


def _bound(value: Any) -> Any:
    return emit(value) if isinstance(value, Expr) and not is_prim_expr(value) else value


def _seen(value: Any) -> Any:
    if isinstance(value, Expr) and not is_prim_expr(value):
        return Seen(tuple(shape_of(value)), dtype_of(value))
    return value


def _operand(value: Any, arg: Any) -> Any:
    """A value as `call_dps_packed` takes it."""
    if isinstance(value, Expr):
        return value
    if value is None:
        return emit(op.null_value())
    if arg is bool:
        return tirx.const(bool(value), "bool")
    if arg is float:
        return tirx.const(float(value), "float64")
    return tirx.const(int(value), "int64")


def object(
    file: str | os.PathLike[str] | bytes,
    functions: Functions,
    *,
    name: str | None = None,
    link: Sequence[str] = (),
) -> Kernels:
    """Take kernels from an object file.

    Args:
        file: a ``.o`` file's path, or its bytes.
        functions: symbol -> what it takes and gives. Several dtypes under one name are
            name -> (symbol -> what it takes and gives), see `ExternFunction.for_dtypes`.
        name: what errors call it; the file's name when left out.
        link: further flags of the linker (``["-lblas"]``).

    Returns:
        the kernels, by the names of `functions`.

    Raises:
        BuildFailure: a symbol that it does not export.
        ValueError: it is no object file.
        OSError: the file cannot be read.
    """
    if isinstance(file, bytes):
        data = file
        name = name or "an object file"
    else:
        data = Path(file).read_bytes()
        name = name or Path(file).name
    return Kernels(name, functions, lambda: (data, link)).build()


def source(
    code: str | os.PathLike[str],
    language: str = "cpp",
    *,
    functions: Functions,
    flags: Sequence[str] = (),
    link: Sequence[str] = (),
    name: str | None = None,
) -> Kernels:
    """Take kernels from C++ or CUDA source, compiled once on this machine, when first used.

    Args:
        code: the source, or a `Path` of its file. TVM FFI's and DLPack's headers are found.
        language: ``"cpp"``, compiled by ``$CXX`` (else c++, g++ or clang++), or ``"cuda"``, by
            nvcc.
        functions: see `object`.
        flags: further flags of the compiler (``["-O3", "-march=native"]``).
        link: further flags of the linker.
        name: what errors call it.

    Returns:
        the kernels, by the names of `functions`.

    Raises:
        ValueError: another language. What else can fail is raised on the first use, or by
            `Kernels.build`: BuildFailure where there is no compiler, it refuses the source, or a
            symbol is missing.
    """
    if language not in ("cpp", "cuda"):
        raise ValueError(f"language={language!r}; it takes 'cpp' or 'cuda'")
    if isinstance(code, os.PathLike):
        name = name or str(code)
        flags = ["-I", str(Path(code).resolve().parent), *flags]
        code = Path(code).read_text()
    text, called = str(code), name or f"<{'C++' if language == 'cpp' else 'CUDA'} source>"

    def make() -> tuple[bytes, Sequence[str]]:
        data = toolchain.compile_object(text, language, called, flags)
        return data, [*link, *toolchain.link_flags(language)]

    return Kernels(called, functions, make)
