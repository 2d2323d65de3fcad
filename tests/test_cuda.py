"""Compiled graphs on NVIDIA GPUs, against eager: what only hardware can show."""

from __future__ import annotations

import copy
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cuda_cases import needs_gpu
from torch import nn

import fx2relax

pytestmark = [pytest.mark.cuda, needs_gpu]
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
HALF = (torch.float16, torch.bfloat16)
TOLERANCE = {torch.float16: (2e-2, 2e-2), torch.bfloat16: (5e-2, 5e-2)}
OPERATORS = (
    *("abs", "add", "addmm", "amax", "bmm", "cat", "clamp", "cos", "cumsum", "div", "erf", "exp"),
    *("flip", "gather", "index_select", "log", "log_softmax", "logsumexp", "masked_fill", "matmul"),
    *("max", "mean", "mul", "nn.functional.avg_pool2d", "nn.functional.batch_norm"),
    *("nn.functional.conv2d", "nn.functional.embedding", "nn.functional.gelu"),
    *("nn.functional.group_norm", "nn.functional.layer_norm", "nn.functional.linear"),
    *("nn.functional.silu", "permute", "pow"),
    *("prod", "roll", "rsqrt", "scatter_add", "sigmoid", "sin", "softmax", "sort", "sqrt", "std"),
    *("sub", "sum", "tanh", "topk", "tril", "var", "where"),
)


