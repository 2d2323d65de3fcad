"""`jit`: named functions of a model, compiled, on torch tensors."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fx2relax import deploy
from fx2relax.deploy.artifact import OUT
from fx2relax.errors import OptionError
from fx2relax.exporting.functions import Spec, export


def jit(
    model: torch.nn.Module,
    functions: Mapping[str, Spec | tuple[Callable[..., Any], Spec]],
    device: Any = "cpu",
    pipeline: Callable[[Any], Any] | None = None,
    out_format: str = "torch",
    *,
    target: Any = None,
    debug: bool = False,
) -> deploy.Artifact:
    """Export functions of a model, compile them, and give them back as callables.

    Args:
        model: see `export`; its weights have data, and share their memory with what is compiled.
            A weight that is changed later is seen after ``result.weights.load_state_dict(...)``.
        functions: by name, a spec, or a function and its spec; see `export`.
        device: where they run: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or a TVM or PyTorch device.
        pipeline: a Relax pass, or any function from module to module, that is applied first.
        out_format: what the functions return: ``"torch"``, ``"numpy"`` or ``"tvm"`` tensors.
        target: a TVM target, its dict or its name; that of the device on this machine when left
            out.
        debug: whether calls of `print` in the functions print when they are called.

    Returns:
        an object with a method for each function, under its name, and the same by ``[name]``.

    Raises:
        OptionError: another `out_format`.
        WeightError: (a ValueError) weights without data.
        UnsupportedOpError, ImportFailure, BuildFailure: see `export` and `Exported.build`.
    """
    if out_format not in OUT:
        raise OptionError(f"out_format={out_format!r}; it takes {', '.join(map(repr, OUT))}")
    exported = export(model, functions, debug=debug)
    exported.params.check_bound()
    if pipeline is not None:
        exported.mod = pipeline(exported.mod)
    where = str(device)
    if target is None and where.startswith("cuda"):
        target = "cuda"
    with tempfile.TemporaryDirectory(prefix="fx2relax-") as folder:
        place = Path(folder) / "artifact"
        exported.build(target).save(place, weights=False)
        given = {p.name: p.data for p in exported.params.values()}
        return deploy.load(place, where, weights=given, out=out_format)
