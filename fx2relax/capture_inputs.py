"""The inputs of a capture as fake tensors, with one symbol per named size."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StrictMinMaxConstraint,
)
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from fx2relax import dtypes
from fx2relax.compat import const_int, tirx
from fx2relax.shapes import SymbolTable
from fx2relax.spec import Dim, Tensor

_DYNAMIC = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass
class Inputs:
    """A graph's inputs, flat.

    Attributes:
        mode: the fake mode that everything is traced in.
        flat: fake tensors and SymInts, one per placeholder of the captured graph.
        names: a name for each.
        symbols: the sizes as TIR variables.
        sizes: each symbolic size's name as the caller gave it.
    """

    mode: FakeTensorMode
    symbols: SymbolTable
    flat: list[Any] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    sizes: dict[sympy.Symbol, str] = field(default_factory=dict)
    spec: pytree.TreeSpec | None = None
    static: dict[int, Any] = field(default_factory=dict)

    def unflatten(self, values: Sequence[Any]) -> list[Any]:
        """The arguments of the user's graph, from flat values."""
        assert self.spec is not None
        given = iter(values)
        leaves = [
            self.static[i] if i in self.static else next(given) for i in range(self.spec.num_leaves)
        ]
        return list(pytree.tree_unflatten(leaves, self.spec))

    def specialised(self) -> str:
        """Which symbolic size the trace has fixed, and to what; an empty string for none."""
        env: Any = self.mode.shape_env
        for symbol, name in self.sizes.items():
            value = env.replacements.get(symbol, symbol)
            if value != symbol:
                needed = self.with_names(str(value))
                return f"the size {name!r} is symbolic, and this works for {name} = {needed} only"
        return ""

    def with_names(self, text: str) -> str:
        """A message of PyTorch's with the caller's names for the sizes."""
        for symbol, name in self.sizes.items():
            text = re.sub(rf"\b{symbol}\b", name, text)
        return text


def fake_inputs(
    gm: fx.GraphModule,
    inputs: Sequence[Any] | None,
    names: Sequence[str] | None,
    given: dict[str, Any] | None,
) -> Inputs:
    """Make the fake inputs of a graph; see `fx2relax.capture.capture`.

    Args:
        gm: the graph.
        inputs: what the caller gave.
        names: what the caller calls them.
        given: the inputs of an exported program by name, with its own fake values.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    if inputs is None:
        if given is None:
            given = {n.name: _value(n) for n in placeholders}
        found = list(given.values())
        names = list(given) if names is None else names
        mode = detect_fake_mode([v for v in found if v is not None])
        if mode is None:
            raise ValueError("the graph carries no fake values: give its inputs")
        made = Inputs(mode, SymbolTable())
        leaves, made.spec = pytree.tree_flatten(found)
        paths = _paths(found, _names(gm, placeholders, names, len(found)))
    else:
        tree = list(inputs)
        structure = _codegen_spec(gm)
        expected = len(placeholders) if structure is None else len(tree)
        required = [n for n in placeholders if not n.args]
        if not min(len(required), expected) <= len(tree) <= expected:
            raise ValueError(
                f"the graph takes {expected} inputs ({', '.join(n.name for n in placeholders)}), "
                f"and {len(tree)} were given"
            )
        made = Inputs(fake_mode(), SymbolTable())
        made.mode.shape_env = made.mode.shape_env or ShapeEnv()
        leaves, made.spec = pytree.tree_flatten(tree, is_leaf=is_pair)
        makers = Maker(made, fixed_sizes(gm, leaves))
        leaves = [makers.value(leaf) for leaf in leaves]
        paths = _paths(tree, _names(gm, placeholders, names, len(tree)))
    _add(made, paths, leaves)
    return made


def add_leaves(
    made: Inputs, tree: Sequence[Any], names: Sequence[str], leaves: Sequence[Any]
) -> None:
    """Note the fake values of all leaves of a tree of inputs."""
    _add(made, _paths(tree, names), leaves)


def _add(made: Inputs, paths: Sequence[str], leaves: Sequence[Any]) -> None:
    for index, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        if isinstance(leaf, _DYNAMIC):
            made.flat.append(leaf)
            made.names.append(path)
        else:
            made.static[index] = leaf


def fake_mode() -> FakeTensorMode:
    env = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    return FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)


def _value(node: fx.Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def _codegen_spec(gm: fx.GraphModule) -> Any:
    """The input structure of a graph that flattens its own arguments; None for others."""
    info = getattr(getattr(gm.graph, "_codegen", None), "pytree_info", None)
    return None if info is None else info.in_spec


def _names(
    gm: fx.GraphModule, placeholders: Sequence[fx.Node], names: Sequence[str] | None, count: int
) -> list[str]:
    """One name per input; repeated ones are numbered."""
    if names is None:
        info = getattr(getattr(gm.graph, "_codegen", None), "pytree_info", None)
        own = [n.name for n in placeholders] if info is None else list(info.orig_args)
        names = [*own, *(f"input_{i}" for i in range(len(own), count))]
    if len(names) < count:
        raise ValueError(f"{count} inputs, but {len(names)} names")
    return list(names[:count])


def _paths(tree: Sequence[Any], names: Sequence[str]) -> list[str]:
    """A name for each leaf: ``x``, or ``x_0`` and ``x_mask`` for the parts of a nested input."""
    found: list[str] = []
    for name, value in zip(names, tree, strict=True):
        pairs, _ = pytree.tree_flatten_with_path(value, is_leaf=is_pair)
        for path, _leaf in pairs:
            parts = re.sub(r"\W+", "_", pytree.keystr(path)).strip("_")
            found.append(f"{name}_{parts}" if parts else name)
    return found


def is_pair(value: Any) -> bool:
    """Whether this is ``(shape, dtype)`` rather than a tuple of inputs."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return False
    shape, dtype = value
    if not isinstance(shape, (tuple, list)) or not all(_is_size(s) for s in shape):
        return False
    if isinstance(dtype, torch.dtype):
        return True
    name = str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    return isinstance(getattr(torch, name, None), torch.dtype)


