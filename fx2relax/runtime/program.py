"""A built Relax module as a Python callable: arguments in, run, outputs out."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from fx2relax.compat import RELEASE, relax, tvm
from fx2relax.errors import ArgumentError
from fx2relax.imported import Imported
from fx2relax.runtime import boundary, torch_call
from fx2relax.runtime.sizes import Solver
from fx2relax.runtime.weights import Weights


class Program:
    """One compiled graph.

    Calling it takes the graph's flat placeholders in order and returns its flat outputs.

    Raises:
        ArgumentError: (a ValueError) an argument of the wrong shape, dtype, device or kind; the
            message names it.
    """

    def __init__(
        self, imported: Imported, executable: Any, device: torch.device | None = None
    ) -> None:
        self.imported = imported
        self.device = device or torch.device("cpu")
        torch_call.register(imported.torch_calls)
        weakref.finalize(self, torch_call.unregister, list(imported.torch_calls))
        where = tvm.device(self.device.type, self.device.index or 0)
        machine = relax.VirtualMachine(executable, where)
        self._machine = machine
        self._main = machine[imported.name]
        self._release = machine[RELEASE]
        transform = f"{imported.name}_transform_params"
        lifted = machine.module.implements_function(transform)
        self._inputs = imported.params[: imported.num_input]
        # What the graph returns twice is one tensor.
        distinct = {id(spec): spec for spec in imported.outputs}
        self._outputs = list(distinct.values())
        self._places = [list(distinct).index(id(spec)) for spec in imported.outputs]
        frozen = imported.params[imported.num_input :]
        self._weights = Weights(frozen, machine[transform] if lifted else None)
        self._constants = {i: s.value for i, s in enumerate(frozen) if s.position < 0}
        self._frozen = [s.position for s in frozen]
        self._shared: list[int] | None = None
        self._solver = Solver(imported.solved, imported.params) if imported.solved else None

    def __call__(self, *arguments: Any) -> list[Any]:
        frozen: list[Any] = [
            self._constants[i] if position < 0 else arguments[position]
            for i, position in enumerate(self._frozen)
        ]
        try:
            values = [boundary.argument(s, arguments[s.position]) for s in self._inputs]
            if self._solver is not None:
                values.append(self._solver.solve(arguments))
            returned = self._main(*values, *self._weights.get(frozen))
            self._release()
        except Exception as error:
            self._explain(arguments, error)
            raise self._raised() or error from None
        results = [boundary.result(r) for r in returned]
        shared = self._shared if self._shared is not None else _sharing(results, arguments)
        if all(not isinstance(r, torch.Tensor) or r.numel() for r in results):
            self._shared = shared  # an empty result has no memory to compare
        for index in shared:
            results[index] = results[index].clone()
        made = [boundary.output(spec, results, arguments) for spec in self._outputs]
        return [made[place] for place in self._places]

    def _raised(self) -> Exception | None:
        """What an operator that runs in PyTorch raised, forgotten at once."""
        raised = None
        for call in self.imported.torch_calls.values():
            raised, call.error = call.error or raised, None
        return raised

    def _explain(self, arguments: Sequence[Any], error: Exception) -> None:
        """Turn a failed call into an ArgumentError if an argument is to blame."""
        for spec in self.imported.params:
            if spec.position < 0:
                continue
            if spec.position >= len(arguments):
                raise ArgumentError(f"argument {spec.name!r} is missing") from error
            reason = boundary.mismatch(spec, arguments[spec.position], self.device)
            if reason is not None:
                raise ArgumentError(f"argument {spec.name!r}: {reason}") from error


def _sharing(results: Sequence[Any], arguments: Sequence[Any]) -> list[int]:
    """Which results share memory with an argument or an earlier result.

    TVM makes a reshape a view. Where it is the last step to an output, eager's output would be
    memory of its own. A program's memory plan is the same at every call, so one look is enough.
    """
    seen = {
        value.untyped_storage().data_ptr()
        for value in arguments
        if isinstance(value, torch.Tensor) and value.layout is torch.strided
    }
    found = []
    for index, value in enumerate(results):
        if not isinstance(value, torch.Tensor) or value.numel() == 0:
            continue
        address = value.untyped_storage().data_ptr()
        if address in seen:
            found.append(index)
        seen.add(address)
    return found
