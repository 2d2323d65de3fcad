"""High-level Relax operators to kernels."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import tvm
from tvm import relax, topi

from ..compat import const_number
from .flow import expressions, name_of
from .repeats import Repeats, Rule
from .views import reshaped

_HALF = ("float16", "bfloat16")
_SUMS = [
    "relax.matmul",
    *(f"relax.nn.conv{n}d{kind}" for n in (1, 2, 3) for kind in ("", "_transpose")),
]
_WITH_ZERO = {
    "relax.add": topi.add,
    "relax.multiply": topi.multiply,
    "relax.divide": topi.divide,
}
# Passes of their own take care of these first.
_DISPATCHED = frozenset(
    f"relax.{name}"
    for name in ("sort", "argsort", "topk", "cumsum", "cumprod", "multinomial_from_uniform")
)


def legalize(mod: Any, own: Mapping[str, Rule] | None = None) -> Any:
    """Turn every high-level operator into a `call_tir` of a kernel.

    Args:
        mod: with high-level operators.
        own: rules of one kind of device, which go before all others.
    """
    repeats = Repeats()
    rules = {name: repeats.once(rule) for name, rule in {**_rules_of(mod), **(own or {})}.items()}
    return tvm.transform.Sequential(
        [
            relax.backend.DispatchSampling(),
            relax.backend.DispatchSortScan(),
            relax.transform.LegalizeOps(rules),
        ]
    )(mod)


def _rules_of(mod: Any) -> dict[str, Rule]:
    """Our own rules, and TVM's of the operators that a module has."""
    names = {name_of(expr) for expr in expressions(mod)}
    found = {name: rule_of(name) for name in names}
    return {**_rules(), **{name: rule for name, rule in found.items() if rule is not None}}


def rule_of(name: str) -> Rule | None:
    """What makes a kernel of an operator's call, given a block builder; None if nothing does."""
    own = _rules().get(name)
    if own is not None or name in _DISPATCHED or not name.startswith("relax."):
        return own
    operator = tvm.ir.Op.get(name)
    return operator.get_attr("FLegalize") if operator.has_attr("FLegalize") else None


@functools.cache
def _rules() -> dict[str, Rule]:
    return {
        **{name: _summed_in_float32(name) for name in _SUMS},
        **{name: _zero_kept(name) for name in _WITH_ZERO},
        "relax.reshape": reshaped,
    }


def _summed_in_float32(name: str) -> Rule:
    """TVM's own rule, but half precision is summed in float32 and rounded once."""
    operator = tvm.ir.Op.get(name)
    default: Rule = operator.get_attr("FLegalize")

    def rule(builder: Any, call: Any) -> Any:
        dtype = str(call.ty.dtype)
        if dtype not in _HALF:
            return default(builder, call)
        wide = builder.normalize(_wide(name, call))
        return builder.call_te(topi.cast, builder.emit(default(builder, wide)), dtype)

    return rule


def _zero_kept(name: str) -> Rule:
    """TVM's own rule, but a constant 0.0 stays a tensor.

    As a number in the kernel it would be computed with as if it were exact: ``x * 0`` is 0 and
    ``x + 0`` is x to TVM, NaN, infinities and -0.0 included.
    """
    default: Rule = tvm.ir.Op.get(name).get_attr("FLegalize")

    def rule(builder: Any, call: Any) -> Any:
        if "float" in str(call.ty.dtype) and any(_is_zero(a) for a in call.args):
            return builder.call_te(_WITH_ZERO[name], *call.args)
        return default(builder, call)

    return rule


def _is_zero(expr: Any) -> bool:
    return const_number(expr) == 0


def _wide(name: str, call: Any) -> Any:
    """The same call with a float32 result."""
    if name == "relax.matmul":
        return relax.op.matmul(*call.args, out_dtype="float32")
    attrs = call.attrs
    names = ["strides", "padding", "dilation", "data_layout", "kernel_layout", "out_layout"]
    if "transpose" in name:
        names.append("output_padding")
    make = getattr(relax.op.nn, name.rsplit(".", 1)[1])
    settings = {key: getattr(attrs, key) for key in names}
    return make(*call.args, **settings, groups=int(attrs.groups), out_dtype="float32")
