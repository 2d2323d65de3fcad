"""A second opinion on our import of a model: its export to ONNX, run by code of two other hands."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fx2relax import onnx_sides as sides
from fx2relax.closeness import difference
from fx2relax.errors import UnsupportedOpError

AGREES = "agrees"
_SIDES = ("ours", "reference", "tvm")
_LONGEST = 300
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class OnnxComparison:
    """What four ways to run one model say of each other.

    A verdict is ``"agrees"``, ``"differs: ..."`` (which output, and how), or ``"cannot: ..."``
    (the step that failed, and its error).

    Attributes:
        ours: our import (`fx2relax.from_fx` and generated kernels) against eager PyTorch.
        reference: `onnx.reference.ReferenceEvaluator` on the exported model against eager.
        tvm: TVM's own ONNX importer on the exported model against eager.
        ours_reference: our import against the reference evaluator.
        ours_tvm: our import against TVM's importer.
        exporter: ``"dynamo"`` or ``"TorchScript"``; empty where the model cannot be exported.
        opset: the version of ONNX's operators; 0 where the model cannot be exported.
        operators: how many nodes the ONNX model has, by operator.
        seconds: how long each step took.
        error: what our import raised, where it cannot.
    """

    ours: str
    reference: str
    tvm: str
    ours_reference: str
    ours_tvm: str
    exporter: str = ""
    opset: int = 0
    operators: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    error: Exception | None = field(default=None, compare=False, repr=False)

    @property
    def compared(self) -> bool:
        """Whether anyone else gave a result that ours was compared with."""
        return any(not v.startswith("cannot") for v in (self.ours_reference, self.ours_tvm))

    def __str__(self) -> str:
        head = "not exported to ONNX"
        if self.exporter:
            count = sum(self.operators.values())
            head = f"{count} ONNX nodes, opset {self.opset}, by the {self.exporter} exporter"
        rows = [
            ("our import, eager", self.ours),
            ("ONNX's reference evaluator, eager", self.reference),
            ("TVM's ONNX importer, eager", self.tvm),
            ("our import, ONNX's reference evaluator", self.ours_reference),
            ("our import, TVM's ONNX importer", self.ours_tvm),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join([head, *(f"  {name:<{width}}  {verdict}" for name, verdict in rows)])


def assert_matches_onnx(
    model: Callable[..., Any],
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    tol: float | tuple[float, float] | None = None,
    exporter: str | None = None,
    torch_calls: bool = False,
    seed: int = 0,
) -> OnnxComparison:
    """Assert that our import of a model does what eager does, and say what ONNX makes of it.

    The model is exported by `torch.onnx.export` and run in `onnx.reference.ReferenceEvaluator` and
    through TVM's own ONNX importer, compiled by TVM's default pipeline. Both, and our import
    (`fx2relax.from_fx`, compiled without any library), are compared with eager and with each
    other in dtype, shape, values and where NaNs and infinities stand. A value is right within the
    tolerance of its dtype, or where the output is no further from a run in float64 than 4 times
    eager's own distance.

    Args:
        model: a module or function. It is run as it is, in its mode, without gradients.
        inputs: tensors, or nests of tensors and Python values; the latter are built in.
        kwargs: keyword arguments of the model.
        tol: relative and absolute tolerance, or one figure for both, instead.
        exporter: ``"dynamo"`` or ``"TorchScript"``; when left out the first, and where it fails
            the second. TorchScript's may crash the process on a model that it does not know.
        torch_calls: allow operators of our import that run in PyTorch.
        seed: PyTorch's seed before each side is run.

    Returns:
        what was found. A difference of the reference evaluator or of TVM's importer, and what
        they or the exporter cannot do, stands there and is no failure.

    Raises:
        AssertionError: our import differs from eager, or cannot be made.
        ImportError: onnx or onnxscript is not installed.
        ValueError: `exporter` is none of the two.
    """
    found = compare_with_onnx(
        model,
        *inputs,
        kwargs=kwargs,
        tol=tol,
        exporter=exporter,
        torch_calls=torch_calls,
        seed=seed,
    )
    if found.ours != AGREES:
        raise AssertionError(str(found)) from found.error
    return found


def compare_with_onnx(
    model: Callable[..., Any],
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    tol: float | tuple[float, float] | None = None,
    exporter: str | None = None,
    torch_calls: bool = False,
    seed: int = 0,
    exported_only: bool = False,
) -> OnnxComparison:
    """`assert_matches_onnx` without the assertion: whatever was found is returned.

    Args:
        model: this and the others are those of `assert_matches_onnx`.
        inputs: see there.
        kwargs: see there.
        tol: see there.
        exporter: see there.
        torch_calls: see there.
        seed: see there.
        exported_only: leave it at that where the model cannot be exported.

    Raises:
        ImportError: onnx or onnxscript is not installed.
        ValueError: `exporter` is none of the two.
        Exception: what the model itself raises in eager.
    """
    if exporter not in (None, "dynamo", "TorchScript"):
        raise ValueError(f"exporter={exporter!r}; it takes 'dynamo' or 'TorchScript'")
    sides.require_onnx()
    leaves = pytree.tree_leaves((tuple(inputs), dict(kwargs or {})))
    tensors = [t.detach() for t in leaves if isinstance(t, torch.Tensor)]
    flat = sides.Flat(model, inputs, kwargs or {})
    run = _Run()
    eager = sides.run_eager(flat, tensors, seed)
    exact = sides.run_exact(flat, tensors, seed)
    program = run.step("torch.export", lambda: sides.captured(flat, tensors))
    exported = run.step(
        "torch.onnx.export", lambda: sides.to_onnx(flat, tensors, program, exporter)
    )
    if program is not None and (exported is not None or not exported_only):
        run.step("ours", lambda: sides.run_ours(flat, program, tensors, seed, torch_calls))
    if exported is not None:
        run.step("reference", lambda: sides.run_reference(exported, tensors))
        run.step("tvm", lambda: sides.run_tvm(exported, tensors))

    def versus_eager(side: str) -> str:
        return _against(run.results[side], eager, exact, tol)

    def versus(other: str) -> str:
        return _against(run.results["ours"], run.results[other], None, tol)

    needs = {"ours": "torch.export", "reference": "torch.onnx.export", "tvm": "torch.onnx.export"}
    missing = {s: run.missing(s, needs[s]) for s in _SIDES}
    verdicts = {s: missing[s] or versus_eager(s) for s in _SIDES}
    pairs = {s: missing["ours"] or missing[s] or versus(s) for s in ("reference", "tvm")}
    for side in pairs:
        # Each is as near to a run in float64 as eager is.
        if verdicts["ours"] == verdicts[side] == AGREES:
            pairs[side] = AGREES
    return OnnxComparison(
        **verdicts,
        ours_reference=pairs["reference"],
        ours_tvm=pairs["tvm"],
        exporter=exported.exporter if exported else "",
        opset=exported.opset if exported else 0,
        operators=exported.operators if exported else {},
        seconds=run.seconds,
        error=run.errors.get("ours") or run.errors.get("torch.export"),
    )


class _Run:
    """Steps that may fail: what each gave, what it raised, how long it took."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}
        self.errors: dict[str, Exception] = {}
        self.seconds: dict[str, float] = {}

    def step(self, name: str, function: Callable[[], Any]) -> Any:
        """What the function returns; None where it raises."""
        began = time.perf_counter()
        try:
            self.results[name] = function()
        except ImportError:
            raise
        except Exception as error:  # a side that cannot is a finding
            self.errors[name] = error
        self.seconds[name] = round(time.perf_counter() - began, 3)
        return self.results.get(name)

    def missing(self, side: str, before: str) -> str:
        """Why a side gave nothing; empty where it gave something."""
        if side in self.results:
            return ""
        name = side if side in self.errors else before
        if name not in self.errors:
            return "cannot: not tried"
        name = side if side in self.errors else before
        where = "" if name == side else f"{name}: "
        return f"cannot: {where}{_short(self.errors[name])}"


def _against(
    got: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor] | None,
    tol: Any,
) -> str:
    # Ours are followed by the new values of what the model writes to.
    if len(got) < len(wanted):
        return f"differs: {len(got)} outputs, {len(wanted)} expected"
    for index, (a, e) in enumerate(zip(got, wanted, strict=False)):
        real = exact[index] if exact is not None and index < len(exact) else None
        found = difference(a, e, real, tol)
        if found:
            return f"differs: output {index}: {found}"
    return AGREES


def _short(error: BaseException) -> str:
    """An error's class and the line that says most, of what it came from."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, UnsupportedOpError):
        text = ", ".join(m.name for m in error.missing)
    else:
        lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines()]
        text = next((line for line in lines if line), "")
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return f"{type(error).__name__}: {text}"
