"""Products of one tensor with several weights as one product with all of them side by side.

Queries, keys and values, or the gate and the up projection of a feed-forward network: the wide
product reads its input once and fills the machine better, and `lift_weights` joins the weights
once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from ..compat import Var
from .alike import SharedWeightsError, alike, taking_weights
from .flow import dtype_of, name_of, result_of, sizes_of
from .values import Values

_op = relax.op


def combine_products(mod: Any) -> Any:
    """Make products of one tensor with several weights one product and a split of its result.

    ``matmul(x, permute_dims(w))`` for linear layers, or ``matmul(x, w)``, where two or more of a
    block have the same `x`; biases are joined if each of the products has one. The weights are
    parameters right of ``num_input`` or made of such, matrices of one dtype and depth, of any
    width, sizes static or symbolic. All functions of the module must read them alike, so that the
    joined weight takes the place of its parts: a weight with another reader stays by itself.

    Args:
        mod: Relax functions with ``num_input``, in high-level operators and in normal form. It is
            not changed.

    Returns:
        the module; the given one where nothing is combined.
    """
    names = taking_weights(mod, None)
    # Each of the products may look at its input in a reshape of its own.
    tidy = relax.transform.EliminateCommonSubexpr()(mod)
    try:
        together = [names] if names else []
        known = [alike(tidy, some) for some in together]
    except SharedWeightsError:  # each of the functions has weights of its own
        together = [[name] for name in names]
        known = [alike(tidy, some) for some in together]
    changed: dict[str, Any] = {}
    for some, (functions, weights) in zip(together, known, strict=True):
        values = Values(mod, weights)
        views = {name: _View(name, functions[name], values) for name in some}
        groups = _groups(list(views.values()), values)
        for name, view in views.items():
            made = view.combined(groups)
            if made is not None:
                changed[name] = made
    if not changed:
        return mod
    mod = mod.clone()
    for name, func in changed.items():
        mod[name] = relax.utils.copy_with_new_vars(func)
    return mod


@dataclass(frozen=True)
class _Factor:
    """A product of a function with a weight.

    Attributes:
        var: what the product, or the sum with its bias, is bound to.
        call: the product.
        weight: the variable of the weight, transposed if `turned`.
        bias: the variable of the bias, None if there is none.
        summed: what the sum with the bias is bound to.
    """

    var: Any
    call: Any
    weight: Any
    turned: bool
    bias: Any
    summed: Any


class _View:
    """The products of one function with its weights.

    Attributes:
        factors: by the value of the weight, its product; None if it is read in another way.
        kinds: by the same, which of them could be one product.
    """

    def __init__(self, name: str, func: Any, values: Values) -> None:
        self.name, self.func, self.values = name, func, values
        own = func.params[int(func.attrs["num_input"]) :]
        self.env = values.read(name, func, dict(zip(own, values.weights, strict=True)))
        self.bound: dict[Any, Any] = {}
        self.readers: dict[Any, list[Any]] = {}
        self.block: dict[Any, int] = {}
        for n, block in enumerate(func.body.blocks):
            for binding in block.bindings:
                self.bound[binding.var] = binding.value
                self.block[binding.var] = n
                for var in relax.analysis.free_vars(binding.value):
                    self.readers.setdefault(var, []).append(binding)
        for var in relax.analysis.free_vars(result_of(func)):
            self.readers.setdefault(var, []).append(None)
        self.reads = Counter(
            self.env[v]
            for v, readers in self.readers.items()
            if isinstance(self.env.get(v), Var)
            for _ in readers
        )
        self.factors: dict[Any, _Factor] = {}
        self.kinds: dict[Any, Any] = {}
        for var, value in self.bound.items():
            factor = self._factor(var, value)
            if factor is not None:
                known = self.env[factor.weight]
                self.factors[known] = factor
                self.kinds[known] = self._kind(factor)

    def _factor(self, var: Any, call: Any) -> _Factor | None:
        if name_of(call) != "relax.matmul" or var in self.env:
            return None
        weight, turned = call.args[1], False
        inner: Any = self.bound.get(weight)
        if name_of(inner) == "relax.permute_dims" and len(self.readers[weight]) == 1:
            axes = inner.attrs.axes
            if axes is None or [int(a) for a in axes] == [1, 0]:
                weight, turned = inner.args[0], True
        known = self.env.get(weight)
        sizes = sizes_of(weight)
        if not isinstance(known, Var) or self.reads[known] != 1 or len(sizes or ()) != 2:
            return None
        if known in self.values.of and self.values.of[known].why:
            return None
        if 0 in (sizes or ()) or sizes_of(call) is None or not isinstance(call.args[0], Var):
            return None
        bias, summed = self._bias(var, call)
        return _Factor(var, call, weight, turned, bias, summed)

    def _bias(self, var: Any, call: Any) -> tuple[Any, Any]:
        readers = self.readers.get(var, [])
        if len(readers) != 1 or readers[0] is None or name_of(readers[0].value) != "relax.add":
            return None, None
        binding = readers[0]
        (other,) = [a for a in binding.value.args if not a.same_as(var)] or [None]
        known = self.env.get(other) if isinstance(other, Var) else None
        if (
            not isinstance(known, Var)
            or self.reads[known] != 1
            or dtype_of(other) != dtype_of(call)
        ):
            return None, None
        sizes, columns = sizes_of(other) or [], (sizes_of(call) or [None])[-1]
        if len(sizes) != 1 or not _equal(sizes[0], columns):
            return None, None
        if self.block[binding.var] != self.block[var]:
            return None, None
        return other, binding.var

    def _kind(self, factor: _Factor) -> Any:
        call = factor.call
        kind = (dtype_of(factor.weight), dtype_of(call))
        return (call.args[0], self.block[factor.var], factor.turned, *kind)

    def known_bias(self, weight: Any) -> Any:
        """The value of a product's bias; None if there is none."""
        bias = self.factors[weight].bias
        return None if bias is None else self.env[bias]

    def combined(self, groups: Sequence[_Group]) -> Any:
        """The function with the products of each group as one; None if it has none of them."""
        found = [g for g in groups if g.weights[0] in self.factors]
        if not found:
            return None
        starts: dict[Any, _Group] = {}
        replaced: dict[Any, tuple[_Group, int]] = {}
        for group in found:
            factors = [self.factors[w] for w in group.weights]
            ends = [f.summed if group.biased else f.var for f in factors]
            replaced.update({end: (group, n) for n, end in enumerate(ends)})
            mine = {f.var for f in factors}
            starts[next(v for v in self.bound if v in mine)] = group
        blocks = [self._block(block, starts, replaced) for block in self.func.body.blocks]
        func = self.func
        body = relax.SeqExpr(blocks, func.body.body)
        made = relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
        return relax.analysis.remove_all_unused(made)

    def _block(self, block: Any, starts: dict[Any, Any], replaced: dict[Any, Any]) -> Any:
        flow = isinstance(block, relax.DataflowBlock)
        bindings: list[Any] = []
        builder = relax.BlockBuilder()

        def bind(name: str, expr: Any) -> Any:
            expr = builder.normalize(expr)
            var = (relax.DataflowVar if flow else Var)(name, expr.ty)
            bindings.append(relax.VarBinding(var, expr))
            return var

        parts: dict[int, list[Any]] = {}
        inside = (
            {b.var for b in block.bindings if self._early(b)} if self._any(block, starts) else ()
        )
        early = [b for b in block.bindings if b.var in inside]
        late = [b for b in block.bindings if b.var not in inside]
        bindings.extend(early)
        for binding in late:
            group = starts.get(binding.var)
            if group is not None:
                parts[id(group)] = self._product(group, bind)
            if binding.var in replaced:
                group, n = replaced[binding.var]
                binding = relax.VarBinding(binding.var, builder.normalize(parts[id(group)][n]))
            bindings.append(binding)
        return type(block)(bindings)

    def _any(self, block: Any, starts: dict[Any, Any]) -> bool:
        return any(b.var in starts for b in block.bindings)

    def _early(self, binding: Any) -> bool:
        """Whether a binding is on weights alone and may stand before all others of its block."""
        known = self.env.get(binding.var)
        value = self.values.of.get(known) if isinstance(known, Var) else None
        return known is not None and (value is None or not value.why)

    def _product(self, group: _Group, bind: Any) -> list[Any]:
        """Bind the product of a group; what its parts are."""
        factors = [self.factors[w] for w in group.weights]
        first = factors[0]
        turned, call = first.turned, first.call
        weights = [f.weight for f in factors]
        name = _joined_name([w.name for w in group.weights])
        weight = bind(name, _op.concat(weights, axis=0 if turned else 1))
        if turned:
            weight = bind(f"{name}_t", _op.permute_dims(weight))
        out = bind(
            "combined", relax.Call(call.op, [call.args[0], weight], call.attrs, call.ty_args)
        )
        if group.biased:
            names = [self.env[f.bias].name for f in factors]
            bias = bind(_joined_name(names), _op.concat([f.bias for f in factors], axis=0))
            out = bind("combined_sum", _op.add(out, bias))
        return _split(out, [(sizes_of(f.call) or [])[-1] for f in factors])


