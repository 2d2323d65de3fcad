"""What an artifact says of itself: its functions, sizes, weights, states and files, as JSON.

The dataclasses are what an exporter fills in; `spelling` reads them back with every check.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .sizes import SizeText
from .structure import Node

#: The version of the format. A reader takes this one and no other.
FORMAT = 1
#: The files of an artifact.
MANIFEST = "manifest.json"
LIBRARY = "library.so"
WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class Size:
    """A named size: one size wherever the name stands, in every function.

    Attributes:
        name: a Python identifier.
        min: the smallest that the functions were exported for.
        max: the largest; None where there is no limit.
        multiple_of: what it has to be divisible by.
    """

    name: str
    min: int = 0
    max: int | None = None
    multiple_of: int = 1


@dataclass(frozen=True)
class Parameter:
    """One parameter of a Relax function left of its weights.

    Attributes:
        name: for messages; a state's own name where `kind` is "state".
        kind: "tensor"; "size", a Relax shape, which the caller gives as an int where the
            function's arguments name it and which is worked out of the tensors' sizes elsewhere;
            "state", a tensor that the runtime owns; "object", handed over as it is.
        shape: of a tensor; of a "size", the sizes themselves; else empty.
        dtype: of a tensor, as TVM spells it; else empty.
    """

    name: str
    kind: str = "tensor"
    shape: tuple[SizeText, ...] = ()
    dtype: str = ""


@dataclass(frozen=True)
class Result:
    """One result of a Relax function.

    Attributes:
        kind: "tensor", "size" (a Relax shape of one size, an int for the caller) or "object".
        shape, dtype: of a tensor.
        argument: the index of the parameter whose new value it is: it is written into the
            caller's array.
        state: the name of the state whose new value it is.
    """

    kind: str = "tensor"
    shape: tuple[SizeText, ...] = ()
    dtype: str = ""
    argument: int | None = None
    state: str | None = None


@dataclass(frozen=True)
class Function:
    """One function of an artifact.

    Attributes:
        name: what callers call.
        parameters: of the Relax function, left of its weights, in order.
        arguments: the caller's, in order: each one's name and structure, whose leaves `At(i)`
            are parameters. An argument that is a constant may be left out of a call.
        results: of the Relax function, in order.
        output: the structure of what the caller gets; its leaves `At(i)` are results.
        weights: names of the weights that the Relax function, or its transform, takes, in order.
        symbol: the Relax function's name in the library; `name` where empty.
        transform: the name of the Relax function that makes of the tuple of `weights` what the
            function takes in their place; empty where it takes them as they are. Functions with
            the same transform of the same weights share what it makes.
        takes: which results of the transform the function takes, in order; None for all.
    """

    name: str
    parameters: tuple[Parameter, ...]
    arguments: tuple[tuple[str, Node], ...]
    results: tuple[Result, ...]
    output: Node
    weights: tuple[str, ...] = ()
    symbol: str = ""
    transform: str = ""
    takes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Weight:
    """One weight; `same_as` names the weight that this is another name of (tied weights)."""

    name: str
    shape: tuple[SizeText, ...]
    dtype: str
    same_as: str = ""


@dataclass(frozen=True)
class State:
    """A tensor that functions read and write and that the runtime owns.

    Attributes:
        shape: numbers only.
        zeros: whether it begins as zeros; else the weight file has its first value, by its name.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    zeros: bool = False


@dataclass(frozen=True)
class File:
    """One file beside the manifest: its size in bytes and its SHA-256 in hexadecimal."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """All that an artifact says of itself.

    Attributes:
        target: the TVM target that the library is compiled for, as a dict.
        tvm, fx2relax, torch: versions; `torch` is empty where none was there.
        cpu_features: LLVM's names of the instruction sets that the library uses ("avx512f").
        alignment: the bytes at a multiple of which the library's kernels take tensors to begin;
            0 where each element in its own place is enough.
        library, weight_file: the files; `save` fills them in. An artifact without weights is
            given them when it is loaded.
        objects: object files that have to be linked before the artifact can be loaded.
        link: the words of the command that does so, without the names of the files.
    """

    functions: tuple[Function, ...]
    weights: tuple[Weight, ...] = ()
    states: tuple[State, ...] = ()
    sizes: tuple[Size, ...] = ()
    target: dict[str, Any] = field(default_factory=dict)
    tvm: str = ""
    fx2relax: str = ""
    torch: str = ""
    cpu_features: tuple[str, ...] = ()
    alignment: int = 0
    library: File | None = None
    weight_file: File | None = None
    objects: tuple[File, ...] = ()
    link: tuple[str, ...] = ()
