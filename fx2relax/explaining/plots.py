"""Pictures of a report, by matplotlib."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fx2relax import units
from fx2relax.explaining.report import Data

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"generated": "#c2593f", "library": "#4f7fb8", "torch": "#8a8a8a"}
_BARS = 25
_TEXT_LINES = 46


def draw(data: Data, kind: str) -> Figure:
    """One picture; see `Explanation.plot`."""
    kinds: dict[str, Callable[[Data], Any]] = {
        "layers": _layers,
        "timeline": _timeline,
        "roofline": _roofline,
        "levels": _levels,
    }
    if kind not in kinds:
        raise ValueError(f"no plot is called {kind!r}; known: {', '.join(kinds)}")
    if kind != "levels" and data.call is None:
        raise ValueError(f"the {kind} plot needs times: call measure() first")
    figure: Figure = kinds[kind](data)
    return figure


@functools.cache
def _kind() -> Any:
    """A figure that notebooks show, also where pyplot was not imported."""
    from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=100)
            return file.getvalue()

    return Picture


def _figure(width: float, height: float) -> tuple[Any, Any]:
    figure = _kind()(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _layers(data: Data) -> Any:
    rows = [row for row in data.by_layer() if row[1] > 0][:_BARS][::-1]
    figure, axes = _figure(8, 1.2 + 0.25 * len(rows))
    axes.barh([name for name, _, _ in rows], [spent * 1e3 for _, spent, _ in rows], color="#c2593f")
    axes.set_xlabel("ms")
    axes.set_title(f"{data.model}: time of each layer")
    return figure


def _timeline(data: Data) -> Any:
    figure, axes = _figure(10, 1.2 + 0.7 * len(data.graphs))
    for row, graph in enumerate(data.graphs):
        start = 0.0
        for kernel in graph.kernels:
            spent = (kernel.seconds or 0.0) * 1e3
            colour = COLOURS[kernel.how]
            axes.barh(row, spent, left=start, color=colour, edgecolor="white", linewidth=0.3)
            start += spent
    axes.set_yticks(range(len(data.graphs)), [graph.name for graph in data.graphs])
    axes.invert_yaxis()
    axes.set_xlabel("ms, kernels one after another")
    axes.set_title(f"{data.model}: kernels")
    from matplotlib.patches import Patch

    axes.legend(handles=[Patch(color=c, label=how) for how, c in COLOURS.items()], loc="best")
    return figure


def _roofline(data: Data) -> Any:
    figure, axes = _figure(7, 5)
    limits = data.limits
    assert limits is not None
    for how, colour in COLOURS.items():
        own = [k for k in data.kernels if k.how == how and k.operations and k.bytes and k.seconds]
        axes.scatter(
            [k.operations / k.bytes for k in own],
            [k.operations / (k.seconds or 1.0) / 1e9 for k in own],
            s=[8 + 300 * (k.seconds or 0.0) / (data.call or 1.0) for k in own],
            color=colour,
            alpha=0.6,
            label=how,
        )
    ridge = limits.operations / limits.bytes
    points = [ridge / 1000, ridge, ridge * 30]
    roof = [min(limits.operations, x * limits.bytes) / 1e9 for x in points]
    axes.plot(points, roof, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations a byte")
    axes.set_ylabel("GFLOP/s")
    axes.set_title(
        f"{data.model} on {limits.threads} thread{'s' if limits.threads > 1 else ''}: "
        f"{units.rate_text(limits.bytes, 1.0, 'B')}, "
        f"{units.rate_text(limits.operations, 1.0, 'FLOP')}"
    )
    axes.legend()
    return figure


def _levels(data: Data) -> Any:
    figure = _kind()(figsize=(16, 9), layout="constrained")
    axes = figure.subplots(1, 3)
    graph = data.graphs[0] if data.graphs else None
    texts = (graph.fx, graph.relax, graph.tir) if graph is not None else ("", "", "")
    for ax, name, body in zip(axes, ("FX", "Relax", "TIR"), texts, strict=True):
        lines = [line[:76] for line in body.splitlines() if line.strip()]
        shown = lines[:_TEXT_LINES] + (["..."] if len(lines) > _TEXT_LINES else [])
        ax.text(0, 1, "\n".join(shown), family="monospace", size=6.5, va="top", parse_math=False)
        ax.set_title(name, loc="left")
        ax.set_axis_off()
    return figure
