"""What is timed, by name. Nothing here imports PyTorch: only the worker processes build."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    Built = tuple[nn.Module, tuple[Tensor, ...]]
else:
    Built = Any

MODES = ("inference", "train", "autocast")
#: Networks of which one training step is timed.
TRAINED = ("resnet18", "bert", "gpt2")


@dataclass(frozen=True)
class Case:
    """One network or kernel.

    Attributes:
        name: as in the table.
        kind: ``"network"``, ``"kernel"``, ``"overhead"`` (a kernel too small to be timed as one) or
            ``"prime"`` (compiled before all others, so that what a side builds once a machine is
            in its cache).
        builder: ``"module:function"`` inside this package; the function takes the batch size.
        batches: the batch sizes it is run with; None for those asked for.
    """

    name: str
    kind: str
    builder: str
    batches: tuple[int, ...] | None = None

    def build(self, batch: int) -> Built:
        """The seeded module and its arguments."""
        import torch

        module, function = self.builder.split(":")
        with torch.random.fork_rng():
            torch.manual_seed(sum(map(ord, self.name)))
            built: Built = getattr(importlib.import_module(f"benchmarks.{module}"), function)(batch)
        return built


NETWORKS = {
    name: Case(name, "network", f"networks.{builder}", batches)
    for name, builder, batches in (
        ("resnet18", "vision:resnet18", None),
        ("resnet50", "vision:resnet50", None),
        ("mobilenetv3", "vision:mobilenetv3", None),
        ("efficientnet-b0", "vision:efficientnet_b0", None),
        ("convnext-tiny", "vision:convnext_tiny", None),
        ("unet", "vision:unet", None),
        ("vit-small", "language:vit_small", None),
        ("bert", "language:bert", None),
        ("gpt2", "language:gpt2", None),
        ("whisper-encoder", "language:whisper_encoder", None),
        ("gpt2-decode", "decode:gpt2", None),
        ("llama-decode", "decode:llama", None),
        ("llama-long", "decode:llama_long", None),
        ("lstm", "other:lstm", None),
        ("dlrm", "other:dlrm", None),
        ("mlp", "other:mlp", (1, 64)),
    )
}

_KERNELS = (
    "gelu-chain",
    "softmax",
    "layer-norm",
    "rms-norm",
    "sum-last",
    "sum-outer",
    "sum-all",
    "amax-last",
    "transpose",
    "transpose-heads",
    "nchw-to-nhwc",
    "gather",
    "embedding",
    "cumsum",
    "argmax",
    "add",
    "broadcast",
)
KERNELS = {
    **{n: Case(n, "kernel", f"kernels:{n.replace('-', '_')}", (1,)) for n in _KERNELS},
    "add-16": Case("add-16", "overhead", "kernels:add_16", (1,)),
}
PRIME = Case("prime", "prime", "kernels:prime", (1,))
CASES = {**NETWORKS, **KERNELS, PRIME.name: PRIME}
