"""The kernels of a graph that can be tuned, and those of them that have been."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fx2relax import stages
from fx2relax.compat import relax, tirx
from fx2relax.pipeline import tuned
from fx2relax.tuning.database import Known

log = logging.getLogger("fx2relax")
# What `lift` calls the functions that are run once for a set of weights.
_ONCE = "_transform_params"


@dataclass
class Kernel:
    """A kernel without a schedule.

    Attributes:
        key: see `pipeline.tuned.key_of`.
        name: what its module calls it.
        func: itself.
        calls: how often its graphs call it.
    """

    key: str
    name: str
    func: Any
    calls: int


class Collector(stages.Observer):
    """Keeps the kernels of what is lowered.

    Attributes:
        kernels: by their keys.
        target: what they were lowered for; None before anything was.
        symbolic: the names of those that cannot be tuned, since a size is not known.
    """

    def __init__(self) -> None:
        self.kernels: dict[str, Kernel] = {}
        self.target: Any = None
        self.symbolic: set[str] = set()

    def note(self, stage: str, what: dict[str, Any]) -> None:
        """Take the kernels of a module that is about to be scheduled."""
        if stage == "fused":
            self.target = what["target"]
            self._take(what["mod"])

    def _take(self, mod: Any) -> None:
        calls = _calls(mod)
        for name, func in mod.functions_items():
            if not isinstance(func, tirx.PrimFunc) or not calls[name.name_hint]:
                continue
            if not tuned.is_tunable(func):
                if not (func.attrs or {}).get("tirx.is_scheduled"):
                    self.symbolic.add(name.name_hint)
                continue
            key = tuned.key_of(func)
            kernel = self.kernels.setdefault(key, Kernel(key, name.name_hint, func, 0))
            kernel.calls += calls[name.name_hint]


def _calls(mod: Any) -> Counter[str]:
    """How often a module's functions call each kernel, but for those that run once."""
    found: Counter[str] = Counter()

    def visit(expr: Any) -> None:
        if isinstance(expr, relax.Call) and getattr(expr.op, "name", "") == "relax.call_tir":
            found[expr.args[0].name_hint] += 1

    for name, func in mod.functions_items():
        if isinstance(func, relax.Function) and not name.name_hint.endswith(_ONCE):
            relax.analysis.post_order_visit(func, visit)
    return found


class Lookup:
    """Gives kernels the schedules that a database has for them: see `pipeline.lower`.

    Args:
        known: what the database holds.

    Attributes:
        used: the keys of the kernels that were given one.
    """

    def __init__(self, known: Mapping[str, Known]) -> None:
        self._known = {key: each for key, each in known.items() if each.best is not None}
        self.used: set[str] = set()

    def covers(self, keys: Iterable[str]) -> bool:
        """Whether it has a schedule for any of these kernels."""
        return not self._known.keys().isdisjoint(keys)

    def __call__(self, func: Any, target: Any) -> Any:
        """A kernel by the fastest schedule that is known, or None."""
        if not self._known or not tuned.is_tunable(func):
            return None
        key = tuned.key_of(func)
        known = self._known.get(key)
        if known is None or known.best is None:
            return None
        try:
            found = tuned.apply(known.best["how"], func, target)
        except (ValueError, KeyError, TypeError) as error:
            log.warning("a tuned schedule is not used: %s: %s", known.name, error)
            return None
        self.used.add(key)
        attrs = func.attrs or {}
        return (
            found.with_attr("global_symbol", attrs["global_symbol"])
            if ("global_symbol" in attrs)
            else found
        )
