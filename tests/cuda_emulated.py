"""The processor as a GPU: kernels are scheduled and written for CUDA, and their text is run here.

What launches the kernels is compiled for the processor, and the kernels' own text, as nvcc would
get it, by its C++ compiler with `cuda_emulated.h`. All else is what it is for tensors on a CPU.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import tvm
import tvm_ffi
from cuda_cases import gpus_of
from cuda_text import Text, parts
from tvm import relax, tirx
from tvm.tirx.build import codegen_build

from fx2relax import devices, drafts, pipeline
from fx2relax.pipeline import building
from fx2relax.pipeline.cuda import with_host
from fx2relax.pipeline.launches import PIPELINE, calls_of, on_device
from fx2relax.pipeline.precise import precise_sources
from fx2relax.runtime import program
from fx2relax.runtime.compilers import find_compiler

_HEADER = Path(__file__).with_name("cuda_emulated.h")
_TAGS = [f"{kind}Idx.{axis}" for kind in ("block", "thread") for axis in "xyz"]
_WAITS = re.compile(r"__sync|__shfl")
_SAID = {1: "traps", 2: "has threads that wait for ever", 3: "goes beyond a tensor's end"}
_SAID |= {4: "is launched without a block", 5: "has a vector that begins within another"}
_POINTER = re.compile(r"([\w ]+)\* __restrict__ (\w+)")
_ARRAY = re.compile(r"(__shared__ )?alignas\(64\) ([\w ]+) (\w+)\[(\d+)\];")
_COUNT = itertools.count()
_CPU = 1  # as DLPack calls it
_KIND = 10  # the field of an argument that holds its device, as TVM calls it


class GPU:
    """What runs kernels in place of a GPU.

    Attributes:
        kernels: the text of all that were compiled, by name.
        backwards: let the last thread of a block, and the last block of a grid, go first.
    """

    def __init__(self, folder: Path, arch: int) -> None:
        self.folder = folder
        self.kernels: dict[str, str] = {}
        self.backwards = False
        self._functions: dict[str, Any] = {}  # of the last program
        with gpus_of(arch):
            self._target = tvm.target.Target(devices.facts(torch.device("cuda:0")))

    def lower(self, mod: Any, **how: Any) -> Any:
        """`pipeline.lower` for the GPU."""
        lifted = how["lift_weights"]
        return building.lower(mod, target=self._target, library="none", lift_weights=lifted)

    def give(self, lowered: Any, name: str, leading: int, into: Any, on_gpu: bool) -> Any:
        """`pipeline.give`; no kernel is called without the line of steps that it is in."""
        ready, calling = building.give(lowered, name, leading, {}, True)
        return ready, replace(calling, kernel=None)

    def kernel(self, module: Any, name: str) -> Any:
        """`program._kernel`, of the program that was compiled last."""
        return self._functions.get(name)

    def machine_code(self, mod: Any, **how: Any) -> Any:
        """`pipeline.machine_code`, where kernels are functions that TVM knows by name."""
        text, launches, host = _translated(mod, self._target)
        prefix = f"fx2relax.emulated.{next(_COUNT)}."
        code = codegen_build(host, with_host(self._target).host)
        kernels = None
        if text.kernels:  # none of a tensor without elements
            self.kernels |= text.kernels
            kernels = _compiled(text, launches, self.folder)
            code.import_module(kernels)
        self._functions = {}
        for name in _kernels(mod):
            function = self._checked(name.name_hint, code[name.name_hint], kernels)
            full = prefix + name.name_hint
            tvm_ffi.register_global_func(full, function)
            self._functions[name.name_hint] = tvm_ffi.get_global_func(full)
        return building.machine_code(_calling(mod, prefix), **how)

    def _checked(self, name: str, function: Any, kernels: Any) -> Any:
        """A function that launches kernels in the order of threads that is set."""
        if kernels is None:
            return function

        def run(*arguments: Any) -> None:
            held = [a for a in arguments if isinstance(a, tvm.runtime.Tensor)]
            arrays = [torch.from_dlpack(a) for a in held]
            places = [n for a in arrays for n in (a.data_ptr(), a.numel() * a.element_size())]
            kernels["emulated_begin"](int(self.backwards), *places)
            function(*arguments)
            if said := kernels["emulated_end"]():
                raise RuntimeError(f"{name} {_SAID[said]}")

        return run


@contextlib.contextmanager
def emulated(folder: Path, arch: int = 80) -> Iterator[GPU]:
    """Let graphs that are compiled in the body run as they do on a GPU.

    Args:
        folder: where the C++ compiler works.
        arch: the GPU's compute capability, such as 80.
    """
    gpu = GPU(folder, arch)
    names = {name: getattr(pipeline, name) for name in ("census", "library_code", "LinkError")}
    own = {"lower": gpu.lower, "give": gpu.give, "machine_code": gpu.machine_code}
    with (
        mock.patch.object(drafts, "pipeline", SimpleNamespace(**names, **own)),
        mock.patch.object(program, "_kernel", gpu.kernel),
        mock.patch.dict(os.environ, {"FX2RELAX_COMPILE_PROCESS": "0"}),
    ):
        yield gpu


def _kernels(mod: Any) -> list[Any]:
    return [name for name, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)]


def _calling(mod: Any, prefix: str) -> Any:
    """A module that calls functions in place of its kernels."""
    kernels = set(_kernels(mod))

    @relax.expr_functor.mutator
    class Calls(relax.PyExprMutator):  # type: ignore[misc]
        def visit_call_(self, call: Any) -> Any:
            if call.op not in kernels:
                return call
            callee = relax.ExternFunc(prefix + call.op.name_hint)
            return relax.Call(callee, call.args, call.attrs, [relax.TupleType([])])

    changed = {
        name: Calls().visit_expr(function) if isinstance(function, relax.Function) else function
        for name, function in mod.functions_items()
        if name not in kernels
    }
    return tvm.IRModule(changed, attrs=mod.attrs)


def _translated(mod: Any, target: Any) -> tuple[Text, Any, Any]:
    """The text of a module's kernels, their launches, and the code that makes them."""
    target = with_host(target)
    device, host, launches = on_device(tvm.IRModule({n: mod[n] for n in _kernels(mod)}), target)
    _, finish, _ = tirx.get_tir_pipeline(PIPELINE)
    with target:
        ready = finish()(_on_processor(host))
        if device is None:
            return Text("", {}, []), (), ready
        with precise_sources():
            source = codegen_build(device, target).inspect_source()
    return Text(*parts(source), launches), calls_of(host), ready


