"""What training does besides a plain backward pass, against eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fx2relax
from fx2relax.testing import assert_matches_eager, close

Step = Callable[[nn.Module, Callable[..., Any]], Any]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    fx2relax.reset_stats()
    yield
    torch._dynamo.reset()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def same(model: nn.Module, step: Step, tol: Any = None, **settings: Any) -> None:
    """Do `step` with a model and with its compiled copy; results, weights and gradients agree."""
    ours = copy.deepcopy(model)
    expected = step(model, model)
    actual = step(ours, torch.compile(ours, backend="relax", **settings))
    pairs = zip(
        torch.utils._pytree.tree_leaves(actual),
        torch.utils._pytree.tree_leaves(expected),
        strict=True,
    )
    for index, (a, e) in enumerate(pairs):
        if isinstance(e, Tensor):
            assert (a.dtype, a.shape, a.stride()) == (e.dtype, e.shape, e.stride())
            close(a, e, tol, f"result {index}")
        else:
            assert a == e
    theirs = dict(model.named_parameters())
    for name, mine in ours.named_parameters():
        close(mine, theirs[name], tol, name)
        grad = theirs[name].grad
        assert (mine.grad is None) == (grad is None), name
        if grad is not None:
            close(mine.grad, grad, tol, f"gradient of {name}")
    for (name, a), (_, e) in zip(ours.named_buffers(), model.named_buffers(), strict=True):
        close(a, e, tol, name)
    assert fx2relax.stats()["graphs"] > 0


X = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))


def test_gradients_add_up_over_calls() -> None:
    def step(model: nn.Module, fn: Callable[..., Any]) -> list[Tensor]:
        losses = [fn(x).square().mean() for x in (X, X[:3], X * 2)]
        for loss in losses:
            (loss / 3).backward()
        return losses

    same(mlp(), step)


def test_backward_twice_through_one_result() -> None:
    def step(model: nn.Module, fn: Callable[..., Any]) -> None:
        loss = fn(X).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    same(mlp(), step)


def test_a_second_backward_without_the_graph_raises() -> None:
    loss = torch.compile(mlp(), backend="relax")(X).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_gradients_by_autograd_grad() -> None:
    def step(model: nn.Module, fn: Callable[..., Any]) -> Any:
        x = X.clone().requires_grad_()
        y = fn(x)
        return torch.autograd.grad(y, [x, model[0].weight], torch.ones_like(y))

    same(mlp(), step)


def test_a_gradient_of_a_gradient_is_refused_as_under_aot_autograd() -> None:
    x = X.clone().requires_grad_()
    y = torch.compile(lambda x: x.sin().sum(), backend="relax")(x)
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


def test_a_gradient_of_a_gradient_within_the_graph() -> None:
    def penalty(x: Tensor, w: Tensor) -> Tensor:
        slope = torch.func.grad(lambda t: ((t @ w).tanh() ** 2).sum())(x)
        return (slope.norm(dim=1) - 1).square().mean()

    assert_matches_eager(penalty, X, torch.randn(6, 4), grad=True)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpointed_layers(dropout: float) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = mlp(), nn.Linear(3, 2)
            self.dropout = nn.Dropout(dropout)

        def forward(self, x: Tensor) -> Tensor:
            inner = checkpoint(lambda t: self.dropout(self.first(t)), x, use_reentrant=False)
            return self.last(inner)

    def step(model: nn.Module, fn: Callable[..., Any]) -> Tensor:
        torch.manual_seed(5)
        y = fn(X)
        y.square().sum().backward()
        return y

    same(Checkpointed(), step, fullgraph=True)
    # Draws alone run in PyTorch.
    assert all("rng_state" in name for name in fx2relax.stats()["fallback_ops"])


@pytest.mark.parametrize("inside", [False, True])
def test_autocast(inside: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), mlp()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                y = F.relu(self.norm(self.conv(x))).mean((2, 3))
                return self.head(y[:, :6]).softmax(-1)

    def step(model: nn.Module, fn: Callable[..., Any]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
            y = fn(torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2)))
        y.float().square().sum().backward()
        return y

    same(Net(), step, tol=2e-2)


# Dynamo makes an instance of it.
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated")
def test_a_function_with_its_own_gradient() -> None:
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
            ctx.save_for_backward(x)
            ctx.scale = scale
            return (x * scale).round()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            (x,) = ctx.saved_tensors
            return grad * ctx.scale * (x.abs() < 1), None

    assert_matches_eager(lambda x: Straight.apply(x.sin(), 3.0) * 2, X, grad=True)


def test_hooks_on_tensors_and_modules() -> None:
    model = mlp()
    model[2].register_forward_hook(lambda m, args, out: out * 1.5)
    model[4].register_forward_pre_hook(lambda m, args: (args[0].clamp(-0.5, 0.5),))

    def step(model: nn.Module, fn: Callable[..., Any]) -> list[Tensor]:
        seen: list[Tensor] = []
        handle = model[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
        x = X.clone().requires_grad_()
        y = fn(x)
        y.register_hook(lambda g: seen.append(g.clone()))
        y.square().sum().backward()
        handle.remove()
        return [y, x.grad, *seen]

    same(model, step)


def test_a_hook_on_an_intermediate() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda g: g * 3)
        return y.square().sum()

    def both(fn: Callable[..., Any]) -> Tensor:
        x = X.clone().requires_grad_()
        fn(x).backward()
        return x.grad

    close(both(torch.compile(fn, backend="relax")), both(fn))


def test_frozen_parameters_and_those_thawed_later() -> None:
    def step(model: nn.Module, fn: Callable[..., Any]) -> list[Tensor]:
        losses = []
        for frozen in (True, False):
            model[0].requires_grad_(not frozen)
            loss = fn(X).square().sum()
            loss.backward()
            losses.append(loss)
        return losses

    same(mlp(), step)


def test_tied_weights_gather_both_gradients() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.embed(ids).tanh()), ids.roll(1))

    def step(model: nn.Module, fn: Callable[..., Any]) -> list[Tensor]:
        optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for _ in range(4):
            optimiser.zero_grad()
            losses.append(fn(torch.arange(9)))
            losses[-1].backward()
            optimiser.step()
        return losses

    same(Tied(), step)


OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "fused adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.05, foreach=True),
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimisers_change_weights_in_place(name: str) -> None:
    def step(model: nn.Module, fn: Callable[..., Any]) -> list[Tensor]:
        optimiser = OPTIMISERS[name](model.parameters())
        losses = []
        for _ in range(5):
            optimiser.zero_grad()
            losses.append(fn(X).square().mean())
            losses[-1].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimiser.step()
        with torch.no_grad():
            losses.append(fn(X))
        return losses

    same(mlp(), step, tol=1e-4)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_a_compiled_optimiser_step() -> None:
    def train(wrap: Callable[[Any], Any]) -> list[Tensor]:
        torch.manual_seed(3)
        model = mlp()
        optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)

        def update() -> None:
            optimiser.step()

        update = wrap(update)
        for _ in range(3):
            optimiser.zero_grad()
            model(X).square().mean().backward()
            update()
        return list(model.parameters())

    compiled = train(lambda fn: torch.compile(fn, backend="relax"))
    for a, e in zip(compiled, train(lambda fn: fn), strict=True):
        close(a, e)


def test_training_and_inference_in_turns() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))

    def step(model: nn.Module, fn: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(7)
        results = []
        for _ in range(2):
            model.train()
            loss = fn(X).square().mean()
            loss.backward()
            model.eval()
            with torch.no_grad():
                results += [loss.detach(), fn(X)]
            with torch.inference_mode():
                results.append(fn(X).clone())
            results.append(fn(X))
        assert [r.requires_grad for r in results] == [False, False, False, True] * 2
        return results

    same(model, step)


def test_no_grad_within_the_graph() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            scale = (x @ w).abs().amax()
        y = (x @ w) / scale
        with torch.no_grad(), torch.enable_grad():
            z = y.relu()
        return y, z, y.detach() * 2, scale

    assert_matches_eager(fn, X, torch.randn(6, 4), grad=True)


def test_gradients_of_some_outputs_and_inputs_only() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return x @ w, (x * 2).sum(), w.exp()

    def both(fn: Callable[..., Any]) -> list[Any]:
        x, w = X.clone(), torch.ones(6, 4, requires_grad=True)
        first, second, third = fn(x, w)
        first.sum().backward()
        assert not second.requires_grad
        return [first, second, third, w.grad]

    for a, e in zip(both(torch.compile(fn, backend="relax")), both(fn), strict=True):
        close(a, e)


def test_weights_under_a_parametrization() -> None:
    model = mlp()
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.spectral_norm(model[2])

    def step(model: nn.Module, fn: Callable[..., Any]) -> Tensor:
        y = fn(X)
        y.square().sum().backward()
        return y

    same(model, step, tol=1e-4)


def test_a_gradient_scaler_sees_infinities() -> None:
    def fn(x: Tensor) -> Tensor:
        return (x * 3e38 * 10).sum()

    def both(fn: Callable[..., Any]) -> Tensor:
        x = X.clone().requires_grad_()
        fn(x).backward()
        return x.grad

    close(both(torch.compile(fn, backend="relax")), both(fn))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own, at the graph break
def test_what_no_grad_writes_keeps_its_history():
    """Also across a graph break; a leaf that is used no further has no gradient."""

    def fn(x, leaf):
        v = x * 3
        with torch.no_grad():
            leaf.mul_(0.5)
            v[v > 0] += 0
        torch._dynamo.graph_break()
        return x, v * 1

    x, leaf = torch.tensor([[1.0], [2.0]]), torch.ones(3)
    assert_matches_eager(fn, x, leaf, grad=True, fullgraph=False)
