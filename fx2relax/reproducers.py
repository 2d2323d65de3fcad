"""A small script that repeats a failed compilation."""

from __future__ import annotations

import operator
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.fx

_TEMPLATE = '''"""A graph that fx2relax could not compile.

{reason}
"""

import torch
from torch import device
from math import inf, nan

import fx2relax


class Graph(torch.nn.Module):
{code}


inputs = [
{inputs}
]
graph = torch.fx.symbolic_trace(Graph())
print(fx2relax.from_fx(graph, inputs, on_unsupported="raise"))
'''


_WRONG = '''"""Nodes whose kernel is not as PyTorch.

{reason}
"""

import sys
from math import inf, nan
from pathlib import Path

import torch
from torch import device

import fx2relax


class Graph(torch.nn.Module):
{code}


inputs = torch.load(Path(__file__).with_name("inputs.pt"))
found = fx2relax.check(Graph(), *inputs, options={{"library": "{library}"}})
print(found)
sys.exit(0 if found.right else 1)
'''


def write_part(
    graph: torch.fx.GraphModule,
    names: Sequence[str],
    inputs: Mapping[str, Any],
    folder: Path,
    reason: str,
    program: str,
) -> Path:
    """Write a script that compiles some nodes of a graph and compares them with PyTorch.

    Args:
        graph: an ATen graph.
        names: of the nodes.
        inputs: what they read, by the names of the nodes that give it.
        folder: made if it is not there; the inputs lie beside the script.
        reason: what is wrong.
        program: which one it is: "torch", "generated" or "none".

    Returns:
        the script.
    """
    part = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    read = [node for node in graph.graph.nodes if node.name in inputs]
    own: list[torch.fx.Node] = []
    for node in graph.graph.nodes:
        taken = node.target is operator.getitem and node.args[0] in own
        if (node.name in names or taken) and node not in read:
            own.append(node)
    for node in read:
        copies[node] = part.placeholder(node.name)
    for node in own:
        copies[node] = part.node_copy(node, copies.__getitem__)
    ends = [node for node in own if not set(node.users) & set(own)]
    part.output(tuple(copies[node] for node in ends))
    folder.mkdir(parents=True, exist_ok=True)
    torch.save([inputs[node.name] for node in read], folder / "inputs.pt")
    path = folder / "reproduce.py"
    text = _WRONG.format(
        reason=_quoted(reason),
        code=_indented(torch.fx.GraphModule(torch.nn.Module(), part).code),
        library="torch" if program == "torch" else "none",
    )
    path.write_text(text)
    return path


def _quoted(reason: str) -> str:
    return reason.replace("\\", "/").replace('"""', "'''")


def _indented(code: str) -> str:
    return "\n".join("    " + line for line in code.strip().splitlines())


def write_reproducer(graph: torch.fx.GraphModule, error: Exception) -> Path:
    """Write a script that imports the graph with inputs of the same shapes; return its path.

    Sizes that are symbols keep their names, unless the graph takes one as an argument: a script has
    numbers for these, and so for all.
    """
    inputs = []
    given = [node for node in graph.graph.nodes if node.op == "placeholder"]
    numbers = any(isinstance(n.meta.get("val"), torch.SymInt) and n.users for n in given)
    for node in given:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            shape = [_number(n) if numbers or isinstance(n, int) else str(n) for n in val.shape]
            inputs.append(f"    ({shape}, {val.dtype}),")
        else:
            inputs.append(f"    {_number(val)!r},")
    text = _TEMPLATE.format(
        reason=_quoted(f"{type(error).__name__}: {error}"),
        code=_indented(graph.code),
        inputs="\n".join(inputs),
    )
    folder = Path(tempfile.mkdtemp(prefix="fx2relax-"))
    path = folder / "reproduce.py"
    path.write_text(text)
    return path


def _number(value: Any) -> Any:
    """A symbol as the number that it stood for when the graph was traced; all else as it is."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    hint = value.node.hint
    return 2 if hint is None else hint
