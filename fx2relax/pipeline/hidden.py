"""Arithmetic that a pass of TVM must not look into, as calls of functions that it does not know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .present import Wanted
from .tir import Call, Rewriter, extern, extern_name, kernel_pass
from .wrapping import Bound


def hidden_from(
    passes: list[Any],
    name: str,
    nodes: Mapping[str, Callable[..., Any]],
    hides: Callable[[Any, set[Any]], bool],
    wanted: Wanted | None = None,
) -> list[Any]:
    """Some passes, for kernels in which they see some of the arithmetic as calls.

    Args:
        passes: TVM's.
        name: tells this arithmetic from other.
        nodes: binary nodes by the name of their class, with what makes one of two operands.
        hides: whether a node of these is to be hidden, given the variables that the kernel binds.
        wanted: see `present`: kernels without any of these hide nothing.
    """
    prefix = f"fx2relax.{name}."

    class Hide(Bound):
        def leave(self, node: Any) -> Any:
            kind = type(node).__name__
            if kind not in nodes or not hides(node, self.bound):
                return node
            return extern(prefix + kind, [node.a, node.b], node.ty)

    class Reveal(Rewriter):
        def leave(self, node: Any) -> Any:
            kind = hidden(node)
            return nodes[kind](node.args[1], node.args[2]) if kind else node

    def hidden(node: Any) -> str:
        """What a call stands for; empty for all else."""
        name = extern_name(node) or ""
        return name.removeprefix(prefix) if name.startswith(prefix) else ""

    return [
        kernel_pass(f"fx2relax.Hide.{name}", lambda func: Hide().stmt(func.body), wanted),
        *passes,
        kernel_pass(
            f"fx2relax.Reveal.{name}",
            lambda func: Reveal().stmt(func.body),
            {Call: lambda node: bool(hidden(node))},
        ),
    ]