def _split(out: Any, widths: list[Any]) -> list[Any]:
    """The columns of a product that belong to each of its weights.

    Slices, each a part of the kernel that reads it, where `split` would often be a copy.
    """
    axis = len(sizes_of(out) or ()) - 1
    start, parts = 0, []
    for width in widths:
        end = start + width
        parts.append(_op.strided_slice(out, [axis], [start], [end], assume_inbound=True))
        start = end
    return parts


@dataclass(frozen=True)
class _Group:
    """Weights that every function multiplies the same tensor by, all of them or none."""

    weights: tuple[Any, ...]
    biased: bool


def _groups(views: Sequence[_View], values: Values) -> list[_Group]:
    """The weights to join, over all functions."""
    order = [*values.weights, *(v.var for v in values.all)]
    found: dict[Any, list[Any]] = {}
    for weight in order:
        users = [view for view in views if view.reads[weight]]
        if users and all(weight in view.factors for view in users):
            kinds = tuple((view.name, view.kinds[weight]) for view in users)
            found.setdefault(kinds, []).append(weight)
    return [
        _Group(tuple(some), all(_same_bias(views, weight) for weight in some))
        for some in found.values()
        if len(some) > 1
    ]


def _same_bias(views: Sequence[_View], weight: Any) -> bool:
    biases = [view.known_bias(weight) for view in views if weight in view.factors]
    return biases[0] is not None and all(b is biases[0] or b.same_as(biases[0]) for b in biases)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(tvm.sym.Analyzer().can_prove_equal(a, b))


def _joined_name(names: Sequence[str]) -> str:
    """``attn.q+k+v.weight`` for ``attn.q.weight``, ``attn.k.weight`` and ``attn.v.weight``."""
    parts = [str(name).split(".") for name in names]
    if len({len(p) for p in parts}) == 1:
        differ = [n for n, same in enumerate(zip(*parts, strict=True)) if len(set(same)) > 1]
        if len(differ) == 1:
            (n,) = differ
            middle = "+".join(p[n] for p in parts)
            return ".".join([*parts[0][:n], middle, *parts[0][n + 1 :]])
    return "+".join(str(name) for name in names)
