"""From a Relax module to an executable of TVM's virtual machine.

`lower` ends at a module that can still be read: fused, scheduled kernels behind `R.call_tir` and
library calls behind `R.call_dps_packed`. `build` carries on to machine code.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from ..compat import RELEASE, const_int
from .codegen import NAME
from .cpu import schedule_kernels
from .fuse import fuse
from .lapack import use_lapack
from .legalize import legalize
from .library import PREFIX, use_library
from .lift import lift
from .masks import holds_masks
from .target import as_target, without_loop_vectorizer
from .threads import share_threads


def lower(
    mod: Any, *, target: Any = None, library: str = "torch", lift_weights: bool = False
) -> Any:
    """Legalise, choose library calls, fuse and schedule a Relax module.

    Args:
        mod: functions in Relax's high-level operators, `call_tir` kernels or packed calls;
            sizes static or symbolic. It is not changed.
        target: a TVM target, its dict or its name; this machine when left out.
        library: "torch" sends products, convolutions, attention and dense linear algebra to
            PyTorch's kernels; "none" generates them.
        lift_weights: move work on weights alone into ``<name>_transform_params``, see `lift`;
            a function then takes what its transform returns in place of its weights.

    Returns:
        the module before its lowering to virtual-machine instructions.

    Raises:
        ValueError: `library` is neither of the two.
    """
    if library not in ("torch", "none"):
        raise ValueError(f"library must be 'torch' or 'none', not {library!r}")
    target = as_target(target)
    with target:
        if library == "torch":
            mod = use_library(use_lapack(mod))
        if lift_weights:
            mod = lift(mod)
        return schedule_kernels(fuse(legalize(mod)), target)


def build(mod: Any, *, target: Any = None, library: str = "torch") -> Any:
    """Lower a module and compile it: see `lower` for the arguments.

    Returns:
        a `relax.VMExecutable`. Each call of its functions gives fresh output tensors and leaves
        its inputs as they were.
    """
    return assemble(lower(mod, target=target, library=library), target=target)


def assemble(lowered: Any, *, target: Any = None) -> Any:
    """Compile what `lower` returned, for the same target."""
    target = as_target(target)
    share_threads()
    passes = relax.transform
    if not _holds_empty(lowered):
        # Copies that become views are gone before anyone looks for masks in them.
        views = [passes.RewriteDataflowReshape(), passes.DeadCodeElimination()]
        lowered = tvm.transform.Sequential(views)(lowered)
    if holds_masks(lowered):
        target = without_loop_vectorizer(target)
    lowered = lowered.clone()
    lowered[RELEASE] = relax.Function([], relax.ShapeExpr([]), relax.ShapeType([])).with_attr(
        "global_symbol", RELEASE
    )
    with target:
        return relax.build(lowered, target, relax_pipeline=_to_virtual_machine(), tir_pipeline=NAME)


def _holds_empty(mod: Any) -> bool:
    """Whether any tensor of a module has a size of 0, which Relax's reshape reads otherwise."""
    found = False

    def visit(expr: Any) -> None:
        nonlocal found
        shape = getattr(getattr(expr, "ty", None), "shape", None)
        if isinstance(shape, relax.ShapeExpr):
            found = found or 0 in [const_int(size) for size in shape.values]

    for _, function in mod.functions_items():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    return found


def _to_virtual_machine() -> Any:
    passes = relax.transform
    return tvm.transform.Sequential(
        [
            passes.ToNonDataflow(),
            passes.RemovePurityChecking(),
            passes.CallTIRRewrite(),
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
    """How many generated kernels a lowered module holds, and how many library calls it makes."""
    kernels = sum(isinstance(f, tvm.tirx.PrimFunc) for _, f in lowered.functions_items())
    calls = 0

    def visit(expr: Any) -> None:
        nonlocal calls
        if isinstance(expr, relax.Call) and getattr(expr.op, "name", "") == "relax.call_dps_packed":
            calls += str(expr.args[0].global_symbol).startswith(PREFIX)

    for _, function in lowered.functions_items():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    return {"tir_kernels": kernels, "library_calls": calls}
