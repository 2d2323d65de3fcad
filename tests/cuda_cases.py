"""Graphs of tensors on GPUs that are not there, and how PyTorch would describe such GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fx2relax import decompositions, devices, switches
from fx2relax.params import InputSpec

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def graph_of(function: Callable[..., Any], *shapes: Any, device: str = "cuda:0") -> Any:
    """A functional ATen graph of a function of tensors that are nowhere.

    Args:
        function: takes a tensor for each shape.
        shapes: sizes, or sizes and a dtype; or a tensor's device after them.
        device: of the others.
    """
    mode = FakeTensorMode()
    with mode, torch.no_grad():
        tensors = [_empty(shape, device) for shape in shapes]
        table = decompositions.table()
        return make_fx(lambda *x: (function(*x),), decomposition_table=table)(*tensors)


def _empty(shape: Any, device: str) -> torch.Tensor:
    sizes = [s for s in shape if isinstance(s, int)]
    dtype = next((s for s in shape if isinstance(s, torch.dtype)), torch.float32)
    return torch.empty(
        sizes, dtype=dtype, device=next((s for s in shape if isinstance(s, str)), device)
    )


def specs_of(graph: Any) -> list[InputSpec]:
    """A graph's inputs as the importer takes them."""
    nodes = [n for n in graph.graph.nodes if n.op == "placeholder"]
    return [InputSpec(n.name, "user", n.meta["val"], position=i) for i, n in enumerate(nodes)]


@contextlib.contextmanager
def gpus_of(arch: int) -> Iterator[None]:
    """Let PyTorch describe GPUs of a compute capability such as 80 in the body."""
    properties = SimpleNamespace(shared_memory_per_block=48 << 10, warp_size=32)
    capability = divmod(arch, 10)
    devices._cuda.cache_clear()
    with (
        mock.patch.dict("os.environ", {switches.CUDA: "1"}),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
    ):
        yield
    devices._cuda.cache_clear()


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> Any:
    """GPUs of one kind, and another where the index is odd, as PyTorch would describe them."""

    def properties(index: int) -> Any:
        return SimpleNamespace(shared_memory_per_block=49152 << index % 2, warp_size=32)

    monkeypatch.setenv(switches.CUDA, "1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9 if i % 2 else 8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    devices._cuda.cache_clear()
    yield
    devices._cuda.cache_clear()
