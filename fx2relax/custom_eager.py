"""A user's kernel outside of compiled graphs: compiled on first use, for tensors of any sizes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from fx2relax import drafts, programs
from fx2relax.custom_kernels import Signature
from fx2relax.errors import ArgumentError, BuildFailure, Fx2RelaxError
from fx2relax.locks import own
from fx2relax.options import Options
from fx2relax.params import InputSpec
from fx2relax.runtime.program import Program

# Each other number among the arguments is another program.
_KEPT = 128
_OPTIONS = Options(on_unsupported="raise", library="torch")


class Compiled:
    """The programs of one operator's calls.

    One serves all tensors of the same dtypes and ranks whose sizes are equal in the same places,
    as PyTorch takes sizes for symbols: 0 and 1 are numbers, and equal ones are one.

    Args:
        signature: the operator's.
        operator: its overload.
    """

    def __init__(self, signature: Signature, operator: Callable[..., Any]) -> None:
        self._signature = signature
        self._operator = operator
        self._lock = own(self, "_lock")
        self._programs: OrderedDict[Any, Program | None] = OrderedDict()

    def __call__(self, values: Sequence[Any]) -> list[torch.Tensor]:
        """Run one call.

        Args:
            values: what `Signature.bind` returned.

        Raises:
            ArgumentError: a tensor that is not on the CPU.
            what `programs.build` raises.
        """
        leaves, structure = pytree.tree_flatten(list(values))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise ArgumentError(
                    f"{self._signature.name} has no kernel for tensors on {tensor.device}"
                )
        given = [t.detach().contiguous() for t in tensors]
        return self._program(leaves, structure, given)(*given)

    def _program(self, leaves: list[Any], structure: Any, tensors: list[torch.Tensor]) -> Program:
        loose = _key(leaves, structure, exact=False)
        found = self._programs.get(loose)
        if found is not None:
            return found
        exact = _key(leaves, structure, exact=True)
        with self._lock:
            found = self._programs.get(loose)
            if found is None and loose in self._programs:  # its sizes decide what is compiled
                found = self._programs.get(exact)
            if found is not None:
                return found
            for key, mode in ((loose, "symbolic"), (exact, "fake")):
                if key in self._programs:
                    continue
                found = self._build(leaves, structure, tensors, mode)
                self._programs[key] = found
                if found is not None:
                    break
            while len(self._programs) > _KEPT:
                self._programs.popitem(last=False)
            assert found is not None
            return found

    def _build(
        self, leaves: list[Any], structure: Any, tensors: list[torch.Tensor], mode: str
    ) -> Program | None:
        """Compile; None where a size that was to be a symbol had to be a number."""
        split, operator = self._signature.split, self._operator

        def call(*given: torch.Tensor) -> Any:
            rest = iter(given)
            filled = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = split(pytree.tree_unflatten(filled, structure))
            return operator(*args, **kwargs)

        # PyTorch says to the whole process that it traces.
        with compile_lock, _disable_current_modes(), torch.no_grad():
            graph = make_fx(call, tracing_mode=mode)(  # type: ignore[arg-type]
                *tensors
            )
            graph.graph.eliminate_dead_code()
            nodes = [n for n in graph.graph.nodes if n.op == "placeholder"]
            mode_of = detect_fake_mode([n.meta["val"] for n in nodes])
            env: Any = mode_of.shape_env if mode_of is not None else None
            specs = [
                InputSpec(f"x{i}", "user", n.meta["val"], position=i) for i, n in enumerate(nodes)
            ]
            built = self._compiled(graph, specs)
            if env is not None and env.guards:
                return None
            return Program(
                built.imported, built.executable, calling=built.calling, kernels=built.kernels
            )

    def _compiled(self, graph: torch.fx.GraphModule, specs: list[InputSpec]) -> drafts.Built:
        try:
            return programs.build(graph, specs, _OPTIONS)
        except Fx2RelaxError:
            raise
        except Exception as error:
            raise BuildFailure(
                f"TVM could not build the kernel of {self._signature.name}: {error}"
            ) from error


def _key(leaves: list[Any], structure: Any, exact: bool) -> Any:
    places: dict[int, int] = {}
    said: list[Any] = [structure]
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            said.append((type(leaf), repr(leaf)))
            continue
        sizes = [
            s if exact or s < 2 else -1 - places.setdefault(s, len(places)) for s in leaf.shape
        ]
        said.append((leaf.dtype, *sizes))
    return tuple(said), exact
