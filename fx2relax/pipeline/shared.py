"""A program as a shared library: the kernels' object code and the virtual machine's instructions.

Independent kernels are compiled side by side: TVM gives up Python's lock while LLVM works, and
meanwhile another thread lowers the next ones.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from fx2relax import objects as own_objects
from fx2relax.units import size_text

from ..runtime.compilers import find_compiler
from ..runtime.toolchain import compiler_for
from .llvm_turns import generating
from .masks import has_masks
from .target import without_loop_vectorizer


class LinkError(RuntimeError):
    """The linker could not make a library of a program."""


# LLVM ends the process where it cannot write all of an object file.
_ROOM = 64 << 20
# A module of LLVM's has a cost of its own.
_KERNELS_APART = 4


@functools.cache
def linker() -> tuple[str, ...] | None:
    """The command that links objects, without their names; None where there is none."""
    found = find_compiler("linker")
    if found is None or os.name != "posix":
        return None
    return (*found, "-shared", "-fPIC")


def shared_library(
    mod: Any,
    target: Any,
    pipeline: str,
    workers: int,
    checkpoint: Callable[[], None] = lambda: None,
) -> bytes | None:
    """Compile a module that is in the virtual machine's terms.

    Args:
        mod: what the last Relax pass returned.
        target: a `tvm.target.Target`.
        pipeline: the name of the pipeline for kernels.
        workers: how many kernels may be compiled at a time.
        checkpoint: called between kernels, in the same thread where there is one worker.

    Returns:
        the library; None where there is no linker.

    Raises:
        LinkError: the linker failed.
        OSError: there is no temporary folder with room for the objects.
    """
    command = _linker_of(mod) or linker()
    if command is None:
        return None
    library: list[bytes] = []

    def link(output: str, objects: list[str], **_: Any) -> None:
        # Every symbol has to be found now, and not when a kernel is first called.
        run_linker(
            [*command, "-o", output, *objects, _runtime(), *_flags_of(mod), "-lm", "-Wl,-z,defs"]
        )
        library.append(Path(output).read_bytes())

    _emit(mod, target, pipeline, workers, link, checkpoint)
    return library[0]


@dataclass(frozen=True)
class Unlinked:
    """A program for a machine that there is no linker for.

    Attributes:
        objects: the bytes of each object file.
        link: the command that makes a library of them there, without names of files.
    """

    objects: tuple[bytes, ...]
    link: tuple[str, ...]


def library_or_objects(mod: Any, target: Any, pipeline: str, workers: int) -> bytes | Unlinked:
    """`shared_library` for a process of TVM's runtime alone, which may be another machine's.

    What the library needs of TVM is found when it is loaded: it is not named in it.

    Raises:
        LinkError: the linker failed.
        OSError: there is no temporary folder with room for the objects.
    """
    found: list[bytes] = []
    command, known = target_linker(target)
    own, flags = _linker_of(mod), _flags_of(mod)
    if own is not None:  # its C++ names what it needs of TVM's FFI
        command = own if known and _here(target) else command
        flags = [_runtime(), *flags]

    def link(output: str, objects: list[str], **_: Any) -> None:
        if known:
            run_linker([*command, "-o", output, *objects, *flags, "-lm"])
        made = [output] if known else objects
        found.extend(Path(path).read_bytes() for path in made)

    _emit(mod, target, pipeline, workers, link)
    return found[0] if known else Unlinked(tuple(found), (*command,))


def link_here(output: str, objects: list[str], **_: Any) -> None:
    """Link object files of this machine's; raises a LinkError where that cannot be done."""
    command = linker()
    if command is None:
        raise LinkError("there is no linker ($CC, cc, gcc, clang)")
    run_linker([*command, "-o", output, *objects, "-lm"])


def library_of(module: Any, target: Any, path: str) -> None:
    """Write a TVM module as a shared library for a target's machine, to be loaded by TVM there.

    Raises:
        LinkError: there is no linker for it, or it failed.
    """
    command, known = target_linker(target)
    if not known:
        raise LinkError(f"there is no linker for {target}: {command[0]} is missing")

    def link(output: str, objects: list[str], **_: Any) -> None:
        run_linker([*command, "-o", output, *objects, "-lm"])

    tvm.runtime.Executable(module).export_library(path, fcompile=link)


def target_linker(target: Any) -> tuple[tuple[str, ...], bool]:
    """The command that links objects for a target, and whether it is there."""
    triple = str(dict(target.export()).get("mtriple", ""))
    if _here(target):
        command = linker()
        return (command, True) if command is not None else (("cc", "-shared", "-fPIC"), False)
    for words in (
        (f"{triple}-gcc",),
        (f"{triple}-clang",),
        ("clang", f"--target={triple}", "-fuse-ld=lld"),
    ):
        lld = "-fuse-ld=lld" not in words or shutil.which("ld.lld")
        if shutil.which(words[0]) and lld:
            return (*words, "-shared", "-fPIC"), True
    return (f"{triple}-gcc", "-shared", "-fPIC"), False


