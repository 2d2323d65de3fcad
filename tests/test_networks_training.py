"""Training steps: losses, gradients, running statistics, and weights that change between calls."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import NETWORKS
from networks.check import BACKEND, assert_as_exact_as_eager, compiled, double, leaves
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class WithLoss(nn.Module):
    """A network and its loss in one graph."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return self.loss(self.model(*args, **kwargs), *args)


def classify(logits: Tensor, images: Tensor) -> Tensor:
    labels = torch.arange(images.shape[0], device=images.device)
    return F.cross_entropy(logits, labels, label_smoothing=0.1)


def next_token(outputs: tuple[Tensor], tokens: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0][:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def pool(outputs: tuple[Tensor, Tensor], tokens: Tensor) -> Tensor:
    hidden, pooled = outputs
    return (hidden**2).mean() + F.mse_loss(pooled, pooled.flip(0).detach() + 0.5)


def trainee(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    if name == "resnet18":
        model, _, _ = NETWORKS[name].build()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return WithLoss(model, classify).train(), (torch.randn(8, 3, 64, 64),), {}
    # Without dropout: its masks are a matter of the random-number tests.
    model, args, kwargs = NETWORKS[name].build(dropout=0.0)
    return WithLoss(model, pool if name == "bert" else next_token).train(), args, kwargs


NAMES = ("resnet18", "bert", "gpt2")


def step(fn: Any, model: nn.Module, args: Any, kwargs: Any, lr: float = 0.01) -> Tensor:
    """Loss, backward, SGD. The gradients stay on the parameters."""
    model.zero_grad()
    loss = fn(*args, **kwargs)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= lr * parameter.grad
    return loss


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", NAMES)
def test_one_step(name):
    model, args, kwargs = trainee(name)
    ours, exact = copy.deepcopy(model), double(model)
    losses = [
        step(compiled(ours), ours, args, kwargs),
        step(model, model, args, kwargs),
        step(exact, exact, double(args), double(kwargs)),
    ]
    assert_as_exact_as_eager(*[[loss] for loss in losses], what="loss")
    named = [dict(m.named_parameters()) for m in (ours, model, exact)]
    for key in named[0]:
        grads = [parameters[key].grad for parameters in named]
        assert (grads[0] is None) == (grads[1] is None), key
        if grads[0] is not None:
            assert_as_exact_as_eager(*[[g] for g in grads], what=f"gradient of {key}")
    # Running statistics, and the count of batches, which is an integer.
    assert_as_exact_as_eager(
        *[list(m.buffers()) for m in (ours, model, exact)], what="running statistic"
    )


def change_by_optimiser(model: nn.Module) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 0.01
    optimiser.step()
    optimiser.zero_grad()


def change_by_load(model: nn.Module) -> None:
    state = {
        key: value + 0.01 * torch.randn_like(value) if value.is_floating_point() else value
        for key, value in model.state_dict().items()
    }
    # A variance must stay positive.
    state |= {k: v.abs() + 0.1 for k, v in state.items() if k.endswith("running_var")}
    model.load_state_dict(state)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("change", [change_by_optimiser, change_by_load])
@pytest.mark.parametrize("name", NAMES)
def test_changed_weights_are_seen_without_recompiling(name, change):
    model, args, kwargs = NETWORKS[name].build()
    counter = CompileCounterWithBackend(BACKEND)
    fn = torch.compile(model, backend=counter, fullgraph=True)
    results = []
    for changed in (False, True):
        if changed:
            with torch.random.fork_rng():
                torch.manual_seed(5)
                change(model)
        with torch.no_grad():
            got, eager = leaves(fn(*args, **kwargs)), leaves(model(*args, **kwargs))
            exact = leaves(double(model)(*double(args), **double(kwargs)))
        assert_as_exact_as_eager(got, eager, exact)
        results.append(eager[0])
    assert (results[0] - results[1]).abs().max() > 1e-3, "the change must show in the output"
    assert counter.frame_count == 1
