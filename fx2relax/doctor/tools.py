"""The compilers, the linker, and the native helper that they make."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess

from fx2relax.doctor.findings import Finding
from fx2relax.doctor.running import Probed
from fx2relax.doctor.storage import other_temporary
from fx2relax.runtime.compilers import find_compiler

_WITHOUT = {
    "c++": ("C++ compiler", "$CXX, c++, g++, clang++", "library calls are made through Python"),
    "c": ("C compiler", "$CC, cc, gcc, clang", "kernels use a thread pool of TVM's"),
    "linker": ("linker", "$CC, cc, gcc, clang, $CXX", "compiled programs are not stored"),
}
_VARIABLES = {"c++": "CXX", "c": "CC"}
_MANAGERS = {
    "apt-get": "apt-get install g++",
    "dnf": "dnf install gcc-c++",
    "apk": "apk add g++ libc-dev",
    "pacman": "pacman -S gcc",
    "zypper": "zypper install gcc-c++",
    "brew": "brew install gcc",
}
# Where programs lie, whatever $PATH says.
_PLACES = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/homebrew/bin"


def check(probed: Probed) -> list[Finding]:
    """What is there, and whether the native helper can be had."""
    found = [_tool(language) for language in _WITHOUT]
    return [*found, _helper(probed)]


def _tool(language: str) -> Finding:
    name, looked_for, without = _WITHOUT[language]
    command = find_compiler(language)
    if command is None:
        text = f"there is none ({looked_for}): {without}"
        return Finding.warning(name, text, install_compiler())
    said = _version(command)
    variable = _VARIABLES.get(language)
    chosen = os.environ.get(variable, "") if variable else ""
    if chosen and not _is_chosen(chosen, command):
        text = f"${variable} is {chosen!r}, which is not found; {command[0]} is used"
        return Finding.warning(name, text, f"unset {variable}", command=list(command))
    if said is None:
        text = f"{shlex.join(command)} does not run"
        return Finding.warning(name, text, install_compiler(), command=list(command))
    return Finding.ok(name, f"{shlex.join(command)}: {said}", command=list(command))


def _is_chosen(chosen: str, command: tuple[str, ...]) -> bool:
    try:
        words = shlex.split(chosen)
    except ValueError:
        return False
    return bool(words) and shutil.which(words[0]) == command[0]


def _version(command: tuple[str, ...]) -> str | None:
    try:
        said = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return next(iter(said.splitlines()), "")


def install_compiler() -> str:
    """The command that brings a compiler here."""
    if platform.system() == "Darwin":
        return "xcode-select --install"
    for places in (None, _PLACES):
        for manager, command in _MANAGERS.items():
            if shutil.which(manager, path=places):
                return command if os.name != "posix" or os.geteuid() == 0 else f"sudo {command}"
    return "conda install -c conda-forge gxx"


def _helper(probed: Probed) -> Finding:
    name = "native helper"
    facts = probed.get("native")
    if os.environ.get("FX2RELAX_NATIVE", "1") == "0":
        return Finding.warning(
            name, "is switched off: library calls are made in Python", "unset FX2RELAX_NATIVE"
        )
    if "native" in probed.errors and _without(probed) is None:
        return Finding.broken(name, probed.errors["native"], "export FX2RELAX_NATIVE=0")
    if not facts:
        return Finding.skipped(name, _without(probed) or "it was not reached")
    if facts["use"]:
        text = f"compiled or found, and loaded, in {facts['seconds']:.1f} s"
        return Finding.ok(name, text, seconds=facts["seconds"])
    said = " ".join("; ".join(facts["warnings"]).split()) or "it cannot be had"
    return Finding.warning(name, said, mend_native(said))


def mend_native(said: str) -> str:
    """What mends a library that is not compiled or loaded: the words of the tools tell why."""
    if "No space left" in said or "failed to map segment" in said:
        return other_temporary()
    if os.environ.get("CXX") and find_compiler("c++") is not None:
        return "unset CXX"
    return install_compiler()


def _without(probed: Probed) -> str | None:
    missing = [stage for stage in ("torch", "tvm", "package") if stage in probed.errors]
    return f"not tried without {missing[0]}" if missing else None
