"""Dense linear algebra by the LAPACK that PyTorch brings, in place of generated kernels.

A kernel that has such a twin names it in an attribute, see `converters.linalg_kernel`.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..runtime.lapack import NAME

_ATTRIBUTE = "fx2relax.lapack"


def use_lapack(mod: Any) -> Any:
    """Replace the calls of kernels that name an operator of PyTorch by calls of that operator."""
    described = {
        name: str(func.attrs[_ATTRIBUTE])
        for name, func in mod.functions_items()
        if isinstance(func, tvm.tirx.PrimFunc) and func.attrs and _ATTRIBUTE in func.attrs
    }
    if not described:
        return mod
    mod = mod.clone()
    for name, func in list(mod.functions_items()):
        if isinstance(func, relax.Function):
            mod[name] = _Calls(mod, described).visit_expr(func)
    return mod


@mutator
class _Calls(PyExprMutator):  # type: ignore[misc]
    """Rewrites the calls of one function."""

    def __init__(self, mod: Any, described: dict[Any, str]) -> None:
        super().__init__(mod)
        self.described = described

    def visit_call_(self, call: Any) -> Any:
        """A call of the library where a kernel has one, the call itself otherwise."""
        call = self.visit_expr_post_order(call)
        if getattr(call.op, "name", "") != "relax.call_tir" or call.args[0] not in self.described:
            return call
        description = tvm.ir.StringImm(self.described[call.args[0]])
        # Symbolic sizes that a kernel uses are operands of it as well.
        tensors = [x for x in call.args[1].fields if isinstance(x.ty, relax.TensorType)]
        result = call.ty_args[0]
        return relax.call_dps_packed(
            NAME,
            relax.Tuple([description, *tensors]),
            out_ty=list(result.fields) if isinstance(result, relax.TupleType) else result,
        )
