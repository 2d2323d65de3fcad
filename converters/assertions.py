"""Assertions: kernels that raise. What they return stands for their having passed."""

from __future__ import annotations

from typing import Any

import torch

import fx2relax.traced  # noqa: F401  defines the operator

from .common import converts, op, tirx
from .opaque import opaque, require, wide

aten = torch.ops.aten


def _assertion(
    values: list[Any], sizes: list[Any], holds: Any, message: str, kind: str = "RuntimeError"
) -> Any:
    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        require(holds(ins, numbers), message, kind)
        outs[0][0] = tirx.const(0, "int8")

    return opaque("assertion", body, values, lambda _: [(1, "int8")], sizes)


@converts(aten._assert_async.msg)
def assert_async_msg(self: Any, assert_msg: str) -> Any:
    """RuntimeError with the message where the one element is zero or false."""
    truth = op.astype(self, "bool")
    return _assertion([truth], [], lambda ins, _: ins[0][0], assert_msg)


@converts(torch.ops.fx2relax.assert_value.default)
def assert_value(condition: Any, message: str) -> Any:
    """ValueError."""
    truth = op.astype(condition, "bool")
    return _assertion([truth], [], lambda ins, _: ins[0][0], message, "ValueError")


@converts(aten._assert_async.default)
def assert_async(self: Any) -> Any:
    """As eager words it."""
    return assert_async_msg(self, "Expected Tensor with single nonzero value, but got zero")


@converts(aten._assert_scalar.default)
def assert_scalar(self: Any, assert_msg: str) -> Any:
    """The same for a number: a condition on sizes."""
    if isinstance(self, (bool, int)):
        number = wide(int(self))
    else:
        number = tirx.Select(self, wide(1), wide(0)) if str(self.ty.dtype) == "bool" else self
    return _assertion([], [number], lambda _, n: wide(n[0]) != wide(0), assert_msg)
