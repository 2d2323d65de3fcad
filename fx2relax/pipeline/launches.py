"""How a GPU would launch a scheduled kernel, and why it could not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.tirx import compilation_pipeline
from tvm.tirx.build import codegen_build, split_host_device_mods

from .nvrtc import written_only

#: TVM's lowering of scheduled kernels, of which none is launched for a tensor without elements.
PIPELINE = "fx2relax.cuda"
#: The most of every NVIDIA GPU since 2014: blocks of a grid, threads of a block, and bytes of a
#: block's shared memory that no launch has to ask for.
_LIMITS = {
    **{"blockIdx.x": 2**31 - 1, "blockIdx.y": 65535, "blockIdx.z": 65535},
    **{"threadIdx.x": 1024, "threadIdx.y": 1024, "threadIdx.z": 64},
}
_THREADS = 1024
SHARED = 48 << 10
_DYNAMIC = "tirx.use_dyn_shared_memory"


class NoLaunch(Exception):
    """A GPU cannot run a kernel as it is scheduled."""


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: its name in the source.
        extents: the sizes of the grid and of a block by TVM's tags; None where it is symbolic.
        shared: the bytes of shared memory of a block.
    """

    kernel: str
    extents: dict[str, int | None]
    shared: int

    def faults(self) -> Iterator[str]:
        """What no GPU would launch."""
        known = {tag: size for tag, size in self.extents.items() if size is not None}
        for tag, size in known.items():
            if not 0 < size <= _LIMITS[tag]:
                yield f"{self.kernel}: {tag} is {size}, of at most {_LIMITS[tag]}"
        threads = math.prod(n for tag, n in known.items() if tag.startswith("threadIdx"))
        if threads > _THREADS:
            yield f"{self.kernel}: {threads} threads in a block"
        if self.shared > SHARED:
            yield f"{self.kernel}: {self.shared} bytes of shared memory"


def on_device(mod: Any, target: Any) -> tuple[Any, Any, list[Launch]]:
    """The kernels of a module as TVM's lowering leaves them for its code generator.

    Args:
        mod: of scheduled kernels alone.
        target: of a GPU, with a host.

    Returns:
        what is generated for the GPU, in a module or None where that is nothing; what launches
        it; and the launches.

    Raises:
        what TVM's passes raise, where a kernel writes to the GPU's memory from the host, say.
    """
    passes, _, finish = tirx.get_tir_pipeline(PIPELINE)
    with target:
        named = relax.transform.AttachGlobalSymbol()(mod)
        host, devices = split_host_device_mods(passes(tirx.transform.BindTarget(target)(named)))
        made = [finish()(found) for found in devices.values()]
    device = made[0] if made else None
    return device, host, list(_launches(host, device))


def _lowering() -> Any:
    lowered, *finish = tirx.get_tir_pipeline("default")

    @tvm.transform.module_pass(opt_level=0, name="fx2relax.LowerForGPU")  # type: ignore[untyped-decorator]
    def lower(mod: Any, ctx: Any) -> Any:
        mod = lowered(mod)
        for name, function in list(mod.functions_items()):
            guarded = tvm_ffi.structural_map(function, (tirx.Evaluate, _unless_empty))
            if not guarded.same_as(function):
                mod[name] = guarded
        return mod

    return (lower, *finish)


def _unless_empty(statement: Any) -> Any:
    """A launch where its grid has a block: CUDA refuses the one of a size that is zero."""
    found = _launch_of(statement.value)
    symbolic = [n for n in found[2] if not isinstance(n, tirx.IntImm)] if found else []
    for size in symbolic:
        there = tirx.const(0, size.ty.dtype) < size
        statement = tirx.IfThenElse(there, statement, None)
    return statement


compilation_pipeline.register_tir_pipeline(PIPELINE, _lowering)


def check(name: Any, function: Any, target: Any) -> None:
    """Raise `NoLaunch` where a GPU cannot run a kernel; what TVM raises of it, too."""
    device, host, launches = on_device(tvm.IRModule({name: function}), target)
    if device is None or _touches_memory(host):
        raise NoLaunch(f"{name.name_hint} does some of its work without a thread")
    written_only(lambda: codegen_build(device, target))
    for launch in launches:
        for fault in launch.faults():
            raise NoLaunch(fault)


def _touches_memory(host: Any) -> bool:
    """Whether what launches kernels reads or writes an element of a tensor itself."""
    found: list[Any] = []
    for _, function in host.functions_items():
        nodes = (tirx.BufferStore, tvm.ir.TensorLoad)
        tvm_ffi.structural_walk(function.body, (nodes, found.append))
    return bool(found)


def calls_of(host: Any) -> Iterator[tuple[str, list[str], list[Any]]]:
    """The name of each kernel that is launched, the tags of the launch, and its values."""
    for _, function in host.functions_items():
        calls: list[Any] = []
        tvm_ffi.structural_walk(function.body, (tvm.ir.Call, calls.append))
        yield from filter(None, map(_launch_of, calls))


def _launch_of(call: Any) -> tuple[str, list[str], list[Any]] | None:
    if getattr(getattr(call, "op", None), "name", "") != "tirx.call_ffi_kernel":
        return None
    tags = [str(t) for t in call.attrs.launch_params]
    return str(call.args[0].value), tags, list(call.args[-len(tags) :] if tags else [])


def _launches(host: Any, device: Any) -> Iterator[Launch]:
    shared = (
        {} if device is None else {g.name_hint: _static(f) for g, f in device.functions_items()}
    )
    for kernel, tags, given in calls_of(host):
        sizes = [int(v) if isinstance(v, tirx.IntImm) else None for v in given]
        extents = dict(zip(tags, sizes, strict=True))
        dynamic = extents.pop(_DYNAMIC, 0) or 0
        yield Launch(kernel, extents, shared[kernel] + dynamic)


def _static(function: Any) -> int:
    """The bytes of shared memory that a function for the GPU declares."""
    buffers: list[Any] = []
    tvm_ffi.structural_walk(
        function.body, (tirx.AllocBuffer, lambda node: buffers.append(node.buffer))
    )
    return sum(
        math.prod(int(n) for n in buffer.shape) * tvm.DataType(str(buffer.dtype)).itemsize
        for buffer in buffers
        if buffer.scope() == "shared"
    )
