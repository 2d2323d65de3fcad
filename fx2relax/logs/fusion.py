"""Which operators became one kernel."""

from __future__ import annotations

from typing import Any

from fx2relax.compat import relax

STAGE = "grouped"


def text(what: dict[str, Any]) -> str:
    """A line for each group: its name, and the kernels that it is made of."""
    lines = []
    for name, function in what["mod"].functions_items():
        if isinstance(function, relax.Function) and "Primitive" in (function.attrs or {}):
            bindings = [b for block in function.body.blocks for b in block.bindings]
            parts = [_callee(b.value) for b in bindings]
            lines.append(f"{name.name_hint}: {', '.join(p for p in parts if p)}")
    return "\n".join(sorted(lines)) or "no kernels were fused"


def _callee(value: Any) -> str:
    arguments = getattr(value, "args", None)
    return str(getattr(arguments[0], "name_hint", "")) if arguments else ""
