"""Trainings that two processes share, of a transformer of another make."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_models import WORDS, batches, next_word, seeded, train
from distributed_parallel import (
    Build,
    Wrap,
    as_it_is,
    compiled,
    contested,
    everywhere_equal,
    parallel,
    trains,
    whole,
    with_spare_now_and_then,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

CASES: dict[str, Callable[[str], None]] = {}
#: Operators that run in PyTorch, by the case. Attention that is computed again counts as a random
#: draw, also without dropout.
IN_PYTORCH = {
    "tied_ddp_recomputed_in_buckets": {
        "higher_order.run_and_save_rng_state",
        "higher_order.run_with_rng_state",
    }
}
WIDE, QUERIES, KEYS, SIZE = 48, 6, 2, 8


def case(function: Callable[[str], None]) -> Callable[[str], None]:
    """Make a function of the device a case."""
    CASES[function.__name__] = function
    return function


def turned(x: Tensor) -> Tensor:
    """Each pair of numbers turned by an angle that grows with its place."""
    places = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
    angles = places[:, None] * 0.5 ** torch.arange(x.shape[-1] // 2, device=x.device)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Gated(nn.Module):
    """Attention with fewer keys than queries, and a gated feed-forward part, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDE), nn.RMSNorm(WIDE)
        sizes = (QUERIES * SIZE, KEYS * SIZE, KEYS * SIZE)
        self.q, self.k, self.v = (nn.Linear(WIDE, size, bias=False) for size in sizes)
        self.out = nn.Linear(QUERIES * SIZE, WIDE, bias=False)
        self.gate, self.up = (nn.Linear(WIDE, 80, bias=False) for _ in range(2))
        self.down = nn.Linear(80, WIDE, bias=False)

    def attend(self, x: Tensor) -> Tensor:
        """Causal attention, over as many heads as the projections have columns for."""
        q, k, v = (p(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(
            turned(q), turned(k), v, is_causal=True, enable_gqa=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))

    def feed(self, x: Tensor) -> Tensor:
        """The feed-forward part."""
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Tied(nn.Module):
    """Words in, a score for each next word out, by the same table.

    Args:
        checkpointed: whether blocks are computed again for their gradients.
        spare: adds a layer that only every other call uses.
        tied: whether there is one table.
    """

    def __init__(self, checkpointed: bool = False, spare: bool = False, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDE)
        self.blocks = nn.ModuleList([Gated() for _ in range(2)])
        self.norm = nn.RMSNorm(WIDE)
        self.head = nn.Linear(WIDE, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.spare = nn.Linear(WIDE, WIDE) if spare else None
        self.checkpointed = checkpointed

    def forward(self, words: Tensor, with_spare: bool = False) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        if with_spare and self.spare is not None:
            x = x + self.spare(x)
        return self.head(self.norm(x))


def accumulated(model: nn.Module, words: Tensor, step: int) -> Tensor:
    """Three batches, of which the last one's gradients are shared."""
    with model.no_sync():
        for turn in (1, 2):
            (next_word(model, words.roll(turn, 0)) / 3).backward()
    loss = next_word(model, words) / 3
    loss.backward()
    return loss


@case
def tied_ddp_accumulates_around(device: str) -> None:
    trains(lambda wrap: wrap(whole(seeded(Tied, device))), device, contested, step=accumulated)


@case
def tied_ddp_accumulates_inside(device: str) -> None:
    trains(lambda wrap: parallel(wrap(seeded(Tied, device))), device, contested, step=accumulated)


@case
def tied_ddp_of_a_static_graph_compiled_whole(device: str) -> None:
    trains(lambda wrap: wrap(whole(seeded(Tied, device), static_graph=True)), device)


@case
def tied_ddp_recomputed_in_buckets(device: str) -> None:
    build = partial(seeded, partial(Tied, checkpointed=True), device)
    trains(lambda wrap: wrap(whole(build())), device)


@case
def tied_ddp_finds_what_is_unused_around(device: str) -> None:
    build = partial(seeded, partial(Tied, spare=True), device)
    step = with_spare_now_and_then
    trains(lambda wrap: parallel(wrap(build()), find_unused_parameters=True), device, step=step)


def sharded(device: str, wrap: Wrap, *, blocks: bool, policy: MixedPrecisionPolicy) -> nn.Module:
    """The transformer with its weights in parts; `wrap` is given the blocks or all of it."""
    # Dynamo follows no hooks of FSDP's into what is computed again.
    model = seeded(partial(Tied, checkpointed=blocks), device)
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    for place, block in enumerate(model.blocks):
        block = wrap(block) if blocks else block
        model.blocks[place] = fully_shard(block, mesh=mesh, mp_policy=policy)
    model = fully_shard(model, mesh=mesh, mp_policy=policy)
    return model if blocks else wrap(model)


def sharded_accumulation(model: nn.Module, words: Tensor, step: int) -> Tensor:
    """Two batches, of which the last one's gradients are shared."""
    model.set_requires_gradient_sync(False)
    next_word(model, words.roll(1, 0)).backward()
    model.set_requires_gradient_sync(True)
    loss = next_word(model, words)
    loss.backward()
    return loss


@case
def tied_fsdp_accumulates(device: str) -> None:
    build = partial(sharded, device, blocks=True, policy=MixedPrecisionPolicy())
    trains(build, device, contested, step=sharded_accumulation, clip=0.5)


def _nearly(build: Build, device: str, wrap: Any) -> None:
    """Assert that a training in half precision is as near to one in float32 as eager's is."""
    data = batches(dist.get_rank(), device)

    def run(wrap: Any, **given: Any) -> Tensor:
        losses, tensors = train(build(wrap, **given), data, clip=0.5)
        return torch.cat([torch.tensor(losses), *(t.flatten().cpu() for t in tensors)]).double()

    exact = run(as_it_is, policy=MixedPrecisionPolicy())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    eager, ours = (
        torch.linalg.vector_norm(run(w, policy=policy) - exact) for w in (as_it_is, wrap)
    )
    assert 0 < ours <= 1.5 * eager, f"{ours:.3g} from float32, eager {eager:.3g}"


@case
def tied_fsdp_in_half_precision_by_blocks(device: str) -> None:
    _nearly(partial(sharded, device, blocks=True), device, compiled)


@case
def tied_fsdp_in_half_precision_compiled_whole(device: str) -> None:
    _nearly(partial(sharded, device, blocks=False), device, compiled)


def split(device: str) -> nn.Module:
    """The transformer, the products of which the processes share, and the rest by places."""
    model = seeded(partial(Tied, tied=False), device)
    here = Shard(1)
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=here),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=here, output_layouts=Replicate()),
    }
    for number in range(len(model.blocks)):
        block = f"blocks.{number}."
        plan |= {
            f"{block}{name}": ColwiseParallel(input_layouts=here)
            for name in ("q", "k", "v", "gate", "up")
        }
        plan |= {f"{block}{n}": RowwiseParallel(output_layouts=here) for n in ("out", "down")}
        plan |= {f"{block}{n}": SequenceParallel() for n in ("norm1", "norm2")}
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    return parallelize_module(model, mesh, plan)


@case
def gated_sequence_parallel(device: str) -> None:
    made = []

    def build(wrap: Wrap) -> nn.Module:
        made.append(split(device))
        return wrap(made[-1])

    trains(build, device, contested, data=batches(0, device), clip=0.5)
    everywhere_equal(made[-1])
