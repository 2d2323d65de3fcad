"""PyTorch's type promotion, done once for every operator that declares it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch._prims_common import elementwise_dtypes

from fx2relax import dtypes
from fx2relax.compat import BlockBuilder, Expr, dtype_of, is_prim_expr, op, relax, tirx
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
        _value(node.args[keyed[n]] if n in keyed else node.kwargs[n])
        for n in chosen
        if n in keyed or n in node.kwargs
    ]
    operands = [v for v in values if isinstance(v, (torch.Tensor, *_NUMBERS))]
    compute, result = elementwise_dtypes(*operands, type_promotion_kind=converter.promote)
    common = result
    if converter.promote is Promotion.ALWAYS_BOOL:
        _, common = elementwise_dtypes(*operands, type_promotion_kind=Promotion.DEFAULT)

    def prepared(value: Any) -> Any:
        # Eager rounds every operand to the common dtype before it computes in a wider one.
        exact = converter.exact_scalars and isinstance(value, (int, float))
        narrow = value if exact else cast(value, dtypes.to_tvm(common))
        return cast(narrow, dtypes.to_tvm(compute))

    for name in chosen:
        if name in keyed:
            args[keyed[name]] = prepared(args[keyed[name]])
        elif name in kwargs:
            kwargs[name] = prepared(kwargs[name])
    return args, kwargs, dtypes.to_tvm(result)


_NUMBERS = (bool, int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)


def _positional(converter: Converter) -> list[str]:
    parameters = inspect.signature(converter.function).parameters.values()
    return [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, torch.fx.Node) else argument


def cast(value: Any, dtype: str) -> Any:
    """A Relax tensor, size or Python number as a Relax tensor of a dtype; others unchanged."""
    if isinstance(value, Expr) and not is_prim_expr(value):
        value = BlockBuilder.current().normalize(value)
        return value if dtype_of(value) == dtype else op.astype(value, dtype)
    if isinstance(value, Expr):
        return size_tensor(value, dtype)
    if isinstance(value, (bool, int, float)):
        return scalar(value, dtype)
    return value


def scalar(value: bool | int | float, dtype: str) -> Any:
    """A 0-d constant, converted as PyTorch converts a Python number to the dtype."""
    # Through the widest dtype of its kind: a Python float is a double, not a float32.
    wide = torch.float64 if isinstance(value, float) else None
    tensor = torch.tensor(value, dtype=wide).to(dtypes.to_torch(dtype))
    if dtype == "bfloat16" or dtype.startswith("float8"):
        return op.astype(relax.const(float(tensor), "float32"), dtype)
    return relax.const(tensor.numpy(), dtype)


def size_tensor(value: Any, dtype: str) -> Any:
    """A size as a 0-d tensor."""
    from fx2relax.compat import te

    def compute() -> Any:
        return te.compute((), lambda *_: tirx.Cast(dtype, value), name="size")

    return BlockBuilder.current().emit_te(compute)
