"""Assertions: kernels that raise. What they return stands for their having passed."""

from __future__ import annotations

from typing import Any

import torch

import fx2relax.traced  # noqa: F401  defines the operator

from .common import converts, dtype, op, product, reshape, shape, tirx
from .opaque import loops, opaque, require, wide

aten = torch.ops.aten


def _assertion(values: list[Any], sizes: list[Any], holds: Any, message: str) -> Any:
    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        require(holds(ins, numbers), message)
        outs[0][0] = tirx.const(0, "int8")

    return opaque("assertion", body, values, lambda _: [(1, "int8")], sizes)


@converts(aten._assert_async.msg)
def assert_async_msg(self: Any, assert_msg: str) -> Any:
    """RuntimeError with the message where the one element is zero or false."""
    truth = op.astype(self, "bool")
    return _assertion([truth], [], lambda ins, _: ins[0][0], assert_msg)


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


@converts(torch.ops.fx2relax.not_negative.default)
def not_negative(x: Any, message: str) -> Any:
    """The same elements; ValueError where one is negative."""
    kind = dtype(x)
    if kind == "bool" or kind.startswith("uint"):
        return x

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        with loops([numbers[0]]) as (i,):
            held = tirx.Cast("float64", ins[0][i])
            require(tirx.Not(held < tirx.const(0, "float64")), message, "ValueError")
            outs[0][i] = ins[0][i]

    count = product(shape(x))
    return reshape(opaque("not_negative", body, [x], lambda n: [(n[0], kind)], [count]), shape(x))
