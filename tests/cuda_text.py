"""The CUDA text of a program's kernels, how each is launched, and its translation by nvcc."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx
from tvm.tirx.build import codegen_build

from fx2relax import devices, drafts, pipeline
from fx2relax.options import Options
from fx2relax.params import InputSpec
from fx2relax.pipeline.cuda import with_host
from fx2relax.pipeline.launches import Launch, on_device
from fx2relax.pipeline.precise import precise_sources

NVCC = shutil.which("nvcc")
_KERNEL = re.compile(r'^extern "C" __global__ .*?\b(\w+_kernel\w*)\(.*\) \{$', re.MULTILINE)


@dataclass(frozen=True)
class Text:
    """What is generated for a GPU.

    Attributes:
        head: the includes and helpers that the kernels need.
        kernels: the text of each kernel by its name.
        launches: how they are launched.
    """

    head: str
    kernels: dict[str, str]
    launches: Sequence[Launch]

    def faults(self) -> list[str]:
        """What no GPU would launch."""
        known = {launch.kernel for launch in self.launches}
        found = [fault for launch in self.launches for fault in launch.faults()]
        return found + [f"{name}: is never launched" for name in self.kernels.keys() - known]


def text_of(graph: Any, specs: list[InputSpec], library: str = "torch") -> Text:
    """What a graph on a GPU is compiled to; see `cuda_cases.graph_of`."""
    return text_of_draft(drafts.draft_of(graph, specs, Options(library=library), False), library)


def text_of_draft(draft: drafts.Draft, library: str) -> Text:
    """What a graph that was imported is compiled to, for the GPU that PyTorch describes now."""
    imported, target = draft.imported, devices.facts(draft.device)
    lifted = imported.num_input < len(imported.params)
    lowered = pipeline.lower(imported.mod, target=target, library=library, lift_weights=lifted)
    leading = imported.num_input + bool(imported.solved)
    ready, _ = pipeline.give(lowered, imported.name, leading)
    return text_of_kernels(ready, target)


def text_of_kernels(ready: Any, target: Any) -> Text:
    """The text of the kernels of what `pipeline.give` returned, as `tirx.build` has it."""
    target = with_host(tvm.target.Target(target))
    functions = {n: f for n, f in ready.functions_items() if isinstance(f, tirx.PrimFunc)}
    device, _, launches = on_device(tvm.IRModule(functions), target)
    if device is None:
        return Text("", {}, [])
    with target, precise_sources():
        source = codegen_build(device, target).inspect_source()
    return Text(*parts(source), launches)


def parts(source: str) -> tuple[str, dict[str, str]]:
    """The head of a text, and its kernels."""
    starts = [(found.start(), found[1]) for found in _KERNEL.finditer(source)]
    ends = [*(start for start, _ in starts[1:]), len(source)]
    head = source[: starts[0][0]]
    head = "\n".join(line for line in head.splitlines() if '"C" __global__' not in line)
    kernels = {name: source[s:e] for (s, name), e in zip(starts, ends, strict=True)}
    return head, kernels


# -- translation -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Translated:
    """What nvcc made of a kernel for one architecture.

    Attributes:
        registers: those of a thread.
        shared: static shared memory of a block, in bytes.
        spilled: what a thread stores and loads for want of registers, in bytes.
        local: the stack of a thread, in bytes.
        error: what nvcc said of a kernel that it refused; then all others are 0.
    """

    registers: int = 0
    shared: int = 0
    spilled: int = 0
    local: int = 0
    error: str = ""


class Translator:
    """Translates kernels to machine code, each text once; what it made is noted in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.runs = 0

    def __call__(self, text: Text, arch: int) -> dict[str, Translated]:
        """What became of each kernel for a compute capability such as 80."""
        places = {name: self._place(text, name, arch) for name in text.kernels}
        fresh: dict[Path, str] = {}
        for name, place in places.items():
            if not place.exists():
                fresh.setdefault(place, name)
        self._translate(text, list(fresh.values()), arch, {n: p for p, n in fresh.items()})
        return {name: Translated(**json.loads(place.read_text())) for name, place in places.items()}

    def _place(self, text: Text, name: str, arch: int) -> Path:
        body = re.sub(rf"\b{name}\b", "kernel", text.kernels[name])
        key = hashlib.sha256("\0".join((text.head, body, str(arch))).encode()).hexdigest()
        return self.folder / f"{key}.json"

    def _translate(self, text: Text, names: list[str], arch: int, places: dict[str, Path]) -> None:
        """All in one run; halves of them after a failure, until the guilty one is alone."""
        if not names:
            return
        source = text.head + "\n" + "\n".join(text.kernels[name] for name in names)
        error, said = self._run(source, arch)
        if error and len(names) > 1:
            for part in (names[: len(names) // 2], names[len(names) // 2 :]):
                self._translate(text, part, arch, places)
            return
        found = {names[0]: Translated(error=error)} if error else _resources(said)
        for name in names:
            places[name].write_text(json.dumps(asdict(found[name])))

    def _run(self, source: str, arch: int) -> tuple[str, str]:
        """An error's first lines, and what is said of resources."""
        self.runs += 1
        with tempfile.TemporaryDirectory(prefix="fx2relax-") as folder:
            path = Path(folder) / "kernels.cu"
            path.write_text(source)
            command = [
                *("nvcc", f"-arch=sm_{arch}", "-cubin", "--use_fast_math", "--resource-usage"),
                *("-o", str(path.with_suffix(".cubin")), str(path)),
            ]
            done = subprocess.run(command, capture_output=True, text=True)
        said = done.stdout + done.stderr
        if done.returncode == 0:
            return "", said
        lines = [line for line in said.splitlines() if "error" in line.lower()] or [said[-300:]]
        return " / ".join(lines[:3]) or f"nvcc ended with {done.returncode}", ""


def _resources(said: str) -> dict[str, Translated]:
    """What ptxas says of each kernel."""
    found = {}
    for part in said.split("Compiling entry function '")[1:]:
        numbers = {
            field: sum(int(n) for n in re.findall(pattern, part))
            for field, pattern in (
                ("registers", r"Used (\d+) registers"),
                ("shared", r"(\d+) bytes smem"),
                ("spilled", r"(\d+) bytes spill"),
                ("local", r"(\d+) bytes stack"),
            )
        }
        found[part.split("'")[0]] = Translated(**numbers)
    return found
