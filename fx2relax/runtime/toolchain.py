"""A user's kernels compiled to objects, once and kept; objects linked to libraries.

An object is kept in the cache folder under a digest of its source, the compiler and the flags,
beside digests of its own bytes and of the headers that it includes: where one has changed, it is
compiled anew.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fx2relax import disk
from fx2relax.compat import tvm_ffi
from fx2relax.errors import BuildFailure
from fx2relax.runtime.compiled import cache_folder, compiler_facts, keep_bounded, locked
from fx2relax.runtime.compilers import find_compiler

_SECONDS = 600
_SUFFIXES = {"cpp": ".cpp", "cuda": ".cu"}


def compiler_for(language: str) -> tuple[str, ...]:
    """The command of the user's compiler.

    Args:
        language: ``"cpp"``, for ``$CXX``, c++, g++ or clang++, or ``"cuda"``, for ``$NVCC``,
            ``$CUDA_HOME/bin/nvcc`` or nvcc.

    Raises:
        BuildFailure: there is none.
        ValueError: another language.
    """
    if language not in _SUFFIXES:
        raise ValueError(f"language={language!r}; it takes {' or '.join(map(repr, _SUFFIXES))}")
    if language == "cpp":
        found = find_compiler("c++")
        if found is None:
            raise BuildFailure("there is no C++ compiler: set $CXX, or install g++ or clang++")
        return found
    found = find_compiler("cuda")
    if found is not None:
        return found
    raise BuildFailure(
        "CUDA source needs nvcc, which is not here: install the CUDA toolkit, and put nvcc on "
        "$PATH, or say where it is in $CUDA_HOME or $NVCC"
    )


def link_flags(language: str) -> list[str]:
    """What a library needs at run time for a language, as flags of the linker."""
    if language != "cuda":
        return []
    program = Path(compiler_for("cuda")[0])
    words = subprocess.run(
        [str(program), "--dryrun", "-c", "x.cu"], capture_output=True, text=True, check=False
    )
    return [
        word
        for line in words.stderr.splitlines()
        if line.startswith("#$ LIBRARIES=")
        for word in shlex.split(line.partition("=")[2])
    ] + ["-lcudart"]


def compile_object(code: str, language: str, name: str, flags: Sequence[str]) -> bytes:
    """Compile source text to an object file, or take it from the cache.

    Safe in several processes at once: one compiles, the others wait for it.

    Args:
        code: the source.
        language: see `compiler_for`.
        name: what the object is called in errors.
        flags: further flags of the compiler.

    Raises:
        BuildFailure: there is no compiler, or it refuses the source; its own words are in it.
    """
    compiler = compiler_for(language)
    command = [*compiler, "-c", *_flags(language), *flags]
    stem = f"kernel-{_key(command, name, code)}"
    folder = cache_folder(f"{stem}.o")
    found = _kept(folder / stem)
    if found is not None:
        return found
    with locked(folder, stem, _SECONDS):
        found = _kept(folder / stem)  # another process may have been first
        return (
            found if found is not None else _compile(command, code, language, name, folder / stem)
        )


def _flags(language: str) -> list[str]:
    include = str(tvm_ffi.libinfo.find_include_path())
    dlpack = str(tvm_ffi.libinfo.find_dlpack_include_path())
    own = ["-fPIC", "-fvisibility=hidden"]
    if language == "cuda":
        own = ["-Xcompiler", ",".join(own)]
    # As system headers, they are no part of what is looked at for changes: their version is.
    folders = [word for folder in dict.fromkeys((include, dlpack)) for word in ("-isystem", folder)]
    return ["-std=c++17", "-O2", *own, *folders]


def _key(command: Sequence[str], name: str, code: str) -> str:
    facts = [*compiler_facts(command), name, code]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:20]


def _kept(stem: Path) -> bytes | None:
    """The object, if it is whole and none of its headers has changed."""
    try:
        data = disk.read_own(stem.with_suffix(".o"))
        said = json.loads(disk.read_own(stem.with_suffix(".json")))
        if said["object"] != hashlib.sha256(data).hexdigest():
            return None
        if any(_digest(Path(path)) != wanted for path, wanted in said["headers"].items()):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    disk.used(stem.with_suffix(".o"))
    return data


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _compile(command: Sequence[str], code: str, language: str, name: str, stem: Path) -> bytes:
    with tempfile.TemporaryDirectory(prefix="fx2relax-") as folder:
        source = Path(folder) / f"kernel{_SUFFIXES[language]}"
        # What the compiler and the kernel's errors call the file.
        source.write_text(f"#line 1 {json.dumps(name)}\n{code}")
        made, rule = source.with_suffix(".o"), source.with_suffix(".d")
        words = [*command, "-MMD", "-MF", str(rule), str(source), "-o", str(made)]
        _run(words, f"{name} does not compile")
        data = made.read_bytes()
        said = {
            "object": hashlib.sha256(data).hexdigest(),
            "headers": {str(path): _digest(path) for path in _headers(rule, source)},
        }
    try:
        # Each is replaced whole. A reader between the two finds them unlike, and takes the lock.
        disk.write_own(stem.with_suffix(".o"), data)
        disk.write_own(stem.with_suffix(".json"), json.dumps(said).encode())
        keep_bounded(stem.parent)
    except OSError as error:
        disk.warn_unusable(error)
    return data


def _headers(rule: Path, source: Path) -> list[Path]:
    """The files that a compiler's rule for `make` names, but for the source itself."""
    text = rule.read_text().replace("\\\n", " ").partition(":")[2]
    paths = [Path(word) for word in shlex.split(text)]
    return [path.resolve() for path in paths if path.name != source.name and path.exists()]


def link(objects: Sequence[tuple[bytes, Sequence[str]]], name: str) -> bytes:
    """Link objects to a shared library that `runtime.loading.load` loads.

    Args:
        objects: the bytes of each, and its flags for the linker.
        name: what the library is called in errors.

    Raises:
        BuildFailure: there is no linker, or a symbol is missing; the linker's words are in it.
    """
    with tempfile.TemporaryDirectory(prefix="fx2relax-") as folder:
        paths = [Path(folder) / f"kernel{n}.o" for n in range(len(objects))]
        for path, (data, _) in zip(paths, objects, strict=True):
            path.write_bytes(data)
        library = Path(folder) / "library.so"
        flags = dict.fromkeys(flag for _, flags in objects for flag in flags)
        runtime = str(tvm_ffi.libinfo.find_libtvm_ffi())
        words = [*compiler_for("cpp"), "-shared", "-fPIC", *map(str, paths), runtime, *flags]
        # Every symbol has to be found now, as Apple's linker sees to by itself.
        now = ["-Wl,-z,defs"] if platform.system() == "Linux" else []
        _run([*words, *now, "-o", str(library)], f"{name} cannot be linked")
        return library.read_bytes()


def _run(command: Sequence[str], what: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or b""
        text = output.decode(errors="replace").strip() or f"{type(error).__name__}: {error}"
        raise BuildFailure(f"{what}: {text[-4000:]}") from None
