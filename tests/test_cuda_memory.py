"""The memory of programs for a GPU, as far as it shows without one: it is PyTorch's."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tvm
import tvm_ffi
from cuda_cases import ampere, graph_of, specs_of
from torch.nn.functional import layer_norm

from fx2relax import devices, drafts, pipeline
from fx2relax.options import Options
from fx2relax.pipeline import building
from fx2relax.pipeline.cuda import with_host
from fx2relax.pipeline.in_torch import in_torch
from fx2relax.pipeline.launches import on_device
from fx2relax.runtime import in_torch as functions
from fx2relax.runtime import owned

__all__ = ["ampere"]


@pytest.mark.usefixtures("ampere")
def test_a_program_for_a_gpu_takes_pytorchs_memory() -> None:
    graph = graph_of(lambda x, w: (x @ w).relu().softmax(-1) @ w, (4, 4), (4, 4))
    draft = drafts.draft_of(graph, specs_of(graph), Options(), False)
    target = devices.facts(draft.device)
    lowered = pipeline.lower(draft.imported.mod, target=target)
    ready, _ = pipeline.give(lowered, draft.imported.name, draft.imported.num_input)
    text = building._to_virtual_machine()(in_torch(ready)).script()
    assert functions.EMPTY in text
    assert "alloc_storage" not in text
    assert "alloc_tensor" not in text


@pytest.mark.usefixtures("ampere")
def test_memory_between_the_launches_of_a_kernel_is_pytorchs() -> None:
    """TVM's own pool on a GPU knows nothing of streams and captures."""
    graph = graph_of(lambda x, w: (x @ w).softmax(0) + layer_norm(x.mT, (4,)), (4, 4), (4, 4))
    draft = drafts.draft_of(graph, specs_of(graph), Options(library="none"), False)
    target = devices.facts(draft.device)
    lowered = pipeline.lower(draft.imported.mod, target=target)
    ready, _ = pipeline.give(lowered, draft.imported.name, draft.imported.num_input)
    kernels = {n: f for n, f in ready.functions_items() if isinstance(f, tvm.tirx.PrimFunc)}
    _, host, launches = on_device(tvm.IRModule(kernels), with_host(tvm.target.Target(target)))
    assert len(launches) > len(kernels), "no kernel has several launches"
    made: list[Any] = []
    for _, function in host.functions_items():
        tvm_ffi.structural_walk(function.body, (tvm.tirx.AllocBuffer, made.append))
    assert made == []
    machine_code = building._to_virtual_machine()(in_torch(ready)).script()
    assert machine_code.count(functions.EMPTY) >= 3


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let programs for the processor do as those for a GPU; what they allocate."""
    made: list[Any] = []
    give = building.give_results

    def given(mod: Any, *rest: Any) -> Any:
        mod, calling = give(mod, *rest)
        return in_torch(mod, "cpu"), calling

    def empty(*arguments: Any) -> torch.Tensor:
        fresh = functions._empty(*arguments)
        made.append(weakref.ref(fresh.untyped_storage()))
        return fresh

    monkeypatch.setattr(building, "give_results", given)
    tvm_ffi.register_global_func(functions.EMPTY, empty, override=True)
    yield made
    tvm_ffi.register_global_func(functions.EMPTY, functions._empty, override=True)


@pytest.mark.usefixtures("fresh")
def test_memory_of_pytorchs_goes_back_after_its_last_use(on_cpu: list[Any]) -> None:
    alive: list[int] = []

    @torch.library.custom_op("fx2relax_tests::look", mutates_args=())
    def look(x: torch.Tensor) -> torch.Tensor:
        alive.append(sum(m() is not None for m in on_cpu))
        return x.clone()

    look.register_fake(torch.empty_like)

    def net(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = look((x @ x).softmax(-1).cumsum(0))
        return x

    x = torch.rand(8, 8)
    compiled = torch.compile(net, backend="relax", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), net(x))
    assert len(on_cpu) >= 20, "too few intermediate results for a look at their memory"
    assert max(alive[:6]) <= 2


@pytest.mark.usefixtures("fresh", "on_cpu")
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_sizes_and_conditions_are_read_in_pytorch(sign: float) -> None:
    def net(x: torch.Tensor) -> Any:
        found = x.nonzero()
        chosen = torch.cond(x.sum() > 0, lambda x: x.sin() @ x, lambda x: x.cos() @ x, (x,))
        return found * 2, chosen, x[:0].exp() @ x

    x = sign * torch.tensor([[1.0, 0.0], [2.0, 0.5]])
    options = {"on_unsupported": "raise"}
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(net, backend="relax", fullgraph=True, options=options)
        torch.testing.assert_close(compiled(x), net(x))


def test_a_capture_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    there = SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(functions, "from_dlpack", lambda _: there)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="no captured graph can read"):
        functions._sizes(SimpleNamespace(__dlpack__=lambda: None))


def test_a_result_is_in_the_storage_that_pytorch_made() -> None:
    """Of other memory at the same address, PyTorch's allocator records no stream."""
    whole = functions._empty((4, 3), "float32", "cpu")
    part = whole[1:]  # as an operator of PyTorch's may give it
    owned.remember(part)
    for tensor, there in ((whole, 0), (part, 3)):
        foreign = torch.from_dlpack(tvm_ffi.from_dlpack(tensor).__dlpack__())
        assert not foreign.untyped_storage().resizable(), "it is PyTorch's in any case"
        found = owned.owned(foreign.view(-1))
        assert found.untyped_storage()._cdata == whole.untyped_storage()._cdata
        assert (found.storage_offset(), found.shape) == (there, (tensor.numel(),))
        assert found.data_ptr() == tensor.data_ptr()
    other = torch.ones(3)
    assert owned.owned(other) is other


def test_storages_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned, "_storages", {})
    kept = [functions._empty((1,), "int8", "cpu") for _ in range(owned._MANY // 2)]
    gone = [torch.ones(1) for _ in range(owned._MANY)]
    for tensor in gone[owned._MANY // 2 :]:
        owned.remember(tensor)
    gone.clear()
    del tensor
    owned.remember(kept[0])
    assert len(owned._storages) <= owned._MANY // 2
    assert owned.owned(kept[1]).untyped_storage()._cdata == kept[1].untyped_storage()._cdata
