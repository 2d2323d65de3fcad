"""Kernels by schedules that were measured, in the place of our own rules.

What is recorded of a kernel is a trace of MetaSchedule's, or the sizes of our own tiles: data that
is applied to the kernel, never code.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir.schedule import Trace

from .building import one_kernel
from .cpu import schedule
from .gemm import tile
from .places import shorten
from .tiles import Tiles, lanes_of

#: What gives a kernel a schedule, for a target; None leaves it to our own rules.
Schedules = Callable[[Any, Any], Any]

# What MetaSchedule's rules for processors are made of. Others replace blocks by calls or promise
# what they do not check.
_STEPS = frozenset(
    {
        *("AddUnitLoop", "Annotate", "CacheRead", "CacheWrite", "ComputeAt", "ComputeInline"),
        *("DecomposeReduction", "EnterPostproc", "Fuse", "GetChildBlocks", "GetConsumers"),
        *("GetLoops", "GetOutputBlocks", "GetProducers", "GetSBlock", "Merge", "Parallel"),
        *("RFactor", "Reorder", "ReverseComputeAt", "ReverseComputeInline", "SampleCategorical"),
        *("SampleComputeLocation", "SamplePartitionedTile", "SamplePerfectTile", "Split"),
        *("Unannotate", "Unroll", "Vectorize"),
    }
)
_MARKS = ("meta_schedule.", "pragma_auto_unroll_max_step", "pragma_unroll_explicit")


#: What sizes of tiles may be: rows of a register tile, sums of one element, elements in cache.
MOST_ROWS, CHAINS, MOST_SUMS = 16, (1, 2, 4, 8), 1 << 16


class NotApplicable(ValueError):
    """A record that does not fit its kernel, or holds what no record holds."""


def nameless(func: Any) -> Any:
    """A kernel as it is known by: without the name that its module gave it."""
    return func.without_attr("global_symbol") if "global_symbol" in (func.attrs or {}) else func


def key_of(func: Any) -> str:
    """A digest of a kernel, the same in every process.

    It depends on the names of blocks, by which a trace finds them, and on no other names.
    """
    said = json.dumps([digest_of(func), _blocks(func)])
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _blocks(func: Any) -> list[str] | None:
    """The names of a kernel's blocks; None where it has none."""
    try:
        sch = s_tir.Schedule(tvm.IRModule({"main": func}), error_render_level="none")
        blocks = sch.get_child_blocks(sch.get_sblock("root"))
        return [str(sch.get(block).name_hint) for block in blocks] or None
    except Exception:  # TVM's schedule errors have no common class
        return None


def digest_of(func: Any) -> str:
    """A digest of a kernel, scheduled or not, by what it does alone."""
    return f"{tvm_ffi.structural_hash(nameless(func)) % (1 << 64):016x}"


def spelled(func: Any) -> str:
    """A kernel as TVMScript; `read` reads it.

    TVM 0.27 dies of a segmentation fault where it is asked for JSON of any kernel.
    """
    text = str(nameless(func).script(show_meta=False))
    # A parameter is called after its weight, which may begin with a digit.
    return re.sub(r"(?<![\w.])(\d+_\w*)", r"_\1", text)


def read(text: str) -> Any:
    """A kernel out of what `spelled` gave; it is run as a program, and so has to be ours.

    Raises:
        ValueError: it is none.
    """
    try:
        return nameless(tvm.script.from_source(text))
    except Exception as error:
        raise ValueError(f"no kernel can be read: {error}") from error


def is_tunable(func: Any) -> bool:
    """Whether a kernel of blocks has no schedule, and all of its sizes are known and none is 0."""
    if (func.attrs or {}).get("tirx.is_scheduled") or _blocks(func) is None:
        return False
    return all(
        isinstance(param.ty, tirx.BufferType)
        and all(isinstance(size, tirx.IntImm) and int(size) > 0 for size in param.shape)
        for param in func.params
    )


def arguments(func: Any) -> list[tuple[tuple[int, ...], str]]:
    """The shape and dtype of each tensor that a kernel reads or writes."""
    return [(tuple(int(size) for size in p.shape), str(p.dtype)) for p in func.params]


def own(func: Any, target: Any) -> Any:
    """A kernel by our own rules."""
    return schedule(func, target)


def blank(func: Any) -> Any:
    """A kernel for MetaSchedule: the marks of our own rules are gone."""
    func = shorten(nameless(func)).with_attr("global_symbol", "main")
    sch = s_tir.Schedule(tvm.IRModule({"main": func}), error_render_level="none")
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        for mark in list(sch.get(block).annotations):
            if str(mark).startswith("fx2relax."):
                sch.unannotate(block, mark)
    return sch.mod["main"]


def apply(how: Mapping[str, Any], func: Any, target: Any) -> Any:
    """A kernel by a recorded schedule.

    Args:
        how: ``{"trace": ...}``, MetaSchedule's as JSON, or ``{"tiles": {...}}``.
        func: the kernel, not scheduled.
        target: a `tvm.target.Target`.

    Raises:
        NotApplicable: the record does not fit.
    """
    try:
        if "tiles" in how:
            found = tile(func, target, _sizes(how["tiles"], target))
        else:
            _check(how["trace"])
            sch = s_tir.Schedule(tvm.IRModule({"main": blank(func)}), error_render_level="none")
            Trace.apply_json_to_schedule(how["trace"], sch)
            found = sch.mod["main"]
    except NotApplicable:
        raise
    except Exception as error:
        raise NotApplicable(f"{type(error).__name__}: {str(error)[:500]}") from error
    if found is None:
        raise NotApplicable("tiles do not suit it")
    return nameless(found).with_attr("tirx.is_scheduled", True)


def _sizes(given: Mapping[str, Any], target: Any) -> Tiles:
    """Sizes of tiles that fit each other."""
    sizes = Tiles(**{name: int(value) for name, value in given.items()})
    fit = (
        1 <= sizes.rows <= MOST_ROWS
        and sizes.lanes in (lanes_of(target, "float32"), lanes_of(target, "float64"))
        and sizes.chains in CHAINS
        and sizes.depth >= 1
        and sizes.block >= 1
        and sizes.columns >= 1
        and sizes.block % sizes.rows == 0
        and sizes.columns % sizes.lanes == 0
        and sizes.block * sizes.columns <= MOST_SUMS
    )
    if not fit:
        raise NotApplicable(f"sizes that do not fit each other: {sizes}")
    return sizes


def _check(trace: Any) -> None:
    """Refuse what is no trace of MetaSchedule's rules for processors."""
    for name, _, attrs, _ in trace[0]:
        if name not in _STEPS:
            raise NotApplicable(f"a step {name!r}")
        if name == "Annotate" and not str(attrs[0]).startswith(_MARKS):
            raise NotApplicable(f"a mark {attrs[0]!r}")


def code(func: Any, target: Any) -> Any:
    """The machine code of a scheduled kernel, as a TVM module with one function, ``main``."""
    return one_kernel(nameless(func).with_attr("global_symbol", "main"), target)
