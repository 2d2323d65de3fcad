"""Where ONNX's reference evaluator or TVM's ONNX importer differs: who is right, and why.

By operator of `op_db`, then by side: ``"reference"``, ``"tvm"``, or ``"both"`` where the exported
model itself says something else than the operator.
"""

from __future__ import annotations

from opinfo.onnx import SIDES, OnnxOutcome

DIFFERENCES: dict[str, dict[str, str]] = {}


def unexplained(outcome: OnnxOutcome) -> list[str]:
    """The differences of an outcome's other sides that the table does not explain."""
    known = DIFFERENCES.get(outcome.op, {})
    return [
        f"{side}: {text}"
        for side in SIDES
        if side not in known and "both" not in known
        for text in outcome.differing(side)
    ]
