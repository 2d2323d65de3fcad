"""PyTorch's type promotion, done once for every operator that declares it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch._prims_common import elementwise_dtypes

from fx2relax import complexes, dtypes
from fx2relax.agreement import agreed
from fx2relax.casting import cast
from fx2relax.registry import Converter, Promotion


def promoted(
    converter: Converter, node: torch.fx.Node, args: list[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any], str]:
    """Cast the promoted arguments to the dtype that PyTorch computes in.

    Scalars become 0-d constants of that dtype, so that a converter sees Relax tensors alone.

    Returns:
        the positional and keyword arguments, and the dtype of the result.
    """
    assert converter.promote is not None
    names = _positional(converter)
    chosen = converter.promote_args or tuple(names)
    keyed = {**dict(zip(names, range(len(args)), strict=False))}
    values = [
        fake_value(node.args[keyed[n]] if n in keyed else node.kwargs[n])
        for n in chosen
        if n in keyed or n in node.kwargs
    ]
    operands = [v for v in values if isinstance(v, (torch.Tensor, *_NUMBERS))]
    compute, result = elementwise_dtypes(*operands, type_promotion_kind=converter.promote)
    common = result
    if converter.promote is Promotion.ALWAYS_BOOL:
        _, common = elementwise_dtypes(*operands, type_promotion_kind=Promotion.DEFAULT)

    def prepared(value: Any) -> Any:
        if compute.is_complex:
            return complexes.as_complex(value, complexes.part_dtype(compute))
        # Eager rounds every operand to the common dtype before it computes in a wider one.
        if isinstance(value, (int, float)):
            if not converter.exact_scalars:
                double = torch.float64 if isinstance(value, float) else None
                value = torch.tensor(value, dtype=double).to(common).item()
            half = compute in (torch.float16, torch.bfloat16)
            wide = torch.float32 if converter.exact_scalars and half else compute
            return cast(value, dtypes.to_tvm(wide))
        return cast(cast(value, dtypes.to_tvm(common)), dtypes.to_tvm(compute))

    for name in chosen:
        if name in keyed:
            args[keyed[name]] = prepared(args[keyed[name]])
        elif name in kwargs:
            kwargs[name] = prepared(kwargs[name])
    if compute.is_complex:
        return args, kwargs, complexes.held_dtype(result)
    places = [keyed[name] for name in chosen if name in keyed]
    for place, value in zip(places, agreed([args[p] for p in places]), strict=True):
        args[place] = value
    return args, kwargs, dtypes.to_tvm(result)


_NUMBERS = (bool, int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)


def _positional(converter: Converter) -> list[str]:
    parameters = inspect.signature(converter.function).parameters.values()
    return [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]


def fake_value(argument: Any) -> Any:
    """What stands for a node's argument while a graph is traced; the argument where it is none."""
    return argument.meta["val"] if isinstance(argument, torch.fx.Node) else argument
