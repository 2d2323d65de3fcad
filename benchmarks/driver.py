"""Runs groups of cells: one process a cell, all of a group alive at once and timed in turns."""

from __future__ import annotations

import math
import random
import re
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cases import CASES, PRIME, TRAINED
from benchmarks.client import Client, WorkerFailed
from benchmarks.results import Cell, Group
from benchmarks.sides import SIDES, split

#: After each turn the others' threads may still spin for a while.
PAUSE = 0.01
LEAST_ROUNDS = 3
#: Seconds of calls in a process that began with empty caches, after the first call.
SETTLING = 0.5
BATCHES = (1, 8)


@dataclass
class Settings:
    """How long and how often.

    Attributes:
        rounds: the most rounds; each gives every side one turn.
        seconds: what a side's turns may take together; a side whose one call takes longer has one.
        timeout: of one request to a worker, such as to compile.
        cold: whether networks are also compiled in a process that has no cache.
        seed: of the order of turns.
        device: where tensors are, ``"cpu"`` or ``"cuda"``.
        dtype: of weights and arguments.
    """

    rounds: int = 20
    seconds: float = 10.0
    timeout: float = 900.0
    cold: bool = True
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"


@dataclass
class _Timed:
    """A side that takes turns."""

    client: Client
    cell: Cell
    calls: int = 1
    rounds: int = 0
    untimed: int = 1

    def plan(self, ms: float, settings: Settings) -> None:
        """Choose calls and rounds from the time of one call."""
        share = settings.seconds / settings.rounds
        call = ms / 1000
        self.calls = max(1, int(share / call)) if call else 1
        # A call that takes longer than its turn leaves little of what it found in the caches.
        self.untimed = 1 if call < share else 0
        turn = call * (self.calls + self.untimed)
        least = LEAST_ROUNDS if call <= settings.seconds else 1
        self.rounds = max(least, min(settings.rounds, int(settings.seconds / turn)))


