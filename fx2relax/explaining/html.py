"""A report as HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from fx2relax import units
from fx2relax.explaining.report import Data, Graph, Kernel, Line, Node
from fx2relax.explaining.text import graph_line, leading_lines, more_lines, summary

# A notebook has colours of its own for tables, light ones where its theme is dark: each is said.
_STYLE = """
.fx2relax { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 76rem; margin: 0 auto; }
.fx2relax { background: #fcfbfa; padding: .1rem .5rem; }
.fx2relax h1 { font-size: 1.5rem; margin: .5rem 0; overflow-wrap: anywhere; }
.fx2relax h2 { font-size: 1.15rem; margin: 1.6rem 0 .4rem; }
.fx2relax p { margin: .3rem 0; overflow-wrap: anywhere; }
.fx2relax .wide { overflow-x: auto; border: 1px solid #ddd; border-radius: 6px; margin: .5rem 0; }
.fx2relax table { border-collapse: collapse; width: 100%; font-size: 13px; background: #fff; }
.fx2relax th, .fx2relax td { padding: .25rem .6rem; text-align: left; vertical-align: top; }
.fx2relax th { background: #f3f1ee; position: sticky; top: 0; white-space: nowrap; }
.fx2relax table, .fx2relax pre, .fx2relax code { color: #222; }
.fx2relax table { table-layout: auto; } .fx2relax code { background: none; }
.fx2relax tbody tr:nth-child(n) { background: #fff; }
.fx2relax tr + tr td { border-top: 1px solid #eee; }
.fx2relax td.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.fx2relax code, .fx2relax pre { font: 12px/1.45 ui-monospace, monospace; }
.fx2relax td code, .fx2relax .of { overflow-wrap: anywhere; }
.fx2relax .of { color: #666; margin-left: .5rem; }
.fx2relax .place { font-weight: 600; white-space: nowrap; color: #444; }
.fx2relax pre { max-height: 28rem; overflow: auto; margin: 0; padding: .6rem; background: #faf9f7; }
.fx2relax summary { cursor: pointer; padding: .3rem 0; font-weight: 600; }
.fx2relax .bar { background: #eee; height: .6rem; min-width: 4rem; border-radius: 3px; }
.fx2relax .bar i { display: block; height: 100%; border-radius: 3px; background: #c2593f; }
.fx2relax .tag { border-radius: 3px; padding: 0 .35rem; color: #fff; white-space: nowrap; }
.fx2relax .generated { background: #a8452d; } .fx2relax .library { background: #3d6ba0; }
.fx2relax .torch { background: #666; } .fx2relax .weights { background: #4d7a4a; }
.fx2relax .nothing { background: #999; }
.fx2relax .why { white-space: pre-line; }
.fx2relax .warn { border-left: 4px solid #c2593f; padding-left: .6rem; }
@media (max-width: 600px) {
  .fx2relax { font-size: 14px; }
  .fx2relax .less { display: none; }
  .fx2relax th { white-space: normal; }
  .fx2relax td code, .fx2relax .of { display: block; margin: 0; }
  .fx2relax th, .fx2relax td { padding: .2rem .4rem; }
}
"""
_LINES = 40
# The columns of each table; the ones with a class are left out on a narrow screen.
_Column = str | tuple[str, str]
_SOURCE: list[_Column] = ["time", "share", "line", ("operators", "less")]
_NODES: list[_Column] = ["node", "operator", "how", "line", ("layer", "less"), ("Relax", "less")]
_KERNELS: list[_Column] = [
    *(("#", "less"), "time", ("share", "less"), ("GB/s", "less"), ("GFLOP/s", "less")),
    *("how", "kernel, and what it computes"),
]


def page(data: Data) -> str:
    """A whole page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(data.model)} in fx2relax</title>"
        "<style>body { margin: 0; padding: .4rem; background: #fcfbfa; }</style></head>"
        f"<body>{fragment(data)}</body></html>\n"
    )


def fragment(data: Data) -> str:
    """What a notebook shows."""
    parts = [
        f"<style>{_STYLE}</style>",
        '<div class="fx2relax">',
        f"<h1>{escape(data.model)}</h1>",
        f"<p>{escape(summary(data))}</p>",
        *_remarks(data),
    ]
    if data.graphs:
        parts += ["<h2>Lines</h2>", _lines(data)]
    for graph in data.graphs:
        parts += _graph(graph, data)
    return "".join([*parts, "</div>"])


def _remarks(data: Data) -> Iterable[str]:
    if data.measured:
        yield f"<p>{escape(data.measured)}</p>"
    if data.limits is not None:
        limits = data.limits
        yield (
            f"<p>This machine, {units.count_text(limits.threads, 'thread')}: "
            f"{units.rate_text(limits.bytes, 1.0, 'B')} from memory, "
            f"{units.rate_text(limits.operations, 1.0, 'FLOP')} in float32.</p>"
        )
    for cut in data.breaks:
        where = f"{cut.line} {cut.line.code}".strip()
        yield (
            f'<p class="warn">Graph break at <code>{escape(where)}</code>: '
            f'<span class="why">{escape(cut.reason)}</span></p>'
        )
    for reason in data.eager:
        yield f'<p class="warn">In PyTorch: {escape(reason)}</p>'


def _lines(data: Data) -> str:
    first, rest = leading_lines(data, _LINES)
    body = [_line(row, data) for row in first]
    for name, spent in data.overheads():
        body.append(
            f'<tr><td class="n">{units.duration_text(spent)}</td><td>{_bar(spent, data.call)}</td>'
            f'<td>{escape(name)}</td><td class="less"></td></tr>'
        )
    table = _table(_SOURCE, body)
    if not rest:
        return table
    more = _table(_SOURCE, [_line(row, data) for row in rest])
    return f"{table}<details><summary>{more_lines(rest, data)}</summary>{more}</details>"


def _line(row: tuple[Line, float, list[str]], data: Data) -> str:
    line, spent, operators = row
    where = escape(str(line) or "(no line)")
    short = ", ".join(name.removeprefix("aten.") for name in operators)
    return (
        f'<tr><td class="n">{units.duration_text(spent) if data.call is not None else ""}</td>'
        f"<td>{_bar(spent, data.call)}</td>"
        f'<td><b class="place" title="{escape(line.file)}">{where}</b> '
        f"<code>{escape(line.code)}</code></td>"
        f'<td class="less">{escape(short)}</td></tr>'
    )


def _graph(graph: Graph, data: Data) -> Iterable[str]:
    yield f"<h2>{escape(graph.name)}</h2><p>{escape(graph_line(graph))}</p>"
    nodes = {node.name: node for node in graph.nodes}
    if graph.kernels:
        order = sorted(graph.kernels, key=lambda k: -(k.seconds or 0.0))
        rows = [_kernel(k, nodes, data) for k in order]
        table = _table(_KERNELS, rows)
        said = units.count_text(len(rows), "kernel")
        yield f"<details open><summary>{said}</summary>{table}</details>"
    if graph.nodes:
        rows = [_node(node) for node in graph.nodes]
        table = _table(_NODES, rows)
        yield f"<details><summary>{units.count_text(len(rows), 'node')}</summary>{table}</details>"
    for name, body in (("FX graph", graph.fx), ("Relax", graph.relax), ("TIR", graph.tir)):
        if body:
            text = f'<div class="wide"><pre>{escape(body)}</pre></div>'
            yield f"<details><summary>{name}</summary>{text}</details>"


def _kernel(kernel: Kernel, nodes: dict[str, Node], data: Data) -> str:
    lines = dict.fromkeys(str(nodes[n].line) for n in kernel.nodes if nodes[n].line.file)
    places = "".join(f'<b class="place">{escape(line)}</b> ' for line in lines)
    made = ", ".join(kernel.nodes)
    return (
        f'<tr><td class="n less">{kernel.number}</td>'
        f'<td class="n">{units.duration_text(kernel.seconds)}</td>'
        f'<td class="less">{_bar(kernel.seconds or 0.0, data.call)}</td>'
        f'<td class="n less">{units.rate_text(kernel.bytes, kernel.seconds, "B")[:-5]}</td>'
        f'<td class="n less">{units.rate_text(kernel.operations, kernel.seconds, "FLOP")[:-8]}</td>'
        f"<td>{_tag(kernel.how)}</td><td><code>{escape(kernel.name)}</code> "
        f'<span class="of">{escape(made)} {places}</span></td></tr>'
    )


def _node(node: Node) -> str:
    why = f" {escape(node.why)}" if node.why else ""
    return (
        f"<tr><td><code>{escape(node.name)}</code></td>"
        f"<td><code>{escape(node.op)}</code> {escape(node.shape)}</td>"
        f"<td>{_tag(node.how)}{why}</td>"
        f"<td><code>{escape(str(node.line))} {escape(node.line.code)}</code></td>"
        f'<td class="less">{escape(node.layer)}</td>'
        f'<td class="less">{escape(", ".join(node.relax))}</td></tr>'
    )


def _tag(how: str) -> str:
    return f'<span class="tag {how}">{how}</span>'


def _bar(part: float, whole: float | None) -> str:
    if not whole:
        return ""
    percent = min(100.0, 100 * part / whole)
    bar = f'<div class="bar less"><i style="width: {percent:.1f}%"></i></div>'
    return f"{percent:.1f}&nbsp;%{bar}"


def _table(names: Iterable[_Column], rows: Iterable[str]) -> str:
    head = "".join(
        f"<th>{n}</th>" if isinstance(n, str) else f'<th class="{n[1]}">{n[0]}</th>' for n in names
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="wide">{table}</div>'
