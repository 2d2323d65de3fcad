"""The machine that code is generated for, as a TVM target."""

from __future__ import annotations

import functools
from typing import Any

import torch
import tvm


@functools.cache
def _cpu_name() -> str:
    return str(tvm.target.codegen.llvm_get_system_cpu())


def host_target() -> Any:
    """LLVM for this machine's own instruction set and as many threads as PyTorch uses."""
    return tvm.target.Target(
        {"kind": "llvm", "mcpu": _cpu_name(), "num-cores": torch.get_num_threads()}
    )


def has_features(target: Any, *features: str) -> bool:
    """Whether code for a target may use instructions of x86 that LLVM has these names for."""
    export = target.export()
    if str(export.get("kind")) != "llvm":
        return False
    arm = str(export.get("mtriple", "")).startswith(("aarch64", "arm64"))
    return _cpu_has(str(export.get("mcpu", "")), features) and not arm


@functools.cache
def _cpu_has(cpu: str, features: tuple[str, ...]) -> bool:
    target = tvm.target.Target({"kind": "llvm", **({"mcpu": cpu} if cpu else {})})
    return all(tvm.target.codegen.target_has_features(name, target) for name in features)


def without_loop_vectorizer(target: Any) -> Any:
    """The same target, without LLVM's own vectorizer; loops that are vectors already stay so."""
    config = dict(target.export())
    if str(config["kind"]) != "llvm":
        return target
    config["cl-opt"] = [*config.get("cl-opt", []), "-vectorize-loops:bool=false"]
    return tvm.target.Target(config)


def as_target(target: Any) -> Any:
    """A `tvm.target.Target` of a target, a dict, a string or None (this machine)."""
    if target is None:
        return host_target()
    return target if isinstance(target, tvm.target.Target) else tvm.target.Target(target)


def described(target: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A target as a saved artifact names it.

    Returns:
        its settings as JSON can spell them, with the triple of this machine where it names none,
        and LLVM's names of the vector instructions that its code may use.
    """
    target = as_target(target)
    found: dict[str, Any] = _plain(dict(target.export()))
    if found["kind"] != "llvm":
        return found, ()
    found.setdefault("mtriple", str(tvm.target.codegen.llvm_get_system_triple()))
    features = tvm.target.codegen.llvm_get_cpu_features(target)
    # Generic code asks for nothing; avx10's names differ between LLVM and Linux.
    used = (str(f) for f in features if str(f).startswith(("avx", "fma", "amx")))
    return found, tuple(sorted(f for f in used if not f.startswith("avx10")))


def _plain(value: Any) -> Any:
    if hasattr(value, "items"):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if isinstance(value, tvm.target.Target):
        return _plain(dict(value.export()))
    return [_plain(item) for item in value] if hasattr(value, "__iter__") else str(value)
