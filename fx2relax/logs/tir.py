"""The kernels of a program, fused and scheduled."""

from __future__ import annotations

from typing import Any

from fx2relax.compat import tirx

STAGE = "lowered"


def text(what: dict[str, Any]) -> str:
    """Each kernel as TVMScript."""
    functions = what["mod"].functions_items()
    kernels = [(name.name_hint, f) for name, f in functions if isinstance(f, tirx.PrimFunc)]
    return "\n\n".join(f"# {name}\n{f.script(show_meta=False)}" for name, f in sorted(kernels))
