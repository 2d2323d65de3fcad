"""Whole quantised networks: PyTorch's PT2E graphs, and the weights of torchao.

A step of a quantised tensor is lost or won where a float32 sum lies on a tie, and another step
follows it: eager differs from itself as much where it sums in another order. So results are held
to the distance of eager runs that are the same but for such noise.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fx2relax
from fx2relax import deploy
from fx2relax.demo.networks import ResNet18, settle
from fx2relax.pipeline.integer_kernels import unit_of
from fx2relax.pipeline.target import as_target

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchao", reason="quantised networks are made by torchao")
    import torchao.quantization as ao
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization.pt2e import quantize_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86
    from torchao.testing.pt2e._xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.utils import unwrap_tensor_subclass

    transformers = pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

pytestmark = pytest.mark.filterwarnings("ignore")  # those of torchao's tracing


def distance(got: Tensor, want: Tensor) -> float:
    """The largest difference in parts of the largest number."""
    return ((got - want).abs().max() / want.abs().max()).item()


def check(got: Tensor, want: Tensor, others: list[Tensor]) -> None:
    """No further from eager than twice what eager's own noise makes of its result."""
    noise = max(distance(other, want) for other in others)
    assert distance(got, want) <= 2 * noise + 2e-6


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    torch._dynamo.reset()
    fx2relax.reset_stats()
    with torch.no_grad():
        yield


def noisy_runs(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Eager's results where floats differ in their last digits."""
    found = []
    with torch.backends.mkldnn.flags(enabled=False):
        found.append(model(x))
    for seed in range(3):
        other, make = copy.deepcopy(model), torch.Generator().manual_seed(seed)
        for weight in [*other.parameters(), *other.buffers()]:
            if weight.is_floating_point():
                weight.mul_(1 + 2e-7 * torch.randn(weight.shape, generator=make))
        found.append(other(x))
    return found


def pt2e(model: nn.Module, x: Tensor, quantizer: Any) -> nn.Module:
    """A PT2E graph of int8 convolutions and linear layers."""
    prepared = quantize_pt2e.prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
    prepared(x)
    return quantize_pt2e.convert_pt2e(prepared)


def x86_quantizer(dynamic: bool = False) -> Any:
    config = x86.get_default_x86_inductor_quantization_config(is_dynamic=dynamic)
    return x86.X86InductorQuantizer().set_global(config)


def xnnpack_quantizer() -> Any:
    return XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))


@pytest.fixture(scope="module")
def image() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def resnet(image: Tensor) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        return pt2e(settle(ResNet18(10), image).eval(), image, x86_quantizer())


def test_pt2e_resnet(resnet: nn.Module, image: Tensor):
    got = torch.compile(resnet, backend="relax", fullgraph=True)(image)
    check(got, resnet(image), noisy_runs(resnet, image))
    stats = fx2relax.stats()
    assert stats["nodes_fallback"] == 0, stats["fallback_ops"]
    assert stats["nodes_compiled"] == stats["nodes_total"] > 0
    # Each kernel by itself, from eager's values: here noise has no layers to grow in.
    found = fx2relax.check(resnet, image)
    assert found.kernels >= 8
    assert found.right, str(found)
    if unit_of(as_target(None)) is not None:
        assert stats["library_calls"] == 0


