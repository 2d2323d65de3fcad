"""What a program calls, in order."""

from __future__ import annotations

from typing import Any

from fx2relax.compat import relax
from fx2relax.provenance import bindings, symbol_of

STAGE = "lowered"


def text(what: dict[str, Any]) -> str:
    """A line for each call of each function: the variable that it makes, and what is called."""
    lines = []
    for name, function in what["mod"].functions_items():
        if not isinstance(function, relax.Function):
            continue
        lines.append(f"{name.name_hint}:")
        for binding in bindings(function):
            callee = called(binding.value)
            if callee:
                lines.append(f"  {binding.var.name} = {callee}  {binding.var.ty}")
    return "\n".join(lines)


def called(value: Any) -> str:
    """The kernel or the packed function that an expression calls; empty for all else."""
    arguments = getattr(value, "args", None)
    return symbol_of(arguments[0]) if arguments else ""
