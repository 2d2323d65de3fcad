"""Which operators became one kernel."""

from __future__ import annotations

from typing import Any

from fx2relax.compat import relax
from fx2relax.logs.kernels import called
from fx2relax.provenance import bindings

STAGE = "grouped"


def text(what: dict[str, Any]) -> str:
    """A line for each group: its name, and the kernels that it is made of."""
    lines = []
    for name, function in what["mod"].functions_items():
        if isinstance(function, relax.Function) and "Primitive" in (function.attrs or {}):
            parts = [called(binding.value) for binding in bindings(function)]
            lines.append(f"{name.name_hint}: {', '.join(p for p in parts if p)}")
    return "\n".join(sorted(lines)) or "no kernels were fused"
