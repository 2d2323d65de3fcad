"""A saved artifact, loaded: functions by name, without PyTorch and without TVM's compiler."""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fx2relax.errors import ArtifactError

from . import arrays
from . import folder as _folder
from . import machine as _machine
from .bound import Weights
from .call import Callee
from .fits import check_machine
from .manifest import File, Manifest
from .states import States
from .weight_file import WeightFile


class Artifact(Mapping[str, Callee]):
    """The functions of a saved artifact, by name: ``artifact["decode"]`` or ``artifact.decode``.

    Made by `load`.

    Attributes:
        manifest: what the artifact says of itself.
        weights: its weights, by name; `weights.load_state_dict` replaces them.
        device: where it runs.
    """

    def __init__(
        self, path: Path, manifest: Manifest, machines: Any, device: Any, out: Callable[[Any], Any]
    ) -> None:
        self.manifest = manifest
        self.device = device
        self._path = path
        self._states = States(manifest, str(path), device)
        self.weights = Weights(manifest, self._states, str(path))
        self._functions = {
            function.name: Callee(
                function, manifest, self.weights, self._states, machines, device, out
            )
            for function in manifest.functions
        }

    def __getitem__(self, name: str) -> Callee:
        try:
            return self._functions[name]
        except KeyError:
            raise KeyError(f"{name!r}; the functions are {', '.join(self._functions)}") from None

    def __getattr__(self, name: str) -> Callee:
        functions = self.__dict__.get("_functions", {})
        if name in functions:
            found: Callee = functions[name]
            return found
        raise AttributeError(
            f"the artifact has no function {name!r}; it has {', '.join(functions)}"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._functions]

    def __repr__(self) -> str:
        lines = [f"  {callee!r}" for callee in self._functions.values()]
        return "\n".join([f"Artifact({str(self._path)!r}, device={str(self.device)!r})", *lines])

    @property
    def states(self) -> dict[str, Any]:
        """The states as they are now, as NumPy arrays of their own, by name."""
        return self._states.read()

    def reset(self) -> None:
        """Give every state its first value again."""
        self._states.reset()


def load(
    folder: str | os.PathLike[str],
    device: Any = "cpu",
    *,
    weights: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    out: str = "numpy",
    verify: bool = True,
) -> Artifact:
    """Load a saved artifact.

    Needs Apache TVM and NumPy. No code is run but the library's, and nothing is unpickled. The
    folder is only read; the weight file is mapped into memory and not copied.

    Args:
        folder: what `save` wrote.
        device: "cpu", "cuda" or "cuda:1", or a TVM device.
        weights: arrays by name, or a safetensors file, in place of the artifact's own.
        out: what functions return: "numpy" arrays (in the host's memory), "tvm" tensors, which
            have DLPack, or "torch" tensors. The last two share the memory of the result.
        verify: whether the weight file's hash is checked, for which all of it is read; its size
            and the library's hash are checked in any case.

    Returns:
        the functions, by name; the weights, by name; the states.

    Raises:
        ArtifactError: the folder is no artifact, or one that this TVM or this machine cannot
            run, or a file of it is cut off, damaged or another one; names the file.
        WeightError: (a ValueError) `weights` are not those of the artifact; names all that are
            wrong.
    """
    place = Path(folder)
    if out not in OUT:
        raise ArtifactError(f"out={out!r}: functions return one of {', '.join(OUT)}")
    manifest = _folder.read_manifest(place)
    if manifest.library is None:
        raise ArtifactError(_unlinked(place, manifest))
    check_machine(manifest, place)
    own = manifest.weight_file if weights is None else None
    check = _Check(place, own if verify else None)
    library = _folder.read_checked(place, manifest.library)
    where = _machine.device(device)
    kind = str(device).partition(":")[0]
    _check_device(manifest, where, place)
    _machine.start(kind)
    machines = _machine.Machines(library, str(place / manifest.library.name), where)
    _check_functions(manifest, machines, place)
    artifact = Artifact(place, manifest, machines, where, OUT[out])
    if own is not None:
        artifact.weights.read(WeightFile(_folder.check_size(place, own)))
    elif isinstance(weights, Mapping):
        artifact.weights.load_state_dict(weights)
    elif weights is not None:
        artifact.weights.read(WeightFile(Path(weights)))
    check.done()
    return artifact


class _Check:
    """The check of a file's hash, in a thread, while other things are done."""

    def __init__(self, place: Path, file: File | None) -> None:
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        if file is not None:
            _folder.check_size(place, file)
            self._thread = threading.Thread(target=self._run, args=(place, file), daemon=True)
            self._thread.start()

    def _run(self, place: Path, file: File) -> None:
        try:
            _folder.check_hash(place, file)
        except Exception as error:
            self._error = error

    def done(self) -> None:
        """Wait for it, and raise what it found."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error


def _unlinked(place: Path, manifest: Manifest) -> str:
    if not manifest.objects:
        return f"{place} holds no library; export the model again"
    names = [file.name for file in manifest.objects]
    command = shlex.join([*manifest.link, "-o", "library.so", *names, "-lm"])
    return (
        f"{place} holds object files that have to be linked first, since there was no linker for"
        f" {manifest.target.get('mtriple', 'the target')} where it was saved. On a machine that has"
        f" one, run fx2relax.deploy.link({str(place)!r}), which runs\n  {command}"
    )


def _check_device(manifest: Manifest, where: Any, place: Path) -> None:
    kind = str(manifest.target.get("kind", ""))
    wanted = {"llvm": "cpu", "c": "cpu", "": ""}.get(kind, kind)
    given = str(where).partition(":")[0]
    if wanted and given != wanted:
        raise ArtifactError(
            f"{place} is compiled for {wanted}, and not for {given}: load it with"
            f" device={wanted!r}, or export it with another target"
        )


def _check_functions(manifest: Manifest, machines: Any, place: Path) -> None:
    for function in manifest.functions:
        for symbol in (function.symbol or function.name, function.transform):
            if symbol and not machines.has(symbol):
                raise ArtifactError(
                    f"{place}: the library has no function {symbol!r}, which {function.name!r}"
                    " needs; export the model again"
                )


def _to_torch(tensor: Any) -> Any:
    import torch.utils.dlpack

    return torch.utils.dlpack.from_dlpack(tensor)


#: What functions can return, and how it is made of TVM's tensors.
OUT: dict[str, Callable[[Any], Any]] = {
    "numpy": arrays.to_numpy,
    "tvm": lambda tensor: tensor,
    "torch": _to_torch,
}
