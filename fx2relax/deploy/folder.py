"""An artifact's folder: written beside its place and moved there whole, and checked when read."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fx2relax.errors import ArtifactError, WeightError

from . import arrays, spelling, weight_file
from .manifest import LIBRARY, MANIFEST, WEIGHTS, File, Manifest
from .weight_file import Entry

_EXCHANGE = 2  # RENAME_EXCHANGE
_HERE = -100  # AT_FDCWD


@dataclass(frozen=True)
class Objects:
    """Object files for a machine that there is no linker for here.

    Attributes:
        files: the bytes of each.
        link: the words of the command that makes a shared library of them there, without names
            of files: ``("aarch64-linux-gnu-gcc", "-shared", "-fPIC")``.
    """

    files: tuple[bytes, ...]
    link: tuple[str, ...]


def save(
    folder: str | os.PathLike[str],
    library: bytes | Objects,
    weights: Mapping[str, Any] | Iterable[tuple[str, Any]] | None,
    manifest: Manifest,
) -> Manifest:
    """Write an artifact.

    Everything is written to a folder beside, which takes the place of `folder` at the end: a
    failure leaves nothing behind, and an older artifact as it was.

    Args:
        folder: where; an empty folder or an artifact there is replaced.
        library: what `pipeline.library_code` returned, or object files.
        weights: NumPy arrays or tensors with DLPack, by name, of every weight that the manifest
            names (tied ones under their first name) and of every state that does not begin as
            zeros. Of an iterable of pairs, one is held at a time. None leaves the weights out.
        manifest: what the artifact is; its `library`, `weight_file`, `objects` and `link` are
            filled in here.

    Returns:
        the manifest as it was written.

    Raises:
        ArtifactError: the folder holds something else.
        WeightError: (a ValueError) the weights are not those that the manifest names; names all
            of them that are wrong.
    """
    place = Path(folder).resolve()
    _refuse_others(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    with _aside(place) as made:
        files: dict[str, Any] = {"library": None, "weight_file": None, "objects": (), "link": ()}
        if isinstance(library, Objects):
            names = [f"kernels{n}.o" for n in range(len(library.files))]
            parts = zip(names, library.files, strict=True)
            files["objects"] = tuple(_write(made / name, data) for name, data in parts)
            files["link"] = library.link
        else:
            files["library"] = _write(made / LIBRARY, library)
        if weights is not None:
            _write_weights(made / WEIGHTS, manifest, weights)
            files["weight_file"] = _described(made / WEIGHTS)
        written = dataclasses.replace(manifest, **files)
        _write(made / MANIFEST, spelling.to_text(written).encode())
        _flush(made)
        _move(made, place)
    return written


def _write(path: Path, data: bytes) -> File:
    path.write_bytes(data)
    return File(path.name, len(data), hashlib.sha256(data).hexdigest())


def _described(path: Path) -> File:
    return File(path.name, path.stat().st_size, weight_file.sha256(path))


def _write_weights(
    path: Path, manifest: Manifest, weights: Mapping[str, Any] | Iterable[tuple[str, Any]]
) -> None:
    """The weight file, after a check of every shape and dtype."""
    own = [weight for weight in manifest.weights if not weight.same_as]
    tied = {weight.name for weight in manifest.weights if weight.same_as}
    stored = [(w.name, w.shape, w.dtype) for w in own]
    stored += [(s.name, s.shape, s.dtype) for s in manifest.states if not s.zeros]
    wanted = {name: (shape, dtype) for name, shape, dtype in stored}
    if isinstance(weights, Mapping):
        shapes = _compared(weights, wanted, tied)
        pairs: Iterable[tuple[str, Any]] = ((name, weights[name]) for name in wanted)
    else:
        open_ended = [n for n, (shape, _) in wanted.items() if not _numbers(shape)]
        if open_ended:
            raise ArtifactError(
                f"weights of symbolic sizes ({', '.join(open_ended)}) have to be given as a dict"
            )
        shapes = {name: tuple(map(int, shape)) for name, (shape, _) in wanted.items()}
        pairs = weights
    entries = [Entry(name, shapes[name], dtype) for name, (_, dtype) in wanted.items()]

    def checked() -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        for name, value in pairs:
            if name in tied:
                continue
            if name in wanted:
                _compared({name: value}, {name: wanted[name]}, tied)
            yield name, arrays.flat_bytes(value, f"weight {name!r}")

    weight_file.write(path, entries, checked())


def _compared(
    weights: Mapping[str, Any], wanted: Mapping[str, tuple[Sequence[Any], str]], tied: set[str]
) -> dict[str, tuple[int, ...]]:
    """The shapes of weights; an error names all that are missing, unexpected or unlike."""
    problems, shapes = [], {}
    missing = [name for name in wanted if name not in weights]
    unexpected = [name for name in weights if name not in wanted and name not in tied]
    problems += [f"missing: {', '.join(missing)}"] if missing else []
    problems += [f"unexpected: {', '.join(unexpected)}"] if unexpected else []
    for name, (shape, dtype) in wanted.items():
        if name not in weights:
            continue
        got, kind = arrays.shape_and_dtype(weights[name], f"weight {name!r}")
        fits = len(got) == len(shape) and all(
            not isinstance(a, int) or a == b for a, b in zip(shape, got, strict=True)
        )
        if not fits or kind != dtype:
            expected = arrays.spelled(shape, dtype)
            problems.append(f"{name}: expected {expected}, got {arrays.spelled(got, kind)}")
        shapes[name] = got
    if problems:
        raise WeightError("\n  ".join(["the weights are not those of the manifest", *problems]))
    return shapes


def _numbers(shape: Sequence[Any]) -> bool:
    return all(isinstance(size, int) for size in shape)


def _refuse_others(place: Path) -> None:
    """Replace nothing but an artifact."""
    if not os.path.lexists(place):
        return
    if not place.is_dir():
        raise ArtifactError(f"{place} is a file; an artifact is a folder")
    found = {entry.name for entry in place.iterdir()}
    if not found:
        return
    try:
        known = read_manifest(place)
    except ArtifactError:
        raise ArtifactError(
            f"{place} is not empty, and is no artifact that could be replaced; choose another"
            " folder"
        ) from None
    own = {MANIFEST, *(file.name for file in named(known))}
    if found - own:
        raise ArtifactError(
            f"{place} holds other files than an artifact's ({', '.join(sorted(found - own)[:5])});"
            " move them away, or choose another folder"
        )


def named(manifest: Manifest) -> list[File]:
    """The files that a manifest names."""
    files = (manifest.library, manifest.weight_file, *manifest.objects)
    return [file for file in files if file is not None]


@contextlib.contextmanager
def _aside(place: Path) -> Iterator[Path]:
    """A new folder beside, which is gone afterwards, whatever happens."""
    made = place.with_name(f".{place.name}.{secrets.token_hex(6)}.part")
    made.mkdir()
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _flush(folder: Path) -> None:
    """What was written reaches the disk before it is given its name."""
    for path in (*folder.iterdir(), folder):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _move(made: Path, place: Path) -> None:
    """Put a folder in its place; the older one takes the place of the first."""
    if not place.exists():
        made.rename(place)
    elif not _exchanged(made, place):
        old = made.with_suffix(".old")
        place.rename(old)
        try:
            made.rename(place)
        except BaseException:
            old.rename(place)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _exchanged(a: Path, b: Path) -> bool:
    """Exchange two folders in one step; returns whether the system can."""
    try:
        exchange = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    names = (_HERE, os.fsencode(a), _HERE, os.fsencode(b))
    return int(exchange(*names, _EXCHANGE)) == 0


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a folder.

    Raises:
        ArtifactError: there is none, or it cannot be used.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(f"{folder} is no artifact: there is no {path.name} in it") from None
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from error
    return spelling.from_text(text, str(path))


def read_checked(folder: Path, file: File) -> bytes:
    """A file's bytes, if they are those that were saved.

    Raises:
        ArtifactError: they are not, or it is not there.
    """
    path = folder / file.name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error}; copy the artifact again") from error
    _check_size(path, len(data), file)
    _check_hash(path, hashlib.sha256(data).hexdigest(), file)
    return data


def check_size(folder: Path, file: File) -> Path:
    """A file's path, if it is there and as long as it was saved.

    Raises:
        ArtifactError: it is not.
    """
    path = folder / file.name
    try:
        _check_size(path, path.stat().st_size, file)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error}; copy the artifact again") from error
    return path


def check_hash(folder: Path, file: File) -> None:
    """Raise an ArtifactError where a file's bytes are not those that were saved."""
    path = folder / file.name
    _check_hash(path, weight_file.sha256(path), file)


def _check_size(path: Path, size: int, file: File) -> None:
    if size != file.size:
        raise ArtifactError(
            f"{path} has {size} bytes, and was saved with {file.size}: it is cut off or another"
            " file; copy the artifact again"
        )


def _check_hash(path: Path, digest: str, file: File) -> None:
    if digest != file.sha256:
        raise ArtifactError(
            f"{path} is not what was saved (SHA-256 {digest[:12]}..., and not"
            f" {file.sha256[:12]}...): it is damaged or another file; copy the artifact again"
        )
