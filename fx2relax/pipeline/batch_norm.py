"""Scales and shifts of a product's channels, BatchNorm's above all, as a part of its weights.

``conv(x, w) * a + b`` is ``conv(x, w * a) + b``; what is made of weights alone, `lift` then does
once. A product's rounding changes by as much as a reordered sum's does. What does not stay: a
weight times an infinite scale (a running variance of ``-eps``) is infinite or NaN by itself, so
that NaN may stand where eager has an infinity, and an intermediate that overflows in eager may not
do so here. The weights are not known when a graph is compiled, so nothing can ask for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from .flow import Flow, bindings, dtype_of, name_of, sizes_of

_op = relax.op
_DTYPES = ("float32", "float64")
# The axis of the channels in a convolution's weight and, for plain ones, in its result.
_CONVOLUTIONS = {
    f"relax.nn.conv{n}d{kind}": bool(kind) for n in (1, 2, 3) for kind in ("", "_transpose")
}
_ARITHMETIC = ("relax.multiply", "relax.divide", "relax.add", "relax.subtract")
_SCALES = ("relax.multiply", "relax.divide")


def fold_scales(mod: Any) -> Any:
    """Fold what follows convolutions and products with frozen weights into those weights.

    BatchNorm in inference over frozen statistics becomes one scale and one shift per channel,
    computed as eager computes them, wherever it stands. In float32 and float64, a convolution (or
    the product with a matrix) whose result has no other reader takes them, and any chain of
    additions and multiplications with one number per channel, into its weight and a bias.

    Args:
        mod: Relax functions in normal form, weights right of ``num_input``; it is not changed.
    """
    mod = mod.clone()
    for name, func in list(mod.functions_items()):
        if not isinstance(func, relax.Function):
            continue
        for rewriter in (_Affine, _Folded):
            flow = Flow(func)
            if flow.weights and any(rewriter.wants(b, flow) for b in bindings(func)):
                # What is replaced must not count as another reader of a product.
                func = relax.analysis.remove_all_unused(rewriter(flow).visit_expr(func))
        mod[name] = func
    return mod


@mutator
class _Affine(PyExprMutator):  # type: ignore[misc]
    """BatchNorm as ``x * scale + shift``."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self.flow = flow

    @staticmethod
    def wants(binding: Any, flow: Flow) -> bool:
        """Whether a binding is the first result of a BatchNorm over frozen statistics."""
        value = binding.value
        if not isinstance(value, relax.TupleGetItem) or value.index != 0:
            return False
        norm: Any = flow.values.get(value.tuple_value)
        return bool(
            name_of(norm) == "relax.nn.batch_norm"
            and not norm.attrs.training
            and all(flow.on_weights(a) for a in norm.args[1:])
            and sizes_of(norm.args[0]) is not None
        )

    def visit_var_binding_(self, binding: Any) -> None:
        """Replace what BatchNorm gives; it is dead itself then."""
        if self.wants(binding, self.flow):
            norm = self.flow.values[binding.value.tuple_value]
            binding = relax.VarBinding(binding.var, self.affine(norm))
        super().visit_var_binding_(binding)

    def affine(self, norm: Any) -> Any:
        """The expression in the place of a BatchNorm's result."""
        x, gamma, beta, mean, variance = (self.visit_expr(a) for a in norm.args)
        attrs, kind, emit = norm.attrs, dtype_of(norm.args[0]), self.builder_.emit
        one, eps = relax.const(1.0, kind), relax.const(float(attrs.epsilon), kind)
        deviation = emit(_op.sqrt(emit(_op.add(variance, eps))))
        scale = emit(_op.divide(one, deviation))
        if attrs.scale:
            scale = emit(_op.multiply(scale, gamma))
        shift = emit(_op.multiply(mean, scale))
        shift = emit(_op.subtract(beta, shift) if attrs.center else _op.negative(shift))
        rank, axis = len(sizes_of(norm.args[0]) or ()), int(attrs.axis)
        scale, shift = (emit(_along(v, rank, axis)) for v in (scale, shift))
        return _op.add(emit(_op.multiply(x, scale)), shift)


