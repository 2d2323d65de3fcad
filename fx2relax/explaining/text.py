"""A report as text, in tables by rich."""

from __future__ import annotations

import io
from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fx2relax import units
from fx2relax.explaining.report import Data, Graph, Line

_ROWS = 30
WAYS = {
    "generated": "generated kernels",
    "library": "calls of PyTorch's library",
    "torch": "operators in PyTorch",
    "weights": "done once on weights",
    "nothing": "nothing to do",
}


def text(data: Data, width: int = 120) -> str:
    """All but the programs' own text; long tables are cut."""
    file = io.StringIO()
    show(data, Console(file=file, width=width, color_system=None))
    return file.getvalue()


def show(data: Data, console: Console) -> None:
    """Print a report."""
    console.print(Text(summary(data)))
    if data.measured:
        console.print(Text(data.measured))
    for graph in data.graphs:
        console.print(Text(f"\n{graph.name}: {graph_line(graph)}"))
        console.print(_kernels(graph, data))
    if data.graphs:
        console.print(_lines(data))
    for cut in data.breaks:
        console.print(Text(f"graph break at {cut.line}  {cut.line.code}\n  {cut.reason}"))
    for reason in data.eager:
        console.print(Text(f"in PyTorch: {reason}"))


def summary(data: Data) -> str:
    """The first lines of a report."""
    words = [f"{data.model}: {units.count_text(len(data.graphs), 'graph')}"]
    words.append(units.count_text(len(data.breaks), "graph break"))
    words.append(f"first call {units.duration_text(data.seconds)}")
    if data.call is not None and data.outside is not None:
        parts = [("in kernels", data.call - data.outside), *data.overheads()]
        shares = (f"{units.share_text(s, data.call)} {name.split(':')[0]}" for name, s in parts)
        words.append(f"a call {units.duration_text(data.call)} ({', '.join(shares)})")
    return ", ".join(words)


def graph_line(graph: Graph) -> str:
    """What a graph is made of, in a line."""
    ways = Counter(node.how for node in graph.nodes)
    words = [f"{ways[way]} {name}" for way, name in WAYS.items() if ways[way]]
    nodes = units.count_text(len(graph.nodes), "node")
    parts = [f"{nodes} ({', '.join(words)}), {units.count_text(len(graph.kernels), 'kernel')}"]
    if graph.why:
        parts.append(graph.why)
    if graph.weights.count:
        weights = graph.weights
        made = f", from which {weights.made} more are made once" if weights.made else ""
        count = units.count_text(weights.count, "weight")
        parts.append(f"{count} of {units.size_text(weights.bytes)}{made}")
    if graph.unplanned:
        plan = f"{units.size_text(graph.memory)} for {units.size_text(graph.unplanned)}"
        parts.append(f"memory {plan} of values between kernels")
    stages = ", ".join(
        f"{k} {units.duration_text(v)}" for k, v in graph.stages.items() if v >= 5e-4
    )
    if stages:
        parts.append(f"compiling: {stages}")
    return "; ".join(parts)


def _kernels(graph: Graph, data: Data) -> Table:
    table = Table(title=f"kernels of {graph.name}", title_justify="left")
    for name in ("#", "time", "share", "GB/s", "GFLOP/s", "how", "kernel", "nodes", "line"):
        table.add_column(name, justify="right" if name in ("#", "time", "share") else "left")
    nodes = {node.name: node for node in graph.nodes}
    timed = any(k.seconds is not None for k in graph.kernels)
    kernels = sorted(graph.kernels, key=lambda k: -(k.seconds or 0.0)) if timed else graph.kernels
    for kernel in kernels[:_ROWS]:
        lines = dict.fromkeys(str(nodes[n].line) for n in kernel.nodes)
        table.add_row(
            str(kernel.number),
            units.duration_text(kernel.seconds),
            units.share_text(kernel.seconds or 0.0, data.call or 0.0),
            units.rate_text(kernel.bytes, kernel.seconds, "B").removesuffix(" GB/s"),
            units.rate_text(kernel.operations, kernel.seconds, "FLOP").removesuffix(" GFLOP/s"),
            kernel.how,
            Text(kernel.name, overflow="ellipsis", no_wrap=True),
            Text(", ".join(kernel.nodes), overflow="ellipsis", no_wrap=True),
            Text(", ".join(line for line in lines if line)),
        )
    if len(kernels) > _ROWS:
        table.caption = f"and {len(kernels) - _ROWS} more"
    return table


def _lines(data: Data) -> Table:
    table = Table(title="lines", title_justify="left")
    for name in ("time", "share", "line", "code", "operators"):
        table.add_column(name, justify="right" if name in ("time", "share") else "left")
    first, rest = leading_lines(data, _ROWS)
    for line, spent, operators in first:
        table.add_row(
            units.duration_text(spent) if data.call is not None else "",
            units.share_text(spent, data.call or 0.0),
            str(line) or "(no line)",
            Text(line.code, overflow="ellipsis", no_wrap=True),
            Text(", ".join(operators), overflow="ellipsis", no_wrap=True),
        )
    for name, spent in data.overheads():
        share = units.share_text(spent, data.call or 0.0)
        table.add_row(units.duration_text(spent), share, "", Text(f"({name})"), "")
    if rest:
        table.caption = f"and {more_lines(rest, data)}"
    return table


_Row = tuple[Line, float, list[str]]


def leading_lines(data: Data, most: int) -> tuple[list[_Row], list[_Row]]:
    """The lines that are shown first, and the rest.

    Where times are known, lines that take none (views, what is done once on weights) are of the
    rest, so that what a call takes outside of kernels does not come after all of them.
    """
    rows = data.by_line()
    if data.call is not None and data.kernels:
        most = min(most, sum(spent > 0 for _, spent, _ in rows))
    return rows[:most], rows[most:]


def more_lines(rest: list[_Row], data: Data) -> str:
    """How many lines there are more, and what they take together."""
    said = units.count_text(len(rest), "more line")
    if data.call is None:
        return said
    spent = sum(taken for _, taken, _ in rest)
    return (
        f"{said}, {units.duration_text(spent)} together" if spent else f"{said}, no kernel's time"
    )
