"""Results in the memory of what a kernel reads for the last time.

A ReLU of 26 MB that writes to memory of its own takes that much more of it, and of the caches.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import relax

from ..marks import REPLACES
from .flow import bindings, name_of, result_of
from .given import alike
from .in_place import Places
from .packing import returns_its_own


def reuse(mod: Any) -> Any:
    """Let kernels write to the memory of an argument that nobody reads after them.

    Args:
        mod: kernels are called with the memory that they write to, which `alloc_tensor` makes.
            It is not changed.
    """
    mod = mod.clone()
    for name, func in list(mod.functions_items()):
        if isinstance(func, relax.Function) and isinstance(func.body, relax.SeqExpr):
            taken = _Memories(mod, func).taken()
            if taken:
                mod[name] = _with_taken(func, taken)
    return mod


class _Memories:
    """What the kernels of one function read and write."""

    def __init__(self, mod: Any, func: Any) -> None:
        self._mod = mod
        self._places = Places(mod, func)
        self._values = {b.var: b.value for b in bindings(func)}
        self._kept = {self._places.root(v) for v in relax.analysis.free_vars(result_of(func))}
        #: By what lies in the memory of another variable: that one.
        self._owners: dict[Any, Any] = {}
        self._last: dict[Any, float] = {}
        for root, uses in self._places.uses.items():
            known = all(self._places.only_uses(self._places.calls[use]) for use in uses)
            # The call that makes a tensor is none of its uses.
            self._last[root] = math.inf if root in self._kept or not known else max(uses)

    def taken(self) -> dict[Any, Any]:
        """By the variable of memory that is not needed: the one whose memory takes its place."""
        found = {}
        for at, call in enumerate(self._places.calls):
            for place in self._candidates(call):
                out, value = call.args[-1], call.args[place]
                if self._may_take(at, call, out, value):
                    found[out] = value
                    self._take(out, value)
                    break
        return found

    def _candidates(self, call: Any) -> list[int]:
        """The arguments whose memory a kernel's result may take, by their positions."""
        if not self._places.is_kernel(call):
            return []
        kernel = self._mod[call.op]
        if len(call.args) != len(kernel.params):
            return []
        return [int(place) for place in (kernel.attrs or {}).get(REPLACES, [])]

    def _owner(self, value: Any) -> Any:
        root = self._places.root(value)
        return self._owners.get(root, root)

    def _may_take(self, at: int, call: Any, out: Any, value: Any) -> bool:
        if not isinstance(value, relax.Var) or not alike(value, out):
            return False
        origin = self._owner(value)
        fresh = self._is_own(origin) or returns_its_own(self._values.get(origin))
        if not (self._is_own(out) and fresh):
            return False
        # Written by this kernel first of all, read by this one last of all, and at one place.
        uses = self._places.uses.get(out, [])
        others = [self._owner(a) for a in call.args if isinstance(a, relax.Var)]
        once = sum(o.same_as(origin) for o in others) == 1
        return bool(uses) and uses[0] == at and self._last[origin] == at and once

    def _take(self, out: Any, value: Any) -> None:
        origin = self._owner(value)
        self._owners[out] = origin
        self._last[origin] = self._last[out]

    def _is_own(self, var: Any) -> bool:
        return name_of(self._values.get(var)) == "relax.builtin.alloc_tensor"


def _with_taken(func: Any, taken: dict[Any, Any]) -> Any:
    """A function with one variable in the place of another's memory."""
    blocks = [
        relax.BindingBlock(
            [relax.VarBinding(b.var, taken[b.var]) if b.var in taken else b for b in block.bindings]
        )
        for block in func.body.blocks
    ]
    body = relax.SeqExpr(blocks, func.body.body)
    return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
