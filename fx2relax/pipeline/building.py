"""From a Relax module to an executable of TVM's virtual machine.

`lower` ends at a module that can still be read: fused, scheduled kernels behind `R.call_tir` and
library calls behind `R.call_dps_packed`. `build` carries on to machine code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tvm
from tvm import relax, s_tir, tirx

from fx2relax import objects, stages

from ..calling import Calling
from ..compat import const_int, threads_apart
from ..runtime import native
from ..tvm_runtime import RELEASE
from .batch_norm import fold_scales
from .byte_weights import use_byte_weights
from .codegen import NAME, UNCHECKED
from .cpu import schedule_kernels
from .cuda import cuda_code, is_cuda, lower_for_cuda, with_host
from .flow import expressions
from .fuse import fuse
from .given import give_results
from .in_torch import in_torch
from .integers import use_integers
from .lapack import use_lapack
from .launches import PIPELINE
from .legalize import legalize
from .library import PREFIX, use_library, use_long_attention
from .lift import lift, without_transforms
from .llvm_turns import generating
from .masks import holds_masks
from .nvrtc import compiled_lightly
from .on_weights import shortened, use_library_on_weights
from .own_names import with_names_apart
from .packing import only_reads, pack
from .precise import precise_sources
from .products import use_contractions
from .relaid import use_channels_last
from .reuse import reuse
from .shared import Unlinked, library_or_objects, link_here, linker, shared_library
from .softmax import softmax
from .straight import straight
from .target import as_target, without_loop_vectorizer
from .threads import share_threads
from .turns import join_turns
from .views import use_views
from .weight_gradients import use_weight_gradients

_Realize = s_tir.stmt.SBlockRealize
_LIBRARY_CALLS = ("relax.call_dps_packed", "relax.call_pure_packed")


def lower(
    mod: Any,
    *,
    target: Any = None,
    library: str = "torch",
    lift_weights: bool = False,
    known: Callable[[Any, Any], Any] | None = None,
) -> Any:
    """Legalise, choose library calls, fuse and schedule a Relax module.

    Args:
        mod: functions in Relax's high-level operators, `call_tir` kernels or packed calls;
            sizes static or symbolic. It is not changed.
        target: a TVM target, its dict or its name; this machine when left out. For CUDA, all
            kernels are generated, whatever `library` says.
        library: "torch" sends products, convolutions, attention and dense linear algebra to
            PyTorch's kernels; "generated" sends dense linear algebra, and attention whose scores
            would fill memory; "none" nothing.
        lift_weights: move work on weights alone into ``<name>_transform_params``, see `lift`;
            a function then takes what its transform returns in place of its weights. Unless
            `library` is "none", PyTorch does the arithmetic in it.
        known: gives a kernel, for a target, a schedule that goes before our rules, or None.

    Returns:
        the module before its lowering to virtual-machine instructions.

    Raises:
        ValueError: `library` is none of the three.
    """
    if library not in ("torch", "generated", "none"):
        raise ValueError(f"library must be 'torch', 'generated' or 'none', not {library!r}")
    threads_apart()
    target = as_target(target)
    if is_cuda(target):
        return lower_for_cuda(mod, target, lift_weights)
    with target:
        mod = use_byte_weights(use_integers(mod, target), target)
        if lift_weights:
            mod = fold_scales(without_transforms(mod))
        if library == "torch":
            mod = use_weight_gradients(mod)
        mod = join_turns(mod)
        if library != "none":
            mod = use_lapack(mod)
        if library == "torch":
            mod = use_library(use_contractions(mod, target, lifted=lift_weights, library=True))
        else:
            if library == "generated":
                mod = use_long_attention(mod)
            mod = use_contractions(mod, target, lifted=lift_weights)
        if lift_weights:
            mod = lift(use_channels_last(mod))
            mod = use_library_on_weights(mod) if library != "none" else mod
        mod, finished = shortened(mod)
        mod = fuse(legalize(mod, {"relax.nn.softmax": softmax}), target)
        stages.note("fused", mod=mod, target=target)
        mod = schedule_kernels(mod, target, known)
        mod.update(finished)
        mod = pack(mod) if library == "torch" else mod
        return with_names_apart(mod)


def build(mod: Any, *, target: Any = None, library: str = "torch") -> Any:
    """Lower a module and compile it.

    Args:
        mod: see `lower`, as for the others.
        target: the same.
        library: the same.

    Returns:
        a `relax.VMExecutable`. Each call of its functions gives fresh output tensors and leaves
        its inputs as they were.
    """
    return assemble(lower(mod, target=target, library=library), target=target)


def assemble(lowered: Any, *, target: Any = None) -> Any:
    """Compile what `lower` returned.

    Args:
        lowered: the module.
        target: the one that it was lowered for.

    Returns:
        a `relax.VMExecutable`; see `build`.
    """
    return machine_code(reuse(_with_memory(lowered)), target=target)


def give(
    lowered: Any,
    name: str,
    leading: int,
    into: Mapping[int, int] | None = None,
    on_gpu: bool = False,
) -> tuple[Any, Calling]:
    """Let a function of what `lower` returned take the memory of its results.

    Args:
        lowered: the module.
        name: the function's.
        leading: how many parameters it has left of its weights.
        into: see `give_results`.
        on_gpu: whether its caller may do what it does, see `straight`.

    Returns:
        a module for `machine_code` or `library_code`, and how the function is called.
    """
    mod, calling = give_results(_with_memory(lowered), name, leading, into or {})
    mod = reuse(mod)
    return straight(mod, name, calling) if on_gpu else (mod, calling)


def machine_code(mod: Any, *, target: Any = None, checked: bool = True) -> Any:
    """Compile a module in which each kernel has the memory that it writes to.

    Args:
        mod: what `give` returned.
        target: see `lower`.
        checked: whether each kernel checks the strides and sizes of what it is called with; the
            virtual machine checks the dtypes and sizes of a function's arguments in any case.

    Returns:
        a `relax.VMExecutable`.
    """
    target = _own_options(mod, _ready(target))
    mod = objects.attached(mod)
    if is_cuda(target):
        target, relax_passes = with_host(target), _to_virtual_machine()
        with target, precise_sources(), compiled_lightly():
            return relax.build(
                in_torch(mod), target, relax_pipeline=relax_passes, tir_pipeline=PIPELINE
            )
    with target, generating(target):
        pipeline = NAME if checked else UNCHECKED
        return relax.build(mod, target, relax_pipeline=_to_virtual_machine(), tir_pipeline=pipeline)


def library_code(
    mod: Any,
    *,
    target: Any = None,
    checked: bool = True,
    workers: int = 2,
    checkpoint: Callable[[], None] = lambda: None,
) -> bytes | None:
    """`machine_code` ahead of time.

    Args:
        mod: see `machine_code`, as for all but the next two.
        target: the same.
        checked: the same.
        workers: how many kernels are compiled at a time.
        checkpoint: called between kernels; what it raises is raised.

    Returns:
        the bytes of a shared library that `runtime.loading.load` makes an executable of; None
        where there is no linker.

    Raises:
        LinkError: the linker failed.
    """
    target = _ready(target)
    mod = objects.attached(mod)
    if is_cuda(target):
        return (
            None
            if linker() is None
            else cuda_code(in_torch(mod), target, _to_virtual_machine(), link_here)
        )
    with target:
        mod = _to_virtual_machine()(mod)
    return shared_library(mod, target, NAME if checked else UNCHECKED, workers, checkpoint)


def portable_code(lowered: Any, *, target: Any = None) -> bytes | Unlinked:
    """Compile a module for a process that has no PyTorch.

    Args:
        lowered: what `lower` returned, for the same target and with ``library="none"``; its
            functions keep their parameters and results.
        target: see `lower`; it may be of another processor than this one.

    Returns:
        the bytes of a shared library; object files where there is no linker for the target.

    Raises:
        LinkError: the linker failed.
    """
    mod = objects.attached(reuse(_with_memory(lowered)))
    target = as_target(target)
    if is_cuda(target):
        return cuda_code(mod, target, _to_virtual_machine(), link_here)
    with target:
        mod = _to_virtual_machine()(mod)
    return library_or_objects(mod, target, NAME, workers=2)


def one_kernel(func: Any, target: Any) -> Any:
    """Compile a scheduled kernel whose name is ``main`` for callers that vouch for its arguments.

    Returns:
        a TVM module.
    """
    share_threads()
    mod = tvm.IRModule({"main": func})
    target = _own_options(mod, as_target(target))
    with target:
        return tvm.tirx.build(mod, target, UNCHECKED)


def _ready(target: Any) -> Any:
    """The target that a module is compiled for here."""
    share_threads()
    native.use()
    return as_target(target)


def _own_options(mod: Any, target: Any) -> Any:
    """The target, with options of LLVM's where a module needs them."""
    return without_loop_vectorizer(target) if holds_masks(mod) else target


