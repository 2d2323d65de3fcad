"""Ten steps of training, compiled and in eager: losses, final weights, running statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import NETWORKS
from networks.check import compiled
from networks.generative import VAE, Discriminator, Generator
from torch import Tensor, nn

import fx2relax

STEPS = 10
# Eager's own numbers, drawn by PyTorch's generators.
RANDOM = {"aten.randn_like.default"}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    fx2relax.reset_stats()
    yield
    torch._dynamo.reset()


def labelled(scores: Tensor, inputs: Tensor) -> Tensor:
    """Cross entropy; every row of a batch is a class of its own."""
    labels = torch.arange(inputs.shape[0], device=inputs.device)
    return F.cross_entropy(scores, labels, label_smoothing=0.1)


def next_token(outputs: tuple[Tensor, ...], tokens: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0][:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def pooled(outputs: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
    hidden, head = outputs
    return (hidden**2).mean() + F.mse_loss(head, head.flip(0).detach() + 0.5)


def halves(scores: Tensor, images: Tensor) -> Tensor:
    """Each pixel's class says whether the picture is bright there."""
    return F.cross_entropy(scores, (images.mean(1) > 0).long())


def clicked(chance: Tensor, *inputs: Tensor) -> Tensor:
    wanted = (torch.arange(chance.shape[0]) % 2).to(chance).view_as(chance)
    return F.binary_cross_entropy(chance, wanted)


# The loss, the step's length, and what the builder takes. Without dropout: its masks are a matter
# of the tests of random numbers.
SUPERVISED: dict[str, tuple[Callable[..., Tensor], float, dict[str, Any]]] = {
    # At 0.01 eager's own losses are 2e-4 from those of a float64 run after nine steps.
    "resnet18": (labelled, 0.002, {}),
    "bert": (pooled, 0.01, {"dropout": 0.0}),
    "gpt2": (next_token, 0.01, {"dropout": 0.0}),
    "llama": (next_token, 0.01, {}),
    "vit": (lambda out, images: labelled(out[0], images), 0.01, {}),
    "unet": (halves, 0.01, {}),
    "lstm": (labelled, 0.1, {}),
    "dlrm": (clicked, 0.1, {}),
}


Trained = tuple[list[float], nn.Module]


def assert_same_training(
    got: Trained,
    eager: Trained,
    exact: Callable[[], Trained] | None = None,
    nearby: Callable[[], list[Trained]] | None = None,
) -> None:
    """Losses within 1e-4 relative, weights within 1e-3, no torch call but random operators.

    Where a ReLU near zero is turned on or off by a rounding error, losses may be further apart: a
    float64 run then says whose are right, and ours may be twice as far from it as eager's, from
    the same weights or from those a rounding error away (`nearby`).
    """
    assert set(fx2relax.stats()["fallback_ops"]) <= RANDOM
    assert abs(eager[0][-1] - eager[0][0]) > 1e-3, "steps that do nothing compare nothing"
    near = pytest.approx(eager[0], rel=1e-4, abs=0)
    truth, eagers = eager, []
    if exact is not None and nearby is not None and got[0] != near:
        truth, eagers = exact(), [eager, *nearby()]
        own = max(_apart(run[0], truth[0]) for run in eagers)
        assert _apart(got[0], truth[0]) <= 2 * own
    else:
        assert got[0] == near
    for key, true in truth[1].state_dict().items():

        def distance(run: Trained, key: str = key, true: Tensor = true) -> float:
            return torch.linalg.vector_norm(
                run[1].state_dict()[key].double() - true.double()
            ).item()

        # Not element by element: a ReLU near zero moves a single channel.
        allowed = 1e-3 * torch.linalg.vector_norm(true.double()).item()
        assert distance(got) <= max([allowed, *(2 * distance(run) for run in eagers)]), key


def _apart(losses: list[float], truth: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, truth, strict=True))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", SUPERVISED)
def test_supervised(name: str) -> None:
    loss, lr, options = SUPERVISED[name]
    model, args, kwargs = NETWORKS[name].build(**options)
    if name == "resnet18":  # a batch that its statistics can be taken from
        with torch.random.fork_rng():
            torch.manual_seed(3)
            args = (torch.randn(8, 3, 64, 64),)
    model.train()

    def train(
        model: nn.Module, wrap: Callable[[Any], Any], args: tuple[Any, ...] = args
    ) -> Trained:
        optimiser = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        fn = wrap(lambda: loss(model(*args, **kwargs), *args))
        losses = []
        for _ in range(STEPS):
            optimiser.zero_grad()
            value = fn()
            value.backward()
            optimiser.step()
            losses.append(value.item())
        return losses, model

    ours, start = copy.deepcopy(model), copy.deepcopy(model)
    double = copy.deepcopy(model).double()

    def exact() -> Trained:
        wide = tuple(x.double() if x.is_floating_point() else x for x in args)
        return train(double, lambda fn: fn, wide)

    def nearby() -> list[Trained]:
        """Eager's training from weights whose last bit is another: eight draws."""
        runs = []
        for seed in range(8):
            other, bits = copy.deepcopy(start), torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for weight in other.parameters():
                    weight *= 1 + 2**-24 * torch.randn(weight.shape, generator=bits)
            runs.append(train(other, lambda fn: fn))
        return runs

    assert_same_training(train(ours, compiled), train(model, lambda fn: fn), exact, nearby)


def test_variational_autoencoder() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model, images = VAE(), torch.rand(8, 3, 32, 32)

    def train(model: VAE, wrap: Callable[[Any], Any]) -> Trained:
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
        fn, losses = wrap(model.loss), []
        with torch.random.fork_rng():
            torch.manual_seed(12)
            for _ in range(STEPS):
                optimiser.zero_grad()
                value = fn(images)
                value.backward()
                optimiser.step()
                losses.append(value.item())
        return losses, model

    ours = copy.deepcopy(model)
    assert_same_training(train(ours, compiled), train(model, lambda fn: fn))
    assert fx2relax.stats()["fallback_ops"].keys() == RANDOM


# Dynamo looks at the gradient of an image that is no leaf, under every backend.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_generator_and_discriminator() -> None:
    """Two networks, two optimisers; the generator's loss passes through the discriminator."""
    with torch.random.fork_rng():
        torch.manual_seed(13)
        pair = nn.ModuleList([Generator(), Discriminator()])
        real = torch.randn(8, 3, 16, 16).tanh()
        noise = torch.randn(STEPS, 2, 8, 16)

    def train(pair: nn.ModuleList, wrap: Callable[[Any], Any]) -> Trained:
        optimisers = [torch.optim.Adam(m.parameters(), lr=2e-4, betas=(0.5, 0.999)) for m in pair]
        generate, judge = (wrap(module) for module in pair)
        losses = []
        for first, second in noise:
            optimisers[1].zero_grad()
            fake = generate(first).detach()
            mistaken = F.softplus(-judge(real)).mean() + F.softplus(judge(fake)).mean()
            mistaken.backward()
            optimisers[1].step()
            optimisers[0].zero_grad()
            seen = F.softplus(-judge(generate(second))).mean()
            seen.backward()
            optimisers[0].step()
            losses += [mistaken.item(), seen.item()]
        return losses, pair

    ours = copy.deepcopy(pair)
    assert_same_training(train(ours, compiled), train(pair, lambda fn: fn))