class Small(nn.Module):
    """A residual block and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.relu(self.second(x) + x)
        return self.head(x.mean((2, 3)))


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    "quantizer", [x86_quantizer, lambda: x86_quantizer(dynamic=True), xnnpack_quantizer]
)
def test_pt2e_quantizers(quantizer: Callable[[], Any], image: Tensor):
    torch.manual_seed(0)
    model = pt2e(Small().eval(), image, quantizer())
    got = torch.compile(model, backend="relax", fullgraph=True)(image)
    check(got, model(image), noisy_runs(model, image))
    assert fx2relax.stats()["nodes_fallback"] == 0, fx2relax.stats()["fallback_ops"]


def test_pt2e_export(image: Tensor, tmp_path: Any):
    """An artifact that runs without PyTorch."""
    torch.manual_seed(0)
    model = pt2e(Small().eval(), image, x86_quantizer())
    exported = fx2relax.export(model, {"forward": {"x": fx2relax.Tensor((2, 3, 32, 32))}})
    exported.save(tmp_path / "small")
    artifact = deploy.load(tmp_path / "small")
    got = torch.from_numpy(artifact.forward(image.numpy()).copy())
    check(got, model(image), noisy_runs(model, image))


def gpt2() -> nn.Module:
    """GPT-2 with linear layers, which torchao quantises, in place of transformers' own."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=128,
        n_layer=2,
        n_head=4,
        vocab_size=160,
        n_positions=32,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, Conv1D):
                linear = nn.Linear(*layer.weight.shape)
                linear.weight, linear.bias = nn.Parameter(layer.weight.t().contiguous()), layer.bias
                setattr(module, name, linear)
    return model


class Logits(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = gpt2()

        def wanted(module: nn.Module, name: str) -> bool:
            return isinstance(module, nn.Linear) and name != "lm_head"

        ao.quantize_(self.model, config, filter_fn=wanted)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits


CONFIGS = {
    "int4": PrototypeInt4WeightOnlyConfig(group_size=32),
    "int8": ao.Int8WeightOnlyConfig(),
    "int4-in-bytes": ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(32)),
    "int8-dynamic": ao.Int8DynamicActivationInt8WeightConfig(),
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("name", "count"), [*((name, 13) for name in CONFIGS), ("int4", 1)])
def test_torchao_gpt2(name: str, count: int):
    model = Logits(CONFIGS[name])
    tokens = torch.randint(0, 160, (1, count), generator=torch.Generator().manual_seed(0))
    got = torch.compile(model, backend="relax", fullgraph=True)(tokens)
    want = model(tokens)
    others = [want]
    if name == "int8-dynamic":  # the others round nothing on the way
        for seed in range(3):
            other, make = Logits(CONFIGS[name]), torch.Generator().manual_seed(seed)
            table = other.model.transformer.wpe.weight
            table.mul_(1 + 2e-7 * torch.randn(table.shape, generator=make))
            others.append(other(tokens))
    check(got, want, others)
    stats = fx2relax.stats()
    assert stats["nodes_fallback"] == 0, stats["fallback_ops"]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", CONFIGS)
def test_torchao_gpt2_exported(name: str, tmp_path: Any):
    """From its weights' parts; as they are, the weights are refused with the remedy."""
    model, tokens = Logits(CONFIGS[name]), torch.arange(7)[None]
    functions = {"forward": {"tokens": fx2relax.Tensor((1, 7), dtype=torch.int64)}}
    with pytest.raises(fx2relax.ImportFailure, match="unwrap_tensor_subclass"):
        fx2relax.export(model, functions)
    want = model(tokens)
    plain = unwrap_tensor_subclass(model)
    fx2relax.export(plain, functions).save(tmp_path / "gpt2")
    artifact = deploy.load(tmp_path / "gpt2")
    got = torch.from_numpy(artifact.forward(tokens.numpy()).copy())
    # A step of a quantised input more or less.
    assert distance(got, want) <= (0.03 if name == "int8-dynamic" else 2e-6)


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_changed_weights_are_seen(name: str):
    model = Logits(CONFIGS[name])
    tokens = torch.arange(7)[None]
    compiled = torch.compile(model, backend="relax", fullgraph=True)
    before = compiled(tokens)
    weight = model.model.transformer.h[0].mlp.c_fc.weight
    (weight.scale_and_zero if name == "int4" else weight.scale).mul_(1.5)
    after = compiled(tokens)
    assert distance(after, before) > 1e-3
    check(after, model(tokens), [model(tokens)])
