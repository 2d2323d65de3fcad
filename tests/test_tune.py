"""Tuning: schedules compute the same, what is kept is faster, and databases hold it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from tune_cases import accepted, lowered, named, recorded
from tune_cases import tuning_settings as tuning_settings

import fx2relax
from fx2relax import disk, stages
from fx2relax.pipeline import spaces, tuned
from fx2relax.pipeline.target import host_target
from fx2relax.tuning import measure
from fx2relax.tuning.database import Database
from fx2relax.tuning.kernels import Collector, Kernel, Lookup
from fx2relax.tuning.search import Search

pytestmark = pytest.mark.usefixtures("tuning_settings")


# What there is to tune, and how it may run.


def test_kernels_are_known_by_what_they_compute() -> None:
    first, second = lowered(), lowered()
    assert len(first.kernels) >= 2
    assert first.kernels.keys() == second.kernels.keys()
    for key, kernel in first.kernels.items():
        assert tuned.key_of(kernel.func.with_attr("global_symbol", "other")) == key
        assert tuned.key_of(tuned.read(tuned.spelled(kernel.func))) == key
        assert kernel.calls == 1


def test_sizes_that_are_not_known_cannot_be_tuned() -> None:
    module = fx2relax.from_fx(torch.fx.symbolic_trace(nn.GELU()), [(("n", 8), "float32")])
    collector = Collector()
    with stages.observed(collector):
        fx2relax.pipeline.lower(module, library="none")
    assert not collector.kernels
    assert collector.symbolic


@pytest.mark.parametrize("part", ["matmul", "softmax"])
def test_drawn_schedules_compute_the_same(part: str) -> None:
    kernel, target = named(lowered(), part), host_target()
    space = spaces.Space(kernel.func, target, "seed")
    arguments = tuned.arguments(kernel.func)
    own = tuned.code(tuned.own(kernel.func, target), target)
    kinds = set()
    for _ in range(6):
        drawn = space.draw([])
        assert drawn is not None
        kinds.update(drawn.how)
        again = tuned.apply(json.loads(json.dumps(drawn.how)), kernel.func, target)
        assert tuned.digest_of(again) == drawn.digest
        found = measure.compare(
            measure.Here(), arguments, own, tuned.code(drawn.func, target), drawn.digest
        )
        assert found.ratio > 0
    assert "trace" in kinds or part == "matmul"
    if part == "matmul":
        assert "tiles" in kinds


def test_a_schedule_that_computes_something_else_is_found() -> None:
    def kernel(factor: float) -> Any:
        graph = torch.fx.symbolic_trace(lambda x: x * factor)
        module = fx2relax.from_fx(graph, [((8, 8), "float32")])
        collector = Collector()
        with stages.observed(collector):
            fx2relax.pipeline.lower(module, library="none")
        return next(iter(collector.kernels.values())).func

    target = host_target()
    one, other = (tuned.code(tuned.own(kernel(f), target), target) for f in (2.0, 2.01))
    arguments = tuned.arguments(kernel(2.0))
    with pytest.raises(measure.Differs, match="differs by"):
        measure.compare(measure.Here(), arguments, one, other, "name")


def test_infinities_and_nans_are_compared() -> None:
    import numpy as np

    number, nan = np.array([1.0, 2.0], "float32"), np.array([1.0, np.nan], "float32")
    measure._agree([number], [number])
    measure._agree([nan], [nan])
    for a, b in ((number, nan), (nan, number), (np.array([1.0, np.inf], "float32"), number)):
        with pytest.raises(measure.Differs):
            measure._agree([a], [b])


@pytest.mark.parametrize(
    ("times", "accepted"),
    [
        ([(1.0, 0.9)] * 15, True),
        ([(1.0, 0.97)] * 15, False),  # less is noise
        ([(1.0, 0.5)] * 12 + [(1.0, 1.1)] * 3, False),  # it lost too often
        ([(1.0, 0.9)] * 13 + [(1.0, 1.1)] * 2, True),
        ([(1.0, 0.5)] * 3, False),  # too few rounds
        ([(1.0, 1.2)] * 15, False),
    ],
)
def test_only_what_is_clearly_faster_is_accepted(
    times: list[tuple[float, float]], accepted: bool
) -> None:
    assert measure.judged(times).accepted is accepted


@pytest.mark.parametrize(
    "how",
    [
        {"tiles": {"rows": 0, "lanes": 16, "chains": 1, "block": 1, "columns": 16, "depth": 1}},
        {"tiles": {"rows": 4, "lanes": 16, "chains": 3, "block": 4, "columns": 16, "depth": 1}},
        {"tiles": {"rows": 4}},
        {"trace": [[["UnsafeSetDType", [], [], []]], []]},
        {"trace": [[["Annotate", [], ["pragma_import_c"], []]], []]},
        {"trace": "nonsense"},
        {},
    ],
)
def test_a_record_that_is_none_is_refused(how: dict[str, Any]) -> None:
    kernel = named(lowered(), "matmul")
    with pytest.raises(tuned.NotApplicable):
        tuned.apply(how, kernel.func, host_target())


# The database.


def test_a_database_survives_whatever_is_in_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = named(lowered(), "softmax")
    database = Database(host_target(), tmp_path)
    assert database.read() == {}
    assert database.state() == ""
    database.add({"kernel": kernel.key, "name": "softmax", "tir": tuned.spelled(kernel.func)})
    database.add(recorded(kernel, how={"trace": []}))
    with database.path.open("ab") as file:  # someone died while it wrote
        file.write(b'{"kernel": "' + kernel.key.encode() + b'", "digest": "half')
    database.add(recorded(kernel, digest="e", ratio=0.25, how={"trace": [1]}))
    database.add({"kernel": kernel.key, "digest": "f", "failed": "crashed"})
    database.add({"kernel": 3})
    database.add(recorded(kernel, digest="g", ratio=0.1, how={"trace": []}, accepted=False))
    (known,) = database.read().values()
    assert "1 line of " in caplog.text
    assert caplog.text.count("cannot be read, and the rest is used") == 1
    assert known.tried == {"d", "e", "f", "g"}
    assert known.failed == 1
    assert known.best is not None
    assert known.best["digest"] == "e"
    assert tuned.key_of(tuned.read(known.tir)) == kernel.key
    database.add({"kernel": kernel.key, "digest": "e", "revoked": True})
    best = database.read()[kernel.key].best
    assert best is not None
    assert best["digest"] == "d"


def test_processes_write_at_once(tmp_path: Path) -> None:
    script = """
        import sys
        from fx2relax.pipeline.target import host_target
        from fx2relax.tuning.database import Database
        database = Database(host_target(), sys.argv[1])
        for n in range(60):
            database.add({"kernel": sys.argv[2], "digest": str(n), "failed": "x" * 5000})
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    pair = [subprocess.Popen([*command, key]) for key in ("a", "b")]
    assert [process.wait(300) for process in pair] == [0, 0]
    (file,) = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted((one["kernel"], int(one["digest"])) for one in lines) == [
        (key, n) for key in "ab" for n in range(60)
    ]


