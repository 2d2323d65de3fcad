"""Tuning within a budget: the kernels in turns, by their share of the time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from fx2relax.pipeline import spaces, tuned
from fx2relax.tuning.database import Database, Known
from fx2relax.tuning.kernels import Kernel
from fx2relax.tuning.measure import Differs, Timed, compare, seconds

#: Tells the process that waits what happens.
Tell = Callable[[dict[str, Any]], None]

# A kernel with less of the time than this is left as it is.
_WORTH = 0.01
# Of how many of the fastest candidates others are made.
_PARENTS = 6
# A schedule that takes as many times as long as ours is not written down, but for its digest.
_KEPT = 1.5
# After so many draws of what was measured before there is nothing left to draw.
_DRAWS = 40


@dataclass
class Subject:
    """A kernel that is tuned.

    Attributes:
        kernel: itself.
        target: what it is compiled for.
        code: of our own schedule.
        arguments: shapes and dtypes.
        known: what is known of it.
        own: seconds of our own schedule.
        share: its part of the time of all.
        spent: seconds of tuning.
        open: whether there may be another candidate.
        confirmed: the digests of the schedules that were timed again.
        space: its schedules, once one was drawn.
    """

    kernel: Kernel
    target: Any
    code: Any
    arguments: list[tuple[tuple[int, ...], str]]
    known: Known
    own: float
    share: float = 0.0
    spent: float = 0.0
    open: bool = True
    confirmed: set[str] = field(default_factory=set)
    space: spaces.Space | None = None

    def draw(self, taken: set[str]) -> spaces.Candidate | None:
        """A candidate that was not measured yet; None where there seems to be none."""
        if self.space is None:
            seed = f"{self.kernel.key} {len(self.known.tried)} {os.getpid()}"
            self.space = spaces.Space(self.kernel.func, self.target, seed)
        best = [record["how"] for record in self.known.ranked()[:_PARENTS]]
        for _ in range(0 if self.space.empty else _DRAWS):
            found = self.space.draw(best)
            if found is not None and found.digest not in self.known.tried | taken:
                return found
        self.open = False
        return None


class Search:
    """Tunes kernels for a while, which begins when it is made.

    Args:
        kernels: what there is to tune.
        target: a `tvm.target.Target`.
        database: where what is found is written, and what is known is read.
        place: where candidates are measured, see `measure`.
        tell: is told of every step.
    """

    def __init__(
        self, kernels: Sequence[Kernel], target: Any, database: Database, place: Any, tell: Tell
    ) -> None:
        self._target, self._database, self._place, self._tell = target, database, place, tell
        self._start = time.monotonic()
        known = database.read()
        self._subjects: list[Subject] = []
        for kernel in kernels:
            self._subjects.append(self._subject(kernel, known.get(kernel.key) or Known()))
        total = sum(s.own * s.kernel.calls for s in self._subjects) or 1.0
        for subject in self._subjects:
            subject.share = subject.own * subject.kernel.calls / total
            tell({"share": subject.share, "own": subject.own, **_named(subject)})

    def _subject(self, kernel: Kernel, known: Known) -> Subject:
        self._tell({"starting": kernel.key})
        if not known.tir:
            known.name, known.tir = kernel.name, tuned.spelled(kernel.func)
            self._database.add({"kernel": kernel.key, "name": kernel.name, "tir": known.tir})
        arguments = tuned.arguments(kernel.func)
        code = tuned.code(tuned.own(kernel.func, self._target), self._target)
        own = seconds(self._place, arguments, code)
        return Subject(kernel, self._target, code, arguments, known, own)

    def run(self, budget: float) -> None:
        """Tune for so many seconds; a measurement that has begun is ended, and one is made."""
        first = True
        worth = min(_WORTH, max((s.share for s in self._subjects), default=0.0))
        with ThreadPoolExecutor(self._place.width) as pool:
            while first or time.monotonic() - self._start < budget:
                waiting = [s for s in self._subjects if s.open and s.share >= worth]
                if not waiting:
                    break
                # The last tenth is for a second look at what was found.
                spent = time.monotonic() - self._start
                if spent > 0.9 * budget and not first and self._confirm_one():
                    continue
                first = False
                subject = min(waiting, key=lambda s: s.spent / s.share)
                begun = time.monotonic()
                self._step(subject, pool)
                subject.spent += time.monotonic() - begun
                self._tell({"spent": time.monotonic() - self._start})
        while self._confirm_one():
            pass
        self._tell({"spent": time.monotonic() - self._start})

    def _step(self, subject: Subject, pool: ThreadPoolExecutor) -> None:
        """Measure as many candidates as there are devices."""
        drawn: list[spaces.Candidate] = []
        while len(drawn) < self._place.width:
            found = subject.draw({candidate.digest for candidate in drawn})
            if found is None:
                break
            drawn.append(found)
            self._tell({"trying": found.digest, **_named(subject)})
        # PyTorch's number of threads is that of this thread.
        each = map if self._place.width == 1 else pool.map
        outcomes = each(lambda one: self._measured(subject, one), drawn)
        for candidate, outcome in zip(drawn, outcomes, strict=True):
            self._write(subject, candidate, outcome)

    def _measured(self, subject: Subject, candidate: spaces.Candidate) -> Timed | str:
        try:
            code = tuned.code(candidate.func, self._target)
            name = f"k{candidate.digest}"
            return compare(self._place, subject.arguments, subject.code, code, name)
        except Differs as error:
            return f"wrong: {error}"
        except Exception as error:  # of compilers, linkers, devices: none is this process's end
            return f"{type(error).__name__}: {str(error)[:300]}"

    def _write(self, subject: Subject, candidate: spaces.Candidate, outcome: Timed | str) -> None:
        known, key, digest = subject.known, subject.kernel.key, candidate.digest
        record: dict[str, Any] = {"kernel": key, "digest": digest}
        if isinstance(outcome, str):
            record["failed"] = outcome
            known.failed += 1
        else:
            record |= {"ratio": outcome.ratio, "own": outcome.own, "accepted": outcome.accepted}
            if outcome.ratio < _KEPT:
                record["how"] = candidate.how
                known.measured[digest] = record
        known.tried.add(digest)
        self._database.add(record)
        self._tell({"tried": digest, **_named(subject), **_without(record, "how", "kernel")})

    def _confirm_one(self) -> bool:
        """Time one accepted schedule again; returns whether there was one to be timed."""
        for subject in self._subjects:
            best = subject.known.best
            if best is None or best["digest"] in subject.confirmed:
                continue
            digest = best["digest"]
            subject.confirmed.add(digest)
            self._tell({"trying": digest, **_named(subject)})
            try:
                code = tuned.code(
                    tuned.apply(best["how"], subject.kernel.func, self._target), self._target
                )
                name = f"c{digest}"
                found = compare(self._place, subject.arguments, subject.code, code, name)
                good = found.accepted
            except Exception:  # whatever it does now, it is not what was accepted
                good = False
            if good:
                self._tell({"confirmed": digest, **_named(subject)})
            else:
                subject.known.revoked.add(digest)
                self._database.add(
                    {"kernel": subject.kernel.key, "digest": digest, "revoked": True}
                )
                self._tell({"revoked": digest, **_named(subject)})
            return True
        return False


def _named(subject: Subject) -> dict[str, Any]:
    return {"kernel": subject.kernel.key, "name": subject.kernel.name}


def _without(record: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in names}
