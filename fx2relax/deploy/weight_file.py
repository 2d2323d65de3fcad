"""The weight file: safetensors, written one tensor at a time and read without a copy.

The format is eight bytes with the length of a JSON header, the header, and the tensors' bytes
without gaps. Here the tensors begin at a multiple of 64 bytes, those whose sizes are such
multiples first, so that vector loads find them well placed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from fx2relax.errors import ArtifactError, WeightError

from .dtypes import FROM_FILE, SIZES, TO_FILE

ALIGNMENT = 64
_LONGEST_HEADER = 100_000_000  # as in the library that the format comes from
_BLOCK = 4 << 20


@dataclass(frozen=True)
class Entry:
    """One tensor of a file; `begin` counts from the first byte of the file.

    Attributes:
        dtype: as TVM spells it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    begin: int = 0

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return math.prod(self.shape) * SIZES[self.dtype]


def write(
    path: Path, entries: Sequence[Entry], tensors: Iterable[tuple[str, np.ndarray[Any, Any]]]
) -> None:
    """Write a file, holding one tensor at a time.

    Args:
        path: which does not exist.
        entries: all tensors; where they begin is decided here.
        tensors: in any order, each one's name and its bytes, flat. Each entry has to come once.

    Raises:
        WeightError: a tensor is missing, unknown, there twice, or of another size.
    """
    header, placed = _placed(entries)
    left = {entry.name: entry for entry in placed}
    end = max((e.begin + e.size for e in placed), default=len(header))
    with open(path, "xb") as file:
        file.write(header)
        file.truncate(end)
        for name, data in tensors:
            entry = left.pop(name, None)
            if entry is None:
                raise WeightError(f"the tensor {name!r} is not to be written, or was already")
            if data.nbytes != entry.size:
                raise WeightError(
                    f"the tensor {name!r} has {data.nbytes} bytes, and {entry.size} were announced"
                )
            file.seek(entry.begin)
            file.write(data.data)
    if left:
        raise WeightError(f"tensors are missing: {', '.join(sorted(left))}")


def _placed(entries: Sequence[Entry]) -> tuple[bytes, list[Entry]]:
    """The header with the eight bytes before it, and the entries with their places."""
    spelled: dict[str, Any] = {}
    ordered = sorted(entries, key=lambda e: -math.gcd(e.size, ALIGNMENT))
    at = 0
    for entry in ordered:
        spelled[entry.name] = {
            "dtype": TO_FILE[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.size],
        }
        at += entry.size
    text = json.dumps(spelled, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    start = len(text) + 8
    placed = [
        Entry(e.name, e.shape, e.dtype, start + spelled[e.name]["data_offsets"][0]) for e in ordered
    ]
    return len(text).to_bytes(8, "little") + text, placed


def sha256(path: Path) -> str:
    """A file's SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


class WeightFile:
    """A file of tensors, mapped into memory.

    Args:
        path: of any safetensors file; tensors of dtypes that TVM has not are errors.

    Attributes:
        entries: by name.

    Raises:
        ArtifactError: the file is damaged, cut off or not of this format; names it.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            try:
                self.entries = _read_header(file, size)
            except _Damaged as error:
                raise ArtifactError(
                    f"{path} is no safetensors file, or not all of it: {error}; copy it again"
                ) from None
            # Read only: the system then keeps none of it in memory that it needs elsewhere.
            self.data: np.ndarray[Any, Any] = (
                np.memmap(file, np.uint8, mode="r") if size else np.empty(0, np.uint8)
            )

    def bits(self, name: str) -> np.ndarray[Any, Any]:
        """A tensor's bytes, flat, in the mapped memory."""
        entry = self.entries[name]
        return self.data[entry.begin : entry.begin + entry.size]


class _Damaged(ValueError):
    """What is wrong with a file."""


def _read_header(file: IO[bytes], size: int) -> dict[str, Entry]:
    first = file.read(8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > _LONGEST_HEADER or 8 + length > size:
        raise _Damaged(f"it has {size} bytes, and its header does not fit")
    try:
        header = json.loads(file.read(length).decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _Damaged(f"its header cannot be read ({error})") from None
    if not isinstance(header, dict):
        raise _Damaged("its header is no object")
    header.pop("__metadata__", None)
    entries = {name: _entry(name, value, 8 + length) for name, value in header.items()}
    end = 8 + length
    for entry in sorted(entries.values(), key=lambda e: (e.begin, e.size)):
        if entry.begin != end:
            raise _Damaged(f"the tensor {entry.name!r} does not begin where the last one ends")
        end += entry.size
    if end != size:
        raise _Damaged(f"it has {size} bytes, and {end} by its header")
    return entries


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Damaged("a name is there twice")
    return found


def _entry(name: str, value: Any, start: int) -> Entry:
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        numbers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError):
        raise _Damaged(f"the tensor {name!r} is not described") from None
    if not isinstance(dtype, str) or dtype not in FROM_FILE:
        raise _Damaged(f"the tensor {name!r} has the dtype {str(dtype)[:40]!r}, which TVM has not")
    if not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise _Damaged(f"the tensor {name!r} has a shape or a place that is none")
    entry = Entry(name, tuple(shape), FROM_FILE[dtype], start + begin)
    if entry.size != end - begin:
        raise _Damaged(f"the tensor {name!r} has {end - begin} bytes, and a shape of {entry.size}")
    return entry
