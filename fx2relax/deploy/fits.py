"""Whether an artifact fits the TVM and the machine that are to run it."""

from __future__ import annotations

import platform
from pathlib import Path

from fx2relax.errors import ArtifactError

from . import machine
from .manifest import Manifest

#: The processors of a target's triple, by what the running system calls its own.
_SAME = {
    "amd64": "x86_64",
    "x86-64": "x86_64",
    "arm64": "aarch64",
}
# The instruction sets whose names LLVM and Linux share, but for signs between the letters.
_COMPARED = ("avx", "fma", "amx")


def check_machine(manifest: Manifest, place: Path) -> None:
    """Raise where an artifact cannot be run by this TVM on this machine.

    Raises:
        ArtifactError: another version of TVM, another processor, or one that lacks instructions.
    """
    _check_tvm(manifest.tvm, place)
    triple = str(manifest.target.get("mtriple", ""))
    if manifest.target.get("kind") != "llvm":
        return
    wanted, here = _processor(triple.partition("-")[0]), _processor(platform.machine())
    if wanted and wanted != here:
        raise ArtifactError(
            f"{place} is compiled for {triple}, and this machine is {here}: export it with a"
            " target of this machine, or load it on such a one"
        )
    own = _cpu_features()
    lacking = [f for f in manifest.cpu_features if own and _compared(f) and _plain(f) not in own]
    if lacking:
        raise ArtifactError(
            f"{place} is compiled for processors with {', '.join(lacking)}, which this one has"
            ' not: export it with the "mcpu" of this one as target'
        )


def _check_tvm(wanted: str, place: Path) -> None:
    here = machine.tvm_version()
    if wanted.split(".")[:2] != here.split(".")[:2]:
        minor = ".".join(wanted.split(".")[:2])
        raise ArtifactError(
            f"{place} is compiled by TVM {wanted or 'of an unknown version'}, and TVM {here} is"
            f" installed: libraries fit one minor version only. pip install"
            f" 'apache-tvm=={minor}.*', or export the model again"
        )


def _processor(name: str) -> str:
    return _SAME.get(name.lower(), name.lower())


def _plain(feature: str) -> str:
    return "".join(c for c in feature.lower() if c.isalnum())


def _compared(feature: str) -> bool:
    return _plain(feature).startswith(_COMPARED)


def _cpu_features() -> set[str]:
    """What Linux says that the processor can do; empty where it says nothing."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("flags"):
                    return {_plain(word) for word in line.partition(":")[2].split()}
    except OSError:
        pass
    return set()
