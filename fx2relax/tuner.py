"""`tune`: the kernels of a model are given faster schedules, now, and a report says which."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fx2relax import background, never_slower, stages
from fx2relax.explaining.calls import caller, compiled_call, name_of
from fx2relax.pipeline.target import host_target
from fx2relax.tune_options import SECONDS, Tune
from fx2relax.tuning import session
from fx2relax.tuning.database import Database, Known
from fx2relax.tuning.kernels import Collector, Kernel
from fx2relax.units import duration_text, share_text

_ROUNDS = 11


@dataclass
class TunedKernel:
    """One kernel.

    Attributes:
        name: what its module calls it.
        key: what the database knows it by.
        calls: how often the model calls it.
        share: its part of the time of all kernels, by our own schedules.
        own: seconds by our own schedule; None where it was not timed.
        ratio: the fastest schedule's seconds over our own's; 1 where ours stays.
        how: ``"own"``, ``"tiles"`` (ours, of other sizes) or ``"trace"`` (MetaSchedule's).
        tried: how many schedules are known, those of earlier runs among them.
        failed: how many of them cannot be used.
    """

    name: str
    key: str
    calls: int
    share: float | None = None
    own: float | None = None
    ratio: float = 1.0
    how: str = "own"
    tried: int = 0
    failed: int = 0


@dataclass
class Tuned:
    """What tuning came to.

    Attributes:
        model: its name.
        kernels: those that could be tuned, the longest first.
        symbolic: the names of those that could not, since their sizes are not known.
        database: the file that all is written to.
        seconds: of tuning, without what processes take to start.
        tried: how many schedules were measured, or failed, in this run.
        failed: how many of them failed.
        crashes: how many processes came down with a candidate.
        before: seconds of a call of the model before, the median; None where it was not timed.
        after: the same with what was tuned, in the fastest of its programs.
        steps: what was done, in order, each with its second (`at`); see `tuning.search`.
    """

    model: str
    kernels: list[TunedKernel]
    symbolic: list[str]
    database: str
    seconds: float = 0.0
    tried: int = 0
    failed: int = 0
    crashes: int = 0
    before: float | None = None
    after: float | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """All of it but the steps, as JSON can spell it."""
        found = asdict(self)
        del found["steps"]
        return found

    def __str__(self) -> str:
        lines = [
            f"{self.model}: {len(self.kernels)} kernels, {self.tried} schedules in "
            f"{self.seconds:.0f} s"
        ]
        for each in self.kernels:
            share = "" if each.share is None else share_text(each.share, 1.0)
            lines.append(
                f"  {each.name}: {share}, {duration_text(each.own)}, {1 / each.ratio:.2f} times as "
                f"fast by {each.how}, {each.tried} tried"
            )
        if self.before is not None and self.after is not None:
            lines.append(
                f"a call: {duration_text(self.before)} before, {duration_text(self.after)} now"
            )
        return "\n".join(lines)


def tune(
    model: Callable[..., Any],
    *inputs: Any,
    seconds: float = SECONDS,
    database: str | Path | None = None,
    library: str = "auto",
    grad: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    tracker: str | None = None,
    key: str | None = None,
    tell: Callable[[dict[str, Any]], None] = lambda step: None,
) -> Tuned:
    """Tune the kernels of a model, and say what came of it.

    What is found is written to a database. `torch.compile` uses it with
    ``options={"tune": {"seconds": 0, "database": ...}}``; another run, here or elsewhere, goes on
    from it.

    Args:
        model: a module or a function, not compiled.
        inputs: what it is called with.
        seconds: how long, over all kernels; 0 only says what is known.
        database: a folder; the cache's when left out.
        library: see the backend's options; ``"auto"`` tunes the kernels of both programs.
        grad: whether gradients are wanted too.
        kwargs: named arguments of the call.
        tracker: a tracker of TVM's RPC, ``host:port``, whose devices measure; they have to be of
            this machine's kind.
        key: what the tracker knows them by.
        tell: is told of every step.

    Returns:
        what was found, kernel by kernel.

    Raises:
        OptionError: a wrong option, or there is no such tracker or device.
        OSError: the database cannot be written.
        what calling the model raises.
    """
    given = {"seconds": seconds, "database": database, "tracker": tracker, "key": key}
    wishes = Tune.make(given)
    collector = _kernels(model, inputs, dict(kwargs or {}), library, grad)
    kernels = list(collector.kernels.values())
    target = collector.target or host_target()
    file = Database(target, wishes.database)
    outcome = session.Outcome()
    if kernels and wishes.seconds > 0:
        outcome = session.run(kernels, target, wishes, tell=tell)
    found = Tuned(
        name_of(model),
        _told(kernels, file.read(), outcome.steps),
        sorted(collector.symbolic),
        str(file.path),
        *(outcome.seconds, outcome.tried, outcome.failed, outcome.crashes),
        steps=outcome.steps,
    )
    if any(each.ratio < 1 for each in found.kernels) and never_slower.enabled(True):
        tell({"comparing": found.model})
        found.before, found.after = _compared(
            model, inputs, dict(kwargs or {}), library, grad, wishes
        )
    return found


def _kernels(
    model: Callable[..., Any],
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    library: str,
    grad: bool,
) -> Collector:
    """The kernels of all programs of a model."""
    call = compiled_call(
        model, inputs, grad=grad, kwargs=kwargs, dynamic=False, options={"library": library}
    )
    collector = Collector()
    with stages.observed(collector):
        call()
    torch._dynamo.reset()
    return collector


def _told(
    kernels: list[Kernel], known: dict[str, Known], steps: list[dict[str, Any]]
) -> list[TunedKernel]:
    timed = {step["kernel"]: step for step in steps if "share" in step}
    found = []
    for kernel in kernels:
        each = TunedKernel(kernel.name, kernel.key, kernel.calls)
        each.share = timed.get(kernel.key, {}).get("share")
        each.own = timed.get(kernel.key, {}).get("own")
        record = known.get(kernel.key)
        if record is not None:
            each.tried, each.failed = len(record.tried), record.failed
            if record.best is not None:
                each.ratio = float(record.best["ratio"])
                each.how = next(iter(record.best["how"]))
                each.own = each.own or float(record.best["own"])
        found.append(each)
    return sorted(found, key=lambda each: -(each.share or 0.0))


def _compared(
    model: Callable[..., Any],
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    library: str,
    grad: bool,
    wishes: Tune,
) -> tuple[float, float]:
    """The median seconds of a call without what was tuned, and with it, in turns."""
    plain: dict[str, Any] = {"library": library}
    known = {**plain, "tune": {"seconds": 0, "database": wishes.database}}
    calls = []
    for options in (plain, known):
        compiled = torch.compile(model, backend="relax", dynamic=False, options=options)
        call = caller(compiled, model, inputs, kwargs, grad)
        for _ in range(3):  # to compile, to choose, and to choose once more
            for _ in range(4 * never_slower.SETTLED):
                call()
            background.wait_for_compilation()
        calls.append(call)
    times: list[list[float]] = [[], []]
    for turn in range(_ROUNDS):
        for place in (turn % 2, 1 - turn % 2):
            start = time.perf_counter()
            calls[place]()
            times[place].append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])
