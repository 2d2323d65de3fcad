"""Every core ATen operator has a route, as `fx2relax ops` measures it; docs/ say the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import fx2relax
from fx2relax import coverage_report, decompositions
from fx2relax.cli import main
from fx2relax.core_calls import CALLS
from fx2relax.coverage import chosen, core_overloads, measure

ROOT = Path(__file__).parent.parent
PINNED = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.M)
pinned = pytest.mark.skipif(
    PINNED is None or not torch.__version__.startswith(f"{PINNED[1]}."),
    reason="each version of PyTorch has core operators of its own",
)
aten = torch.ops.aten


@pytest.fixture(scope="module")
def rows():
    table = decompositions.table()
    return {str(target): measure(target, table) for target in core_overloads()}


def one(target):
    return measure(target, decompositions.table())


def declines(*args, **kwargs):
    raise fx2relax.Unsupported("any tensor")


@pinned
def test_every_core_operator_has_an_example():
    assert {str(target) for target in core_overloads()} == set(CALLS)
    assert len(CALLS) == 193


@pinned
def test_the_readme_is_current(rows):
    page = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")
    block = page.partition("<!-- ops -->\n")[2].partition("\n<!-- /ops -->")[0]
    expected = coverage_report.summary(list(rows.values()))
    assert block == expected, "put what `fx2relax ops --summary` prints between the comments"


def test_only_random_generators_fft_and_complex_numbers_run_in_pytorch(rows):
    found = {row.name: row.reason for row in rows.values() if row.route == "torch call"}
    assert set(found.values()) <= {"random generators", "FFT", "complex numbers"}, found
    assert found["aten.rand.default"] == "random generators"
    assert found["aten._fft_r2c.default"] == "FFT"


def test_every_call_can_be_imported(rows):
    failed = {row.name: what for row in rows.values() for what in row.errors if what != "complex64"}
    assert not failed


def test_real_dtypes_are_compiled(rows):
    missing = {
        row.name: dtype
        for row in rows.values()
        for dtype, good in row.dtypes.items()
        if not good and dtype != "complex64" and not row.reason
    }
    assert not missing


def test_symbolic_sizes_and_gradients_are_compiled(rows):
    compiled = [row for row in rows.values() if not row.reason]
    assert [r.name for r in compiled if r.dynamic not in ("yes", "-")] == []
    assert [r.name for r in compiled if r.gradient not in ("yes", "-")] == []


@pytest.mark.parametrize(
    ("name", "route", "used", "dtypes", "dynamic", "gradient"),
    [
        ("aten.mm.default", "converter", ["matmul"], "8", "yes", "yes"),
        ("aten.gelu.default", "converter", ["nn.gelu"], "4", "yes", "yes"),
        ("aten.cumsum.default", "converter", ["@cumsum"], "9", "yes", "yes"),
        ("aten.bitwise_and.Tensor", "converter", ["bitwise_and"], "4", "yes", "-"),
        ("aten.hardtanh.default", "decomposition", ["@clamp"], "6", "yes", "yes"),
        ("aten.atan2.out", "decomposition", ["@atan2"], "4", "yes", "-"),
        ("aten.sym_size.int", "converter", [], "9", "yes", "-"),
        ("aten.argmax.default", "converter", None, "7", "yes", "-"),
        ("aten.native_dropout.default", "torch call", None, "0", "torch call", "yes"),
    ],
)
def test_known_rows(rows, name, route, used, dtypes, dynamic, gradient):
    row = rows[name]
    assert (row.route, row.dynamic, row.gradient) == (route, dynamic, gradient)
    if used is not None:
        assert [*row.relax, *(f"@{k}" for k in row.kernels)] == used
        missing = [f" + {dtype}" for dtype, good in row.dtypes.items() if not good]
        assert str(sum(row.dtypes.values())) + "".join(missing) == dtypes
    assert row.errors == {}


def test_an_operator_without_an_example_has_a_route_alone():
    assert (one(aten.silu.default).route, one(aten.silu.default).call) == ("converter", "")
    assert one(aten.celu.default).route == "decomposition"
    assert one(aten._fft_c2c.default).route == "torch call"


def test_a_call_that_a_converter_declines_is_a_torch_call():
    with fx2relax.overrides({aten._cdist_forward.default: declines}):
        row = one(aten._cdist_forward.default)
    assert (row.route, row.torch) == ("torch call", ["aten._cdist_forward.default"])
    assert (row.reason, row.dynamic, set(row.dtypes.values())) == ("", "torch call", {False})


def test_a_converter_that_fails_is_reported():
    with fx2relax.overrides({aten.erf.default: lambda self: 1 / 0}):
        row = one(aten.erf.default)
    assert "ZeroDivisionError" in row.errors["float32"]
    assert "ZeroDivisionError" in row.errors["dynamic shapes"]
    assert (row.route, row.dynamic) == ("torch call", "no")


def test_a_backward_operator_without_a_converter_is_found():
    with fx2relax.overrides({aten._cdist_backward.default: declines}):
        row = one(aten._cdist_forward.default)
    assert (row.route, row.gradient) == ("converter", "torch call")
    assert row.backward_torch == ["aten._cdist_backward.default"]


def test_patterns():
    assert [str(t) for t in chosen(["aten.mm.*", "aten.bm*"])] == [
        "aten.bmm.default",
        "aten.mm.default",
    ]


def test_the_command_prints_a_table():
    done = CliRunner().invoke(main, ["ops", "aten.mm.*", "aten.rand.*"])
    assert done.exit_code == 0, done.output
    assert re.search(r"aten\.mm\.default +converter +matmul +all +yes", done.output)
    assert re.search(r"aten\.rand\.default +torch call +torch: aten\.rand\.default", done.output)
    assert done.output.endswith(": converter 1, torch call 1\n")


def test_the_command_prints_json():
    done = CliRunner().invoke(main, ["ops", "aten.mm.default", "--json"])
    (row,) = json.loads(done.output)
    assert (row["name"], row["call"]) == ("aten.mm.default", "x[n, k], x[k, m]")
    assert row["dtypes"]["bfloat16"] is True


def test_a_pattern_that_matches_nothing_is_an_error():
    done = CliRunner().invoke(main, ["ops", "aten.nothing"])
    assert done.exit_code == 2
    assert "no core ATen operator matches aten.nothing" in done.output