def _along(vector: Any, rank: int, axis: int) -> Any:
    """A vector as a tensor that varies along one axis."""
    sizes: list[Any] = [1] * rank
    sizes[axis] = (sizes_of(vector) or [1])[0]
    return _op.reshape(vector, sizes)


@dataclass
class _Chain:
    """A product, its name, and the arithmetic that follows it: operator, other operand, side."""

    root: Any
    name: str
    steps: list[tuple[str, Any, int]] = field(default_factory=list)


@mutator
class _Folded(PyExprMutator):  # type: ignore[misc]
    """Convolutions and products with the scales and shifts of their results inside."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self.flow = flow
        self.chains: dict[Any, _Chain] = {}
        for binding in bindings(flow.func):
            if self.wants(binding, flow):
                self._follow(binding)

    @staticmethod
    def wants(binding: Any, flow: Flow) -> bool:
        """Whether a binding is a product with frozen weights."""
        value = binding.value
        name = name_of(value)
        if name not in _CONVOLUTIONS and name != "relax.matmul":
            return False
        weight = _matrix(value, flow) if name == "relax.matmul" else value.args[1]
        kinds = {dtype_of(value), *(dtype_of(a) for a in value.args)}
        known = weight is not None and flow.on_weights(weight)
        plain = name == "relax.matmul" or str(value.attrs.out_layout).startswith("NC")
        return known and plain and len(kinds) == 1 and kinds <= set(_DTYPES)

    def _follow(self, binding: Any) -> None:
        chain, var = _Chain(binding.value, binding.var.name), binding.var
        ends = {id(value): v for v, value in self.flow.values.items()}
        sizes = sizes_of(var)
        if sizes is None or not isinstance(sizes[_axis(binding.value, len(sizes))], int):
            return
        best: tuple[int, Any] | None = None
        while (step := self._step(var, chain.root, sizes)) is not None:
            reader, entry = step
            chain.steps.append(entry)
            var = ends[id(reader)]
            if self._pays(chain):
                best = len(chain.steps), var
        if best is not None:
            chain.steps, end = chain.steps[: best[0]], best[1]
            self.chains[end] = chain

    def _pays(self, chain: _Chain) -> bool:
        """A bias alone is the library's; one number times a matrix fuses with what reads it."""
        scales = [other for name, other, _ in chain.steps if name in _SCALES]
        if name_of(chain.root) == "relax.matmul":
            return any((sizes_of(other) or [1])[-1] != 1 for other in scales)
        return bool(scales)

    def _step(self, var: Any, root: Any, sizes: list[Any]) -> Any:
        reader = self.flow.only_reader(var)
        name = name_of(reader)
        if name not in _ARITHMETIC or dtype_of(reader) != dtype_of(root):
            return None
        side = 1 if reader.args[0].same_as(var) else 0
        other = reader.args[side]
        given = sizes_of(other)
        if not self.flow.on_weights(other) or given is None or dtype_of(other) != dtype_of(root):
            return None
        if name == "relax.divide" and side == 0:
            return None
        if len(given) > len(sizes):
            return None
        place = len(given) - (len(sizes) - _axis(root, len(sizes)))
        if any(size != 1 for n, size in enumerate(given) if n != place):
            return None
        channels = sizes[_axis(root, len(sizes))]
        if place >= 0 and given[place] not in (1, channels):
            return None
        return reader, (name, other, side)

    def visit_var_binding_(self, binding: Any) -> None:
        """Replace the end of a chain; its other links are dead then."""
        chain = self.chains.get(binding.var)
        if chain is not None:
            binding = relax.VarBinding(binding.var, self.fold(chain))
        super().visit_var_binding_(binding)

    def fold(self, chain: _Chain) -> Any:
        """The product with a scaled weight, and the bias that is left."""
        root, emit = chain.root, self.builder_.emit
        sizes = sizes_of(root) or []
        axis = _axis(root, len(sizes))
        scale: Any = None
        shift: Any = None
        for name, other, side in chain.steps:
            vector = self._vector(other)
            if name in _SCALES:
                operator = _op.multiply if name == "relax.multiply" else _op.divide
                if scale is None and operator is _op.multiply:
                    scale = vector
                else:
                    one = relax.const(1.0, dtype_of(root))
                    scale = emit(operator(one if scale is None else scale, vector))
                shift = None if shift is None else emit(operator(shift, vector))
            elif name == "relax.add":
                shift = vector if shift is None else emit(_op.add(shift, vector))
            elif side:  # (product) - vector
                negative = emit(_op.negative(vector))
                shift = negative if shift is None else emit(_op.subtract(shift, vector))
            else:
                minus = relax.const(-1.0, dtype_of(root))
                scale = emit(_op.multiply(minus if scale is None else scale, minus))
                shift = vector if shift is None else emit(_op.subtract(vector, shift))
        # Of the same node still, but not its value, which nothing has now.
        product = emit(self._scaled(root, scale), f"{chain.name}_scaled")
        if shift is None:
            return product
        if sizes_of(shift) != [sizes[axis]]:
            shift = emit(_op.broadcast_to(shift, [sizes[axis]]))
        return _op.add(product, emit(_along(shift, len(sizes), axis)))

    def _vector(self, other: Any) -> Any:
        """A scale or shift as a vector of one number per channel, or of one."""
        length = max((int(n) for n in sizes_of(other) or ()), default=1)
        value: Any = self.flow.values.get(other)
        if name_of(value) == "relax.reshape" and sizes_of(value.args[0]) == [length]:
            return self.visit_expr(value.args[0])
        return self.builder_.emit(_op.reshape(self.visit_expr(other), [length]))

    def _scaled(self, root: Any, scale: Any) -> Any:
        emit = self.builder_.emit
        if name_of(root) == "relax.matmul":
            weight = _matrix(root, self.flow)
            turned = not weight.same_as(root.args[1])
            factor = emit(_op.reshape(scale, [-1, 1] if turned else [1, -1]))
            weight = emit(_op.multiply(self.visit_expr(weight), factor))
            weight = emit(_op.permute_dims(weight)) if turned else weight
            return _op.matmul(self.visit_expr(root.args[0]), weight, out_dtype=dtype_of(root))
        weight = self.visit_expr(root.args[1])
        sizes = sizes_of(weight) or []
        around = [1] * (len(sizes) - 2)
        if _CONVOLUTIONS[name_of(root)] and (sizes_of(scale) or [1])[0] != 1:
            # (inputs, outputs of a group, ...), the inputs of one group after those of another
            groups = int(root.attrs.groups)
            split = emit(_op.reshape(weight, [groups, -1, *sizes[1:]]))
            factor = emit(_op.reshape(scale, [groups, 1, sizes[1], *around]))
            scaled = emit(_op.reshape(emit(_op.multiply(split, factor)), sizes))
        else:
            factor = emit(_op.reshape(scale, [-1, 1, *around]))
            scaled = emit(_op.multiply(weight, factor))
        x = self.visit_expr(root.args[0])
        return relax.Call(root.op, [x, scaled], root.attrs, root.ty_args)


def _axis(root: Any, rank: int) -> int:
    return rank - 1 if name_of(root) == "relax.matmul" else 1


def _matrix(product: Any, flow: Flow) -> Any:
    """The matrix that a product multiplies by from the right, behind its transposition."""
    weight = product.args[1]
    sizes = sizes_of(weight)
    if sizes is None or len(sizes) != 2 or len(sizes_of(product.args[0]) or ()) < 1:
        return None
    value: Any = flow.values.get(weight)
    if name_of(value) == "relax.permute_dims":
        axes = value.attrs.axes
        if axes is None or [int(a) for a in axes] == [1, 0]:
            return value.args[0]
    return weight
