"""How a model is called for a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree


def name_of(model: Any) -> str:
    """A model's name: that of its class, or of the function."""
    own = None if isinstance(model, torch.nn.Module) else getattr(model, "__name__", None)
    return str(own or type(model).__name__)


def compiled_call(
    model: Callable[..., Any],
    inputs: tuple[Any, ...],
    *,
    grad: bool,
    kwargs: Mapping[str, Any] | None,
    dynamic: bool | None,
    options: Mapping[str, Any] | None,
) -> Callable[[], Any]:
    """`caller` of a model that is compiled anew; the arguments are those of `explain`."""
    torch._dynamo.reset()
    settings = {**(options or {}), "cache": False}
    compiled = torch.compile(model, backend="relax", dynamic=dynamic, options=settings)
    return caller(compiled, model, inputs, dict(kwargs or {}), grad)


def caller(
    compiled: Callable[..., Any],
    model: Callable[..., Any],
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    grad: bool,
) -> Callable[[], Any]:
    """What calls a compiled model once, and differentiates it if that is wanted.

    Gradients are of the sum of all floating-point results; those of weights and inputs are left as
    they are.
    """
    weights = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    wanted = [
        t
        for t in (*weights, *pytree.tree_leaves((inputs, kwargs)))
        if isinstance(t, torch.Tensor) and t.requires_grad
    ]

    def inference() -> None:
        with torch.no_grad():
            compiled(*inputs, **kwargs)

    def training() -> None:
        results = pytree.tree_leaves(compiled(*inputs, **kwargs))
        floats = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
        if floats and not wanted:
            raise ValueError(
                "no gradient to compute: give a module, whose parameters are known, or an input"
                " that requires a gradient (what a function holds besides is not seen)"
            )
        if floats:
            total = sum(r.abs().sum() if r.is_complex() else r.float().sum() for r in floats)
            torch.autograd.grad(total, wanted, allow_unused=True)  # type: ignore[arg-type]

    return training if grad else inference
