"""Frozen weights as a compiled program takes them, and when they have to be made anew."""

from __future__ import annotations

import ctypes
import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fx2relax.compat import from_torch
from fx2relax.locks import own
from fx2relax.params import InputSpec
from fx2relax.runtime import boundary

_PROBES = 4


class Weights:
    """The frozen weights as TVM takes them, remembered until one of them changes.

    One program may serve several modules (layers that are compiled one by one): what was made of
    each module's weights is remembered, and let go of when one of them is no more.

    A weight has changed when it is another tensor, lies elsewhere or has another
    `Tensor._version`. Writes through ``.data`` leave the version as it is: where the program
    holds results made of the weights, a few elements of each weight are compared as well, which
    finds an update of a whole tensor (a LoRA merge) but not one of a single element. Inference
    tensors have no version, and count as changed at every call.

    Args:
        specs: the weights, in the order of `get`.
        transform: makes what the program takes of the tuple of weights; None where it takes the
            weights themselves.
        streams: keeps what was made in order among the streams of a GPU: a function of these
            tensors that returns what each call asks first; None for the processor.
        in_torch: whether the program takes PyTorch's tensors.
    """

    def __init__(
        self,
        specs: Sequence[InputSpec],
        transform: Any | None,
        streams: Callable[[list[Any]], Callable[[], None]] | None = None,
        in_torch: bool = False,
    ) -> None:
        self._specs, self._in_torch = list(specs), in_torch
        self._transform, self._streams = transform, streams
        self._sets: dict[tuple[int, ...], _Made] = {}
        self._last: _Made | None = None
        self._making = own(self, "_making", threading.RLock)

    def get(self, weights: Sequence[torch.Tensor]) -> list[Any]:
        """What stands right of `num_input` in the call."""
        made = self._last
        if made is None or not made.holds(weights):
            if self._streams is not None and torch.cuda.is_current_stream_capturing():
                # Nothing is made before the graph is replayed, and then there, for that graph.
                return self._captured(weights)
            made = self._last = self._find(weights)
        if made.enter is not None:
            made.enter()
        return made.ready

    def _captured(self, weights: Sequence[torch.Tensor]) -> list[Any]:
        """What is made of weights that nothing was made of, in a graph that is being captured."""
        ids = tuple(map(id, weights))
        made = self._sets.get(ids)
        if made is None or not made.holds(weights):
            return self._renew(weights, ids).ready
        if made.enter is not None:
            made.enter()
        return made.ready

    def _find(self, weights: Sequence[torch.Tensor]) -> _Made:
        ids = tuple(map(id, weights))
        made = self._sets.get(ids)
        if made is not None and made.holds(weights):
            return made
        if any(weight.is_inference() for weight in weights):  # made anew by every call
            made = self._sets[ids] = self._renew(weights, ids)
            return made
        # One thread makes what all wait for: as many copies might not fit into memory.
        with self._making:
            made = self._sets.get(ids)
            if made is None or not made.holds(weights):
                made = self._sets[ids] = self._renew(weights, ids)
        return made

    def _renew(self, weights: Sequence[torch.Tensor], ids: tuple[int, ...]) -> _Made:
        # Of their own: what TVM holds must not keep a weight's object alive.
        prepared = [
            boundary.argument(spec, weight.detach())
            for spec, weight in zip(self._specs, weights, strict=True)
        ]
        tensors = prepared if self._in_torch else [from_torch(tensor) for tensor in prepared]
        copied = [
            weight
            for weight, tensor in zip(weights, prepared, strict=True)
            if tensor.data_ptr() != weight.data_ptr()
        ]
        if self._transform is not None:
            tensors = list(self._transform(tuple(tensors)))
            if self._in_torch:
                tensors = list(map(boundary.result, tensors))
            copied = list(weights)
        probes = [probe for weight in copied for probe in _probes(weight)]
        return _Made(
            ids=list(ids),
            alive=_watched(weights, self, ids),
            addresses=list(map(_address, weights)),
            # Where the program reads the weights' own memory, it sees what is written there.
            versions=_versions(weights) if copied else None,
            probes=probes,
            words=[probe.tobytes() for probe in probes],
            ready=tensors,
            enter=self._streams(tensors) if self._streams is not None and copied else None,
        )

    def forget(self) -> None:
        """Let go of all that was made."""
        self._sets.clear()
        self._last = None

    def drop(self, ids: tuple[int, ...]) -> None:
        """Let go of what was made of weights of which one is no more."""
        made = self._sets.pop(ids, None)
        if made is not None and made is self._last:
            self._last = None


@dataclass(frozen=True)
class _Made:
    """What was made of the weights, and how they were then; one object, for threads' sake.

    Attributes:
        ids: of the weights; no other object has them while it lives.
        alive: references that tell when it has to go.
        versions: None where it does not matter.
        ready: what was made.
        enter: lets the current stream read it; None where every stream may.
    """

    ids: list[int]
    alive: list[Any]
    addresses: list[int]
    versions: list[float] | None
    probes: list[memoryview]
    words: list[bytes]
    ready: list[Any]
    enter: Callable[[], None] | None = None

    def holds(self, weights: Sequence[torch.Tensor]) -> bool:
        """Whether it was made of these weights, as they are."""
        # Loops in C: a network may have hundreds of weights, and each call comes here.
        return (
            list(map(id, weights)) == self.ids
            and list(map(_address, weights)) == self.addresses
            and (self.versions is None or _versions(weights) == self.versions)
            and (not self.probes or [probe.tobytes() for probe in self.probes] == self.words)
        )


def _watched(weights: Sequence[torch.Tensor], holder: Weights, ids: tuple[int, ...]) -> list[Any]:
    """References to the weights that tell their holder when one is no more."""
    to = weakref.ref(holder)

    def gone(_: Any) -> None:
        found = to()
        if found is not None:
            found.drop(ids)

    return [weakref.ref(weight, gone) for weight in weights]


_address = torch.Tensor.data_ptr


def room(weight: torch.Tensor) -> int:
    """How many bytes there are from where a weight begins to its storage's end."""
    before = int(weight.storage_offset()) * weight.element_size()
    return weight.untyped_storage().nbytes() - before


def _probes(weight: torch.Tensor) -> list[memoryview]:
    """A live view of a few 8-byte words of a weight's memory, spread over it."""
    size = room(weight)
    if weight.device.type != "cpu" or size < 8:
        return []
    step = max(8, size // _PROBES // 8 * 8)
    memory = (ctypes.c_ubyte * (size // 8 * 8)).from_address(weight.data_ptr())
    return [memoryview(memory).cast("B").cast("Q")[:: step // 8]]


def _versions(weights: Sequence[torch.Tensor]) -> list[float]:
    try:
        return list(map(_version, weights))
    except RuntimeError:  # inference tensors have none
        # Another NaN each time: no list is equal to one that holds it, so that an inference tensor
        # is never taken for unchanged.
        return [float("nan") if w.is_inference() else w._version for w in weights]


_version = operator.attrgetter("_version")
