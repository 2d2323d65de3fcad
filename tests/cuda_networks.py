"""Graphs of the benchmark networks on a GPU that is not there, without their weights."""

from __future__ import annotations

from typing import Any

import benchmarks_found as benchmarks_found
import torch
from cuda_models import there
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from benchmarks.cases import NETWORKS
from fx2relax.params import InputSpec

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def network(name: str, dtype: str, batch: int = 1) -> tuple[Any, list[InputSpec]]:
    """The functional ATen graph of a benchmark network for inference on a GPU, and its inputs."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad():
        program = torch.export.export(*_built(name, DTYPES[dtype], batch, mode), strict=False)
    return there(program)


def _built(name: str, dtype: torch.dtype, batch: int, mode: FakeTensorMode) -> Any:
    """A network and its arguments, all of them fake."""
    try:
        with mode:
            model, args = NETWORKS[name].build(batch)
    except DataDependentOutputException:  # it reads a number out of a tensor that it makes
        model, args = NETWORKS[name].build(batch)
    made: dict[Any, Any] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        """The same one for a tied weight."""
        if tensor not in made:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            with mode:
                found = torch.empty(tensor.shape, dtype=kind)
            parameter = isinstance(tensor, torch.nn.Parameter)
            made[tensor] = torch.nn.Parameter(found, False) if parameter else found
        return made[tensor]  # type: ignore[no-any-return]

    for module in model.modules():
        for place in (module._parameters, module._buffers):
            place.update({k: fake(v) for k, v in place.items() if v is not None})
    return model, tuple(fake(a) for a in args)
