"""Networks that are neither of images nor of attention."""

from __future__ import annotations

import torch

from benchmarks.cases import Built
from benchmarks.networks.shared import DLRM, LSTMClassifier, layers


def lstm(batch: int) -> Built:
    """Two bidirectional layers of 256 over 64 tokens."""
    model = LSTMClassifier(vocabulary=10000, width=256, classes=5)
    return model.eval(), (torch.randint(1, 10000, (batch, 64)),)


def dlrm(batch: int) -> Built:
    """Eight tables of 10,000 rows of 64, each read at 4 rows a sample."""
    tables, bag = 8, 4
    model = DLRM(rows=(10000,) * tables, width=64)
    ids = torch.randint(10000, (tables, bag * batch))
    offsets = torch.arange(0, bag * batch, bag).repeat(tables, 1)
    return model.eval(), (torch.randn(batch, 13), ids, offsets)


def mlp(batch: int) -> Built:
    return layers(784, 512, 512, 10).eval(), (torch.randn(batch, 784),)
