"""Object files of an artifact become its library, on a machine that has a linker for them."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fx2relax.errors import ArtifactError

from . import folder as _folder
from . import spelling
from .manifest import LIBRARY, MANIFEST, File, Manifest

_SECONDS = 600


def link(folder: str | os.PathLike[str], command: Sequence[str] | None = None) -> Manifest:
    """Link the object files of an artifact, so that it can be loaded.

    Args:
        folder: of an artifact that was saved as object files. One that has its library already
            stays as it is.
        command: the linker and its flags, without names of files; what the manifest says when
            left out: ``["aarch64-linux-gnu-gcc", "-shared", "-fPIC"]``.

    Returns:
        the manifest as it is now.

    Raises:
        ArtifactError: no artifact, a damaged object file, or no linker, or it failed.
    """
    place = Path(folder)
    manifest = _folder.read_manifest(place)
    if manifest.library is not None:
        return manifest
    if not manifest.objects:
        raise ArtifactError(f"{place} holds no object files; export the model again")
    words = list(manifest.link if command is None else command)
    with tempfile.TemporaryDirectory(prefix=".link-", dir=place) as made:
        names = []
        for file in manifest.objects:
            names.append(str(Path(made) / file.name))
            Path(names[-1]).write_bytes(_folder.read_checked(place, file))
        built = Path(made) / LIBRARY
        _run([*words, "-o", str(built), *names, "-lm"])
        data = built.read_bytes()
        described = File(LIBRARY, len(data), hashlib.sha256(data).hexdigest())
        linked = dataclasses.replace(manifest, library=described)
        text = Path(made) / MANIFEST
        text.write_text(spelling.to_text(linked), encoding="utf-8")
        # The library first: a manifest that names one names one that is there.
        built.replace(place / LIBRARY)
        text.replace(place / MANIFEST)
    return linked


def _run(command: list[str]) -> None:
    if not command or shutil.which(command[0]) is None:
        raise ArtifactError(
            f"there is no linker {command[0] if command else ''!r} here: install it, or name"
            ' another one: link(folder, ["clang", "--target=...", "-fuse-ld=lld", "-shared"])'
        )
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        text = (getattr(error, "stderr", b"") or b"").decode(errors="replace").strip()
        raise ArtifactError(f"{command[0]} cannot link it: {text[-2000:] or error}") from error
