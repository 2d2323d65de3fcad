"""The figures that a run comes down to: geometric means and extremes of ratios, beside their goals.

A latency ratio says how many times faster our side is than the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.cases import MODES
from benchmarks.results import Cell, Group, Results
from benchmarks.sides import DYNAMO, OURS, SIDES, split


@dataclass
class Figure:
    """A line of the summary.

    Attributes:
        what: which cells, against whom.
        value: the figure in words.
        goal: what it is to be, or nothing.
        met: whether it is; None without a goal or without a cell.
    """

    what: str
    value: str
    goal: str = ""
    met: bool | None = None


@dataclass(frozen=True)
class _Goal:
    """Against one side: at least `mean` in the geometric mean, and `least` in every cell."""

    other: str
    mean: float | None = None
    least: float | None = None


_GOALS = {
    ("inference", "network"): (
        _Goal("inductor", 1.25, 0.97),
        _Goal("eager", 1.4, 1.0),
        _Goal("inductor-freezing", 1.0),
        _Goal("openvino", 1.0),
        _Goal("relax_dynamo"),
        _Goal(DYNAMO),
    ),
    ("inference", "kernel"): (
        _Goal("inductor", 1.2, 0.9),
        _Goal("eager"),
        _Goal("inductor-freezing"),
        _Goal("openvino"),
        _Goal("relax_dynamo"),
    ),
    ("inference", "overhead"): (_Goal("inductor", 1.0), _Goal("eager"), _Goal(DYNAMO)),
    ("train", "network"): (_Goal("inductor", 1.0), _Goal("eager")),
    ("autocast", "network"): (
        _Goal("inductor", 1.0, 1.0),
        _Goal("eager"),
        _Goal("inductor-freezing"),
    ),
}
COLD = WARM = 1 / 3
MEMORY = 1.1
OPTIONED = 1.5


def geometric_mean(values: Iterable[float]) -> float:
    """NaN of nothing."""
    logs = [math.log(v) for v in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan


def right(group: Group, side: str) -> Cell | None:
    """A side's cell, if it has a time and eager's results."""
    cell = group.cells.get(side)
    return cell if cell is not None and cell.status == "ok" and cell.ms else None


def ratio(group: Group, other: str, ours: str = OURS) -> float | None:
    """How many times faster `ours` is than `other`."""
    a, b = right(group, other), right(group, ours)
    return a.ms / b.ms if a and b and a.ms and b.ms else None


def parts(results: Results) -> list[tuple[str, str, list[Group]]]:
    """The groups by mode and kind, in the order of the tables."""
    kinds = ("network", "kernel", "overhead")
    found = [
        (mode, kind, [g for g in results.groups if (g.mode, g.kind) == (mode, kind)])
        for mode in MODES
        for kind in kinds
    ]
    return [part for part in found if part[2]]


def title(mode: str, kind: str) -> str:
    """A part's heading."""
    if mode == "inference":
        return {"network": "networks", "kernel": "kernels", "overhead": "one call's cost"}[kind]
    return {"train": "training steps", "autocast": "networks, bfloat16 autocast"}[mode]


def sides(results: Results) -> list[str]:
    """The columns that any group has, in the order of `SIDES`."""
    found: dict[str, None] = {}
    for group in results.groups:
        found |= dict.fromkeys(group.cells)
    return sorted(found, key=lambda side: (list(SIDES).index(split(side)[0]), side))


