"""The weights of an export: their names, shapes and dtypes, and the data that is bound to them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fx2relax import dtypes
from fx2relax.errors import WeightError

_LISTED = 20


@dataclass
class Param:
    """One weight.

    Attributes:
        name: in the ``state_dict``.
        shape: ints, and text for a symbolic size.
        dtype: TVM's name.
        kind: ``"parameter"``, ``"buffer"``, ``"state"`` (a buffer that a function writes to) or
            ``"constant"``.
        data: a CPU tensor that shares the memory of what was bound; None while unbound.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    kind: str = "parameter"
    data: torch.Tensor | None = None

    @property
    def bound(self) -> bool:
        """Whether there is data."""
        return self.data is not None

    def mismatch(self, value: torch.Tensor) -> str:
        """How a value differs from what the weight has to be; an empty string if it does not."""
        shape = tuple(value.shape)
        fits = len(shape) == len(self.shape) and all(
            isinstance(want, str) or want == have
            for want, have in zip(self.shape, shape, strict=True)
        )
        if not fits:
            return f"{self.name}: its shape is {_shown(self.shape)}, not {_shown(shape)}"
        if dtypes.has_tvm(value.dtype) and dtypes.to_tvm(value.dtype) == self.dtype:
            return ""
        return f"{self.name}: its dtype is {self.dtype}, not {str(value.dtype).split('.')[-1]}"


class Params(Mapping[str, Param]):
    """The weights of an export by name.

    ``params["fc.weight"] = tensor`` binds data (a torch tensor, a NumPy array, or anything with
    DLPack) without a copy, and ``params["fc.weight"] = None`` unbinds it.

    Args:
        params: in the order of the functions' parameters.
        unused: names of the model's weights that no function reads.
    """

    def __init__(self, params: list[Param], unused: set[str] | None = None) -> None:
        self._params = {p.name: p for p in params}
        self.unused = unused or set()

    def __getitem__(self, name: str) -> Param:
        return self._params[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Bind or unbind a weight.

        Raises:
            KeyError: there is no such weight.
            WeightError: (a ValueError) another shape or dtype.
        """
        if name not in self._params:
            raise KeyError(f"there is no weight {name!r}")
        self._bind({name: value})

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)

    def __repr__(self) -> str:
        bound = sum(p.bound for p in self.values())
        return f"<{len(self)} weights, {bound} bound>"

    @property
    def unbound(self) -> list[str]:
        """The names of the weights without data."""
        return [p.name for p in self.values() if not p.bound]

    def check_bound(self) -> None:
        """Raise WeightError, which lists them, if weights have no data."""
        missing = self.unbound
        if missing:
            raise WeightError(
                f"{len(missing)} weights have no data: {', '.join(missing[:_LISTED])}"
            )

    def unbind(self) -> None:
        """Let go of all data."""
        for param in self.values():
            param.data = None

    def load_state_dict(
        self, state: Mapping[str, Any], strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Bind the weights that a mapping holds, without a copy.

        Args:
            state: name -> torch tensor, NumPy array or anything with DLPack.
            strict: whether every weight has to be there, and nothing else; weights of the model
                that no function reads may be there.

        Returns:
            the names of the weights that were missing, and those that no weight has.

        Raises:
            WeightError: (a ValueError) `strict` and there are such names, or weights of another
                shape or dtype; it lists them all, and nothing is bound.
        """
        missing = [p.name for p in self.values() if p.name not in state and p.kind != "constant"]
        unexpected = [n for n in state if n not in self._params and n not in self.unused]
        if strict and (missing or unexpected):
            lines = [_lines("missing", missing), _lines("unexpected", unexpected)]
            raise WeightError("\n".join(filter(None, lines)))
        self._bind({name: value for name, value in state.items() if name in self._params})
        return missing, unexpected

    def load_safetensors(
        self, *paths: str | Path, strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Bind the weights in safetensors files, which are mapped into memory and not read.

        Args:
            paths: the files; a weight is in one of them.
            strict: see `load_state_dict`.

        Returns:
            the names of the weights that were missing, and those that no weight has.

        Raises:
            WeightError: see `load_state_dict`.
        """
        from safetensors.torch import load_file

        state: dict[str, torch.Tensor] = {}
        for path in paths:
            state |= load_file(path)
        return self.load_state_dict(state, strict)

    def _bind(self, values: Mapping[str, Any]) -> None:
        tensors = {n: None if v is None else as_tensor(n, v) for n, v in values.items()}
        faults = [self[n].mismatch(t) for n, t in tensors.items() if t is not None]
        faults = [*filter(None, faults), *_unequal(self._params, tensors)]
        if faults:
            raise WeightError(_lines("these do not fit", faults))
        for name, tensor in tensors.items():
            self._params[name].data = tensor


def _unequal(params: Mapping[str, Param], new: Mapping[str, torch.Tensor | None]) -> list[str]:
    """Sizes of one name that differ between weights, after a change."""
    seen: dict[str, tuple[int, str]] = {}
    faults = []
    for param in params.values():
        data = new.get(param.name, param.data)
        if data is None or len(data.shape) != len(param.shape):
            continue
        for size, value in zip(param.shape, data.shape, strict=True):
            if not isinstance(size, str) or not size.isidentifier():
                continue
            first = seen.setdefault(size, (value, param.name))
            if first[0] != value:
                faults.append(
                    f"{param.name}: its size {size} is {value}, and {first[0]} in {first[1]}"
                )
    return faults


def as_tensor(name: str, value: Any) -> torch.Tensor:
    """Data for a weight as a torch tensor on the CPU that shares its memory where that is one."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, np.ndarray):
        with warnings.catch_warnings():
            # A mapped file cannot be written to, and nothing here writes to weights.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return torch.from_numpy(value)
    if hasattr(value, "__dlpack__"):
        return torch.utils.dlpack.from_dlpack(value)
    raise WeightError(f"{name}: a weight is a tensor or an array, not {type(value).__name__}")


def _shown(shape: tuple[int | str, ...]) -> str:
    return "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"


def _lines(title: str, items: list[str]) -> str:
    if not items:
        return ""
    shown = items[:_LISTED]
    more = [f"and {len(items) - _LISTED} more"] if len(items) > _LISTED else []
    return "\n  ".join([f"{title}: {len(items)}", *shown, *more])
