"""Pages with tables of runs: what is put into them, and that ours hold what the run gave."""

from __future__ import annotations

from pathlib import Path

import benchmarks_found
import pytest
from click.testing import CliRunner

from benchmarks.pages import fill, main
from benchmarks.results import Cell, Group, Results, environment

ROOT = Path(benchmarks_found.__file__).parents[1]
PAGES = ["README.md", "docs/benchmarks.md", "docs/benchmarks-more.md"]


def _results() -> Results:
    cells = {side: Cell(ms=ms, rounds=[ms]) for side, ms in (("eager", 6.0), ("relax", 2.0))}
    results = Results(environment(["--quick", "--resume", "--out", "somewhere"]))
    results.put(Group("inference", "network", "mlp", 1, 2, cells | {"dynamo": Cell(ms=5.0)}))
    return results


def test_prose_and_other_runs_stay(tmp_path: Path) -> None:
    page = """Before.

<!-- run mine level=3 suffix=", here" tables="Summary;Latency" where=no sides=eager,relax -->
What was there.
<!-- end -->
Between.
<!-- run another -->
Its own.
<!-- end -->
<!-- run mine level=0 tables=Latency -->
<!-- end -->
"""
    text = fill(page, {"mine": _results()}, tmp_path)
    kept = "\nBetween.\n<!-- run another -->\nIts own.\n<!-- end -->\n<!-- run mine level=0"
    first, second = text.split(kept)
    assert first.startswith("Before.\n\n<!-- run mine level=3")
    assert second.endswith("<!-- end -->\n")
    assert "### Summary, here\n" in first
    assert "### Latency: networks, here\n" in first
    assert "What was there" not in first
    assert "In short" not in first
    assert "| mlp | 1 | 2 | 6 (3.00x) | 2 |" in first
    assert "python -m benchmarks --quick" not in first
    assert "#" not in second
    assert "`python -m benchmarks --quick` at" in second
    assert "5 (2.50x)" in second
    assert fill(text, {"mine": _results()}, tmp_path) == text


def test_plots_are_drawn_beside_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- run mine plots=drawn -->\n<!-- end -->\n")
    (tmp_path / "drawn").mkdir()
    _results().save(tmp_path / "in" / "results.json")
    done = CliRunner().invoke(main, [f"mine={tmp_path / 'in'}", str(page)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "![latency-networks](drawn/latency-networks.png)\n<!-- end -->" in page.read_text()
    assert (tmp_path / "drawn" / "latency-networks.png").stat().st_size > 1000


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- run mine levels=3 -->\n<!-- end -->\n")
    _results().save(tmp_path / "results.json")
    for given, reason in ((tmp_path, "levels"), (tmp_path / "none", "results.json")):
        done = CliRunner().invoke(main, [f"mine={given}", str(page)])
        assert done.exit_code == 1
        assert reason in done.output
    assert page.read_text() == "<!-- run mine levels=3 -->\n<!-- end -->\n"


@pytest.mark.parametrize("page", PAGES)
def test_our_pages_are_what_the_runs_gave(page: str, tmp_path: Path) -> None:
    text = (ROOT / page).read_text()
    assert text.count("<!-- run ") == text.count("<!-- end -->") > 0
    (tmp_path / "benchmarks").mkdir()
    full = Results.load(ROOT / "docs/benchmarks/results.json")
    assert fill(text, {"full": full}, tmp_path) == text
