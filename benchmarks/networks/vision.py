"""Convolution networks over images of 224 x 224, and a U-Net over 128 x 128."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cases import Built
from benchmarks.networks.shared import ConvNeXtTiny, EfficientNetB0, MobileNetV3Large, UNet
from fx2relax.demo.networks import ResNet18, settle


class Bottleneck(nn.Module):
    """A 3x3 convolution between two of 1x1, and a shortcut (He et al., 2015)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet50(ResNet18):
    """ResNet-50 with torchvision's shapes: the stem and the head of ResNet-18."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__(classes)
        blocks: list[nn.Module] = []
        inputs = 64
        for stage, (width, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
            for i in range(depth):
                blocks.append(Bottleneck(inputs, width, 2 if stage and i == 0 else 1))
                inputs = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)


def _images(model: nn.Module, batch: int, size: int = 224) -> Built:
    return settle(model, torch.randn(4, 3, 64, 64)), (torch.randn(batch, 3, size, size),)


def resnet18(batch: int) -> Built:
    return _images(ResNet18(), batch)


def resnet50(batch: int) -> Built:
    return _images(ResNet50(), batch)


def mobilenetv3(batch: int) -> Built:
    return _images(MobileNetV3Large(), batch)


def efficientnet_b0(batch: int) -> Built:
    return _images(EfficientNetB0(), batch)


def convnext_tiny(batch: int) -> Built:
    return _images(ConvNeXtTiny(), batch)


def unet(batch: int) -> Built:
    return _images(UNet(width=32), batch, 128)
