"""Memory that one launch of a kernel writes for the next: the caller's, as results are.

TVM would take it from a pool of its own on the GPU, which PyTorch's allocator then lacks, which
gives it to the next call without a look at streams, and which a captured graph would share with
calls outside of it.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..compat import type_of
from .flow import expressions, name_of

_SBlock, _Realize = s_tir.stmt.SBlock, s_tir.stmt.SBlockRealize


def with_given_memory(mod: Any) -> Any:
    """Let scheduled kernels take the memory between their launches, as further results.

    A kernel stays as it is where a call of it does not show the sizes.
    """
    found = {
        name: buffers
        for name, function in mod.functions_items()
        if isinstance(function, tirx.PrimFunc) and (buffers := _between(function))
    }
    for call in expressions(mod) if found else ():
        for used in [call.op, *call.args] if isinstance(call, relax.Call) else ():
            if used in found and _types(mod[used], found[used], call) is None:
                del found[used]
    if not found:
        return mod
    functions = {name: f for name, f in mod.functions_items() if name not in found}
    known = {}
    for name, buffers in found.items():
        made = _taking(mod[name], buffers)
        # A name holds the type of the function that it stands for.
        renamed = tvm.ir.GlobalVar(name.name_hint)
        relax.expr._update_type(renamed, made.ty)
        functions[renamed] = made
        known[name] = renamed, mod[name], buffers
    changed = tvm.IRModule(functions, attrs=mod.attrs)
    for name, function in list(changed.functions_items()):
        if isinstance(function, relax.Function):
            changed[name] = _Giver(changed, known).visit_expr(function)
    return changed


def _between(function: Any) -> list[Any]:
    """The buffers on the GPU that a kernel allocates around its launches."""
    if not isinstance(function.body, _Realize):
        return []
    return [b for b in function.body.block.alloc_buffers if b.scope() in ("", "global")]


def _taking(function: Any, buffers: list[Any]) -> Any:
    """A kernel with some of its buffers as its last parameters."""
    root = function.body.block
    block = _SBlock(
        root.iter_vars,
        root.reads,
        root.writes,
        root.name_hint,
        root.body,
        root.init,
        [b for b in root.alloc_buffers if not any(b.same_as(taken) for taken in buffers)],
        root.match_buffers,
        root.annotations,
    )
    body = _Realize(function.body.iter_values, function.body.predicate, block)
    params = [*function.params, *buffers]
    return tirx.PrimFunc(params, body, function.ret_type, function.attrs, function.span)


def _types(function: Any, buffers: list[Any], call: Any) -> list[Any] | None:
    """What buffers of a kernel are at a call of it; None where the call does not show that."""
    if name_of(call) != "relax.call_tir" or not isinstance(call.args[1], relax.Tuple):
        return None
    results = call.ty_args[0]
    results = list(results.fields) if isinstance(results, relax.TupleType) else [results]
    known: dict[Any, Any] = {}
    taken = [*map(type_of, call.args[1].fields), *results]
    for param, kind in zip(function.params, taken, strict=True):
        if not isinstance(kind, relax.TensorType):
            continue
        if not isinstance(kind.shape, relax.ShapeExpr):
            return None
        for inside, outside in zip(param.shape, kind.shape.values, strict=True):
            if isinstance(inside, tirx.Var):
                known.setdefault(inside, outside)
    found = []
    for buffer in buffers:
        if any(v not in known for n in buffer.shape for v in tirx.analysis.undefined_vars(n)):
            return None
        sizes = [
            tvm_ffi.structural_map(n, (tirx.Var, lambda var: known.get(var, var)))
            for n in buffer.shape
        ]
        found.append(relax.TensorType(sizes, str(buffer.dtype)))
    return found


@mutator
class _Giver(PyExprMutator):  # type: ignore[misc]
    """Rewrites the calls of one function.

    Args:
        mod: with the changed kernels.
        found: the changed ones' names, the kernels as they were, and the buffers that they take.
    """

    def __init__(self, mod: Any, found: dict[Any, tuple[Any, Any, list[Any]]]) -> None:
        super().__init__(mod)
        self.found = found

    def visit_call_(self, call: Any) -> Any:
        """A call whose last results are nobody's."""
        call = self.visit_expr_post_order(call)
        if name_of(call) != "relax.call_tir" or call.args[0] not in self.found:
            return call
        name, kernel, buffers = self.found[call.args[0]]
        more = _types(kernel, buffers, call)
        assert more is not None
        result = call.ty_args[0]
        several = isinstance(result, relax.TupleType)
        own = list(result.fields) if several else [result]
        made = self.builder_.emit(relax.call_tir(name, call.args[1], [*own, *more]))
        parts = [relax.TupleGetItem(made, place) for place in range(len(own))]
        return relax.Tuple(parts) if several else parts[0]
