"""A converter's signature is its operator's ATen schema: count, keyword-only, defaults."""

import inspect

import pytest
import torch

import fx2relax  # noqa: F401 - registers the converters
from fx2relax.registry import Converter, registered

OVERLOADS = {
    str(target): converter
    for target, converter in registered().items()
    if isinstance(target, torch._ops.OpOverload)
}


# How schemas spell a dtype that is a default: c10::ScalarType's number.
_SCALAR_TYPES = {torch.int64: 4, torch.float32: 6}


def _plain(value):
    """Defaults in one spelling: ``[]`` is ``()``, a one-element list its element."""
    if isinstance(value, torch.dtype):
        return _SCALAR_TYPES[value]
    if isinstance(value, (list, tuple)):
        values = [_plain(v) for v in value]
        return values[0] if values and all(v == values[0] for v in values) else tuple(values)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def mismatches(converter: Converter) -> list[str]:
    """How a converter's signature differs from its schema; empty when it does not."""
    arguments = converter.target._schema.arguments
    parameters = list(inspect.signature(converter.function).parameters.values())
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return ["takes *args or **kwargs"]
    if len(parameters) != len(arguments):
        return [f"{len(parameters)} parameters, the schema has {len(arguments)}"]
    found = []
    for parameter, argument in zip(parameters, arguments, strict=True):
        keyword_only = parameter.kind is parameter.KEYWORD_ONLY
        if keyword_only != argument.kwarg_only:
            found.append(f"{parameter.name}: keyword-only is {keyword_only}")
        if keyword_only and parameter.name != argument.name:
            found.append(f"{parameter.name}: the schema's keyword is {argument.name}")
        has_default = parameter.default is not parameter.empty
        if has_default != argument.has_default_value():
            found.append(f"{parameter.name}: has a default is {has_default}")
        elif has_default and _plain(parameter.default) != _plain(argument.default_value):
            found.append(
                f"{parameter.name}: default {parameter.default!r}, "
                f"the schema's {argument.default_value!r}"
            )
    return found


@pytest.mark.parametrize("name", sorted(OVERLOADS))
def test_signature_is_the_schema(name):
    assert mismatches(OVERLOADS[name]) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda self: self,
        lambda self, other, alpha=1: self,
        lambda self, other, *, alpha=2: self,
        lambda self, other=1, *, alpha=1: self,
        lambda self, other, *, beta=1: self,
        lambda *args: args,
    ],
)
def test_a_wrong_signature_is_found(function):
    assert mismatches(Converter(torch.ops.aten.add.Tensor, function))


def test_promoted_parameters_exist():
    for name, converter in OVERLOADS.items():
        names = set(inspect.signature(converter.function).parameters)
        assert set(converter.promote_args or ()) <= names, name
