"""A small script that repeats a failed compilation."""

from __future__ import annotations

import tempfile
from pathlib import Path

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


def write_reproducer(graph: torch.fx.GraphModule, error: Exception) -> Path:
    """Write a script that imports the graph with inputs of the same shapes; return its path."""
    inputs = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            val = node.meta.get("val")
            if isinstance(val, torch.Tensor):
                shape = [int(s) if isinstance(s, int) else str(s) for s in val.shape]
                inputs.append(f"    ({shape}, {val.dtype}),")
            else:
                inputs.append(f"    {val!r},")
    code = graph.code.strip()
    text = _TEMPLATE.format(
        reason=f"{type(error).__name__}: {error}".replace('"""', "'''"),
        code="\n".join("    " + line for line in code.splitlines()),
        inputs="\n".join(inputs),
    )
    folder = Path(tempfile.mkdtemp(prefix="fx2relax-"))
    path = folder / "reproduce.py"
    path.write_text(text)
    return path
