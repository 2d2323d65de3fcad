"""`print` in a function that is exported: an effect, which happens where the function runs."""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.fx.node import has_side_effect

from fx2relax.compat import AnyType, relax, tvm

#: The packed function that prints: of an object that stands for the order of effects, a text with
#: ``{}`` for each tensor, and the tensors; it gives the object back.
PRINT = "fx2relax.print"

_library = torch.library.Library("fx2relax_effects", "DEF")
_library.define("print(str text, Tensor[] values) -> ()")


@torch.library.impl(_library, "print", "CompositeExplicitAutograd")
def _print(text: str, values: list[torch.Tensor]) -> None:
    sys.stdout.write(text.format(*values))


@torch.library.impl(_library, "print", "Meta")
def _print_nothing(text: str, values: list[torch.Tensor]) -> None:
    pass


_PRINTS = has_side_effect(torch.ops.fx2relax_effects.print.default)


@contextlib.contextmanager
def kept_prints() -> Iterator[None]:
    """While a function is traced, its calls of `print` become a part of it."""
    original = builtins.print

    def traced(*values: Any, sep: Any = " ", end: Any = "\n", **more: Any) -> None:
        if more.get("file") not in (None, sys.stdout):
            original(*values, sep=sep, end=end, **more)
            return
        texts, tensors = [], []
        for value in values:
            if isinstance(value, torch.SymInt):
                value = torch.full((), value, dtype=torch.int64)  # type: ignore[call-overload]
            if isinstance(value, torch.Tensor):
                texts.append("{}")
                tensors.append(value)
            else:
                texts.append(_literal(str(value)))
        text = _literal(" " if sep is None else sep).join(texts)
        _PRINTS(text + _literal("\n" if end is None else end), tensors)

    with mock.patch.object(builtins, "print", traced):
        yield


class Prints:
    """The prints of a function that is imported, in order.

    Args:
        importer: of the function.
        io: the parameter that stands for all that was printed before; None where nothing may be.
    """

    def __init__(self, importer: Any, io: Any) -> None:
        self.importer, self.io = importer, io

    def takes(self, node: torch.fx.Node) -> bool:
        """Whether a node is a print that may be."""
        return node.target is _PRINTS and self.io is not None

    def take(self, node: torch.fx.Node) -> bool:
        """Emit a node if it is a print."""
        if not self.takes(node):
            return False
        text, values = node.args
        tensors = [self.importer.env[v] for v in values]  # type: ignore[union-attr]
        call = relax.op.call_pure_packed(
            PRINT, self.io, tvm.ir.StringImm(text), *tensors, ty_args=AnyType()
        )
        self.io = self.importer.builder.emit(call, "_io")
        return True


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
