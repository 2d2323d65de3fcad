"""Whole networks against their export to ONNX; ``pytest tests/test_onnx_networks.py`` runs all."""

from __future__ import annotations

import pytest
from networks import NETWORKS
from onnx_tables import remembered

from fx2relax.onnx_check import AGREES
from fx2relax.testing import assert_matches_onnx

# What a plain run of all tests takes: small, and between them most kinds of layers.
LIGHT = ("lstm", "dlrm", "vit")
# Operators that TVM's ONNX importer has no converter for, or converts to a module with an error.
NOT_IN_TVM = {
    "lstm": "LSTM",
    "dlrm": "Loop",
    "t5": "broadcast_to expects",
}
# GatherElements of the reference evaluator reshapes a row of more than 32 indices wrongly.
NOT_IN_REFERENCE = {"bert": "cannot reshape array of size 1"}

_ALL = [n if n in LIGHT else pytest.param(n, marks=pytest.mark.whole) for n in NETWORKS]


@pytest.mark.parametrize("name", _ALL)
def test_network(name):
    model, args, kwargs = NETWORKS[name].build()
    with remembered():
        found = assert_matches_onnx(model, *args, kwargs=kwargs)
    for side, missing in (("reference", NOT_IN_REFERENCE), ("tvm", NOT_IN_TVM)):
        verdict = getattr(found, side)
        if verdict != AGREES:  # a later release may know it
            assert verdict.startswith("cannot: "), str(found)
            assert name in missing, str(found)
            assert missing[name] in verdict
    assert found.compared
