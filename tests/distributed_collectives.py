"""Collectives in the graphs of two processes: each is made, once, in order, and waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from distributed_parallel import compiled, contested
from torch import Tensor, nn

import fx2relax

CASES: dict[str, Callable[[str], None]] = {}
#: The operators of a case that run in PyTorch besides collectives.
IN_PYTORCH = {
    "beside_random_draws": {"aten.bernoulli.p", "aten.rand_like.default"},
    "in_a_users_operator": {"fx2relax_distributed_test.total.default"},
    "in_a_branch": {"higher_order.cond"},
}
#: More than a contest takes to be decided.
CALLS = 8


def case(function: Callable[[str], None]) -> Callable[[str], None]:
    """Make a function of the device a case."""
    CASES[function.__name__] = function
    return function


def world() -> dist.ProcessGroup:
    """All processes."""
    return dist.group.WORLD


def counted(function: Callable[..., Any], *given: Any) -> tuple[Any, int]:
    """What a function returns, and how many collectives were made meanwhile."""
    before = world()._get_sequence_number_for_group()
    result = function(*given)
    if isinstance(result, (Tensor, tuple)):
        result = torch.utils._pytree.tree_map(torch.clone, result)  # which waits
    return result, world()._get_sequence_number_for_group() - before


def alike(function: Callable[..., Any], *given: Tensor) -> None:
    """As many collectives and the same results as in eager, at each of many calls."""
    program = contested(function)
    for number in range(CALLS):
        ours, eager = ([t + number for t in given] for _ in range(2))
        expected, wanted = counted(function, *eager)
        result, made = counted(program, *ours)
        assert made == wanted > 0, f"{made} collectives, in eager {wanted}"
        torch.testing.assert_close((result, ours), (expected, eager))


def own(device: str, *sizes: int) -> Tensor:
    """Numbers of this process."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(*sizes, generator=generator).to(device)


@case
def each_kind(device: str) -> None:
    def all_kinds(x: Tensor) -> tuple[Tensor, ...]:
        group = world()
        summed = funcol.all_reduce(x * 2, "sum", group)
        funcol.all_reduce(x - 1, "max", group)  # its result is not used
        gathered = funcol.all_gather_single(x, 1, group)
        scattered = funcol.reduce_scatter_single(summed + x, "sum", 0, group)
        swapped = funcol.all_to_all_single(scattered, [1, 1], [1, 1], group)
        sent = funcol.broadcast(swapped.sin(), 1, group)
        again = funcol.all_reduce(x * 2, "sum", group)  # what was made before
        listed = funcol.all_reduce_coalesced([x, again], "sum", group)
        return summed, gathered, scattered, swapped, sent, again, *listed

    alike(all_kinds, own(device, 4, 6))


