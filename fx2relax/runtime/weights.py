"""Frozen weights as a compiled program takes them, and when they have to be made anew."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from fx2relax.compat import from_torch
from fx2relax.params import InputSpec
from fx2relax.runtime import boundary

_PROBES = 4


class Weights:
    """The frozen weights as TVM takes them, remembered until one of them changes.

    A weight has changed when it is another tensor, lies elsewhere or has another
    `Tensor._version`. Writes through ``.data`` leave the version as it is: where the program
    holds results made of the weights, a few elements of each weight are compared as well, which
    finds an update of a whole tensor (a LoRA merge) but not one of a single element. Inference
    tensors have no version, and count as changed at every call.

    Args:
        specs: the weights, in the order of `get`.
        transform: makes what the program takes of the tuple of weights; None where it takes the
            weights themselves.
    """

    def __init__(self, specs: Sequence[InputSpec], transform: Any | None) -> None:
        self._specs = list(specs)
        self._transform = transform
        self._seen: list[tuple[torch.Tensor, float, int]] = []
        self._probes: list[Any] = []
        self._values: list[int] = []
        self._ready: list[Any] = []

    def get(self, weights: Sequence[torch.Tensor]) -> list[Any]:
        """What stands right of `num_input` in the call."""
        seen = self._seen
        if len(seen) != len(weights):
            return self._renew(weights)
        for weight, (tensor, version, address) in zip(weights, seen, strict=True):
            if weight is not tensor or version != _version(weight) or address != weight.data_ptr():
                return self._renew(weights)
        if self._probes and self._values != [probe.value for probe in self._probes]:
            return self._renew(weights)
        return self._ready

    def _renew(self, weights: Sequence[torch.Tensor]) -> list[Any]:
        prepared = [
            boundary.argument(spec, weight)
            for spec, weight in zip(self._specs, weights, strict=True)
        ]
        tensors = [from_torch(tensor) for tensor in prepared]
        copied = [
            weight
            for weight, tensor in zip(weights, prepared, strict=True)
            if tensor.data_ptr() != weight.data_ptr()
        ]
        if self._transform is not None:
            tensors = list(self._transform(tuple(tensors)))
            copied = list(weights)
        self._seen = [(w, _version(w), w.data_ptr()) for w in weights]
        self._probes = [probe for weight in copied for probe in _probes(weight)]
        self._values = [probe.value for probe in self._probes]
        self._ready = tensors
        return tensors


def _probes(weight: torch.Tensor) -> list[Any]:
    """Live views of a few 8-byte words of a weight's memory, spread over it."""
    size = weight.untyped_storage().nbytes() - weight.storage_offset() * weight.element_size()
    if weight.device.type != "cpu" or size < 8:
        return []
    step = max(8, size // _PROBES // 8 * 8)
    start = weight.data_ptr()
    return [ctypes.c_uint64.from_address(start + at) for at in range(0, size - 7, step)]


def _version(tensor: torch.Tensor) -> float:
    # NaN is unequal to itself, so an inference tensor is never taken for unchanged.
    return float("nan") if tensor.is_inference() else tensor._version
