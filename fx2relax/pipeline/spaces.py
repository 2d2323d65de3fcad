"""Schedules that a kernel may have: MetaSchedule's space for processors, and sizes of our tiles.

MetaSchedule's rules, traces, mutators and postprocessors are used; its searches and its database
cannot be: each copies modules by way of JSON, and TVM 0.27 dies of a segmentation fault where it is
asked for JSON of any kernel (``tvm.ir.save_json``). What was measured to be the best is mutated, in
the place of what a model holds to be the best.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm import s_tir
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Trace

from . import tuned
from .gemm import tiles_of
from .tiles import Tiles

_log = logging.getLogger(__name__)
_TRIES = 16
# How often a candidate is one of the best, changed a little, and how often a draw from all.
_MUTATED = 0.7
# How often a kernel in tiles is given other tiles, and how often what MetaSchedule does.
_TILED = 0.6
_SEEDS = (1 << 31) - 1


@dataclasses.dataclass
class Candidate:
    """A schedule to measure.

    Attributes:
        how: what is recorded of it.
        func: the kernel by it.
        digest: of the kernel by it: two records may come to the same.
    """

    how: dict[str, Any]
    func: Any
    digest: str


class Space:
    """The schedules of one kernel.

    Args:
        func: the kernel, not scheduled, of known sizes.
        target: a `tvm.target.Target`.
        seed: of the draws.
    """

    def __init__(self, func: Any, target: Any, seed: str) -> None:
        self._func, self._target = func, target
        self._chance = random.Random(seed)
        self._tiles: Tiles | None = None
        self._traces: list[Any] = []
        self._mutators: list[Any] = []
        self._weights: list[float] = []
        self._postprocs: list[Any] = []
        try:
            self._tiles = tiles_of(func, target)
            self._explore()
        except Exception as error:
            # What its rules do not expect has no common class; the kernel keeps our schedule.
            _log.debug("MetaSchedule has no space: %s", str(error)[:500])

    def _explore(self) -> None:
        self._blank = tuned.blank(self._func)
        generator = ms.space_generator.PostOrderApply(
            sch_rules=_rules(self._target),
            postprocs=[
                ms.postproc.DisallowDynamicLoop(),
                ms.postproc.RewriteParallelVectorizeUnroll(),
                ms.postproc.RewriteReductionBlock(),
            ],
            # Those of loops that threads share and of where blocks are computed copy the module.
            mutator_probs={ms.mutator.MutateTileSize(): 0.9, ms.mutator.MutateUnroll(): 0.1},
        )
        mod = tvm.IRModule({"main": self._blank})
        self._context = _context(mod, self._target, generator, self._chance.randint(1, _SEEDS))
        for found in generator.generate_design_space(mod):
            self._traces.append(found.trace.simplified(True))
        self._postprocs = list(generator.postprocs)
        for mutator, weight in generator.mutator_probs.items():
            self._mutators.append(mutator)
            self._weights.append(float(getattr(weight, "value", weight)))

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return self._tiles is None and not self._traces

    def draw(self, best: Sequence[Mapping[str, Any]]) -> Candidate | None:
        """A candidate; None where none was found that can be built.

        Args:
            best: what is recorded of the fastest ones that are known.
        """
        for _ in range(_TRIES):
            tiled = self._tiles is not None and (not self._traces or self._chance.random() < _TILED)
            mutate = self._chance.random() < _MUTATED
            kind = "tiles" if tiled else "trace"
            parents = [how for how in best if kind in how] if mutate else []
            parent = self._chance.choice(parents) if parents else None
            try:
                found = self._draw_tiles(parent) if tiled else self._draw_trace(parent)
            except Exception as error:
                # Errors of schedules and postprocessors have no common class.
                _log.debug("a draw fails: %s", str(error)[:500])
                continue
            if found is not None:
                return found
        return None

    def _draw_tiles(self, parent: Mapping[str, Any] | None) -> Candidate:
        assert self._tiles is not None
        sizes = Tiles(**parent["tiles"]) if parent is not None else self._tiles
        changes = 1 if parent is not None else 3
        wide = self._tiles.lanes
        for _ in range(changes):
            name = self._chance.choice(("rows", "chains", "block", "columns", "depth"))
            block = max(sizes.block // sizes.rows, 1)
            if name == "rows":
                rows = self._chance.randint(1, tuned.MOST_ROWS)
                blocks = max(round(sizes.block / rows), 1)
                sizes = dataclasses.replace(sizes, rows=rows, block=rows * blocks)
            elif name == "chains":
                sizes = dataclasses.replace(sizes, chains=self._chance.choice(tuned.CHAINS))
            elif name == "block":
                block = self._scaled(block)
                sizes = dataclasses.replace(sizes, block=sizes.rows * block)
            elif name == "columns":
                columns = self._scaled(max(sizes.columns // wide, 1))
                sizes = dataclasses.replace(sizes, columns=wide * columns)
            else:
                sizes = dataclasses.replace(sizes, depth=self._scaled(sizes.depth))
        how = {"tiles": dataclasses.asdict(sizes)}
        return _candidate(how, tuned.apply(how, self._func, self._target))

    def _scaled(self, size: int) -> int:
        """A size that is larger or smaller by one, a half or a whole."""
        return max(self._chance.choice((size - 1, size + 1, size // 2, size * 2, size * 3 // 2)), 1)

    def _draw_trace(self, parent: Mapping[str, Any] | None) -> Candidate | None:
        if parent is None:
            # Without decisions the trace draws each of them anew.
            trace = Trace(self._chance.choice(self._traces).insts, {})
        else:
            sch = self._schedule()
            Trace.apply_json_to_schedule(parent["trace"], sch)
            mutator = self._chance.choices(self._mutators, self._weights)[0]
            trace = mutator.apply(sch.trace.simplified(True))
            if trace is None:
                return None
        sch = self._schedule()
        trace.apply_to_schedule(sch, remove_postproc=True)
        sch.enter_postproc()
        if not all(postproc.apply(sch) for postproc in self._postprocs):
            return None
        # What is measured is what the record gives, after it was written and read.
        trace = sch.trace.simplified(False).as_json()
        how = json.loads(json.dumps({"trace": trace}, default=_plain))
        return _candidate(how, tuned.apply(how, self._func, self._target))

    def _schedule(self) -> Any:
        return s_tir.Schedule(
            tvm.IRModule({"main": self._blank}),
            seed=self._chance.randint(1, _SEEDS),
            error_render_level="none",
        )


def _plain(value: Any) -> Any:
    """What TVM leaves in a trace that JSON cannot spell."""
    if isinstance(value, (tvm.tirx.IntImm, tvm.tirx.FloatImm)):
        return value.value
    return list(value) if hasattr(value, "__iter__") else str(value)


def _context(mod: Any, target: Any, generator: Any, seed: int) -> Any:
    """What rules, mutators and postprocessors know the target by.

    `TuneContext` itself first imports all tensor intrinsics, none of which is used here, for half
    a minute.
    """
    made = ms.TuneContext.__new__(ms.TuneContext)
    ignore = functools.partial(_log.log, logging.NOTSET)
    parts = (mod, target, generator, None, "main", 1, seed, lambda *said: ignore("%s", said))
    made.__init_handle_by_constructor__(ms._ffi_api.TuneContext, *parts)
    ms._ffi_api.TuneContextInitialize(made)
    return made


def _candidate(how: dict[str, Any], func: Any) -> Candidate:
    return Candidate(how, func, tuned.digest_of(func))


def _rules(target: Any) -> list[Any]:
    """MetaSchedule's rules for processors without those that make calls of instructions.

    Where there is one thread no loop is shared. What is unrolled further takes longer to compile
    than many candidates do.
    """
    threads = int(target.attrs.get("num-cores", 0)) or 1
    rules = ms.schedule_rule
    return [
        rules.InlineConstantScalars(),
        rules.AutoInline(
            into_producer=False,
            into_consumer=True,
            inline_const_tensor=True,
            disallow_if_then_else=True,
            require_injective=True,
            require_ordered=True,
            disallow_op=["tirx.exp"],
        ),
        rules.AddRFactor(max_jobs_per_core=16, max_innermost_factor=64),
        rules.MultiLevelTiling(
            structure="SSRSRS",
            max_innermost_factor=64,
            reuse_write=rules.ReuseType(req="may", levels=[1, 2], scope="global"),
        ),
        rules.ParallelizeVectorizeUnroll(
            max_jobs_per_core=16 if threads > 1 else -1,
            max_vectorize_extent=64,
            unroll_max_steps=[0, 16, 64],
            unroll_explicit=True,
        ),
        rules.RandomComputeLocation(),
    ]
