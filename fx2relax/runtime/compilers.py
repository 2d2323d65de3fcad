"""The user's compilers and linker, by name; it imports neither PyTorch nor TVM."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterable

_CANDIDATES = {
    "c": ("$CC", "cc", "gcc", "clang"),
    "c++": ("$CXX", "c++", "g++", "clang++"),
    "linker": ("$CC", "cc", "gcc", "clang", "$CXX", "c++"),
    "cuda": ("$NVCC", "$CUDA_HOME/bin/nvcc", "nvcc"),
}


def find_compiler(language: str) -> tuple[str, ...] | None:
    """The command of the user's compiler; None where there is none.

    Args:
        language: ``"c"``, ``"c++"``, ``"cuda"``, or ``"linker"``, for what links objects.
    """
    for words in _commands(_CANDIDATES[language]):
        if words and (found := shutil.which(words[0])):
            return (found, *words[1:])
    return None


def _commands(candidates: Iterable[str]) -> Iterable[list[str]]:
    for name in candidates:
        variable, slash, rest = name.removeprefix("$").partition("/")
        if variable == name.partition("/")[0]:  # none of the environment's
            yield [name]
        elif value := os.environ.get(variable, ""):
            yield [f"{value}/{rest}"] if slash else _words(value)


def _words(value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError:  # a quotation mark without another
        return []
