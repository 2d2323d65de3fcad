"""What Dynamo and AOTAutograd bring beyond plain tensors: loops, transforms, other tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import map as map_over
from torch._higher_order_ops import scan, while_loop
from torch.testing._internal.two_tensor import TwoTensor

import fx2relax
from fx2relax.testing import assert_matches_eager, close

# PyTorch's own machinery for these warns.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script(_method)?` is deprecated"),
]

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    fx2relax.reset_stats()
    yield
    torch._dynamo.reset()


def loop(x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
    """Halve until it is small or `n` rounds are over."""
    return while_loop(
        lambda i, y: (i > 0) & (y.norm() > 0.5), lambda i, y: (i - 1, y * 0.5), (n, x)
    )


@pytest.mark.parametrize("rounds", [0, 3, 40])
def test_while_loop(rounds: int) -> None:
    assert_matches_eager(loop, X, torch.tensor(rounds), torch_calls=True)


def test_map_and_scan() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        mapped = map_over(lambda row, w: (row * w).sin().sum(), x, w)
        last, running = scan(lambda c, row: (c * 0.5 + row, c.clone()), w.clone(), x, dim=0)
        return mapped, last, running

    assert_matches_eager(fn, X, torch.randn(4), torch_calls=True)
    assert_matches_eager(fn, X, torch.randn(4), torch_calls=True, grad=True)


def test_vmap_and_derivatives() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        def energy(row: Tensor) -> Tensor:
            return (row @ w).tanh().square().sum()

        each = torch.vmap(energy)(x)
        slopes = torch.vmap(torch.func.grad(energy))(x)
        matrix = torch.func.jacrev(lambda v: v @ w)(x[0])
        pushed = torch.func.jvp(energy, (x[1] * 1,), (x[2] * 1,))[1]
        pairs = torch.vmap(torch.vmap(torch.dot, (0, None)), (None, 0))(x, x)
        return each, slopes, matrix, pushed, pairs, torch.func.hessian(energy)(x[0])

    assert_matches_eager(fn, X, torch.randn(4, 3), tol=1e-4)


def test_a_trace_that_fails_leaves_no_level_behind(caplog: pytest.LogCaptureFixture) -> None:
    """PyTorch cannot trace a forward derivative at a view; what follows must not suffer."""

    def at_a_row(x: Tensor) -> Tensor:
        return torch.func.jvp(lambda r: (r @ x.t()).tanh().sum(), (x[1],), (x[2],))[1]

    def at_a_copy(x: Tensor) -> Tensor:
        return torch.func.jvp(lambda r: (r @ x.t()).tanh().sum(), (x[1] * 1,), (x[2] * 1,))[1]

    for fn in (at_a_row, at_a_copy):
        close(torch.compile(fn, backend="relax")(X), fn(X))
    assert fx2relax.stats()["nodes_compiled"] > 0


def test_vmap_draws_and_batched_indices() -> None:
    def fn(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        rows = torch.vmap(lambda t, j: t[j].cumsum(0))(x, i)
        noise = torch.vmap(lambda t: t + torch.rand_like(t), randomness="different")(x)
        return rows, noise

    assert_matches_eager(
        fn, X, torch.tensor([[0, 3], [1, 1], [2, 0], [3, 3], [0, 1]]), seed=4, torch_calls=True
    )


@pytest.fixture
def custom() -> Iterator[Callable[..., Any]]:
    with torch.library._scoped_library("fx2relax_test", "FRAGMENT") as library:

        @torch.library.custom_op(
            "fx2relax_test::scaled",
            mutates_args=(),
        )
        def scaled(x: Tensor, by: float) -> Tensor:
            return x.t().contiguous() * by

        @scaled.register_fake
        def _(x: Tensor, by: float) -> Tensor:
            return x.new_empty(x.shape[::-1])

        scaled.register_autograd(
            lambda ctx, grad: (grad.t() * ctx.by, None),
            setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]),
        )

        @torch.library.custom_op("fx2relax_test::fill", mutates_args=("out",))
        def fill(out: Tensor, x: Tensor) -> None:
            out.copy_(x.sum() * torch.ones_like(out))

        yield scaled, fill
    del library


def test_custom_operators(custom: Any) -> None:
    scaled, fill = custom

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = scaled(x.sin(), 2.5) + 1
        out = torch.zeros(3)
        fill(out, x)
        return y, out * 2

    assert_matches_eager(fn, X, torch_calls=True, fullgraph=True)
    assert_matches_eager(lambda x: scaled(x.sin(), 2.5) + 1, X, torch_calls=True, grad=True)
    assert set(fx2relax.stats()["fallback_ops"]) >= {"fx2relax_test.scaled.default"}


def test_complex_tensors() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        z = torch.fft.rfft(x)
        filtered = z * torch.view_as_complex(torch.stack([x[:, :3], x[:, 1:]], -1))
        return filtered, z.abs() + 1, torch.fft.irfft(filtered, 4), z.conj().angle()

    assert_matches_eager(fn, X, torch_calls=True)
    assert_matches_eager(fn, X, torch_calls=True, grad=True)


def test_sparse_tensors() -> None:
    def fn(matrix: Tensor, x: Tensor) -> Tensor:
        return torch.sparse.mm(matrix, x.sin()) + 1

    matrix = torch.eye(5).to_sparse()
    close(torch.compile(fn, backend="relax")(matrix, X), fn(matrix, X))


def test_subclasses_as_aot_autograd_unwraps_them() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ w).relu() + 1, x.t()

    pair = TwoTensor(X, X * 2)
    w = torch.randn(4, 3)
    for got, expected in zip(
        torch.compile(fn, backend="relax", fullgraph=True)(pair, w), fn(pair, w), strict=True
    ):
        assert isinstance(got, TwoTensor)
        close(got.a, expected.a)
        close(got.b, expected.b)
    assert fx2relax.stats()["nodes_compiled"] > 0


def test_a_subclass_with_a_gradient() -> None:
    def both(fn: Callable[..., Any]) -> TwoTensor:
        pair = TwoTensor(X.clone(), X * 2).requires_grad_()
        fn(pair).sum().backward()
        return pair.grad

    def fn(x: Tensor) -> Tensor:
        return (x.sin() * x).exp()

    got, expected = both(torch.compile(fn, backend="relax")), both(fn)
    close(got.a, expected.a)
    close(got.b, expected.b)


def test_what_breaks_the_graph_says_so() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        return y * 2 if y.sum().item() > 0 else y - 1

    for sign in (1, -1):
        close(torch.compile(fn, backend="relax")(sign * X.abs()), fn(sign * X.abs()))
    torch._dynamo.reset()
    exc = torch._dynamo.exc
    with pytest.raises((exc.Unsupported, exc.UserError), match=r"y.sum\(\).item\(\) > 0"):
        torch.compile(fn, backend="relax", fullgraph=True)(X)


def test_marked_sizes() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("relax")

    def fn(x: Tensor) -> Tensor:
        n = x.shape[0]
        return torch.cat([x, x * 2]).view(-1, 2).sum(1) / (n + 1)

    compiled = torch.compile(fn, backend=counter)
    for n in (6, 9, 12, 2):
        x = torch.randn(n, 4)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
        close(compiled(x), fn(x))
    assert counter.frame_count == 1


def test_sizes_of_nought_and_one_are_special() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.softmax(0) + x.mean(0), x.reshape(-1)

    compiled = torch.compile(fn, backend="relax", dynamic=True)
    for n in (5, 1, 0, 7, 1):
        for got, expected in zip(compiled(X[:1].expand(n, 4)), fn(X[:1].expand(n, 4)), strict=True):
            assert got.shape == expected.shape
            close(got, expected)