def _with_memory(lowered: Any) -> Any:
    """The module with the memory that each kernel writes to."""
    passes = relax.transform
    # Copies that become views are gone before anyone looks for masks in them.
    if not _holds_empty(lowered):
        lowered = passes.DeadCodeElimination()(_with_reshapes(use_views(lowered)))
    mod = tvm.transform.Sequential(
        [passes.ToNonDataflow(), passes.RemovePurityChecking(), passes.CallTIRRewrite()]
    )(lowered)
    mod[RELEASE] = relax.Function([], relax.ShapeExpr([]), relax.ShapeType([])).with_attr(
        "global_symbol", RELEASE
    )
    return mod


def _with_reshapes(mod: Any) -> Any:
    """The module with kernels that only copy as reshapes.

    TVM's pass fails on a kernel of one tensor that is not a block, as a product of a matrix by
    itself in tiles: it is shown one that does nothing.
    """
    tiled = {
        name: func
        for name, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc) and not isinstance(func.body, _Realize)
    }
    mod = mod.clone()
    for name, func in tiled.items():
        mod[name] = tirx.PrimFunc(func.params, tirx.Evaluate(0), func.ret_type, func.attrs)
    mod = relax.transform.RewriteDataflowReshape()(mod)
    for name, func in tiled.items():
        mod[name] = func
    return mod


