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
