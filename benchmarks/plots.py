"""Plots of a run: latency beside eager's, compile seconds, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import parts, right, sides, title
from benchmarks.results import Group, Results

_COLOURS = {
    "eager": "#888888",
    "dynamo": "#bbbbbb",
    "inductor": "#e07b39",
    "inductor-freezing": "#a8501a",
    "openvino": "#5b8bd0",
    "relax_dynamo": "#b9a3d6",
    "relax": "#2a9d5c",
}
_FLOOR = 0.25
_MORE = ("#145a32", "#7dcea0", "#d4ac0d", "#117a65")

#: A value of a side in a group, or None.
Value = Callable[[Group, str], float | None]


def _speed(group: Group, side: str) -> float | None:
    eager, cell = right(group, "eager"), right(group, side)
    return eager.ms / cell.ms if eager and cell and eager.ms and cell.ms else None


def _seconds(field: str) -> Value:
    def value(group: Group, side: str) -> float | None:
        cell = right(group, side)
        seconds: float | None = getattr(cell, field) if cell else None
        return seconds

    return value


def _peak(group: Group, side: str) -> float | None:
    cell = right(group, side)
    return cell.memory.get("peak") if cell else None


def _panels(groups: Sequence[Group]) -> list[tuple[str, list[Group]]]:
    """Groups by batch size and threads; a network of sizes of its own is named with its batch."""
    keys: dict[tuple[int, int], list[Group]] = {}
    common = {1, 8}
    for group in groups:
        batch = group.batch if group.batch in common else min(g.batch for g in groups)
        keys.setdefault((batch, group.threads), []).append(group)
    return [
        (f"batch {batch}, {threads} thread{'s' if threads > 1 else ''}", found)
        for (batch, threads), found in sorted(keys.items())
    ]


def _bars(
    axes: Any, groups: Sequence[Group], columns: Sequence[str], value: Value, log: bool
) -> None:
    """A cluster of bars for each group, a colour for each side; of ratios, from 1 up or down."""
    width = 0.85 / max(1, len(columns))
    more = iter(_MORE * 3)
    for i, side in enumerate(columns):
        found = [(x, v) for x, g in enumerate(groups) if (v := value(g, side)) is not None]
        colour = _COLOURS.get(side) or next(more)
        places = [x + (i - (len(columns) - 1) / 2) * width for x, _ in found]
        base = 1.0 if log else 0.0
        heights = [v - base for _, v in found]
        axes.bar(places, heights, width, bottom=base, label=side, color=colour, zorder=2)
        for place, (_, v) in zip(places, found, strict=True):
            if log and v < _FLOOR:  # the others would be flat on an axis that has it
                style = {"ha": "center", "va": "bottom", "rotation": 90, "fontsize": 7, "zorder": 4}
                axes.text(place, _FLOOR * 1.03, f"1/{1 / v:.0f}", **style)
    batches: dict[str, set[int]] = {}
    for group in groups:
        batches.setdefault(group.case, set()).add(group.batch)
    names = [f"{g.case} b{g.batch}" if len(batches[g.case]) > 1 else g.case for g in groups]
    axes.set_xticks(range(len(groups)), names, rotation=35, ha="right")
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.grid(axis="y", which="major", color="#dddddd", zorder=0)


def _figure(
    panels: Sequence[tuple[str, list[Group]]],
    columns: Sequence[str],
    value: Value,
    label: str,
    heading: str,
    log: bool,
    path: Path,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullFormatter

    most = max(len(groups) for _, groups in panels)
    figure, all_axes = pyplot.subplots(
        len(panels), 1, figsize=(max(6.0, 1.5 + 0.85 * most), 3.4 * len(panels)), squeeze=False
    )
    for (name, groups), axes in zip(panels, all_axes[:, 0], strict=True):
        _bars(axes, groups, columns, value, log)
        axes.set_title(name, fontsize=10)
        axes.set_ylabel(label)
        if log:
            axes.set_yscale("log", base=2)
            axes.set_ylim(bottom=max(axes.get_ylim()[0], _FLOOR))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.axhline(1, color="#333333", linewidth=1, zorder=3)
    handles, labels = all_axes[0, 0].get_legend_handles_labels()
    figure.suptitle(heading)
    figure.legend(handles, labels, loc="lower center", ncols=min(4, len(labels)))
    figure.tight_layout(rect=(0, 0.12 / len(panels), 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _drawings(results: Results) -> dict[str, tuple[list[Group], list[str], Value, str, str, bool]]:
    """By file name: groups, sides, value, axis, heading, and whether it is a ratio."""
    columns = sides(results)
    others = [side for side in columns if side != "eager"]
    found: dict[str, tuple[list[Group], list[str], Value, str, str, bool]] = {}
    axis = "times faster than eager"
    for mode, kind, groups in parts(results):
        if kind == "overhead":
            continue
        name = f"latency-{kind}s" if mode == "inference" else f"latency-{mode}"
        found[name] = (groups, others, _speed, axis, f"Latency: {title(mode, kind)}", True)
        if (mode, kind) == ("inference", "network"):
            for field, what in (("cold_s", "cold"), ("warm_s", "warm")):
                heading = f"Compile time, {what}, the first call included"
                found[f"compile-{what}"] = (
                    groups, others, _seconds(field), "seconds", heading, False,
                )  # fmt: skip
            found["memory"] = (groups, columns, _peak, "MB", "Peak resident memory", False)
    return {
        name: drawing
        for name, drawing in found.items()
        if any(drawing[2](g, side) is not None for g in drawing[0] for side in drawing[1])
    }


def names(results: Results) -> list[str]:
    """The plots that `draw` writes, without their ending."""
    return list(_drawings(results))


def draw(results: Results, folder: Path) -> list[Path]:
    """Write every plot that the run has values for; give the files."""
    files = []
    for name, (groups, columns, value, label, heading, log) in _drawings(results).items():
        files.append(folder / f"{name}.png")
        _figure(_panels(groups), columns, value, label, heading, log, files[-1])
    return files
