"""Graphs of models for inference on a GPU that is not there, and on the processor.

PyTorch without CUDA refuses a model of fake tensors on a GPU as soon as Python indexes one of them,
so that a model is exported from the processor, and its export traced once more on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fx2relax
from fx2relax import cuda_routes, decompositions, drafts, programs
from fx2relax.capture import trace
from fx2relax.capture_inputs import fake_inputs
from fx2relax.capture_source import GraphSource
from fx2relax.gpu_rewrites import rewritten
from fx2relax.layouts import dense_permutation
from fx2relax.params import InputSpec
from fx2relax.pipeline import building

GPU = torch.device("cuda:0")


def here(model: Any, *args: Any) -> tuple[Any, list[InputSpec]]:
    """The functional ATen graph of a model for inference, and its inputs, on the processor."""
    return _traced(GraphSource(exported(model, *args)))


def there(program: torch.export.ExportedProgram) -> tuple[Any, list[InputSpec]]:
    """The same on a GPU, of an exported program; the inputs as the backend describes them."""
    graph, specs = _traced(_OnGpu(program))
    for spec in specs:
        if isinstance(spec.val, torch.Tensor):
            spec.permutation = dense_permutation(spec.val.shape, spec.val.stride())
    return graph, specs


def exported(model: Any, *args: Any) -> torch.export.ExportedProgram:
    """A model as it is exported for inference."""
    with torch.no_grad():
        return torch.export.export(model, args, strict=False)


def _traced(source: GraphSource) -> tuple[Any, list[InputSpec]]:
    assert source.given is not None
    given = source.given
    if isinstance(source, _OnGpu):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        given = {n: _moved(mode, v) for n, v in given.items()}
    with torch.no_grad():
        made = fake_inputs(source.gm, None, None, given)
        captured = trace(source, made, decompositions.asking_table())
    return captured.gm, captured.specs()


def _moved(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    with mode:
        shape, strides = tensor.shape, tensor.stride()
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=GPU)


class _OnGpu(GraphSource):
    """An exported program with its tensors on a GPU."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__(program)
        for node in self.gm.graph.nodes:
            if "device" in node.kwargs:
                node.update_kwarg("device", GPU)

    def fake(self, mode: FakeTensorMode, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor on the GPU with a weight's own sizes."""
        return _moved(mode, tensor)


def operators(graph: Any) -> list[str]:
    """What a graph calls, by names without namespaces and overloads."""
    targets = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    known = [t for t in targets if isinstance(t, torch._ops.OpOverload)]
    return [t._schema.name.split("::")[1] for t in known]


def run(graph: Any, specs: list[InputSpec], *args: torch.Tensor) -> Any:
    """A graph's results, of its own weights and of arguments."""
    given = iter(args)
    with torch.no_grad():
        return graph(*(s.value if s.value is not None else next(given) for s in specs))


@contextmanager
def as_on_gpu() -> Iterator[list[Any]]:
    """Compile graphs of tensors on the processor as if they were on a GPU, but for the kernels.

    Yields:
        the graphs that were imported, once they are rewritten.
    """
    original, graphs = drafts.draft_of, []

    def draft_of(graph: Any, specs: Any, *rest: Any) -> Any:
        graphs.append(rewritten(graph, specs))
        return original(graphs[-1], specs, *rest)

    give = building.give

    def given(lowered: Any, name: str, leading: int, into: Any, on_gpu: bool) -> Any:
        return give(lowered, name, leading, {}, True)

    with (
        mock.patch.object(programs, "draft_of", draft_of),
        mock.patch.object(building, "give", given),
        mock.patch.object(cuda_routes, "on_cuda", return_value=True),
        mock.patch.dict("os.environ", {"FX2RELAX_COMPILE_PROCESS": "0"}),
    ):
        yield graphs


def is_kept_on_disk(model: Any, x: torch.Tensor, tolerance: dict[str, float]) -> None:
    """A program gives eager's results when it is compiled, and when it is read from the disk."""
    for times in (0, 1):
        torch._dynamo.reset()
        fx2relax.reset_stats()
        with as_on_gpu(), torch.no_grad():
            fast = torch.compile(model, backend="relax", options={"never_slower": False})
            torch.testing.assert_close(fast(x), model(x), **tolerance)
        assert fx2relax.stats()["cache_hits"] == times
