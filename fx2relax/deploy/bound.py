"""The weights of a loaded artifact: by name, replaced by name, and as its functions take them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from fx2relax.errors import ArgumentError, ArtifactError, WeightError
from fx2relax.locks import own

from . import arrays
from .machine import Machines
from .manifest import Function, Manifest, Weight
from .sizes import Shown, Unsolved, parse, solve
from .states import States
from .weight_file import WeightFile


class Incompatible(NamedTuple):
    """What `load_state_dict` found besides the weights; as PyTorch's own."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Bound:
    """Weights as they are at one time, and what was made of them; never changed afterwards.

    Attributes:
        tensors: TVM's, by the name of the weight; tied ones once.
        sizes: the named sizes that their shapes tell.
    """

    def __init__(self, tensors: dict[str, Any], sizes: dict[str, int]) -> None:
        self.tensors = tensors
        self.sizes = sizes
        self._made: dict[Any, list[Any]] = {}
        self._lock = own(self, "_lock")

    def ready(self, function: Function, names: list[str], machines: Machines, to: Any) -> list[Any]:
        """What stands right of a function's own parameters in a call.

        Args:
            function: the function.
            names: of its weights, tied ones by their first name.
            machines: run its transform.
            to: the device.
        """
        key = (function.transform, tuple(names))
        made = self._made.get(key)
        if made is None:
            with self._lock:
                made = self._made.get(key)
                if made is None:
                    made = self._made[key] = self._make(function.transform, names, machines, to)
        return made if function.takes is None else [made[n] for n in function.takes]

    def _make(self, transform: str, names: list[str], machines: Machines, to: Any) -> list[Any]:
        if not transform:
            for name in names:  # moved once, for all functions
                self.tensors[name] = arrays.on_device(self.tensors[name], to)
            return [self.tensors[name] for name in names]
        given = tuple(arrays.on_device(self.tensors[name], to) for name in names)
        with machines.take() as machine:
            return list(machine[transform](given))


class Weights(Mapping[str, Any]):
    """The weights of an artifact, by name, as NumPy arrays that cannot be written to.

    `load_state_dict` replaces them. Arrays that it is given are used where they lie: after they
    have been changed, it has to be called again.

    Args:
        manifest: what they have to be.
        states: of the artifact; a state dict may hold them too.
        name: of the artifact, for messages.
    """

    def __init__(self, manifest: Manifest, states: States, name: str) -> None:
        self._name = name
        self._states = states
        self._align = manifest.alignment
        self._wanted = {weight.name: weight for weight in manifest.weights}
        self._lock = own(self, "_lock")
        #: What calls use; replaced whole.
        self.bound: Bound | None = None if self._own() else Bound({}, {})

    def _own(self) -> list[Weight]:
        return [weight for weight in self._wanted.values() if not weight.same_as]

    def canonical(self, name: str) -> str:
        """The first name of a weight that has several."""
        return self._wanted[name].same_as or name

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        weight = self._wanted[name]
        array: np.ndarray[Any, Any] = arrays.to_numpy(
            self.current().tensors[weight.same_as or name]
        ).view()
        array.flags.writeable = False
        return array

    def __contains__(self, name: object) -> bool:
        return name in self._wanted

    def __iter__(self) -> Iterator[str]:
        return iter(self._wanted)

    def __len__(self) -> int:
        return len(self._wanted)

    def current(self) -> Bound:
        """The weights as they are now.

        Raises:
            ArtifactError: there are none yet.
        """
        if self.bound is None:
            names = [weight.name for weight in self._own()]
            raise ArtifactError(
                f"{self._name} was saved without weights, and has been given none:"
                f" {_listed(names)}. Give them as load(..., weights=) or by weights.load_state_dict"
            )
        return self.bound

    def read(self, file: WeightFile) -> None:
        """Take all weights, and the first values of states, out of a file, without a copy."""
        given = {name: _stored(file, name, self._align) for name in file.entries}
        self._replace(given, True, f"{file.path}")

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Incompatible:
        """Replace weights by name, for all calls that begin afterwards.

        Args:
            state_dict: NumPy arrays, or tensors with DLPack, by name. Tied weights may be given
                under any of their names. A state that is among them begins anew with its value.
            strict: whether a missing or unexpected name is an error; else the weights that are
                missing stay as they are.

        Returns:
            the missing and the unexpected names.

        Raises:
            WeightError: (a ValueError) names every missing and unexpected one, and every weight
                of another shape or dtype; nothing is replaced then.
        """
        return self._replace(
            {name: functools.partial(state_dict.__getitem__, name) for name in state_dict},
            strict,
            self._name,
        )

    def _replace(
        self, given: Mapping[str, Callable[[], Any]], strict: bool, name: str
    ) -> Incompatible:
        with self._lock:
            found = {self.canonical(n): value for n, value in given.items() if n in self._wanted}
            own = self._own()
            missing = [weight.name for weight in own if weight.name not in found]
            known = self._wanted.keys() | self._states.names
            unexpected = [n for n in given if n not in known]
            problems = []
            if strict or self.bound is None:
                problems += [f"missing: {_listed(missing)}"] if missing else []
            if strict:
                problems += [f"unexpected: {_listed(unexpected)}"] if unexpected else []
            tensors = {} if self.bound is None else dict(self.bound.tensors)
            for weight in own:
                if weight.name not in found:
                    continue
                try:
                    value = found[weight.name]()
                    tensor = arrays.given(value, f"weight {weight.name!r}", self._align)
                except ArgumentError as error:
                    problems.append(str(error))
                    continue
                wrong = _mismatch(weight, tensor)
                problems += [wrong] if wrong else []
                tensors[weight.name] = tensor
            states = self._states.fitting(
                {n: value for n, value in given.items() if n in self._states.names}, problems
            )
            sizes: dict[str, int] = {}
            if not problems:
                sizes = _sizes(own, tensors, problems)
            if problems:
                raise WeightError("\n  ".join([f"the weights do not fit {name}", *problems]))
            self.bound = Bound(tensors, sizes)
            self._states.begin(states)
            return Incompatible(missing, unexpected)


def _stored(file: WeightFile, name: str, align: int) -> Callable[[], Any]:
    entry = file.entries[name]
    return lambda: arrays.from_bits(file.bits(name), entry.shape, entry.dtype, align)


def _mismatch(weight: Weight, tensor: Any) -> str | None:
    shape, dtype = tuple(tensor.shape), str(tensor.dtype)
    fits = len(shape) == len(weight.shape) and all(
        not isinstance(wanted, int) or wanted == size
        for wanted, size in zip(weight.shape, shape, strict=True)
    )
    if fits and dtype == weight.dtype:
        return None
    wanted = arrays.spelled(weight.shape, weight.dtype)
    return f"weight {weight.name!r}: expected {wanted}, got {arrays.spelled(shape, dtype)}"


def _sizes(own: list[Weight], tensors: Mapping[str, Any], problems: list[str]) -> dict[str, int]:
    shown = [
        Shown(parse(wanted), int(size), f"axis {axis} of weight {weight.name!r}")
        for weight in own
        for axis, (wanted, size) in enumerate(
            zip(weight.shape, tensors[weight.name].shape, strict=True)
        )
    ]
    try:
        return solve(shown, {})
    except Unsolved as error:
        problems.append(str(error))
        return {}


def _listed(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names)
