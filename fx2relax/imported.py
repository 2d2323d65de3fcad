"""What the importer hands to the runtime."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fx2relax.compat import IRModule
from fx2relax.outputs import OutputSpec
from fx2relax.params import InputSpec
from fx2relax.shapes import SymbolTable
from fx2relax.torch_calls import TorchCall


@dataclass
class Imported:
    """A Relax module and what the runtime has to know to call it.

    Attributes:
        mod: the module; its function `name` takes `params` in order. None where the program was
            compiled before.
        params: the Relax function's parameters; the first `num_input` are the caller's.
        outputs: how the graph's flat outputs are made from what the function returns.
        torch_calls: the nodes that run in PyTorch, by the name of their packed function.
        symbols: PyTorch's symbols and the TIR variables that stand for them.
        solved: symbols that no parameter shows by itself, passed as one more shape parameter.
        nodes: how many operator nodes the graph has.
    """

    mod: IRModule
    name: str
    params: list[InputSpec]
    num_input: int
    outputs: list[OutputSpec]
    torch_calls: dict[str, TorchCall]
    symbols: SymbolTable
    solved: list[Any] = field(default_factory=list)
    nodes: int = 0
    converted: int = 0

    @property
    def weights(self) -> list[InputSpec]:
        """The parameters right of `num_input`."""
        return self.params[self.num_input :]

    @property
    def weight_bytes(self) -> int:
        """How many bytes the weights are."""
        return sum(s.val.numel() * s.val.element_size() for s in self.weights)
