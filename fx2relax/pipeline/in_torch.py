"""Programs for GPUs of a process that has PyTorch: its memory, and its way to read a number.

TVM takes memory of its own from the driver, which PyTorch's allocator then lacks, which a graph
that is captured must not do, and which is used again without a look at streams. What it reads on
the host it reads on the stream of all, which does not wait for PyTorch's.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..compat import type_of
from ..runtime.in_torch import EMPTY, SIZES, TRUTH
from .flow import name_of


def in_torch(mod: Any, kind: str = "cuda") -> Any:
    """Let the functions of a module allocate by PyTorch, and read what is on their device by it.

    Args:
        mod: in it, kernels are called with the memory that they write to, which `alloc_tensor`
            makes.
        kind: of the device on which the memory is, as PyTorch names it: the current one of its
            kind at the call.

    Returns:
        the module with its Relax functions changed.
    """
    mod = mod.clone()
    for name, function in list(mod.functions_items()):
        if isinstance(function, relax.Function):
            mod[name] = _InTorch(mod, kind).visit_expr(function)
    return mod


@mutator
class _InTorch(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: Any, kind: str) -> None:
        super().__init__(mod)
        self.kind = kind

    def visit_call_(self, call: Any) -> Any:
        """A call of PyTorch's in the place of one of TVM's own."""
        name = name_of(call)
        if name == "relax.builtin.alloc_tensor":
            shape, dtype = self.visit_expr(call.args[0]), str(type_of(call).dtype)
            given = [shape, tvm.ir.StringImm(dtype), tvm.ir.StringImm(self.kind)]
            return relax.Call(relax.ExternFunc(EMPTY), given, ty_args=[type_of(call)])
        if name == "relax.tensor_to_shape":
            tensor = self.visit_expr(call.args[0])
            return relax.Call(relax.ExternFunc(SIZES), [tensor], ty_args=[type_of(call)])
        return self.visit_expr_post_order(call)

    def visit_if_(self, choice: Any) -> Any:
        """A condition that lies on the host."""
        condition = self.visit_expr(choice.cond)
        there = relax.Call(relax.ExternFunc(TRUTH), [condition], ty_args=[type_of(condition)])
        there = self.builder_.emit(there)
        yes, no = (self.visit_with_new_scope(b) for b in (choice.true_branch, choice.false_branch))
        return relax.If(there, yes, no, choice.span)
