"""Every network that the tests compile and import, by name.

`NETWORKS[name].build()` gives a seeded module in evaluation mode with its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fx2relax.demo.networks import ResNet18, settle
from networks.language import BUILDERS, spread
from networks.other import DLRM, LSTMClassifier
from networks.swin import SwinTiny
from networks.vision import ConvNeXtTiny, EfficientNetB0, MobileNetV3Small, UNet

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Network:
    """How to build a network, and what may be asked of it."""

    name: str
    make: Callable[..., Built]
    #: `fx.symbolic_trace` cannot follow Python that branches on a tensor's size.
    traceable: bool = True

    def build(self, **options: Any) -> Built:
        """The seeded module in evaluation mode, its arguments and keyword arguments."""
        with torch.random.fork_rng():
            torch.manual_seed(sum(map(ord, self.name)))
            return self.make(**options)


def image(model: Callable[[], nn.Module], size: int, batch: int = 2) -> Built:
    """A network over images, with statistics measured on a batch of other images."""
    return settle(model(), torch.randn(4, 3, size, size)), (torch.randn(batch, 3, size, size),), {}


def language(name: str, **options: Any) -> Built:
    model, args, kwargs = BUILDERS[name](**options)
    return spread(model).eval(), args, kwargs


def lstm() -> Built:
    tokens = torch.randint(1, 200, (4, 15))
    tokens[2, 11:] = 0
    return LSTMClassifier().eval(), (tokens,), {}


def dlrm() -> Built:
    model = DLRM().eval()
    sizes = [bag.num_embeddings for bag in model.bags]
    # Bags of two, no, four and three ids.
    ids = torch.stack([torch.randint(n, (9,)) for n in sizes])
    offsets = torch.tensor([0, 2, 2, 6]).repeat(len(sizes), 1)
    return model, (torch.randn(4, 13), ids, offsets), {}


NETWORKS = {
    network.name: network
    for network in (
        Network("resnet18", partial(image, partial(ResNet18, 100), 64)),
        Network("mobilenetv3", partial(image, partial(MobileNetV3Small, 100), 64)),
        Network("efficientnet", partial(image, partial(EfficientNetB0, 100), 64)),
        Network("convnext", partial(image, partial(ConvNeXtTiny, 100), 64)),
        Network("swin", partial(image, partial(SwinTiny, 100), 112), traceable=False),
        Network("unet", partial(image, UNet, 48)),
        Network("lstm", lstm),
        Network("dlrm", dlrm),
        *(Network(name, partial(language, name), traceable=False) for name in BUILDERS),
    )
}
