"""Small Relax modules for the pipeline's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import tvm
from tvm import relax, tirx

from fx2relax.pipeline import build


def module(
    body: Callable[..., Any],
    *shapes: Sequence[int | str],
    dtypes: str | Sequence[str] = "float32",
) -> Any:
    """A module whose `main` is `body(builder, *parameters)`; a size that is a name is symbolic."""
    names = {d: tirx.Var(d, "int64") for s in shapes for d in s if isinstance(d, str)}
    kinds = [dtypes] * len(shapes) if isinstance(dtypes, str) else list(dtypes)
    builder = relax.BlockBuilder()
    params = [
        relax.Var(f"x{n}", relax.TensorType([names.get(d, d) for d in shape], kind))
        for n, (shape, kind) in enumerate(zip(shapes, kinds, strict=True))
    ]
    with builder.function("main", params, attrs={"num_input": len(params)}):
        with builder.dataflow():
            out = builder.emit_output(builder.normalize(body(builder, *params)))
        builder.emit_func_output(out)
    return builder.get()


def run(mod: Any, *inputs: torch.Tensor, library: str = "none") -> Any:
    """Build a module and call its `main`."""
    machine = relax.VirtualMachine(build(mod, library=library), tvm.cpu())
    return machine["main"](*inputs)