def _here(target: Any) -> bool:
    """Whether a target is a processor of this machine's kind."""
    triple = str(dict(target.export()).get("mtriple", ""))
    return not triple or _processor(triple) == _processor(platform.machine())


def _linker_of(mod: Any) -> tuple[str, ...] | None:
    """The user's C++ compiler where a module carries objects: it knows what these need."""
    if not own_objects.held(mod):
        return None
    return (*compiler_for("cpp"), "-shared", "-fPIC")


def _flags_of(mod: Any) -> list[str]:
    """What the objects that a module carries are linked with."""
    return list(dict.fromkeys(flag for file in own_objects.held(mod) for flag in file.link))


def _processor(triple: str) -> str:
    name = triple.partition("-")[0].lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def _emit(
    mod: Any,
    target: Any,
    pipeline: str,
    workers: int,
    link: Any,
    checkpoint: Callable[[], None] = lambda: None,
) -> None:
    """Compile a module to object files, and hand these to `link(output, objects)`."""
    executable, parts = _compiled(mod, target)
    with _workshop() as folder:
        objects = [str(folder / f"kernels{n}.o") for n in range(len(parts))]

        def emit(part: _Part, path: str) -> None:
            checkpoint()
            kernels = _lowered(part.kernels, part.target, pipeline)
            with generating(part.target):
                _codegen(kernels, part.target).write_to_file(path)

        if workers > 1 and len(parts) > 1:
            with ThreadPoolExecutor(workers) as pool:
                list(pool.map(emit, parts, objects))
        else:
            for part, path in zip(parts, objects, strict=True):
                emit(part, path)
        library = folder / "program.so"
        with generating(target):
            executable.export_library(str(library), addons=objects, fcompile=link)


@contextlib.contextmanager
def _workshop() -> Iterator[Path]:
    """A temporary folder for object files; an OSError where there is no room for them."""
    with tempfile.TemporaryDirectory(prefix="fx2relax-") as folder:
        free = shutil.disk_usage(folder).free
        if free < _ROOM:
            where = tempfile.gettempdir()
            raise OSError(errno.ENOSPC, f"No space left but {size_text(free)}", where)
        yield Path(folder)


# Out of the terminal's group: Ctrl-C is not meant for what compiles in the background. `setsid`
# does that as well, but gives it its own share of the processors, however nice it is.
_APART: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
)


def run_linker(command: Sequence[str]) -> None:
    """Run the linker; a LinkError has what it said."""
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=120, **_APART)
    except (OSError, subprocess.SubprocessError) as error:
        text = (getattr(error, "stderr", b"") or b"").decode(errors="replace").strip()
        raise LinkError(f"{command[0]} cannot link it: {text[-2000:]}") from error


def _runtime() -> str:
    return str(tvm_ffi.libinfo.find_libtvm_ffi())


@dataclass(frozen=True)
class _Part:
    """Kernels that are compiled together, and the target with the options that they need."""

    kernels: Any
    target: Any


def _compiled(mod: Any, target: Any) -> tuple[Any, list[_Part]]:
    """The instructions as an executable without kernels, and the kernels in parts.

    What is exported is packed beside a module of LLVM's, so that there is one without functions.
    """
    builder = relax.ExecBuilder()
    attrs = dict(mod.attrs) if mod.attrs else {}
    left = relax.vm_build._vmcodegen(builder, mod)
    kernels = relax.vm_build._filter_tir(left)
    parts = [] if kernels is None else _parts(kernels, target)
    constants = dict(attrs.get("const_name_to_constant", {}))
    with generating(target):
        empty = _codegen(tvm.IRModule({}), target)
    given = list(attrs.get("external_mods", []))
    linked = relax.vm_build._ffi_api.VMLink(builder, target, empty, given, constants)
    return relax.VMExecutable(linked), parts


def _lowered(kernels: Any, target: Any, pipeline: str) -> Any:
    """Kernels as LLVM's code generator takes them; what `tvm.tirx.build` does before it."""
    kernels = tvm.tirx.transform.BindTarget(target.with_host(target))(kernels)
    passes, finalize, _ = tvm.tirx.get_tir_pipeline(pipeline)
    with target:
        return finalize()(passes(kernels))


def _parts(kernels: Any, target: Any) -> list[_Part]:
    """Few kernels at a time, and last those that nothing else is compiled beside."""
    plain: list[Any] = []
    masked: list[Any] = []
    for name, kernel in kernels.functions.items():
        (masked if has_masks(kernel) else plain).append((name, kernel))
    found = []
    for functions, where in (plain, target), (masked, without_loop_vectorizer(target)):
        count = -(-len(functions) // _KERNELS_APART)
        for n in range(count):
            part = tvm.IRModule(dict(functions[n::count]), attrs=kernels.attrs)
            found.append(_Part(part, where))
    return found


def _codegen(kernels: Any, target: Any) -> Any:
    return tvm.get_global_func("target.build.llvm")(kernels, target)
