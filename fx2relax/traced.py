"""What Dynamo traces in the place of functions of PyTorch at which it breaks the graph.

They look at their tensors' values: to return a Python bool, or to raise an exception.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

__all__ = ["install"]


@torch.library.custom_op(
    "fx2relax::assert_value", mutates_args=(), schema="(Tensor condition, str message) -> ()"
)
def _assert_value(condition: Tensor, message: str) -> None:
    """As `aten._assert_async`, with the exception of a wrong value."""
    if not condition:
        raise ValueError(message)


@_assert_value.register_fake
def _(condition: Tensor, message: str) -> None:
    return None


def equal(input: Tensor, other: Tensor) -> Any:
    """`torch.equal`."""
    if input.shape != other.shape:
        return False
    return torch.eq(input, other).all().item()


def allclose(
    input: Tensor,
    other: Tensor,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    equal_nan: bool = False,
) -> Any:
    """`torch.allclose`."""
    return torch.isclose(input, other, rtol, atol, equal_nan).all().item()


def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """`torch.nn.functional.gaussian_nll_loss`, its look at the variances as an assertion."""
    if isinstance(var, float):
        if var < 0:
            raise ValueError("var has negative entry/entries")
        var = var * torch.ones_like(input)
    else:
        text = "var has negative entry/entries"
        torch.ops.fx2relax.assert_value(torch.logical_not(torch.any(var < 0)), text)
    if var.size() != input.size():
        if input.size()[:-1] == var.size():
            var = torch.unsqueeze(var, -1)
        elif (
            input.ndim != var.ndim
            or sum(y for x, y in zip(input.size(), var.size(), strict=True) if x != y) != 1
        ):
            raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(reduction + " is not valid")
    var = var.clone()
    with torch.no_grad():
        var.clamp_(min=eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * 1.8378770664093453  # log(2 pi)
    if reduction == "mean":
        return loss.mean()
    return loss.sum() if reduction == "sum" else loss


def _inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    def handler(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        return tx.inline_user_function_return(VariableTracker.build(tx, function), args, kwargs)

    return handler


def _number(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns what the data tells: Dynamo takes that into a graph if asked to."""
    inlined = _inlined(function)
    names = set(inspect.signature(function).parameters)

    def handler(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch._dynamo.config.capture_scalar_outputs or not kwargs.keys() <= names:
            return None
        return inlined(self, tx, *args, **kwargs)

    return handler


def _method(handler: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, tx, *args, **kwargs: handler(self, tx, self, *args, **kwargs)


def install() -> None:
    """Have Dynamo trace these functions; what they warn of is said once a graph has run."""
    handlers = TorchInGraphFunctionVariable._get_handlers()
    for function in (equal, allclose):
        handler = _number(function)
        handlers.setdefault(getattr(torch, function.__name__), handler)
        name = f"method_{function.__name__}"
        if not hasattr(TensorVariable, name):
            setattr(TensorVariable, name, _method(handler))
    handlers.setdefault(F.gaussian_nll_loss, _inlined(gaussian_nll_loss))
    config = torch._dynamo.config
    config.reorderable_logging_functions = {*config.reorderable_logging_functions, warnings.warn}
