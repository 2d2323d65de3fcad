"""The versions that are installed, and whether this package supports them."""

from __future__ import annotations

import platform

from fx2relax import installed
from fx2relax._version import __version__
from fx2relax.doctor.findings import Finding
from fx2relax.doctor.running import Probed
from fx2relax.installed import SUPPORTED, numbers, unsupported, wanted

_STAGES = {"torch": "torch", "apache-tvm": "tvm", "numpy": "numpy"}


def check(probed: Probed) -> list[Finding]:
    """Python, this package, and what it is built on."""
    found = [
        Finding.ok("Python", platform.python_version(), version=platform.python_version()),
        Finding.ok("fx2relax", __version__, version=__version__),
    ]
    found += [_package(name, probed) for name in SUPPORTED]
    ffi = probed.get("tvm").get("ffi") or installed.version("apache-tvm-ffi")
    if ffi is not None:
        found.append(Finding.ok("tvm_ffi", ffi, version=ffi))
    if "package" in probed.errors and not {"torch", "tvm"} & probed.errors.keys():
        text = f"cannot be imported: {probed.errors['package']}"
        mend = f"pip install {wanted('torch')} {wanted('apache-tvm')}"
        found.append(Finding.broken("fx2relax.backend", text, mend))
    return found


def _package(name: str, probed: Probed) -> Finding:
    stage = _STAGES[name]
    listed, imported = installed.version(name), probed.get(stage).get("version")
    version = imported or listed
    error = probed.errors.get(stage)
    if version is None and (error is None or probed.kinds.get(stage) == "ModuleNotFoundError"):
        return Finding.broken(name, "is not installed", f"pip install {wanted(name)}")
    said = version or "of an unknown version"
    facts = {"version": version, "supported": wanted(name).strip("'")}
    problem = unsupported(name, version)
    if problem == "old":
        text = f"{said} is too old"
        return Finding.broken(name, text, f"pip install {wanted(name)}", **facts)
    if error is not None:
        mend = f"pip install --force-reinstall {wanted(name)}"
        return Finding.broken(name, f"{said} cannot be imported: {error}", mend, **facts)
    if problem == "new":
        text = f"{said} is newer than what is supported"
        return Finding.warning(name, text, f"pip install {wanted(name)}", **facts)
    if imported and listed and numbers(imported)[:3] != numbers(listed)[:3]:
        text = f"{imported} is imported, and pip knows of {listed}: there are two"
        mend = f"pip install --force-reinstall {wanted(name)}"
        return Finding.warning(name, text, mend, **facts)
    return Finding.ok(name, said, **facts)
