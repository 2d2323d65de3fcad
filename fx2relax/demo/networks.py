"""The two seeded networks of the demo, in plain PyTorch: ResNet-18 and a GPT-2-style decoder."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al., 2015)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 with torchvision's shapes."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks: list[nn.Module] = []
        inputs = 64
        for stage, outputs in enumerate((64, 128, 256, 512)):
            blocks.append(BasicBlock(inputs, outputs, 1 if stage == 0 else 2))
            blocks.append(BasicBlock(outputs, outputs, 1))
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.blocks(self.stem(x)))
        out: Tensor = self.head(torch.flatten(x, 1))
        return out


class DecoderBlock(nn.Module):
    """Masked self-attention and a GELU MLP, each after a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.ln2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.ln1(x)).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))
        return out


class Decoder(nn.Module):
    """A GPT-2-style decoder; the defaults are the shape of GPT-2 small.

    The output layer is tied to the token embedding, as in GPT-2.
    """

    def __init__(
        self,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        vocabulary: int = 50257,
        context: int = 1024,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # GPT-2 scales the layers that feed the residual stream by its depth.
                residual = name.endswith(("project.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers if residual else 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def settle(model: nn.Module, *args: object) -> nn.Module:
    """Give every BatchNorm statistics and scales of a trained kind; return `model` for inference.

    Fresh statistics (mean 0, variance 1) hide a swapped or an ignored statistic, and without
    training a deep network's activations vanish or explode. One pass in training mode over `args`
    measures what each layer really sees.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    with torch.no_grad():
        for norm in norms:
            norm.momentum = 1.0
            norm.weight.uniform_(0.6, 1.4)
            norm.bias.normal_(std=0.2)
        if norms:
            model.train()(*args)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    return model.eval()


def resnet18(classes: int = 1000, size: int = 224, batch: int = 1) -> tuple[nn.Module, Tensor]:
    """A seeded ResNet-18 with a batch of inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(18)
        model = settle(ResNet18(classes), torch.randn(4, 3, min(size, 64), min(size, 64)))
        return model, torch.randn(batch, 3, size, size)


def decoder(batch: int = 1, length: int = 64, **config: int) -> tuple[nn.Module, Tensor]:
    """A seeded GPT-2-style decoder with a batch of token ids."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = Decoder(**config).eval()
        vocabulary = model.tokens.num_embeddings
        return model, torch.randint(vocabulary, (batch, length))