def _holds_empty(mod: Any) -> bool:
    """Whether any tensor of a module has a size of 0, which Relax's reshape reads otherwise."""
    for expr in expressions(mod):
        shape = getattr(getattr(expr, "ty", None), "shape", None)
        if isinstance(shape, relax.ShapeExpr) and 0 in [const_int(n) for n in shape.values]:
            return True
    return False


def _to_virtual_machine() -> Any:
    passes = relax.transform
    return tvm.transform.Sequential(
        [
            passes.StaticPlanBlockMemory(),
            passes.LowerAllocTensor(),
            passes.KillAfterLastUse(),
            passes.LowerRuntimeBuiltin(),
            passes.ComputePrimValue(),
            passes.VMShapeLower(),
            passes.AttachGlobalSymbol(),
        ]
    )


def census(lowered: Any) -> dict[str, int]:
    """How many generated kernels a lowered module holds, and how many library calls it makes.

    Args:
        lowered: what `lower` returned.

    Returns:
        ``{"tir_kernels": count, "library_calls": count, "reads": count}``, the last of those among
        the calls that take as long as a weight takes to be read once.
    """
    kernels = sum(isinstance(f, tvm.tirx.PrimFunc) for _, f in lowered.functions_items())
    calls = [
        expr
        for expr in expressions(lowered)
        if isinstance(expr, relax.Call)
        and getattr(expr.op, "name", "") in _LIBRARY_CALLS
        and str(expr.args[0].global_symbol).startswith(PREFIX)
    ]
    reads = sum(map(only_reads, calls))
    return {"tir_kernels": kernels, "library_calls": len(calls), "reads": reads}
