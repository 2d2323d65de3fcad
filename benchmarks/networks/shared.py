"""The networks that the tests compile too, at other sizes. They live in `tests/networks`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from networks.language import Outputs, spread
from networks.other import DLRM, LSTMClassifier
from networks.other import mlp as layers
from networks.vision import ConvNeXtTiny, EfficientNetB0, MobileNetV3Large, UNet

__all__ = [
    "DLRM",
    "ConvNeXtTiny",
    "EfficientNetB0",
    "LSTMClassifier",
    "MobileNetV3Large",
    "Outputs",
    "UNet",
    "layers",
    "spread",
]
