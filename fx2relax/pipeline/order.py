"""Puts bindings behind what defines the sizes that they use, which FuseOps does not look at."""

from __future__ import annotations

from typing import Any

from tvm import relax


def sizes_first(mod: Any) -> Any:
    """Move each binding behind the `match_cast` of its symbolic sizes; else keep the order."""
    changed = {}
    for name, func in mod.functions_items():
        if isinstance(func, relax.Function) and isinstance(func.body, relax.SeqExpr):
            given = {
                symbol
                for param in func.params
                for symbol in relax.analysis.definable_tir_vars_in_type(param.ty)
            }
            blocks = [_sorted(block, given) for block in func.body.blocks]
            if any(new is not old for new, old in zip(blocks, func.body.blocks, strict=True)):
                body = relax.SeqExpr(blocks, func.body.body)
                changed[name] = relax.Function(
                    func.params, body, func.ret_ty, func.is_pure, func.attrs
                )
    if changed:
        mod = mod.clone()
        for name, func in changed.items():
            mod[name] = func
    return mod


def _sorted(block: Any, given: set[Any]) -> Any:
    bindings = list(block.bindings)
    makers: dict[Any, int] = {}
    for n, binding in enumerate(bindings):
        makers[binding.var] = n
        if isinstance(binding, relax.MatchCast):
            for symbol in relax.analysis.definable_tir_vars_in_type(binding.ty):
                if symbol not in given:
                    makers.setdefault(symbol, n)
    order: list[int] = []
    done: set[int] = set()

    def place(n: int) -> None:
        if n in done:
            return
        done.add(n)
        for name in _needs(bindings[n]):
            if name in makers:
                place(makers[name])
        order.append(n)

    for n in range(len(bindings)):
        place(n)
    if order == sorted(order):
        return block
    return type(block)([bindings[n] for n in order])


def _needs(binding: Any) -> list[Any]:
    """The variables and symbols that must be known before a binding."""
    ty = binding.ty if isinstance(binding, relax.MatchCast) else binding.var.ty
    value = binding.value
    return [
        *relax.analysis.free_vars(value),
        *relax.analysis.free_symbolic_vars(value),
        *relax.analysis.tir_vars_in_type(ty),
    ]
