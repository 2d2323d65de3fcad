"""Tensors that functions read and write from call to call, and that belong to the artifact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fx2relax.errors import ArgumentError, ArtifactError
from fx2relax.locks import own

from . import arrays
from .manifest import Manifest


class States:
    """The states of an artifact.

    Args:
        manifest: what they are.
        name: of the artifact, for messages.
        device: where they are kept.

    Attributes:
        lock: held by a call from when it reads a state until it has written it.
        tensors: TVM's, by name; a write puts another one in its place.
    """

    def __init__(self, manifest: Manifest, name: str, device: Any) -> None:
        self.lock = own(self, "lock")
        self.tensors: dict[str, Any] = {}
        self._name = name
        self._device = device
        self._states = {state.name: state for state in manifest.states}
        self._first: dict[str, Any] = {}
        self.begin({s.name: _zeros(s.shape, s.dtype) for s in manifest.states if s.zeros})

    @property
    def names(self) -> frozenset[str]:
        """What they are called."""
        return frozenset(self._states)

    def fitting(
        self, given: Mapping[str, Callable[[], Any]], problems: list[str]
    ) -> dict[str, Any]:
        """Values as TVM's tensors; those that do not fit are added to `problems`, in words."""
        found = {}
        for name, value in given.items():
            state = self._states[name]
            try:
                tensor = arrays.given(value(), f"state {name!r}")
            except ArgumentError as error:
                problems.append(str(error))
                continue
            shape, dtype = tuple(tensor.shape), str(tensor.dtype)
            if (shape, dtype) != (state.shape, state.dtype):
                wanted = arrays.spelled(state.shape, state.dtype)
                got = arrays.spelled(shape, dtype)
                problems.append(f"state {name!r}: expected {wanted}, got {got}")
            found[name] = tensor
        return found

    def begin(self, first: Mapping[str, Any]) -> None:
        """Take first values, and begin with them."""
        with self.lock:
            self._first.update(first)
            self._restart(first)

    def reset(self) -> None:
        """Give every state its first value again."""
        with self.lock:
            self._restart(self._first)

    def _restart(self, names: Mapping[str, Any]) -> None:
        for name in names:
            first = self._first[name]
            # A copy: what the file or the caller holds stays as it is.
            fresh = arrays.empty(first.shape, str(first.dtype), self._device)
            arrays.copy(first, fresh)
            self.tensors[name] = fresh

    def get(self, name: str) -> Any:
        """The value of a state, as TVM's tensor.

        Raises:
            ArtifactError: it has none yet.
        """
        if name not in self.tensors:
            raise ArtifactError(
                f"{self._name} was saved without a first value of the state {name!r}; give it"
                " among the weights"
            )
        return self.tensors[name]

    def read(self) -> dict[str, Any]:
        """The values as they are, as NumPy arrays of their own."""
        with self.lock:
            return {name: arrays.to_numpy(t).copy() for name, t in self.tensors.items()}


def _zeros(shape: tuple[int, ...], dtype: str) -> Any:
    return arrays.zeros(shape, dtype, arrays.host())