class Driver:
    """Runs the cells of a list of sides in a folder.

    Args:
        sides: labels of columns: a name in `SIDES`, and options for our backend after it.
        folder: for logs, caches and references.
        settings: how long and how often.
        say: told what begins.
    """

    def __init__(
        self,
        sides: Sequence[str],
        folder: Path,
        settings: Settings,
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        # Eager comes first: the others are held to its results.
        self.sides = ["eager", *(side for side in sides if side != "eager")]
        # Workers run in another folder.
        self.folder, self.settings, self.say = folder.resolve(), settings, say
        self.work = self.folder / "work"

    def prime(self) -> dict[str, dict[str, float]]:
        """Compile a first program with each side; give its seconds and what it then holds in MB.

        What a side builds once for a machine (headers, a helper) is then in a cache, of which each
        cell is given a copy.
        """
        found = {}
        for side in self.sides:
            known = SIDES[split(side)[0]]
            if known.missing or self.settings.device not in known.devices:
                continue
            self.say(f"first use of {side}")
            cache = self._primed(side)
            shutil.rmtree(cache, ignore_errors=True)
            group = Group("inference", PRIME.kind, PRIME.name, 1, 1)
            client = self._start(group, side, cache)
            try:
                self._load(client, group, side, cache)
                answer = client.ask("compile")
                found[side] = {"seconds": answer["seconds"], "held": answer["held"]}
            except WorkerFailed:
                pass  # each cell of the side says why
            finally:
                client.close()
        return found

    def run(self, group: Group) -> Group:
        """Fill in the cells of all sides."""
        timed: dict[str, _Timed] = {}
        reference, exact = self.work / "reference.pt", self.work / "exact.pt"
        shutil.rmtree(self.work / "cells", ignore_errors=True)
        try:
            for side in self.sides:
                cell = group.cells[side] = Cell()
                if reason := self._unable(side, group, timed):
                    cell.status, cell.reason = "missing", reason
                    continue
                client = None
                try:
                    client = self._compiled(group, side, cell, reference, exact)
                    timed[side] = _Timed(client, cell)
                    rough = group.mode != "inference" or self.settings.dtype != "float32"
                    if side == "eager" and rough:
                        self._exact(group, exact)
                except WorkerFailed as failure:
                    self._failed(cell, failure)
                    if client is not None:
                        client.close()
            self._time(group, timed)
        finally:
            for each in timed.values():
                each.client.close()
            shutil.rmtree(self.work / "cells", ignore_errors=True)
            reference.unlink(missing_ok=True)
            exact.unlink(missing_ok=True)
        return group

    def _unable(self, side: str, group: Group, timed: dict[str, _Timed]) -> str:
        known = SIDES[split(side)[0]]
        if group.mode not in known.modes:
            return f"does not take part in {group.mode}"
        if known.missing:
            return known.missing
        if self.settings.device not in known.devices:
            return f"does not take part on {self.settings.device}"
        if side != "eager" and "eager" not in timed:
            return "there is no result of eager to compare with"
        return ""

    def _exact(self, group: Group, path: Path) -> None:
        """Save the results of a float64 run in eager."""
        self.say(f"{group.name}: eager in float64")
        cache = self.work / "cells" / "exact"
        client = self._start(group, "eager", cache)
        try:
            self._load(client, group, "eager", cache, exact=True)
            client.ask("compile")
            client.ask("save", path=str(path))
        finally:
            client.close()

    def _compiled(
        self, group: Group, side: str, cell: Cell, reference: Path, exact: Path
    ) -> Client:
        """A worker that has made its first call, which was right or is noted as wrong."""
        cache = self.work / "cells" / _file_name(side)
        if self._primed(side).exists():
            shutil.copytree(self._primed(side), cache)
        if side != "eager" and group.kind == "network" and self.settings.cold:
            self.say(f"{group.name}: {side}, cold")
            client = self._start(group, side, cache)
            try:
                self._load(client, group, side, cache)
                found = client.ask("compile")
                cell.cold_s = found["seconds"]
                # Ours tries and stores programs after the first call, too.
                client.ask("warm", seconds=SETTLING)
                cell.memory["cold_peak"] = client.ask("finish")["peak"]
            finally:
                client.close()
        self.say(f"{group.name}: {side}")
        client = self._start(group, side, cache)
        try:
            loaded = self._load(client, group, side, cache)
            cell.import_s = loaded.pop("import_seconds")
            found = client.ask("compile")
            cell.warm_s = found["seconds"]
            cell.memory |= loaded
            cell.memory |= {"children_peak": found["children_peak"], "peak": found["peak"]}
            if side == "eager":
                client.ask("save", path=str(reference))
                cell.absolute = cell.relative = 0.0
            else:
                double = str(exact) if exact.exists() else None
                _judge(cell, client.ask("check", path=str(reference), exact=double))
        except WorkerFailed:
            client.close()
            raise
        return client

    def _time(self, group: Group, timed: dict[str, _Timed]) -> None:
        """Rounds of turns, each round in another order, until every side has had its own."""
        self.say(f"{group.name}: timing")
        for side in list(timed):
            self._take(timed, side, self._warm)
        order = random.Random(self.settings.seed)
        for number in range(self.settings.rounds):
            sides = [side for side, each in timed.items() if number < each.rounds]
            for side in order.sample(sides, len(sides)):
                self._take(timed, side, self._turn)
        for side in list(timed):
            self._take(timed, side, self._finish)

    def _take(self, timed: dict[str, _Timed], side: str, do: Callable[[_Timed], None]) -> None:
        """Do something with a side, which is out if it fails."""
        try:
            do(timed[side])
        except WorkerFailed as failure:
            each = timed.pop(side)
            self._failed(each.cell, failure)
            each.client.close()

    def _warm(self, each: _Timed) -> None:
        each.plan(each.client.ask("warm", seconds=self.settings.seconds / 10)["ms"], self.settings)

    def _turn(self, each: _Timed) -> None:
        answer = each.client.ask("time", calls=each.calls, untimed=each.untimed)
        each.cell.rounds.append(answer["ms"])
        time.sleep(PAUSE)

    def _finish(self, each: _Timed) -> None:
        answer = each.client.ask("finish")
        cell = each.cell
        cell.notes, cell.calls = answer["notes"], each.calls
        cell.memory["peak"] = max(cell.memory["peak"], answer["peak"])
        cell.memory["held"] = answer["held"]
        cell.ms = statistics.median(cell.rounds)

    def _failed(self, cell: Cell, failure: WorkerFailed) -> None:
        cell.status, cell.reason = "failed", str(failure)

    def _start(self, group: Group, side: str, cache: Path) -> Client:
        log = self.folder / "logs" / f"{group.mode}-{group.name.replace(' ', '-')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"== {side}\n")
        return Client(group.threads, cache, log, self.settings.timeout)

    def _load(
        self, client: Client, group: Group, side: str, cache: Path, exact: bool = False
    ) -> dict[str, float]:
        return client.ask(
            "load",
            side=side,
            case=group.case,
            batch=group.batch,
            threads=group.threads,
            mode=group.mode,
            cache=str(cache),
            exact=exact,
            device=self.settings.device,
            dtype=self.settings.dtype,
        )

    def _primed(self, side: str) -> Path:
        return self.work / "primed" / _file_name(side)


def _file_name(side: str) -> str:
    return re.sub(r"[^\w.-]+", "-", side)


def _judge(cell: Cell, errors: dict[str, float]) -> None:
    """Note the errors, and whether they are too large."""
    finite = math.isfinite(errors["relative"])
    if finite:  # JSON has no infinity
        cell.absolute, cell.relative = errors["absolute"], errors["relative"]
    if not errors["right"]:
        how = f"off by {errors['relative']:.1e} of the largest value"
        cell.status = "wrong"
        cell.reason = how if finite else "another shape, dtype, integer, NaN or infinity"


def groups(
    modes: Sequence[str],
    cases: Sequence[str],
    batches: Sequence[int] | None,
    threads: Sequence[int],
) -> list[Group]:
    """Every group of a run, in order; kernels take part in inference alone.

    Args:
        modes: out of `benchmarks.cases.MODES`.
        cases: names of networks and kernels.
        batches: batch sizes; None for 1 and 8, and for all of a case that has sizes of its own.
        threads: thread counts.
    """
    found = []
    for mode in modes:
        for name in cases:
            case = CASES[name]
            if mode != "inference" and case.kind != "network":
                continue
            if mode == "train" and name not in TRAINED:
                continue
            sizes = batches or BATCHES
            if case.batches is not None:
                chosen = [b for b in case.batches if batches is None or b in batches]
                sizes = chosen or case.batches[:1]
            found += [Group(mode, case.kind, name, b, t) for b in sizes for t in threads]
    return found
