"""A program as a shared library: the kernels' object code and the virtual machine's instructions.

Independent kernels are compiled side by side: TVM gives up Python's lock while LLVM works.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from fx2relax import objects as own_objects

from ..runtime.toolchain import compiler_for


class LinkError(RuntimeError):
    """The linker could not make a library of a program."""


# A module of LLVM's has a cost of its own.
_KERNELS_APART = 4


@functools.cache
def linker() -> tuple[str, ...] | None:
    """The command that links objects, without their names; None where there is none."""
    names = (os.environ.get("CC"), "cc", "gcc", "clang", os.environ.get("CXX"), "c++")
    found = next((c for c in names if c and shutil.which(c)), None)
    if found is None or os.name != "posix":
        return None
    return (found, "-shared", "-fPIC")


def shared_library(mod: Any, target: Any, pipeline: str, workers: int) -> bytes | None:
    """Compile a module that is in the virtual machine's terms.

    Args:
        mod: what the last Relax pass returned.
        target: a `tvm.target.Target`.
        pipeline: the name of the pipeline for kernels.
        workers: how many kernels may be compiled at a time.

    Returns:
        the library; None where there is no linker.

    Raises:
        LinkError: the linker failed.
    """
    command, own = linker(), own_objects.held(mod)
    if own:  # what a user's C++ needs at run time, its compiler knows
        command = (*compiler_for("cpp"), "-shared", "-fPIC")
    if command is None:
        return None
    flags = tuple(dict.fromkeys(flag for file in own for flag in file.link))
    executable, parts = _compiled(mod, target, pipeline)
    with tempfile.TemporaryDirectory(prefix="fx2relax-") as folder:
        objects = [str(Path(folder) / f"kernels{n}.o") for n in range(len(parts))]

        def emit(part: Any, path: str) -> None:
            _codegen(part, target).write_to_file(path)

        if workers > 1 and len(parts) > 1:
            with ThreadPoolExecutor(workers) as pool:
                list(pool.map(emit, parts, objects))
        else:
            for part, path in zip(parts, objects, strict=True):
                emit(part, path)
        library = Path(folder) / "program.so"
        executable.export_library(str(library), addons=objects, fcompile=_link(command, flags))
        return library.read_bytes()


def _link(command: tuple[str, ...], flags: tuple[str, ...] = ()) -> Any:
    def link(output: str, objects: list[str], **_: Any) -> None:
        try:
            subprocess.run(
                # Every symbol has to be found now, and not when a kernel is first called.
                [*command, "-o", output, *objects, _runtime(), *flags, "-lm", "-Wl,-z,defs"],
                check=True,
                capture_output=True,
                timeout=120,
            )
        except (OSError, subprocess.SubprocessError) as error:
            text = (getattr(error, "stderr", b"") or b"").decode(errors="replace").strip()
            raise LinkError(f"{command[0]} cannot link it: {text[-2000:]}") from error

    return link


def _runtime() -> str:
    return str(tvm_ffi.libinfo.find_libtvm_ffi())


def _compiled(mod: Any, target: Any, pipeline: str) -> tuple[Any, list[Any]]:
    """The instructions as an executable without kernels, and the lowered kernels in parts.

    What is exported is packed beside a module of LLVM's, so that there is one without functions.
    """
    builder = relax.ExecBuilder()
    attrs = dict(mod.attrs) if mod.attrs else {}
    left = relax.vm_build._vmcodegen(builder, mod)
    kernels = relax.vm_build._filter_tir(left)
    parts = [] if kernels is None else _parts(_lowered(kernels, target, pipeline))
    constants = dict(attrs.get("const_name_to_constant", {}))
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


def _parts(kernels: Any) -> list[Any]:
    functions = list(kernels.functions.items())
    count = max(-(-len(functions) // _KERNELS_APART), 1)
    return [tvm.IRModule(dict(functions[n::count]), attrs=kernels.attrs) for n in range(count)]


def _codegen(kernels: Any, target: Any) -> Any:
    return tvm.get_global_func("target.build.llvm")(kernels, target)
