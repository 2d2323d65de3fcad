"""What was measured, as dataclasses and as the JSON file that a run leaves."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

VERSION = 1


@dataclass
class Cell:
    """One side in one group.

    Attributes:
        status: ``"ok"``, ``"wrong"`` (not eager's results: its times do not count), ``"failed"``
            or ``"missing"`` (not installed).
        reason: of any other status than ok.
        ms: the median round's mean time of a call.
        rounds: that of each round.
        calls: calls in a round.
        cold_s, warm_s: compile seconds, the first call included, with empty caches and with those
            that the cold process left; a kernel has no cold process, and its warm is cold.
        absolute, relative: errors; see `benchmarks.agreement`.
        memory: in MB: ``imported``, ``loaded`` and ``held``, held after the imports, with the
            model, and after the calls; ``peak``, resident at most after loading, and before it
            ``load_peak``; ``weights``; ``children_peak``, the largest process started; and
            ``cold_peak``, that of the cold process.
        import_s: seconds to import the side's libraries.
        notes: what the side left to PyTorch, and our backend's counters.
    """

    status: str = "ok"
    reason: str = ""
    ms: float | None = None
    rounds: list[float] = field(default_factory=list)
    calls: int = 0
    cold_s: float | None = None
    warm_s: float | None = None
    absolute: float | None = None
    relative: float | None = None
    memory: dict[str, float] = field(default_factory=dict)
    import_s: float | None = None
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass
class Group:
    """The cells that were timed in turns: one case, batch, thread count and mode."""

    mode: str
    kind: str
    case: str
    batch: int
    threads: int
    cells: dict[str, Cell] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.mode, self.case, self.batch, self.threads

    @property
    def name(self) -> str:
        """Such as ``bert b8 t1``."""
        return f"{self.case} b{self.batch} t{self.threads}"


@dataclass
class Results:
    """A run.

    Attributes:
        environment: date, machine, versions, command, revision; see `environment`.
        first_use: of each side's first program on this machine, which is next to nothing: the
            seconds to compile it, which no cell's cold time holds, and the MB held after it.
        groups: in the order in which they were run.
    """

    environment: dict[str, Any]
    first_use: dict[str, dict[str, float]] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)

    def put(self, group: Group) -> None:
        """Add a group, in the place of one with its key."""
        self.groups = [g for g in self.groups if g.key != group.key] + [group]

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        data = {"version": VERSION, **dataclasses.asdict(self)}
        new.write_text(json.dumps(data, indent=1), encoding="utf-8")
        os.replace(new, path)

    @classmethod
    def load(cls, path: Path) -> Results:
        """Raises ValueError for a file of another version."""
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("version", None) != VERSION:
            raise ValueError(f"{path} was written by another version of the benchmarks")
        groups = [
            Group(**{**g, "cells": {side: Cell(**cell) for side, cell in g["cells"].items()}})
            for g in data.pop("groups")
        ]
        return cls(**data, groups=groups)


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _gigabytes() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _revision() -> str:
    """The commit, marked where files differ from it."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        found = subprocess.run([*git, "describe", "--always", "--dirty"], capture_output=True)
    except OSError:
        return "unknown"
    return found.stdout.decode().strip() or "unknown"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpus() -> str | None:
    """The GPUs and their driver, as ``nvidia-smi`` names them; None where it finds none."""
    asked = "--query-gpu=name,driver_version,memory.total"
    try:
        found = subprocess.run(
            ["nvidia-smi", asked, "--format=csv,noheader"], capture_output=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return None if found.returncode else found.stdout.decode().strip() or None


def environment(
    arguments: list[str], device: str = "cpu", dtype: str = "float32"
) -> dict[str, Any]:
    """Where and with what the run is made."""
    packages = ("torch", "apache-tvm", "transformers", "openvino", "numpy")
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["python -m benchmarks", *arguments]),
        "revision": _revision(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_gb": _gigabytes(),
        "device": device,
        "dtype": dtype,
        "gpus": gpus() if device == "cuda" else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: found for name in packages if (found := _version(name))},
    }
