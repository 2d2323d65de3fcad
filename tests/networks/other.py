"""An LSTM classifier, a recommendation network, and the two audio networks with real weights."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LSTMClassifier(nn.Module):
    """Token ids -> embedding -> two bidirectional LSTM layers -> mean and last state -> classes."""

    def __init__(self, vocabulary: int = 200, width: int = 24, classes: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(4 * width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        y, (hidden, _) = self.lstm(self.embed(tokens))
        return self.head(torch.cat([y.mean(1), hidden[-1], hidden[-2]], dim=1))


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for i, o in pairwise(sizes):
        layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """Embedding bags and dense features, joined by pairwise products (Naumov et al., 2019)."""

    def __init__(
        self, rows: tuple[int, ...] = (50, 100, 200), width: int = 16, dense: int = 13
    ) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(n, width, mode="sum") for n in rows)
        self.bottom = mlp(dense, 64, width)
        pairs = (len(rows) + 1) * len(rows) // 2
        self.top = mlp(width + pairs, 64, 1)

    def forward(self, dense: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        """`ids` and `offsets` have one row for each table."""
        x = F.relu(self.bottom(dense))
        features = [x] + [bag(ids[n], offsets[n]) for n, bag in enumerate(self.bags)]
        stacked = torch.stack(features, dim=1)
        products = stacked @ stacked.transpose(1, 2)
        i, j = torch.tril_indices(len(features), len(features), -1).unbind()
        return torch.sigmoid(self.top(torch.cat([x, products[:, i, j]], dim=1)))


class CrepeTiny(nn.Module):
    """CREPE's smallest pitch network (Kim et al., 2018), with torchcrepe's parameter names."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (1, 128, 16, 16, 16, 32, 64)
        for n, (i, o) in enumerate(pairwise(sizes), 1):
            kernel, stride = (512, 4) if n == 1 else (64, 1)
            self.add_module(f"conv{n}", nn.Conv2d(i, o, (kernel, 1), (stride, 1)))
            self.add_module(f"conv{n}_BN", nn.BatchNorm2d(o, eps=0.0010000000474974513, momentum=0))
        self.classifier = nn.Linear(256, 360)

    def forward(self, frames: Tensor) -> Tensor:
        x = frames[:, None, :, None]
        for n in range(1, 7):
            x = F.pad(x, (0, 0, 254, 254) if n == 1 else (0, 0, 31, 32))
            x = self.get_submodule(f"conv{n}_BN")(F.relu(self.get_submodule(f"conv{n}")(x)))
            x = F.max_pool2d(x, (2, 1), (2, 1))
        x = x.permute(0, 2, 1, 3).reshape(-1, 256)
        return torch.sigmoid(self.classifier(x))


class SpeakerEncoder(nn.Module):
    """GE2E speaker embeddings (Wan et al., 2018), with Resemblyzer's parameter names."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, mels: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(mels)
        embeds = F.relu(self.linear(hidden[-1]))
        return embeds / torch.norm(embeds, dim=1, keepdim=True)
