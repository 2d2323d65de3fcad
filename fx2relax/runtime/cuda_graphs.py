"""``mode="reduce-overhead"`` on a GPU: the launches of a call are captured once, and replayed.

What is captured reads and writes fixed addresses. Weights are read where they lie; other arguments
are copied into memory of the graph's own, and its results out of it, so that they are the caller's
to keep.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fx2relax.layouts import overlaps
from fx2relax.locks import own

log = logging.getLogger("fx2relax")

Call = Callable[[Sequence[Any]], Any]
#: Calls of one size that run as they are before they are captured: they prepare weights, choose
#: algorithms, and are compared and timed.
WARM = 3
#: So many sizes are captured; each holds memory of its own.
SIZES = 16
# PyTorch captures one graph at a time: whoever begins waits for all that the GPUs have to do.
_capturing = own(sys.modules[__name__], "_capturing")


class Replayed:
    """A program as a function of a tuple of arguments, replayed where that can be.

    Args:
        call: the program's; it leaves no trace but its results.
        device: the GPU.
        weights: the places of arguments that are read where they lie.
        frozen: those of them of which the program may have made something else: once they are
            written to, a call is captured anew.
    """

    def __init__(
        self,
        call: Call,
        device: torch.device,
        weights: Sequence[int],
        frozen: Sequence[int],
    ) -> None:
        self._call, self._device = call, device
        self._weights, self._frozen = frozenset(weights), list(frozen)
        self._known: dict[Any, _Captured | int | None] = {}  # a count of calls before one is
        self._lock = own(self, "_lock")
        self._side: Any = None
        self._done: Any = None  # when the last replay is, on which stream

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """Replay the call that was captured of such arguments, or make it."""
        if torch.cuda.is_current_stream_capturing():  # of the user's
            return self._call(arguments)
        key = self._key(arguments)
        known = self._known.get(key, 0) if key is not None else None
        if known is None:
            return self._call(arguments)
        with self._lock, torch.cuda.device(self._device):
            known = self._known.get(key, 0)
            if known is None:
                return self._call(arguments)
            if isinstance(known, _Captured) and known.versions != self._versions(arguments):
                known = 0
            if isinstance(known, int):
                if known < WARM:
                    return self._warm(key, known, arguments)
                known = self._known[key] = self._capture(arguments)
                if known is None:
                    return self._call(arguments)
            return self._replay(known, arguments)

    def _key(self, arguments: Sequence[Any]) -> Any:
        """What a capture holds for; None for what cannot be captured."""
        parts: list[Any] = []
        for place, value in enumerate(arguments):
            if not isinstance(value, torch.Tensor):
                if not isinstance(value, (int, float, bool, str, type(None))):
                    return None
                parts.append((type(value), value))
                continue
            plain = value.layout is torch.strided and not value.is_quantized
            if not plain or value.is_conj() or value.is_neg() or value.device != self._device:
                return None
            where = value.data_ptr() if place in self._weights else None
            parts.append((value.dtype, tuple(value.shape), value.stride(), where))
        key = tuple(parts)
        full = len(self._known) >= SIZES and key not in self._known
        return None if full else key

    def _warm(self, key: Any, count: int, arguments: Sequence[Any]) -> Any:
        """A call on a stream beside the current one, as a capture will be."""
        current = torch.cuda.current_stream(self._device)
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)
        side = self._side
        side.wait_stream(current)
        with torch.cuda.stream(side):
            results = self._call(arguments)
        current.wait_stream(side)
        for value in results:
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                value.record_stream(current)
        self._known[key] = count + 1
        return results

    def _capture(self, arguments: Sequence[Any]) -> _Captured | None:
        """Capture a call; None where it does what a capture cannot hold."""
        try:
            # Memory that is made under inference_mode cannot be written to outside of it.
            with torch.inference_mode(False), torch.no_grad():
                taken = [self._taken(place, v) for place, v in enumerate(arguments)]
                graph = torch.cuda.CUDAGraph()
                # PyTorch's own stream for captures is on the GPU that had the first of them. Other
                # threads may allocate meanwhile.
                how = {"stream": self._side, "capture_error_mode": "thread_local"}
                with _capturing, torch.cuda.graph(graph, **how):
                    results = list(self._call(taken))
        except Exception as error:
            log.info("a graph is not captured: %s: %s", type(error).__name__, error)
            return None
        captured = _Captured(graph, taken, results, self._versions(arguments))
        if not captured.found():
            log.info("a graph is not captured: its results share memory")
            return None
        return captured

    def _versions(self, arguments: Sequence[Any]) -> list[int | None]:
        """Those of weights; inference tensors have none, and each call looks at them anew."""
        given = [arguments[place] for place in self._frozen]
        return [None if weight.is_inference() else weight._version for weight in given]

    def _taken(self, place: int, value: Any) -> Any:
        if place in self._weights or not isinstance(value, torch.Tensor):
            return value
        fresh = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
        return fresh.copy_(value)

    def _replay(self, captured: _Captured, arguments: Sequence[Any]) -> list[Any]:
        stream = torch.cuda.current_stream(self._device)
        if self._done is not None and self._done[1] != stream.cuda_stream:
            stream.wait_event(self._done[0])  # it may be reading what is written here
        with torch.no_grad():
            for place, memory in enumerate(captured.taken):
                if isinstance(memory, torch.Tensor) and place not in self._weights:
                    memory.copy_(arguments[place])
            captured.graph.replay()
            results = [self._given(r, arguments) for r in captured.outputs]
        done = torch.cuda.Event()
        done.record(stream)
        self._done = done, stream.cuda_stream
        return results

    @staticmethod
    def _given(result: Any, arguments: Sequence[Any]) -> Any:
        if isinstance(result, _Argument):
            return arguments[result.place]
        if not isinstance(result, torch.Tensor):
            return result
        fresh = torch.empty_strided(
            result.shape, result.stride(), dtype=result.dtype, device=result.device
        )
        return fresh.copy_(result)


@dataclass(frozen=True)
class _Argument:
    """A result that is the caller's own argument."""

    place: int


@dataclass
class _Captured:
    """A call that was captured.

    Attributes:
        graph: PyTorch's.
        taken: what it was called with, in memory that stays.
        results: what it returned, which each replay writes anew.
        versions: those of the frozen weights.
        outputs: the same, with arguments named by their places; see `found`.
    """

    graph: Any
    taken: list[Any]
    results: list[Any]
    versions: list[int | None]
    outputs: list[Any] = field(default_factory=list)

    def found(self) -> bool:
        """Find what each result is; whether copies of them are as the call's own would be."""
        places = {id(v): i for i, v in enumerate(self.taken) if isinstance(v, torch.Tensor)}
        storages = {
            v.untyped_storage().data_ptr()
            for v in self.taken
            if isinstance(v, torch.Tensor) and v.numel()
        }
        self.outputs = []
        for result in self.results:
            place = places.get(id(result))
            if place is not None:
                self.outputs.append(_Argument(place))
                continue
            if isinstance(result, torch.Tensor):
                if result.layout is not torch.strided or result.is_conj() or result.is_neg():
                    return False
                if overlaps(result):
                    return False
                where = result.untyped_storage().data_ptr()
                if result.numel() and where in storages:
                    return False
                storages.add(where)
            self.outputs.append(result)
        return True
