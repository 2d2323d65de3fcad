"""How the network tests judge numbers, and how they run an imported module without PyTorch.

A network's result is right when it is no further from a float64 run than 4 times eager's own
distance plus 1e-6.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import tvm
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from tvm import relax
from tvm.relax.frontend import detach_params

import fx2relax
from fx2relax import pipeline

#: What every network test passes to `torch.compile`.
BACKEND = "relax"


def leaves(value: Any) -> list[Any]:
    """The tensors of a nested result, in order."""
    return [x for x in pytree.tree_leaves(value) if x is not None]


def double(value: Any) -> Any:
    """A copy of a module or of nested arguments with its floating-point parts in float64."""
    if isinstance(value, nn.Module):
        return copy.deepcopy(value).double()
    return pytree.tree_map(
        lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, value
    )


def distance(got: Tensor, exact: Tensor) -> float:
    """Largest absolute difference; NaN in either makes it infinite."""
    assert got.shape == exact.shape, f"shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    if got.numel() == 0:
        return 0.0
    error = (got.detach().double() - exact.detach().double()).abs().max().item()
    return error if error == error else float("inf")


def assert_as_exact_as_eager(
    got: Iterable[Tensor], eager: Iterable[Tensor], exact: Iterable[Tensor], what: str = "output"
) -> None:
    """No further from the float64 run than 4 times eager's own distance plus 1e-6."""
    for i, (g, e, x) in enumerate(zip(list(got), list(eager), list(exact), strict=True)):
        assert g.dtype == e.dtype, f"{what} {i}: dtype {g.dtype}, eager gives {e.dtype}"
        ours, theirs = distance(g, x), distance(e, x)
        assert ours <= 4 * theirs + 1e-6, (
            f"{what} {i}: {ours:.3g} from the float64 run, eager {theirs:.3g}"
        )


def run_without_torch(mod: Any, params: dict[str, Any], inputs: Iterable[Tensor]) -> list[Tensor]:
    """Build with generated kernels only and run by the VM: no PyTorch tensor enters the call."""
    vm = relax.VirtualMachine(pipeline.build(mod, library="none"), tvm.cpu())
    args = [tvm.runtime.tensor(x.detach().contiguous().numpy()) for x in inputs]
    out = vm["main"](*args, *params["main"])
    flat = [out] if isinstance(out, tvm.runtime.Tensor) else list(out)
    return [torch.from_numpy(np.array(x.numpy())) for x in flat]


def compiled(model: Any, dynamic: bool | None = None) -> Any:
    """`torch.compile` with our backend and one whole graph."""
    return torch.compile(model, backend=BACKEND, fullgraph=True, dynamic=dynamic)


class Judge:
    """A network with its eager and float64 results, computed once, to hold other results to."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        with torch.no_grad():
            self.eager = leaves(model(*args, **kwargs))
            self.exact = leaves(double(model)(*double(args), **double(kwargs)))
        self.inputs = leaves((args, kwargs))

    def check(self, got: Any) -> None:
        assert_as_exact_as_eager(leaves(got), self.eager, self.exact)

    def check_compiled(self) -> None:
        """Under `torch.compile`: right, and no node left to PyTorch."""
        fx2relax.reset_stats()
        with torch.no_grad():
            self.check(compiled(self.model)(*self.args, **self.kwargs))
        stats = fx2relax.stats()
        assert stats["graphs"] == 1
        assert stats["nodes_fallback"] == 0, stats["fallback_ops"]
        assert stats["nodes_compiled"] == stats["nodes_total"] > 0

    def check_imported(self, graph_module: torch.fx.GraphModule) -> None:
        """Through `from_fx`, with the weights as parameters, built and run without PyTorch."""
        mod, params = detach_params(fx2relax.from_fx(graph_module, self.inputs))
        main = mod["main"]
        num_input = int(main.attrs["num_input"])
        assert len(main.params) == num_input + len(params["main"])
        self.check(run_without_torch(mod, params, self.inputs))

    def check_exported(self) -> None:
        """`check_imported` over the graph of `torch.export`."""
        with torch.no_grad():
            self.check_imported(export(self.model, self.args, self.kwargs))


def export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The graph module of `torch.export`."""
    with warnings.catch_warnings():
        # nn.LSTM holds its weights twice, by name and in a list; export warns about the list.
        warnings.filterwarnings("ignore", message="The tensor attributes? .*_flat_weights")
        return torch.export.export(model, args, kwargs).module()
