"""What Dynamo traces in the place of functions of PyTorch at which it breaks the graph.

They look at their tensors' values: to return a Python bool, or to raise an exception.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fx2relax.alignments import ctc_loss

__all__ = ["install"]


@torch.library.custom_op(
    "fx2relax::not_negative", mutates_args=(), schema="(Tensor x, str message) -> Tensor"
)
def _not_negative(x: Tensor, message: str) -> Tensor:
    """A copy of a tensor that has no negative element; else ValueError.

    An assertion by itself, without a result, would be left out of a graph that is trained.
    """
    if torch.any(x < 0):
        raise ValueError(message)
    return x.clone()


@_not_negative.register_fake
def _(x: Tensor, message: str) -> Tensor:
    return x.clone()


def _same_gradient(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient, None


_not_negative.register_autograd(_same_gradient)


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
    """`torch.nn.functional.gaussian_nll_loss`, its look at the variances in one operator."""
    text = "var has negative entry/entries"
    if isinstance(var, float):
        if var < 0:
            raise ValueError(text)
        var = var * torch.ones_like(input)
    own: Tensor = torch.ops.fx2relax.not_negative(var, text)
    if own.size() != input.size():
        if input.size()[:-1] == own.size():
            own = torch.unsqueeze(own, -1)
        elif (
            input.ndim != own.ndim
            or sum(y for x, y in zip(input.size(), own.size(), strict=True) if x != y) != 1
        ):
            raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(reduction + " is not valid")
    with torch.no_grad():
        own.clamp_(min=eps)
    loss = 0.5 * (torch.log(own) + (input - target) ** 2 / own)
    if full:
        loss = loss + 0.5 * 1.8378770664093453  # log(2 pi)
    if reduction == "mean":
        return loss.mean()
    return loss.sum() if reduction == "sum" else loss


def _is_ours(tx: Any) -> bool:
    """Whether Dynamo traces for this backend; others have their own ways."""
    return getattr(tx.output.compiler_fn, "compiler_name", "relax") == "relax"


def _inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    def handler(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        # `torch.func` does not differentiate the operators that stand for these.
        if not _is_ours(tx) or torch._C._are_functorch_transforms_active():
            return None
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


def _counted(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """`tensor_split` into as many parts as a 0-d input says: Dynamo guards on the number."""
    given = args[1].realize() if len(args) > 1 else None
    if not isinstance(given, TensorVariable) or given.ndim != 0:
        return None
    if not _is_ours(tx) or not torch._dynamo.config.capture_scalar_outputs:
        return None
    number = given.call_method(tx, "item", [], {})
    if not isinstance(number, SymNodeVariable) or free_unbacked_symbols(number.sym_num):
        return None
    count = VariableTracker.build(tx, number.evaluate_expr())
    return self.call_function(tx, [args[0], count, *args[2:]], kwargs)


def _not_transformed(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Break the graph at a recurrent layer that `torch.func` transforms: PyTorch has it wrong."""
    if torch._C._are_functorch_transforms_active():
        unimplemented(
            gb_type="torch.func transforms a recurrent layer",
            context=str(self.value),
            explanation="fx2relax leaves torch.func transforms of LSTM, GRU and RNN to eager.",
            hints=[],
        )
    return None


def _method(handler: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, tx, *args, **kwargs: handler(self, tx, self, *args, **kwargs)


def install() -> None:
    """Have Dynamo trace these functions for this backend."""
    table = getattr(TorchInGraphFunctionVariable, "_get_handlers", None)
    if table is None:  # a PyTorch that keeps them elsewhere: the graph breaks there
        return
    handlers = table()
    for function in (equal, allclose):
        handler = _number(function)
        handlers.setdefault(getattr(torch, function.__name__), handler)
        name = f"method_{function.__name__}"
        if not hasattr(TensorVariable, name):
            setattr(TensorVariable, name, _method(handler))
    handlers.setdefault(torch.tensor_split, _counted)
    handlers.setdefault(F.gaussian_nll_loss, _inlined(gaussian_nll_loss))
    handlers.setdefault(F.ctc_loss, _inlined(ctc_loss))
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        handlers.setdefault(getattr(torch, name), _not_transformed)
