"""Relax modules of several functions over one list of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from fx2relax.pipeline import build

SQUARE = {"w1": (8, 8), "w2": (8, 8)}
Body = Callable[..., Any]


class Script:
    """What a body writes with: `name = operator(...)` becomes ``s.name(operator(...))``."""

    def __init__(self, builder: Any, kernels: Mapping[str, Any], dataflow: bool) -> None:
        self.builder, self.kernels = builder, kernels
        self._var = relax.DataflowVar if dataflow else relax.Var

    def __getattr__(self, name: str) -> Any:
        def bind(expr: Any) -> Any:
            expr = self.builder.normalize(expr)
            var = self._var(name, expr.ty)
            self.builder.emit_normalized(relax.VarBinding(var, expr))
            return var

        return bind


def module(
    bodies: Mapping[str, Body],
    weights: Mapping[str, Sequence[Any]] | Mapping[str, Mapping[str, Sequence[Any]]] = SQUARE,
    x: Sequence[Any] = (4, 8),
    dtypes: Mapping[str, str] | None = None,
    dataflow: bool = True,
    kernels: Mapping[str, Any] | None = None,
    pure: bool = True,
) -> Any:
    """A module of functions `body(s, x, *weights)`.

    Args:
        bodies: by the functions' names.
        weights: shapes by name, a size that is a name being symbolic; or such a table for each
            function. A shape may end in a dtype.
        x: the shape of the functions' only input.
        dtypes: by function, float32 when left out.
        dataflow: whether the bindings are in a dataflow block.
        kernels: further functions.
        pure: whether no function has an effect.
    """
    builder = relax.BlockBuilder()
    known = {name: builder.add_func(func, name) for name, func in (kernels or {}).items()}
    for name, body in bodies.items():
        symbols: dict[str, Any] = {}
        own: Any = weights.get(name, weights)
        kind = (dtypes or {}).get(name, "float32")

        def tensor(shape: Any, kind: str = kind, symbols: dict[str, Any] = symbols) -> Any:
            *sizes, last = shape or [None]
            if last is not None and str(last).startswith(("float", "int", "bfloat", "bool")):
                kind = last
            elif shape:
                sizes = [*sizes, last]
            numbers = [
                symbols.setdefault(s, tirx.Var(s, "int64")) if isinstance(s, str) else s
                for s in sizes
            ]
            return relax.TensorType(numbers, kind)

        params = [relax.Var(n, tensor(s)) for n, s in {"x": x, **own}.items()]
        with builder.function(name, params, attrs={"num_input": 1}, pure=pure):
            script = Script(builder, known, dataflow)
            if dataflow:
                with builder.dataflow():
                    out = builder.emit_output(body(script, *params), "output")
            else:
                out = builder.emit(body(script, *params), "output")
            builder.emit_func_output(out)
    made = builder.get()
    assert relax.analysis.well_formed(made) in (None, True)
    return made


def values(shapes: Sequence[Sequence[int]], seed: int = 0, dtype: str = "float32") -> list[Any]:
    """Small integers as floats, so that sums in any order are equal."""
    rng = np.random.default_rng(seed)
    return [rng.integers(-4, 5, s).astype(dtype) for s in shapes]


def tensors(arrays: Sequence[Any]) -> list[Any]:
    """NumPy arrays as TVM's tensors."""
    return [tvm.runtime.tensor(a) for a in arrays]


def arrays(result: Any) -> list[Any]:
    """A function's result as a list of NumPy arrays."""
    return [result.numpy()] if hasattr(result, "numpy") else [r.numpy() for r in result]


def machine(mod: Any) -> Any:
    """A virtual machine for a module, its kernels generated."""
    return relax.VirtualMachine(build(mod, library="none"), tvm.cpu())


def assert_same_numbers(before: Any, shared: Any, x: Any, weights: Sequence[Any]) -> None:
    """Each function gives the same on the old weights as on what its transform makes of them."""
    relax.analysis.well_formed(shared.mod)
    old, new = machine(before), machine(shared.mod)
    given = tensors(weights)
    made = {t: new[t](given) for t in set(shared.transforms.values())}
    names = [g.name_hint for g, f in before.functions_items() if isinstance(f, relax.Function)]
    for name in names:
        if before[name].attrs is None or "num_input" not in before[name].attrs:
            continue
        after = made[shared.transforms[name]] if name in shared.transforms else given
        wanted = arrays(old[name](*tensors([x]), *given))
        got = arrays(new[name](*tensors([x]), *after))
        assert len(wanted) == len(got)
        for a, b in zip(wanted, got, strict=True):
            np.testing.assert_array_equal(a, b)
