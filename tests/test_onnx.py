"""A model's export to ONNX as the second opinion on our import."""

from __future__ import annotations

import sys

import pytest
import torch
from onnx_tables import remembered
from torch import nn

from fx2relax import onnx_sides, overrides
from fx2relax.closeness import difference
from fx2relax.compat import op
from fx2relax.errors import UnsupportedOpError
from fx2relax.onnx_check import AGREES, compare_with_onnx
from fx2relax.testing import OnnxComparison, assert_matches_onnx

aten = torch.ops.aten
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True, scope="module")
def quick():
    with remembered():
        yield


def assert_all_agree(model, *inputs, **options):
    found = assert_matches_onnx(model, *inputs, **options)
    assert (found.ours, found.reference, found.tvm) == (AGREES,) * 3, str(found)
    assert (found.ours_reference, found.ours_tvm) == (AGREES,) * 2, str(found)
    assert found.compared
    return found


def test_a_module():
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3), nn.Softmax(-1))
    found = assert_all_agree(model, torch.randn(4, 5))
    assert found.exporter == "dynamo"
    assert found.opset > 10
    assert found.operators["Gemm"] == 2
    assert set(found.seconds) == {
        "torch.export",
        "torch.onnx.export",
        "ours",
        "reference",
        "tvm",
    }


def test_nested_arguments_keywords_and_python_values():
    def model(pair, power, *, scale, shift=None):
        x, y = pair["x"], pair["y"]
        return {"sum": x**power + y * scale, "count": 3, "rest": [y, shift]}

    x, y = torch.randn(2, 3), torch.randn(3)
    assert_all_agree(model, {"y": y, "x": x}, 2, kwargs={"scale": torch.tensor(0.5)})


@pytest.mark.parametrize("shape", [(), (0, 3), (1,)])
def test_small_shapes(shape):
    assert_all_agree(lambda x: x * 2 + 1, torch.randn(shape))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.bool])
def test_dtypes(dtype):
    x = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    assert_all_agree(lambda x: torch.cat([x, x.flip(1)]), x)


def test_bfloat16():
    found = assert_matches_onnx(lambda x: x + x, torch.randn(3, 4).bfloat16())
    assert found.reference == found.ours_reference == AGREES


def test_complex_numbers_are_pairs():
    x = torch.randn(3, 4, dtype=torch.complex64)
    found = assert_matches_onnx(lambda x, y: x * y, x, x.flip(0).conj())
    assert found.reference == found.ours_reference == AGREES


def test_nan_and_infinities():
    found = assert_matches_onnx(torch.log, torch.tensor([0.0, -1.0, NAN, INF, 2.0]))
    assert found.reference == AGREES


def test_strided_inputs_and_an_input_given_twice():
    x = torch.randn(6, 4).t()[:, ::2]
    assert_all_agree(lambda x, y: x @ y.t(), x, x)