def _is_size(value: Any) -> bool:
    return isinstance(value, (int, str, Dim, tirx.Var, tirx.IntImm)) and not isinstance(value, bool)


def fixed_sizes(module: torch.nn.Module, leaves: Sequence[Any]) -> set[int]:
    """The sizes of the weights and of the inputs, which a hint must not equal by accident."""
    sizes = {size for t in (*module.parameters(), *module.buffers()) for size in t.shape}
    for leaf in leaves:
        shape = leaf[0] if is_pair(leaf) else getattr(leaf, "shape", ())
        sizes.update(s for s in shape if isinstance(s, int))
    return sizes


class Maker:
    """Makes fake values of what the caller gave for the inputs."""

    def __init__(self, inputs: Inputs, avoid: set[int]) -> None:
        self.inputs = inputs
        self.hints = _hints(avoid)
        self.made: dict[Any, Any] = {}
        #: The bounds that were said of each symbol; PyTorch's own follow what it guards on.
        self.bounds: dict[Any, Any] = {}
        #: What was said of sizes besides their bounds, as PyTorch's guards.
        self.assumed: set[Any] = set()

    def value(self, leaf: Any) -> Any:
        mode = self.inputs.mode
        if isinstance(leaf, torch.Tensor):
            return mode.from_tensor(leaf.detach(), static_shapes=True)
        if isinstance(leaf, Tensor) or is_pair(leaf):
            shape, dtype = (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf
            with mode:
                return torch.empty([self.size(s) for s in shape], dtype=torch_dtype(dtype))
        if isinstance(leaf, (str, Dim, tirx.Var)):
            return self.size(leaf)
        if leaf is None or isinstance(leaf, (bool, int, float, complex, torch.dtype, torch.device)):
            return leaf
        raise ValueError(
            f"an input is a tensor, a (shape, dtype) pair, a size, a number or None, not {leaf!r}"
        )

    def size(self, size: Any) -> Any:
        """An int, or the SymInt of a name or variable."""
        size = const_int(size)
        if isinstance(size, int):
            return size
        # Variables are told apart by identity: two of one name are two sizes.
        key = size if isinstance(size, str) else ("var", hash(size), size.name)
        var = tirx.Var(size, "int64") if isinstance(size, str) else size
        return self.symbol(key, var)

    def symbol(self, key: Any, var: Any, known: Dim | None = None) -> Any:
        """The SymInt of a size, made on first use.

        Args:
            key: what tells sizes apart.
            var: the TIR variable that stands for it, and has its name.
            known: its bounds.
        """
        if key not in self.made:
            self.made[key] = self._symbol(var, known or Dim(var.name))
        return self.made[key]

    def _symbol(self, var: Any, known: Dim) -> Any:
        env: Any = self.inputs.mode.shape_env
        hint = self._hint(known)
        source = ConstantSource(f"__size_{len(self.made)}_{var.name}")
        bounds = None
        if known.min > 2 or known.max is not None:
            # PyTorch takes no size for 0 or 1 while it traces.
            most = known.max if known.max is not None else int_oo
            bounds = StrictMinMaxConstraint(False, ValueRanges(max(known.min, 2), max(most, 2)))
        symbol = env.create_symbol(
            hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=bounds
        )
        self.bounds[symbol] = env.var_to_range[symbol]
        self.inputs.symbols.bind(symbol, var)
        self.inputs.sizes[symbol] = str(var.name)
        size = env.create_symintnode(symbol, hint=hint, source=source)
        if known.multiple_of > 1:
            said = size % known.multiple_of == 0
            self.assumed.add(env.simplify(said.node.expr))
            torch._check(said)
            self.assumed.add(env.simplify(said.node.expr))
        return size

    def _hint(self, known: Dim) -> int:
        """A size that is allowed, and that no other one equals by accident."""
        for prime in self.hints:
            size = prime * known.multiple_of
            if known.max is not None and size > known.max:
                break
            if size >= known.min:
                return size
        step = known.multiple_of
        assert known.max is not None
        return max(known.max // step * step, 2)


def _hints(avoid: set[int]) -> Iterator[int]:
    """Primes that occur nowhere else, so that no size equals another by accident."""
    candidate = 11
    while True:
        candidate = int(sympy.nextprime(candidate))
        if candidate not in avoid:
            yield candidate


def torch_dtype(dtype: Any) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    return dtypes.to_torch(dtypes.as_tvm(dtype))