def test_the_cache_is_its_owners_alone(tmp_path: Path) -> None:
    database = Database(host_target())
    assert database.path.is_relative_to(tmp_path / "cache")
    database.add({"kernel": "a", "digest": "b"})
    assert database.path.stat().st_mode & 0o077 == 0
    database.where.chmod(0o777)
    with pytest.raises(disk.NotOwn):
        Database(host_target())


def test_a_database_is_used_in_another_folder(tmp_path: Path) -> None:
    collector, target = lowered(), host_target()
    kernel, other = named(collector, "softmax"), named(collector, "matmul")
    drawn = accepted(tmp_path / "here", kernel)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    lookup = Lookup(Database(target, tmp_path / "there").read())
    assert lookup.covers([kernel.key])
    assert not lookup.covers([other.key])
    assert lookup(other.func, target) is None
    found = lookup(kernel.func, target)
    assert lookup.used == {kernel.key}
    assert found.attrs["tirx.is_scheduled"]
    assert tuned.digest_of(tuned.nameless(found)) == drawn.digest


def test_a_database_that_does_not_fit_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kernel, target = named(lowered(), "softmax"), host_target()
    database = Database(target, tmp_path)
    database.add({"kernel": kernel.key, "name": "softmax", "tir": tuned.spelled(kernel.func)})
    database.add(recorded(kernel, how={"trace": [[["Tensorize", [], [], []]], []]}))
    lookup = Lookup(database.read())
    assert lookup(kernel.func, target) is None
    assert not lookup.used
    assert "a tuned schedule is not used" in caplog.text


# Searching.


def _search(folder: Path, kernels: list[Kernel]) -> tuple[Search, list[dict[str, Any]], Database]:
    target, told = host_target(), []
    database = Database(target, folder)
    return Search(kernels, target, database, measure.Here(), told.append), told, database


def test_a_search_goes_on_from_what_is_known(tmp_path: Path) -> None:
    kernels = list(lowered().kernels.values())
    search, told, database = _search(tmp_path, kernels)
    search.run(1.0)
    first = {step["tried"] for step in told if "tried" in step}
    assert first
    known = database.read()
    assert set(known) == {kernel.key for kernel in kernels}
    assert set.union(*(each.tried for each in known.values())) == first
    search, told, database = _search(tmp_path, kernels)
    search.run(1.0)
    second = {step["tried"] for step in told if "tried" in step}
    assert second
    assert not first & second
    for each in database.read().values():
        if each.best is not None:
            assert each.best["accepted"]
            assert each.best["ratio"] <= measure.CLEAR


def test_what_is_not_faster_again_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = named(lowered(), "softmax")
    drawn = accepted(tmp_path, kernel)
    monkeypatch.setattr("fx2relax.tuning.search.compare", lambda *a: measure.Timed(1.0, 1.3, False))
    search, told, database = _search(tmp_path, [kernel])
    search.run(0.01)
    assert {"revoked": drawn.digest} in [
        {k: v for k, v in step.items() if k == "revoked"} for step in told
    ]
    assert database.read()[kernel.key].best is None


def test_a_database_that_is_cut_off_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = Database(host_target(), tmp_path)
    database.add({"kernel": "k", "digest": "a", "failed": "crashed"})
    database.add({"kernel": "k", "digest": "b", "failed": "crashed"})
    database.path.write_bytes(database.path.read_bytes()[:-9])
    assert database.read()["k"].tried == {"a"}
    assert database.read()["k"].tried == {"a"}
    assert caplog.text.count("1 line of ") == 1