def test_the_model_and_its_inputs_stay_as_they_are():
    model = nn.BatchNorm1d(3, momentum=0.5)
    x = torch.randn(4, 3)
    before, held = x.clone(), {k: v.clone() for k, v in model.state_dict().items()}
    assert_matches_onnx(model, x)
    assert torch.equal(x, before)
    assert all(torch.equal(v, held[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("exporter", ["dynamo", "TorchScript"])
def test_either_exporter_and_an_unused_input(exporter):
    found = assert_all_agree(
        lambda x, unused, y: x.relu() - y,
        torch.randn(3),
        torch.randn(2),
        torch.randn(3),
        exporter=exporter,
    )
    assert found.exporter == exporter


def test_the_second_exporter_where_the_first_cannot(monkeypatch):
    def fails(*_):
        raise RuntimeError("not this one")

    monkeypatch.setattr(onnx_sides, "_by_dynamo", fails)
    assert assert_all_agree(torch.relu, torch.randn(3)).exporter == "TorchScript"


def test_an_fx_trace_where_torch_export_has_no_program(monkeypatch):
    def fails(*_):
        raise RuntimeError("not this one")

    monkeypatch.setattr(torch.export, "export", fails)
    found = assert_all_agree(nn.Linear(3, 4), torch.randn(2, 3))
    assert found.exporter == "TorchScript"


def wrong_sine(self):
    return op.cos(self)


def test_a_difference_of_ours_fails():
    with overrides({aten.sin.default: wrong_sine}), pytest.raises(AssertionError) as caught:
        assert_matches_onnx(torch.sin, torch.zeros(2, 3))
    text = str(caught.value)
    assert "our import, eager" in text
    assert "differs: output 0: 6 of 6 values, 1 at [0, 0], expected 0" in text


def test_who_differs_is_told():
    with overrides({aten.sin.default: wrong_sine}):
        found = compare_with_onnx(torch.sin, torch.zeros(2, 3))
    assert found.reference == found.tvm == AGREES
    assert found.ours.startswith("differs")
    assert found.ours_reference.startswith("differs")
    assert found.ours_tvm.startswith("differs")


def test_a_difference_of_the_others_is_no_failure(monkeypatch):
    real = onnx_sides.run_reference
    monkeypatch.setattr(onnx_sides, "run_reference", lambda *a: [t + 1 for t in real(*a)])
    found = assert_matches_onnx(torch.sin, torch.zeros(3))
    assert found.ours == found.tvm == AGREES
    assert found.reference.startswith("differs: output 0: 3 of 3 values")
    assert found.ours_reference.startswith("differs")


def test_what_the_others_cannot_is_told():
    found = assert_matches_onnx(nn.LSTM(3, 4), torch.randn(5, 2, 3))
    assert found.reference == AGREES
    assert found.tvm.startswith("cannot: ")
    assert "LSTM" in found.tvm
    assert found.compared
    assert "TVM's ONNX importer, eager" in str(found)


def test_what_cannot_be_exported_is_told():
    x = torch.eye(3) * 2
    found = assert_matches_onnx(torch.linalg.inv, x, exporter="dynamo")
    assert found.ours == AGREES
    assert found.reference.startswith("cannot: torch.onnx.export: ")
    assert "linalg_inv" in found.reference
    assert not found.compared
    assert str(found).startswith("not exported to ONNX")


def test_what_we_cannot_import_fails():
    with pytest.raises(AssertionError, match="cannot: UnsupportedOpError: ") as caught:
        assert_matches_onnx(lambda x: torch.fft.rfft(x).abs(), torch.randn(8))
    assert isinstance(caught.value.__cause__, UnsupportedOpError)
    assert_matches_onnx(lambda x: torch.fft.rfft(x).abs(), torch.randn(8), torch_calls=True)


def test_without_onnx(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match="pip install onnx onnxscript"):
        assert_matches_onnx(torch.sin, torch.zeros(3))


def test_without_onnxscript(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert assert_matches_onnx(torch.sin, torch.zeros(3)).exporter == "TorchScript"
    with pytest.raises(ImportError, match="pip install onnx onnxscript"):
        assert_matches_onnx(torch.sin, torch.zeros(3), exporter="dynamo")


def test_an_unknown_exporter():
    with pytest.raises(ValueError, match="it takes 'dynamo' or 'TorchScript'"):
        assert_matches_onnx(torch.sin, torch.zeros(3), exporter="other")


def test_what_eager_refuses_is_raised():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        assert_matches_onnx(torch.mm, torch.zeros(2, 3), torch.zeros(2, 3))


def test_a_comparison_without_others():
    found = OnnxComparison("agrees", *["cannot: not tried"] * 4)
    assert not found.compared
    assert "our import, eager                       agrees" in str(found)


class TestDifference:
    def test_none(self):
        assert difference(torch.tensor([1.0, NAN, INF]), torch.tensor([1.0, NAN, INF])) is None

    def test_strides_do_not_matter(self):
        x = torch.randn(3, 4)
        assert difference(x, x.t().contiguous().t()) is None

    def test_dtype_before_shape(self):
        found = difference(torch.zeros(3), torch.zeros(2, dtype=torch.float64))
        assert found == "dtype torch.float32, expected torch.float64"

    def test_shape(self):
        assert difference(torch.zeros(3), torch.zeros(1, 3)) == "shape [3], expected [1, 3]"

    def test_integers(self):
        found = difference(torch.tensor([1, 5]), torch.tensor([1, 7]))
        assert found == "1 of 2 values, 5 at [1], expected 7"

    @pytest.mark.parametrize(
        ("got", "wanted"), [(NAN, 1.0), (1.0, NAN), (INF, 1.0), (1.0, INF), (INF, -INF), (NAN, INF)]
    )
    def test_special_values_elsewhere(self, got, wanted):
        found = difference(torch.tensor([[0.0, got]]), torch.tensor([[0.0, wanted]]))
        assert found is not None
        assert "elsewhere: 1 of 2 values" in found
        assert "at [0, 1]" in found

    def test_tolerance(self):
        near, one = torch.tensor([1.001]), torch.tensor([1.0])
        assert difference(near, one) is not None
        assert difference(near, one, tol=1e-2) is None
        assert difference(near, one, tol=(1e-2, 0.0)) is None

    def test_as_near_to_float64_as_eager(self):
        got, eager = torch.tensor([100.003]), torch.tensor([99.999])
        exact = torch.tensor([100.0], dtype=torch.float64)
        assert difference(got, eager) is not None
        assert difference(got, eager, exact) is None
        assert difference(got + 0.01, eager, exact) is not None

    def test_complex(self):
        x = torch.randn(3, dtype=torch.complex64)
        assert difference(torch.view_as_real(x), x) is None
        assert difference(x, x.conj().resolve_conj()) is not None
        assert difference(x, x + 0j) is None
