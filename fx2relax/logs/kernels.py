"""What a program calls, in order."""

from __future__ import annotations

from typing import Any

from fx2relax.compat import relax

STAGE = "lowered"


def text(what: dict[str, Any]) -> str:
    """A line for each call of each function: the variable that it makes, and what is called."""
    lines = []
    for name, function in what["mod"].functions_items():
        if not isinstance(function, relax.Function):
            continue
        lines.append(f"{name.name_hint}:")
        for block in getattr(function.body, "blocks", ()):
            for binding in block.bindings:
                callee = called(getattr(binding, "value", None))
                if callee:
                    lines.append(f"  {binding.var.name} = {callee}  {binding.var.ty}")
    return "\n".join(lines)


def called(value: Any) -> str:
    """The kernel or the packed function that an expression calls; empty for all else."""
    arguments = getattr(value, "args", None)
    target = arguments[0] if arguments else None
    return str(getattr(target, "name_hint", "") or getattr(target, "global_symbol", ""))