def _latency(mode: str, kind: str, groups: Sequence[Group], goal: _Goal) -> Figure:
    what = f"{title(mode, kind)}, against {goal.other}"
    pairs = [(r, g) for g in groups if (r := ratio(g, goal.other)) is not None]
    # A cell without our result is a cell that is not faster.
    lost = sum(1 for g in groups if OURS in g.cells and right(g, goal.other) and not right(g, OURS))
    wanted = [
        *([f"mean at least {goal.mean:g}"] if goal.mean else []),
        *([f"none below {goal.least:g}"] if goal.least else []),
    ]
    if not pairs:
        return Figure(what, "no cell with both", ", ".join(wanted), False if lost else None)
    mean = geometric_mean(r for r, _ in pairs)
    worst, where = min(pairs, key=lambda pair: pair[0])
    value = f"{mean:.2f} times faster; least {worst:.2f}, {where.name}; {len(pairs)} cells"
    if lost:
        value += f", and {lost} with no right result of {OURS}"
    met = None
    if wanted:
        met = mean >= (goal.mean or 0) and worst >= (goal.least or 0) and not lost
    return Figure(what, value, ", ".join(wanted), met)


def _compile(
    groups: Sequence[Group], field: str, what: str, goal: float | None, side: str = OURS
) -> Figure:
    """Total compile seconds of the cells that both sides have."""
    pairs: list[tuple[float, float]] = []
    for group in groups:
        ours, other = right(group, side), right(group, "inductor")
        if ours and other and getattr(ours, field) and getattr(other, field):
            pairs.append((getattr(ours, field), getattr(other, field)))
    name = f"{what} compile, of inductor's"
    wanted = "" if goal is None else f"at most {goal:.2f}"
    if not pairs:
        return Figure(name, "no cell with both", wanted)
    a, b = (math.fsum(column) for column in zip(*pairs, strict=True))
    value = f"{a / b:.2f} ({a:.1f} s of {b:.1f} s); {len(pairs)} cells"
    return Figure(name, value, wanted, None if goal is None else a / b <= goal)


def _memory(groups: Sequence[Group], kind: str, what: str) -> Figure:
    """The largest resident memory of a process, of `Cell.memory`'s `kind`."""
    found = []
    for group in groups:
        ours, other = right(group, OURS), right(group, "inductor")
        if ours and other and ours.memory.get(kind) and other.memory.get(kind):
            found.append((ours.memory[kind] / other.memory[kind], group))
    what, goal = f"peak memory{what}, of inductor's", f"at most {MEMORY:g}"
    if not found:
        return Figure(what, "no cell with both", goal)
    worst, where = max(found, key=lambda pair: pair[0])
    mean = geometric_mean(r for r, _ in found)
    value = f"mean {mean:.2f}; most {worst:.2f}, {where.name}; {len(found)} cells"
    return Figure(what, value, goal, worst <= MEMORY)


def _optioned(groups: Sequence[Group], side: str) -> Figure:
    """A column of ours with options, against ours without."""
    found = [(1 / r, g) for g in groups if (r := ratio(g, OURS, side)) is not None]
    what = f"{side}, time of {OURS}'s"
    goal = f"mean at most {OPTIONED:g}" if side.endswith("library=none") else ""
    if not found:
        return Figure(what, "no cell with both", goal)
    mean = geometric_mean(r for r, _ in found)
    worst, where = max(found, key=lambda pair: pair[0])
    value = f"{mean:.2f}; most {worst:.2f}, {where.name}; {len(found)} cells"
    return Figure(what, value, goal, mean <= OPTIONED if goal else None)


def summary(results: Results) -> list[Figure]:
    """Every figure that the run's groups allow."""
    found: list[Figure] = []
    present = sides(results)
    for mode, kind, groups in parts(results):
        goals = _GOALS.get((mode, kind), ())
        found += [_latency(mode, kind, groups, g) for g in goals if g.other in present]
        if (mode, kind) == ("inference", "network"):
            if "inductor" in present:
                found.append(_compile(groups, "cold_s", "cold", COLD))
                found.append(_compile(groups, "warm_s", "warm", WARM))
                if DYNAMO in present:
                    found.append(_compile(groups, "warm_s", "Dynamo's own warm", None, DYNAMO))
                found.append(_memory(groups, "cold_peak", " of a first process"))
                found.append(_memory(groups, "peak", ""))
            optioned = [side for side in present if side.startswith(f"{OURS} ")]
            found += [_optioned(groups, side) for side in optioned]
    return found
