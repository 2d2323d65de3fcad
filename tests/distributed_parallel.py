"""Trainings that two processes share: data parallel, sharded, tensor parallel."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from distributed_models import (
    Normalized,
    Transformer,
    batches,
    local,
    next_word,
    same,
    seeded,
    tensors,
    train,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import fx2relax

Wrap = Callable[[nn.Module], nn.Module]
Build = Callable[[Wrap], nn.Module]
CASES: dict[str, Callable[[str], None]] = {}


def case(function: Callable[[str], None]) -> Callable[[str], None]:
    """Make a function of the device a case."""
    CASES[function.__name__] = function
    return function


def compiled(function: Any, **options: Any) -> Any:
    """What is compiled without a contest, in which nothing is to be gained here."""
    given = {"never_slower": False, **options}
    return torch.compile(function, backend="relax", options=given)


def contested(function: Any) -> Any:
    """What a user writes."""
    return torch.compile(function, backend="relax")


def as_it_is(function: Any) -> Any:
    """Eager."""
    return function


def trains(build: Build, device: str, wrap: Any = compiled, **how: Any) -> None:
    """Train a model in eager and compiled, and compare."""
    data = how.pop("data", None) or batches(dist.get_rank(), device)
    eager = train(build(as_it_is), data, **how)
    same(train(build(wrap), data, **how), eager)


# -- data parallel -------------------------------------------------------------------------------


def parallel(model: nn.Module, **options: Any) -> nn.Module:
    """DDP with a bucket for every few weights."""
    dist._DEFAULT_FIRST_BUCKET_BYTES = 8192  # no later one may be smaller
    return DistributedDataParallel(model, bucket_cap_mb=0.01, **options)


def whole(model: nn.Module, **options: Any) -> nn.Module:
    """DDP with one bucket, at which nothing is split."""
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 20
    return DistributedDataParallel(model, **options)


@case
def ddp_of_a_compiled_model(device: str) -> None:
    trains(lambda wrap: parallel(wrap(seeded(Transformer, device))), device)


@case
def ddp_compiled_in_buckets(device: str) -> None:
    trains(lambda wrap: wrap(parallel(seeded(Transformer, device))), device, contested)
    if device == "cpu":
        assert fx2relax.stats()["graphs"] >= 4, "it was not split"


@case
def ddp_accumulates(device: str) -> None:
    def step(model: nn.Module, words: Tensor, number: int) -> Tensor:
        with model.no_sync():
            next_word(model, words.flip(0, 1)).backward()
        own = [p.grad.clone() for p in model.parameters()]
        loss = next_word(model, words)
        loss.backward()
        shared = [p.grad for p in model.parameters()]
        assert not any(map(torch.equal, own, shared))
        return loss

    trains(lambda wrap: wrap(whole(seeded(Transformer, device))), device, step=step)


@case
def ddp_with_a_hook(device: str) -> None:
    buckets: dict[Any, list[int]] = {as_it_is: [], compiled: []}

    def build(wrap: Wrap) -> nn.Module:
        def hook(state, bucket):  # of which DDP reads the annotations, but not as strings
            buckets[wrap].append(bucket.index())
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            # The sum, and not the mean.
            return work.get_future().then(lambda future: future.value()[0])

        model = parallel(seeded(Transformer, device))
        model.register_comm_hook(None, hook)
        return wrap(model)

    trains(build, device)
    assert max(buckets[as_it_is]) > 0
    assert sorted(buckets[compiled]) == sorted(buckets[as_it_is])


@case
def ddp_of_a_static_graph(device: str) -> None:
    build = partial(seeded, partial(Transformer, checkpointed=True), device)
    trains(lambda wrap: parallel(wrap(build()), static_graph=True), device)


def with_spare_now_and_then(model: nn.Module, words: Tensor, number: int) -> Tensor:
    """A step in which every second batch leaves a part of the model unused."""
    loss = next_word(model, words, with_spare=number % 2 == 1)
    loss.backward()
    return loss


@case
def ddp_finds_what_is_unused(device: str) -> None:
    build = partial(seeded, partial(Transformer, spare=True), device)
    step = with_spare_now_and_then
    trains(lambda wrap: wrap(whole(build(), find_unused_parameters=True)), device, step=step)


@case
def ddp_broadcasts_buffers(device: str) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    data = list(torch.randn(4, 6, 12, generator=generator).to(device))

    def step(model: nn.Module, x: Tensor, number: int) -> Tensor:
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    trains(lambda wrap: wrap(parallel(seeded(Normalized, device))), device, data=data, step=step)


# -- sharded -------------------------------------------------------------------------------------


@case
def fsdp_of_flat_parameters(device: str) -> None:
    def build(wrap: Wrap) -> nn.Module:
        model = seeded(partial(Transformer, layers=2), device)
        blocks = ModuleWrapPolicy({type(model.blocks[0])})
        return wrap(
            FullyShardedDataParallel(
                model,
                auto_wrap_policy=blocks,
                use_orig_params=True,
                device_id=torch.device(device),
            )
        )

    trains(build, device)


def sharded(device: str, wrap: Wrap = as_it_is, checkpointed: bool = False) -> nn.Module:
    """A transformer, each block's weights gathered when it runs; `wrap` is given the blocks."""
    model = seeded(partial(Transformer, checkpointed=checkpointed, layers=2), device)
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    for place, block in enumerate(model.blocks):
        model.blocks[place] = fully_shard(wrap(block), mesh=mesh)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


