"""Manifests as JSON, and back with a check of every type, name and index.

The dataclasses' own annotations say what each key holds, so that both directions have one source.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections import Counter
from collections.abc import Iterable
from typing import Any

from fx2relax.errors import ArtifactError

from . import manifest as _manifest
from . import sizes, structure
from .dtypes import SIZES
from .manifest import FORMAT, Function, Manifest, Parameter, Result

_VERSION_KEY = "fx2relax_artifact"
_KINDS = {Parameter: ("tensor", "size", "state", "object"), Result: ("tensor", "size", "object")}


class _Wrong(ValueError):
    """What is wrong with a manifest, without the file's name."""


def to_text(manifest: Manifest) -> str:
    """A manifest as JSON.

    Raises:
        ArtifactError: it contradicts itself.
    """
    try:
        _check(manifest)
    except _Wrong as error:
        raise ArtifactError(f"a manifest cannot be written: {error}") from None
    spelled = {_VERSION_KEY: FORMAT, **_spelled(manifest)}
    return json.dumps(spelled, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def from_text(text: str | bytes, name: str) -> Manifest:
    """What `to_text` made.

    Args:
        text: what the file holds.
        name: of the file, for messages.

    Raises:
        ArtifactError: not such text, of another version, or it contradicts itself.
    """
    try:
        value = json.loads(text, object_pairs_hook=_once)
        if not isinstance(value, dict) or type(value.get(_VERSION_KEY)) is not int:
            raise _Wrong(f"it has no {_VERSION_KEY!r} with the version of its format")
        version = value.pop(_VERSION_KEY)
        if version != FORMAT:
            newer = "install the fx2relax that it was saved with" if version > FORMAT else ""
            raise _Wrong(
                f"it is of format {version}, and this fx2relax reads format {FORMAT}: "
                + (newer or "export the model again")
            )
        manifest: Manifest = _read(Manifest, value, "")
        _check(manifest)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ArtifactError(
            f"{name} is not JSON, or not all of it ({error}); copy or export the artifact again"
        ) from None
    except _Wrong as error:
        raise ArtifactError(f"{name} cannot be used: {error}") from None
    return manifest


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Wrong(f"a key is there twice among {[key for key, _ in pairs][:8]}")
    return found


def _spelled(value: Any) -> Any:
    if isinstance(value, typing.get_args(structure.Node)):
        return structure.to_json(value)
    if dataclasses.is_dataclass(value):
        items = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {name: _spelled(item) for name, item in items}
    if isinstance(value, (tuple, list)):
        return [_spelled(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _spelled(item) for key, item in value.items()}
    return value


def _read(kind: Any, value: Any, where: str) -> Any:
    """A value of JSON as what an annotation says."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind == structure.Node:
        try:
            return structure.from_json(value)
        except ValueError as error:
            raise _Wrong(f"{where}: {error}") from None
    if dataclasses.is_dataclass(kind):
        return _read_class(kind, value, where)
    if origin is tuple and isinstance(value, list):
        if inner[-1] is not ...:
            if len(value) != len(inner):
                raise _Wrong(f"{where} has {len(value)} items, not {len(inner)}")
            return tuple(
                _read(k, v, f"{where}[{n}]")
                for n, (k, v) in enumerate(zip(inner, value, strict=True))
            )
        return tuple(_read(inner[0], v, f"{where}[{n}]") for n, v in enumerate(value))
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        for option in inner:
            if option is not type(None) and (option not in (int, str) or type(value) is option):
                return _read(option, value, where)
    if origin is dict and isinstance(value, dict):
        return value
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise _Wrong(f"{where} is {str(value)[:60]!r}, which is not {_wanted(kind)}")


def _wanted(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind)) if not typing.get_args(kind) else str(kind)


def _read_class(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _Wrong(f"{where or 'it'} is {str(value)[:60]!r}, which is not an object")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    dot = f"{where}." if where else ""
    missing, unknown = sorted(fields.keys() - value.keys()), sorted(value.keys() - fields.keys())
    if missing or unknown:
        named = [f"{dot}{n} is missing" for n in missing] + [
            f"{dot}{n} is unknown" for n in unknown
        ]
        raise _Wrong(", ".join(named))
    kinds = _annotations(kind)
    return kind(**{name: _read(kinds[name], value[name], f"{dot}{name}") for name in fields})


_KNOWN: dict[Any, dict[str, Any]] = {}


def _annotations(kind: Any) -> dict[str, Any]:
    if kind not in _KNOWN:
        names = {**vars(_manifest), "Node": structure.Node}
        _KNOWN[kind] = typing.get_type_hints(kind, names)
    return _KNOWN[kind]


def _check(manifest: Manifest) -> None:
    """What the types alone do not say."""
    known = {size.name for size in manifest.sizes}
    for size in manifest.sizes:
        if not sizes.is_name(size.name):
            raise _Wrong(f"{size.name!r} cannot be the name of a size")
        if size.multiple_of < 1 or size.min < 0 or (size.max is not None and size.max < size.min):
            raise _Wrong(f"the limits of the size {size.name!r} leave nothing")
    _unique("size", [size.name for size in manifest.sizes])
    _unique("function", [function.name for function in manifest.functions])
    stored = [*(w.name for w in manifest.weights), *(s.name for s in manifest.states)]
    _unique("weight or state", stored)
    weights = {weight.name: weight for weight in manifest.weights}
    for weight in manifest.weights:
        _tensor(f"weight {weight.name!r}", weight.shape, weight.dtype, known)
        other = weights.get(weight.same_as) if weight.same_as else None
        if weight.same_as and (other is None or other.same_as):
            raise _Wrong(f"weight {weight.name!r} is tied to {weight.same_as!r}, which is none")
    for state in manifest.states:
        _tensor(f"state {state.name!r}", state.shape, state.dtype, known)
    states = {state.name for state in manifest.states}
    for function in manifest.functions:
        _check_function(function, known, weights.keys(), states)
    for file in (manifest.library, manifest.weight_file, *manifest.objects):
        if file is not None and (not file.name or set(file.name) & set("/\\\0") or file.size < 0):
            raise _Wrong(f"{file.name!r} cannot be the name of a file beside the manifest")


def _check_function(
    function: Function, known: Iterable[str], weights: Iterable[str], states: Iterable[str]
) -> None:
    what = f"function {function.name!r}"
    if not function.name:
        raise _Wrong("a function has no name")
    _unique(f"{what}: argument", [name for name, _ in function.arguments])
    for name in function.weights:
        if name not in weights:
            raise _Wrong(f"{what} takes the weight {name!r}, which there is not")
    parts: list[Parameter | Result] = [*function.parameters, *function.results]
    for part in parts:
        if part.kind not in _KINDS[type(part)]:
            raise _Wrong(f"{what}: {part.kind!r} is no kind of {type(part).__name__.lower()}")
        if part.kind == "tensor":
            _tensor(what, part.shape, part.dtype, known)
        elif part.kind == "size":
            _shape(what, part.shape, known)
    for parameter in function.parameters:
        if parameter.kind == "state" and parameter.name not in states:
            raise _Wrong(f"{what} takes the state {parameter.name!r}, which there is not")
    for result in function.results:
        if result.state is not None and result.state not in states:
            raise _Wrong(f"{what} writes the state {result.state!r}, which there is not")
        written = result.argument
        if written is not None and not 0 <= written < len(function.parameters):
            raise _Wrong(f"{what} writes parameter {written}, which there is not")
    given = [leaf for _, node in function.arguments for leaf in structure.leaves(node)]
    for leaf in given:
        if not isinstance(leaf, (structure.At, structure.Constant)):
            raise _Wrong(f"{what}: {structure.to_json(leaf)} cannot be part of an argument")
    _indices(f"{what}: parameter", given, structure.At, len(function.parameters))
    _unique(f"{what}: parameter", [n.index for n in given if isinstance(n, structure.At)])
    named = {n.index for n in given if isinstance(n, structure.At)}
    for index, parameter in enumerate(function.parameters):
        if (parameter.kind in ("tensor", "object")) != (
            index in named
        ) and parameter.kind != "size":
            raise _Wrong(f"{what}: parameter {parameter.name!r} and its arguments disagree")
    output = list(structure.leaves(function.output))
    _indices(f"{what}: result", output, structure.At, len(function.results))
    _indices(f"{what}: argument", output, structure.Argument, len(function.parameters))
    for leaf in output:
        if isinstance(leaf, structure.SizeOf):
            _shape(what, (leaf.text,), known)
        if isinstance(leaf, structure.Argument) and leaf.index not in named:
            raise _Wrong(f"{what} returns parameter {leaf.index}, which is no argument")


def _indices(what: str, nodes: Iterable[Any], kind: Any, count: int) -> None:
    for node in nodes:
        if isinstance(node, kind) and node.index >= count:
            raise _Wrong(f"{what} {node.index} is named, of {count}")


def _unique(what: str, names: Iterable[Any]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise _Wrong(f"{what} {twice[0]!r} is there twice")


def _tensor(what: str, shape: Iterable[Any], dtype: str, known: Iterable[str]) -> None:
    if dtype not in SIZES:
        raise _Wrong(f"{what}: there is no dtype {dtype!r}")
    _shape(what, shape, known)


def _shape(what: str, shape: Iterable[Any], known: Iterable[str]) -> None:
    for size in shape:
        if isinstance(size, int):
            if not 0 <= size < 2**63:
                raise _Wrong(f"{what}: {size} is not a size")
            continue
        try:
            unknown = sorted(sizes.parse(size).names - set(known))
        except ValueError as error:
            raise _Wrong(f"{what}: {error}") from None
        if unknown:
            raise _Wrong(f"{what}: the size {unknown[0]!r} is not among the named sizes")
