"""MobileNetV3, ConvNeXt-Tiny, EfficientNet-B0 and a U-Net, with their papers' shapes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv_norm(
    inputs: int,
    outputs: int,
    kernel: int = 1,
    stride: int = 1,
    groups: int = 1,
    act: type[nn.Module] | None = None,
) -> nn.Sequential:
    """Convolution, BatchNorm and, unless it is None, an activation."""
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs, eps=1e-3),
    ]
    if act is not None:
        layers.append(act())
    return nn.Sequential(*layers)


class SqueezeExcite(nn.Module):
    """Scale every channel by a gate computed from all the channels' means."""

    def __init__(
        self, channels: int, squeezed: int, act: type[nn.Module], gate: type[nn.Module]
    ) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.down = nn.Conv2d(channels, squeezed, 1)
        self.act = act()
        self.up = nn.Conv2d(squeezed, channels, 1)
        self.gate = gate()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.up(self.act(self.down(self.pool(x)))))


class InvertedResidual(nn.Module):
    """Expand, convolve each channel by itself, squeeze, project (MobileNetV2 onwards)."""

    def __init__(
        self,
        inputs: int,
        expanded: int,
        outputs: int,
        kernel: int,
        stride: int,
        act: type[nn.Module],
        squeeze: nn.Module | None,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        if expanded != inputs:
            layers.append(conv_norm(inputs, expanded, act=act))
        layers.append(conv_norm(expanded, expanded, kernel, stride, expanded, act))
        if squeeze is not None:
            layers.append(squeeze)
        layers.append(conv_norm(expanded, outputs))
        self.body = nn.Sequential(*layers)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.residual else y


def divisible(value: float, by: int = 8) -> int:
    """Round to a multiple of `by`, never down by more than a tenth."""
    rounded = max(by, int(value + by / 2) // by * by)
    return rounded + by if rounded < 0.9 * value else rounded


class MobileNetV3Small(nn.Module):
    """MobileNetV3-small (Howard et al., 2019)."""

    # kernel, expanded, out, squeeze-excite, activation, stride
    rows = (
        (3, 16, 16, True, nn.ReLU, 2),
        (3, 72, 24, False, nn.ReLU, 2),
        (3, 88, 24, False, nn.ReLU, 1),
        (5, 96, 40, True, nn.Hardswish, 2),
        (5, 240, 40, True, nn.Hardswish, 1),
        (5, 240, 40, True, nn.Hardswish, 1),
        (5, 120, 48, True, nn.Hardswish, 1),
        (5, 144, 48, True, nn.Hardswish, 1),
        (5, 288, 96, True, nn.Hardswish, 2),
        (5, 576, 96, True, nn.Hardswish, 1),
        (5, 576, 96, True, nn.Hardswish, 1),
    )
    # The widths of the last convolution and of the layer before the classes.
    last, hidden = 576, 1024

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_norm(3, 16, 3, 2, act=nn.Hardswish)]
        inputs = 16
        for kernel, expanded, outputs, squeezes, act, stride in self.rows:
            squeeze = (
                SqueezeExcite(expanded, divisible(expanded / 4), nn.ReLU, nn.Hardsigmoid)
                if squeezes
                else None
            )
            layers.append(InvertedResidual(inputs, expanded, outputs, kernel, stride, act, squeeze))
            inputs = outputs
        layers.append(conv_norm(inputs, self.last, act=nn.Hardswish))
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.Linear(self.last, self.hidden),
            nn.Hardswish(),
            nn.Dropout(0.2),
            nn.Linear(self.hidden, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(F.adaptive_avg_pool2d(self.features(x), 1), 1))


class MobileNetV3Large(MobileNetV3Small):
    """MobileNetV3-large."""

    rows = (
        (3, 16, 16, False, nn.ReLU, 1),
        (3, 64, 24, False, nn.ReLU, 2),
        (3, 72, 24, False, nn.ReLU, 1),
        (5, 72, 40, True, nn.ReLU, 2),
        (5, 120, 40, True, nn.ReLU, 1),
        (5, 120, 40, True, nn.ReLU, 1),
        (3, 240, 80, False, nn.Hardswish, 2),
        (3, 200, 80, False, nn.Hardswish, 1),
        (3, 184, 80, False, nn.Hardswish, 1),
        (3, 184, 80, False, nn.Hardswish, 1),
        (3, 480, 112, True, nn.Hardswish, 1),
        (3, 672, 112, True, nn.Hardswish, 1),
        (5, 672, 160, True, nn.Hardswish, 2),
        (5, 960, 160, True, nn.Hardswish, 1),
        (5, 960, 160, True, nn.Hardswish, 1),
    )
    last, hidden = 960, 1280


class EfficientNetB0(nn.Module):
    """EfficientNet-B0 (Tan and Le, 2019)."""

    # expansion, kernel, stride, out, repeats
    rows = (
        (1, 3, 1, 16, 1),
        (6, 3, 2, 24, 2),
        (6, 5, 2, 40, 2),
        (6, 3, 2, 80, 3),
        (6, 5, 1, 112, 3),
        (6, 5, 2, 192, 4),
        (6, 3, 1, 320, 1),
    )

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_norm(3, 32, 3, 2, act=nn.SiLU)]
        inputs = 32
        for expansion, kernel, stride, outputs, repeats in self.rows:
            for i in range(repeats):
                expanded = inputs * expansion
                squeeze = SqueezeExcite(expanded, max(1, inputs // 4), nn.SiLU, nn.Sigmoid)
                step = stride if i == 0 else 1
                layers.append(
                    InvertedResidual(inputs, expanded, outputs, kernel, step, nn.SiLU, squeeze)
                )
                inputs = outputs
        layers.append(conv_norm(inputs, 1280, act=nn.SiLU))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.features(x)).flatten(1))


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of an NCHW tensor."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """A 7x7 depthwise convolution and an MLP over the channels, scaled per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.up = nn.Linear(channels, 4 * channels)
        self.down = nn.Linear(4 * channels, channels)
        # 1e-6 in the paper, which would leave the block without a visible effect here.
        self.scale = nn.Parameter(torch.rand(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXtTiny(nn.Module):
    """ConvNeXt-Tiny (Liu et al., 2022)."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        widths, depths = (96, 192, 384, 768), (3, 3, 9, 3)
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), ChannelNorm(widths[0])]
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            if stage:
                layers += [ChannelNorm(widths[stage - 1])]
                layers += [nn.Conv2d(widths[stage - 1], width, 2, 2)]
            layers += [ConvNeXtBlock(width) for _ in range(depth)]
        self.features = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(widths[-1], eps=1e-6)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.features(x).mean([-2, -1])))


def double_conv(inputs: int, outputs: int) -> nn.Sequential:
    """The U-Net's building block."""
    return nn.Sequential(
        conv_norm(inputs, outputs, 3, act=nn.ReLU), conv_norm(outputs, outputs, 3, act=nn.ReLU)
    )


class UNet(nn.Module):
    """A U-Net whose decoder upsamples once by interpolation and then by transposed convolution."""

    def __init__(self, width: int = 16, classes: int = 3) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.encoder = nn.ModuleList(
            double_conv(i, o) for i, o in zip([3, *widths[:-1]], widths, strict=True)
        )
        self.interpolate = nn.Conv2d(widths[3], widths[2], 1)
        self.up = nn.ModuleList(nn.ConvTranspose2d(widths[i + 1], widths[i], 2, 2) for i in (1, 0))
        self.decoder = nn.ModuleList(double_conv(2 * widths[i], widths[i]) for i in (2, 1, 0))
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for stage in self.encoder:
            x = stage(F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        skips.pop()
        for i, stage in enumerate(self.decoder):
            skip = skips.pop()
            if i == 0:
                x = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
                x = self.interpolate(x)
            else:
                x = self.up[i - 1](x)
            x = stage(torch.cat([skip, x], dim=1))
        return self.head(x)