@case
def fsdp_of_compiled_blocks(device: str) -> None:
    trains(partial(sharded, device, checkpointed=True), device, contested, clip=0.5)


@case
def fsdp_compiled_whole(device: str) -> None:
    trains(lambda wrap: wrap(sharded(device)), device, clip=0.5)


class Waved(nn.Module):
    """Work on a weight alone, which is done once where the weight stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.sin()


@case
def fsdp_gathers_what_is_new(device: str) -> None:
    """A gathered weight lies where it did, under the version it had, and holds something else."""
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    model = seeded(lambda: nn.Sequential(Waved(), Waved()), device)
    for place, part in enumerate(model):
        model[place] = fully_shard(contested(part), mesh=mesh, reshard_after_forward=True)
    x = torch.ones(3, 16, device=device)
    results = []
    with torch.no_grad():
        for number in range(8):
            whole = [parameter.full_tensor() for parameter in model.parameters()]
            ours, eager = model(x), x @ whole[0].sin() @ whole[1].sin()
            torch.testing.assert_close(ours, eager)
            results.append(ours.clone())
            for parameter in model.parameters():  # one number of many
                parameter.to_local().view(-1)[5 + number] += 0.5
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(results))


# -- tensor parallel -----------------------------------------------------------------------------


def split(plan: dict[str, Any], device: str, checkpointed: bool = False) -> nn.Module:
    """A transformer, the products of which the processes share."""
    model = seeded(partial(Transformer, checkpointed=checkpointed), device)
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    return parallelize_module(model, mesh, plan)


def in_block(plan: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A plan for the block."""
    return {f"blocks.0.{name}": style for name, style in plan().items()}


def rows_and_columns() -> dict[str, Any]:
    """Heads and hidden units are split."""
    inner = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    return {**inner, "out": RowwiseParallel(), "down": RowwiseParallel()}


def sequences() -> dict[str, Any]:
    """The same, and what is between products is split by place."""
    here = Shard(1)
    inner = {name: ColwiseParallel(input_layouts=here) for name in ("q", "k", "v", "up")}
    outer = {name: RowwiseParallel(output_layouts=here) for name in ("out", "down")}
    return {**inner, **outer, "norm1": SequenceParallel(), "norm2": SequenceParallel()}


def everywhere_equal(model: nn.Module) -> None:
    """Weights that each process holds whole are the same in all, to the last digit."""
    whole = [
        local(t)
        for t in tensors(model)
        if all(p.is_replicate() for p in getattr(t, "placements", ()))
    ]
    assert whole
    flat = torch.cat([t.detach().reshape(-1) for t in whole])
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, flat)
    assert all(torch.equal(flat, other) for other in gathered)


def trains_split(
    plan: Callable[[], dict[str, Any]], device: str, checkpointed: bool = False, **how: Any
) -> None:
    """Train a model that processes share, all on the same batches."""
    made = []

    def build(wrap: Wrap) -> nn.Module:
        made.append(split(plan(), device, checkpointed))
        return wrap(made[-1])

    trains(build, device, contested, data=batches(0, device), **how)
    everywhere_equal(made[-1])


@case
def tensor_parallel(device: str) -> None:
    trains_split(lambda: in_block(rows_and_columns), device, foreach=False)


@case
def tensor_parallel_recomputed(device: str) -> None:
    trains_split(lambda: in_block(rows_and_columns), device, checkpointed=True, foreach=False)


@case
def sequence_parallel(device: str) -> None:
    def plan() -> dict[str, Any]:
        here = Shard(1)
        return {
            **in_block(sequences),
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=here),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=here, output_layouts=Replicate()),
        }

    trains_split(plan, device, clip=0.5)


@case
def tensor_parallel_is_called(device: str) -> None:
    """Without gradients, more often than a contest takes, and after a change of the weights."""
    model = split(in_block(rows_and_columns), device)
    forward = contested(model)
    words = batches(0, device)[0][:, :-1]
    with torch.no_grad():
        for _ in range(2):
            for _ in range(8):
                ours = forward(words)
            torch.testing.assert_close(ours, model(words), rtol=1e-4, atol=1e-5)
            for parameter in model.parameters():
                parameter.mul_(1.5)


@case
def distributed_tensors_in_and_out(device: str) -> None:
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(size, generator=generator).to(device) for size in ((6, 8), (8, 4))]

    def product(x: DTensor, w: DTensor) -> tuple[DTensor, DTensor]:
        y = x @ w
        return y.redistribute(placements=[Replicate()]).relu(), y * 2

    def run(function: Callable[..., Any]) -> list[DTensor]:
        x, w = (
            distribute_tensor(value, mesh, [placement]).requires_grad_()
            for value, placement in zip(values, (Replicate(), Shard(1)), strict=True)
        )
        results = function(x, w)
        sum(result.sum() for result in results).backward()
        return [*results, x.grad, w.grad]

    for ours, eager in zip(run(contested(product)), run(product), strict=True):
        assert ours.placements == eager.placements
        torch.testing.assert_close(ours.to_local(), eager.to_local())
