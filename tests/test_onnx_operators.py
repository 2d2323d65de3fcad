"""A seeded slice of the operators against their export to ONNX; `sweep_onnx.py` runs all."""

from __future__ import annotations

import random

import pytest
from onnx_differences import DIFFERENCES, unexplained
from opinfo.onnx import SIDES, Found, OnnxOutcome, onnx_rows, run_onnx
from opinfo.rows import OPS, Row

_SLICE = random.Random(2026).sample(list(onnx_rows()), 40)


@pytest.mark.parametrize("row", _SLICE, ids=lambda row: row.op)
def test_as_onnx(row: Row) -> None:
    outcome = run_onnx(row, 1)
    assert unexplained(outcome) == []


def test_the_table_names_operators_and_sides():
    for name, sides in DIFFERENCES.items():
        assert name in OPS
        assert set(sides) <= {*SIDES, "both", "ours"}
        assert all(len(why) > 20 for why in sides.values())


def found(**verdicts: str) -> OnnxOutcome:
    agree = dict.fromkeys(("ours", "reference", "tvm", "ours_reference", "ours_tvm"), "agrees")
    return OnnxOutcome("sin", [Found("float32[2]", **{**agree, **verdicts}, exporter="dynamo")])


def test_what_counts():
    assert found().compared
    assert unexplained(found()) == []
    assert found(ours="cannot: UnsupportedOpError: aten.sin.default").wrong == []
    failed = found(ours="cannot: ImportFailure: shape")
    assert unexplained(failed) == ["ours: float32[2]: cannot: ImportFailure: shape"]
    refused = found(ours="cannot: ImportFailure: of a view")
    refused.op = "as_strided.partial_views"
    assert unexplained(refused) == []
    refused.found[0].ours = "differs: output 0: x"
    assert unexplained(refused) == ["ours: float32[2]: differs: output 0: x"]
    assert unexplained(found(tvm="differs: output 0: x")) == [
        "tvm: float32[2]: differs: output 0: x"
    ]


def test_a_wrong_converter_is_found():
    import torch

    from fx2relax import overrides
    from fx2relax.compat import op

    def wrong(self):
        return op.cos(self)

    with overrides({torch.ops.aten.sin.default: wrong}):
        outcome = run_onnx(Row("sin", "float32", "forward"), 2)
    assert outcome.compared
    assert unexplained(outcome)[0].startswith("ours: ")