def _on_processor(host: Any) -> Any:
    """What launches kernels, for tensors that lie in the processor's memory."""

    def compared(check: Any) -> Any:
        kind = check.a
        if getattr(getattr(kind, "op", None), "name", "") != "tirx.tvm_struct_get":
            return check
        if int(kind.args[2]) != _KIND:
            return check
        return tirx.EQ(kind, tirx.IntImm("int32", _CPU))

    def called(call: Any) -> Any:
        first = call.args[0] if len(call.args) else None
        chosen = getattr(first, "value", None) == "__tvm_set_device"
        return tirx.IntImm("int32", 0) if chosen else call

    def told(statement: Any) -> Any:
        if statement.attr_key != "device_type":
            return statement
        value = tirx.IntImm("int32", _CPU)
        return tirx.AttrStmt(statement.node, statement.attr_key, value, statement.body)

    rules = [(tirx.EQ, compared), (tvm.ir.Call, called), (tirx.AttrStmt, told)]
    done = {n: tvm_ffi.structural_map(f, rules) for n, f in host.functions_items()}
    return tvm.IRModule(done, attrs=host.attrs)


def _watched(text: str) -> str:
    """A kernel that says where it reads or writes what is not there."""

    def array(found: re.Match[str]) -> str:
        kind = "static Shared" if found[1] else "Local"
        return f"{kind}<{found[2]}, {found[4]}> {found[3]};"

    return _ARRAY.sub(array, _POINTER.sub(r"Checked<\1> \2", text))


def _compiled(text: Text, launches: Iterable[Any], folder: Path) -> Any:
    """The kernels as functions that TVM's launches find."""
    tags = {kernel: found for kernel, found, _ in launches}
    entries = []
    for name, body in text.kernels.items():
        numbers = [_TAGS.index(t) if t in _TAGS else -1 for t in tags[name]]
        waits = "true" if _WAITS.search(body) else "false"
        entries.append(f"KERNEL({name}, {waits}, {len(numbers)}, {', '.join(map(str, numbers))})")
    # A library of the same name would be the one that was loaded before.
    source = Path(tempfile.mkdtemp(dir=folder)) / "kernels.cpp"
    library = source.with_suffix(".so")
    source.write_text(
        "\n".join([f'#include "{_HEADER}"', *map(_watched, text.kernels.values()), *entries])
    )
    compiler = find_compiler("c++")
    assert compiler is not None, "needs a C++ compiler"
    command = [
        *(*compiler, "-std=c++17", "-fno-strict-aliasing", "-ffp-contract=off", "-w"),
        *("-shared", "-fPIC", "-o", str(library), str(source)),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[:3000])
    return tvm_ffi.load_module(str(library))
