"""Counters of what was compiled and how it runs, cumulative for the process."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

from fx2relax.locks import own


class Stats:
    """The counters behind `fx2relax.stats()`; see there."""

    def __init__(self) -> None:
        self._lock = own(self, "_lock")
        self.reset()

    def reset(self) -> None:
        """Set every counter to zero."""
        self.graphs = 0
        self.nodes_total = 0
        self.nodes_compiled = 0
        self.nodes_fallback = 0
        self.relax_calls = 0
        self.tir_kernels = 0
        self.library_calls = 0
        self.compile_seconds = 0.0
        #: Counts a call of a graph: in C, so that threads at once lose none.
        self.called: Callable[[], int] = itertools.count(1).__next__
        self._looked = 0
        self.fallback_ops: Counter[str] = Counter()
        self.graphs_slower = 0
        self.cache_hits = 0
        self.cache_misses = 0
        self.cache_skipped: Counter[str] = Counter()

    def add_graph(
        self,
        *,
        nodes: int,
        fallback: Counter[str],
        seconds: float,
        relax_calls: int = 0,
        tir_kernels: int = 0,
        library_calls: int = 0,
    ) -> None:
        """Count one compiled graph."""
        with self._lock:
            self.graphs += 1
            self.nodes_total += nodes
            missed = sum(fallback.values())
            self.nodes_fallback += missed
            self.nodes_compiled += nodes - missed
            self.fallback_ops.update(fallback)
            self.compile_seconds += seconds
            self.relax_calls += relax_calls
            self.tir_kernels += tir_kernels
            self.library_calls += library_calls

    def count(self, name: str) -> None:
        """Add one to a counter."""
        with self._lock:
            setattr(self, name, getattr(self, name) + 1)

    def skip_cache(self, why: str) -> None:
        """Count a graph whose program is not stored."""
        with self._lock:
            self.cache_skipped[why] += 1

    @property
    def calls(self) -> int:
        """How often compiled graphs were called."""
        with self._lock:
            self._looked += 1
            return self.called() - self._looked

    def snapshot(self) -> dict[str, Any]:
        """The counters as a dict."""
        return {
            "graphs": self.graphs,
            "nodes_total": self.nodes_total,
            "nodes_compiled": self.nodes_compiled,
            "nodes_fallback": self.nodes_fallback,
            "fallback_ops": dict(self.fallback_ops),
            "compile_seconds": self.compile_seconds,
            "calls": self.calls,
            "relax_calls": self.relax_calls,
            "tir_kernels": self.tir_kernels,
            "library_calls": self.library_calls,
            "graphs_slower": self.graphs_slower,
            "cache_hits": self.cache_hits,
            "cache_misses": self.cache_misses,
            "cache_skipped": dict(self.cache_skipped),
        }


counters = Stats()


def stats() -> dict[str, Any]:
    """What was compiled and called in this process, since the start or `reset_stats`.

    Returns:
        a dict of counters: ``graphs`` compiled; ``nodes_total`` operator nodes in them, of which
        ``nodes_compiled`` became Relax and ``nodes_fallback`` run in PyTorch, one by one or with
        their whole graph; ``fallback_ops``, {operator: nodes}; ``compile_seconds``; ``calls`` of
        compiled graphs; ``relax_calls``, ``tir_kernels`` and ``library_calls``, the operator
        calls imported, the kernels generated and the calls into PyTorch's kernel library in the
        compiled programs; ``graphs_slower``, those that run in eager because eager is faster;
        ``cache_hits`` and ``cache_misses``, the graphs found compiled on disk and those stored
        there; ``cache_skipped``, {why a graph's program is not stored: graphs}.
    """
    return counters.snapshot()


def reset_stats() -> None:
    """Set every counter of `stats` to zero."""
    counters.reset()