@pytest.fixture(autouse=True)
def asked_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Compiled from scratch, in kernels of ours, without a warning."""
    monkeypatch.setenv("FX2RELAX_CUDA", "1")
    torch._dynamo.reset()
    fx2relax.reset_stats()
    torch.manual_seed(0)
    with caplog.at_level(logging.WARNING, "fx2relax"):
        yield
    said = [r.getMessage() for r in caplog.records if r.name == "fx2relax"]
    torch._dynamo.reset()
    assert said == []


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="relax", **options)


def close(actual: Any, expected: Any, dtype: torch.dtype = torch.float32) -> None:
    rtol, atol = TOLERANCE.get(dtype, (1e-3, 1e-4))
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)


def net(width: int = 64, device: str = "cuda") -> nn.Module:
    layers = (nn.Linear(width, 2 * width), nn.GELU(), nn.LayerNorm(2 * width))
    return nn.Sequential(*layers, nn.Linear(2 * width, width), nn.Softmax(-1)).to(device)


def image_net() -> nn.Module:
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 5)).cuda()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF, torch.int64], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_operator(name: str, dtype: torch.dtype) -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    op = next(o for o in op_db if o.name == name and not o.variant_test_name)
    if dtype not in op.supported_dtypes("cuda"):
        pytest.skip("PyTorch has no such kernel")
    for sample in itertools.islice(op.sample_inputs("cuda", dtype), 4):
        call = lambda *a, s=sample: op(*a, **s.kwargs)  # noqa: E731
        torch._dynamo.reset()
        arguments = (sample.input, *sample.args)
        with torch.no_grad():
            close(compiled(call)(*arguments), call(*arguments), dtype)


@pytest.mark.parametrize("make", [net, image_net])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_network(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    model = make().to(dtype).eval()
    shape = (4, 3, 16, 16) if make is image_net else (4, 64)
    x = torch.randn(shape, device="cuda", dtype=dtype)
    with torch.no_grad():
        close(compiled(model)(x), model(x), dtype)
    assert fx2relax.stats()["tir_kernels"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool, dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 2, 4, 16, 32, device="cuda", dtype=dtype)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k * 2, v, is_causal=causal) + q

    close(compiled(attend)(q, k, v), attend(q, k, v), dtype)


def test_dynamic_sizes() -> None:
    model = net().eval()
    fast = compiled(model, dynamic=True)
    with torch.no_grad():
        for rows in (3, 5, 9):
            x = torch.randn(rows, 64, device="cuda")
            close(fast(x), model(x))


def _train(model: nn.Module, run: Any, steps: int = 10, scaled: Any = None) -> list[float]:
    torch.manual_seed(1)
    optimiser = torch.optim.SGD(model.parameters(), 0.02)
    losses = []
    for _ in range(steps):
        x = torch.randn(8, 3, 16, 16, device="cuda")
        optimiser.zero_grad()
        with torch.autocast("cuda", scaled or torch.float16, enabled=scaled is not None):
            loss = nn.functional.cross_entropy(run(x), torch.arange(8, device="cuda") % 5)
        if scaled is torch.float16:
            scaler = torch.amp.GradScaler("cuda", init_scale=128.0)
            scaler.scale(loss).backward()
            scaler.step(optimiser)
            scaler.update()
        else:
            loss.backward()
            optimiser.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("scaled", [None, *HALF], ids=str)
def test_ten_steps(scaled: torch.dtype | None) -> None:
    """In float32, under autocast to bfloat16, and with `GradScaler` in float16."""
    model = image_net()
    twin = copy.deepcopy(model)
    expected = _train(twin, twin, scaled=scaled)
    found = _train(model, compiled(model), scaled=scaled)
    assert found == pytest.approx(expected, rel=1e-3 if scaled is None else 5e-2)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=5e-3)


def test_a_call_on_another_stream() -> None:
    model = net().eval()
    fast = compiled(model)
    x = torch.randn(4, 64, device="cuda")
    with torch.no_grad():
        fast(x)
        for _ in range(5):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                late = x * 2
                found = fast(late)
            torch.cuda.current_stream().wait_stream(stream)
            close(found, model(x * 2))


def test_no_call_waits_for_the_gpu() -> None:
    model = net().eval()
    fast = compiled(model)
    x = torch.randn(4, 64, device="cuda")
    with torch.no_grad():
        fast(x)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        busy = torch.cuda.Event()
        busy.record()
        fast(x)
        assert not busy.query(), "the call waited"


def test_memory_is_pytorchs_and_goes_back() -> None:
    model = net(256).eval()
    fast = compiled(model)
    x = torch.randn(64, 256, device="cuda")
    with torch.no_grad():
        fast(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found = fast(x)
        assert torch.cuda.max_memory_allocated() > before
        del found
        assert torch.cuda.memory_allocated() == before


def test_a_capture_of_the_users() -> None:
    model = net().eval()
    fast = compiled(model)
    x = torch.randn(4, 64, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            fast(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = fast(x)
        x.copy_(torch.randn(4, 64))
        graph.replay()
        close(found, model(x))


def test_reduce_overhead() -> None:
    model = net().eval()
    fast = compiled(model, mode="reduce-overhead")
    with torch.inference_mode():
        kept = []
        for _ in range(8):
            x = torch.randn(4, 64, device="cuda")
            kept.append((fast(x), model(x)))
        for found, expected in kept:
            close(found, expected)
        model[0].weight.data = torch.randn_like(model[0].weight)
        close(fast(x), model(x))


def test_a_size_that_depends_on_data() -> None:
    def positive(x: torch.Tensor) -> torch.Tensor:
        return (x.nonzero() * 2).float().sum(0)

    x = torch.randn(50, device="cuda")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        close(compiled(positive)(x), positive(x))


def test_a_seed_means_what_it_means_in_eager() -> None:
    drop = nn.Dropout(0.5)
    x = torch.ones(1000, device="cuda")
    torch.manual_seed(5)
    expected = torch.compile(drop, backend="aot_eager")(x)
    torch.manual_seed(5)
    close(compiled(drop)(x), expected)


@several
def test_each_gpu_of_one_process() -> None:
    for place in (1, 0):
        model = net(device=f"cuda:{place}").eval()
        x = torch.randn(4, 64, device=f"cuda:{place}")
        with torch.no_grad():
            found = compiled(model)(x)
        assert found.device == x.device
        close(found, model(x))
        assert torch.cuda.current_device() == 0


def _in_parallel(rank: int, folder: str) -> None:
    os.environ["FX2RELAX_CUDA"] = "1"
    torch.cuda.set_device(rank)
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("nccl", store=store, rank=rank, world_size=2)
    losses = []
    for backend in ("eager", "relax"):
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(net(device=f"cuda:{rank}"), [rank])
        run = torch.compile(model, backend=backend)
        optimiser = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(rank)
        losses.append([])
        for _ in range(3):
            optimiser.zero_grad()
            loss = run(torch.randn(4, 64, device=f"cuda:{rank}")).square().sum()
            loss.backward()
            optimiser.step()
            losses[-1].append(float(loss.detach()))
    torch.distributed.destroy_process_group()
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@several
def test_data_parallel_over_nccl(tmp_path: Any) -> None:
    torch.multiprocessing.spawn(_in_parallel, (str(tmp_path),), nprocs=2)