@case
def written_in_place(device: str) -> None:
    """What Dynamo makes of the plain calls of `torch.distributed`."""

    def plain(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        dist.all_reduce(y)
        z = y.new_empty(2 * y.shape[0], y.shape[1])
        dist.all_gather_into_tensor(z, y + x)
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return y, z

    alike(plain, own(device, 3, 5))


@case
def beside_random_draws(device: str) -> None:
    def noisy(x: Tensor) -> Tensor:
        x = funcol.all_reduce(torch.dropout(x, 0.5, True), "sum", world())
        return funcol.all_reduce(x + torch.rand_like(x), "sum", world())

    program = compiled(noisy)
    x = own(device, 4, 6)
    for seed in range(3):
        torch.manual_seed(seed)
        eager = counted(noisy, x)
        torch.manual_seed(seed)
        torch.testing.assert_close(counted(program, x), eager)
    torch.manual_seed(0)


@case
def with_gradients(device: str) -> None:
    def shared(x: Tensor, w: Tensor) -> Tensor:
        whole = funcol.all_gather_single_autograd(x @ w, 0, world())
        part = funcol.reduce_scatter_single_autograd(whole.tanh(), "sum", 0, world())
        return part.square().sum()

    def run(function: Any, number: int) -> list[Tensor]:
        # Near its ends, the gradient of tanh is what is left of a difference.
        x, w = own(device, 4, 6) / 8 + number / 16, own(device, 6, 6)
        inputs = [x.requires_grad_(), w.requires_grad_()]
        loss = function(*inputs)
        return [loss.detach(), *torch.autograd.grad(loss, inputs)]

    program = contested(shared)
    for number in range(CALLS):
        eager, wanted = counted(run, shared, number)
        ours, made = counted(run, program, number)
        assert made == wanted > 1
        torch.testing.assert_close(ours, eager)


@case
def begun_in_eager(device: str) -> None:
    """A graph waits for what was begun before it, also where nothing says that it must."""
    x = own(device, 1 << 18)
    expected = funcol.all_reduce(x, "sum", world()) * 2

    @compiled
    def waits(y: Tensor) -> Tensor:
        return torch.ops.c10d_functional.wait_tensor(y.view(-1)) * 2

    def late(begin: Callable[[], Tensor], finish: Callable[[Tensor], Tensor]) -> Tensor:
        if dist.get_rank() == 1:
            time.sleep(0.2)  # so that the other process would see it if it did not wait
        return finish(begin())

    waits(x.clone())
    dist.barrier()
    with funcol.allow_inflight_collective_as_graph_input_ctx():

        def begin() -> Tensor:
            y = x.clone()
            dist.all_reduce(y, async_op=True)
            return y

        torch.testing.assert_close(late(begin, waits), expected)
    doubled = compiled(lambda y: y * 2)
    for _ in range(2):
        begun = lambda: funcol.all_reduce(x, "sum", world())  # noqa: E731
        torch.testing.assert_close(late(begun, doubled), expected)


@case
def of_a_weight(device: str) -> None:
    """What is made of weights alone is made once; not so what other processes have a part in."""

    class Gathering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(own(device, 6, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ funcol.all_gather_single(self.weight.t(), 0, world()).t()

    module = Gathering()
    program = contested(module)
    x = own(device, 4, 6)
    with torch.no_grad():
        for number in range(CALLS):
            eager, wanted = counted(module, x)
            ours, made = counted(program, x)
            assert made == wanted == 1
            torch.testing.assert_close(ours, eager)
            if dist.get_rank() == number % 2:  # the other one's is as it was
                module.weight.mul_(1.5)


@case
def in_a_users_operator(device: str) -> None:
    """Nobody sees that it talks to other processes: a graph with one is not run twice either."""
    if not hasattr(torch.ops.fx2relax_distributed_test, "total"):

        @torch.library.custom_op("fx2relax_distributed_test::total", mutates_args=())
        def total(x: Tensor) -> Tensor:
            y = x.clone()
            dist.all_reduce(y)
            return y

        total.register_fake(torch.empty_like)
    operator = torch.ops.fx2relax_distributed_test.total
    alike(lambda x: operator(x * 2) + 1, own(device, 4, 6))


@case
def in_a_branch(device: str) -> None:
    def branching(x: Tensor) -> Tensor:
        y = funcol.all_reduce(x, "sum", world()) * 1.5
        up = lambda v: funcol.all_reduce(v, "sum", world()) + 1  # noqa: E731
        z = torch.cond(y.sum() > 0, up, lambda v: v - 1, (y,))
        return funcol.all_reduce(z * 2, "max", world())

    program = compiled(branching)
    for sign in (1, -1):
        x = own(device, 4, 6).abs() * sign
        torch.testing.assert_close(counted(program, x), counted(branching, x))


@case
def one_compiles_and_one_finds(device: str) -> None:
    """A program from disk and one that was compiled make the same collectives."""

    def shared(x: Tensor) -> Tensor:
        return funcol.all_reduce((x @ x.t()).tanh(), "sum", world()) * 3

    x = own(device, 7, 5)
    expected = shared(x) * 1
    for turn in range(2):
        stores = dist.get_rank() == turn
        torch._dynamo.reset()
        fx2relax.reset_stats()
        with torch.no_grad():
            result = compiled(shared, cache=stores)(x)
        torch.testing.assert_close(result, expected)
        if device == "cpu":
            hits = fx2relax.stats()["cache_hits"]
            assert hits == (1 if stores and turn else 0), hits
        dist.barrier()
