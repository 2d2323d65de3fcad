"""Which operators PyTorch's kernel library computes, and which are called in PyTorch."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fx2relax.compat import relax
from fx2relax.logs.kernels import called
from fx2relax.provenance import bindings

STAGE = "lowered"


def text(what: dict[str, Any]) -> str:
    """A line for each function of the library, with the number of its calls."""
    counts: Counter[str] = Counter()
    for _, function in what["mod"].functions_items():
        if not isinstance(function, relax.Function):
            continue
        for binding in bindings(function):
            name = called(binding.value)
            if name.startswith("fx2relax."):
                counts[name.removeprefix("fx2relax.")] += 1
    lines = [f"{count} x {name}" for name, count in counts.most_common()]
    return "\n".join([f"library={what['library']}", *(lines or ["no calls"])])
