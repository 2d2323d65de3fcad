"""Small artifacts for the tests of `fx2relax.deploy`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tvm
from tvm import relax, tirx

from fx2relax import _version, deploy
from fx2relax.deploy import Function, Manifest, Parameter, Result, Size, State, Weight
from fx2relax.deploy.structure import At, Several
from fx2relax.pipeline import lower, portable_code
from fx2relax.pipeline import target as targets

#: The weights of `mlp`.
WEIGHTS = {
    "fc.weight": np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4),
    "fc.bias": np.linspace(0, 1, 6, dtype=np.float32),
}
WIDE = Size("n", min=1, max=64)


class Builder:
    """Relax functions that share weights; sizes that are names are one variable in a function."""

    def __init__(self) -> None:
        self.builder = relax.BlockBuilder()

    def add(
        self,
        name: str,
        inputs: Sequence[tuple[str, Sequence[Any], str]],
        weights: Sequence[tuple[str, Sequence[Any], str]],
        body: Callable[..., Any],
    ) -> None:
        """A function whose results are what `body(builder, *parameters)` returns, a list.

        An input of dtype "shape" is a Relax shape of these sizes.
        """
        names: dict[str, Any] = {}

        def size(value: Any) -> Any:
            if isinstance(value, str):
                names.setdefault(value, tirx.Var(value, "int64"))
            return names.get(value, value)

        def parameter(row: tuple[str, Sequence[Any], str]) -> Any:
            sizes = [size(s) for s in row[1]]
            plain = row[2] == "shape"
            kind = relax.ShapeType(sizes) if plain else relax.TensorType(sizes, row[2])
            return relax.Var(row[0], kind)

        parameters = [parameter(row) for row in (*inputs, *weights)]
        builder = self.builder
        with builder.function(name, parameters, attrs={"num_input": len(inputs)}):
            with builder.dataflow():
                results = body(builder, *parameters)
                out = builder.emit_output(relax.Tuple([builder.normalize(r) for r in results]))
            builder.emit_func_output(out)

    def code(self, target: Any = None, lift: bool = True) -> bytes:
        """The library of all functions."""
        mod = lower(self.builder.get(), target=target, library="none", lift_weights=lift)
        code = portable_code(mod, target=target)
        assert isinstance(code, bytes)
        return code


def versions(target: Any = None) -> dict[str, Any]:
    """The fields of a manifest that every artifact has."""
    described, features = targets.described(target)
    return {
        "tvm": tvm.__version__,
        "fx2relax": _version.__version__,
        "torch": torch.__version__,
        "target": described,
        "cpu_features": features,
    }


def linear(builder: Any, x: Any, weight: Any, bias: Any) -> list[Any]:
    product = builder.emit(relax.op.matmul(x, builder.emit(relax.op.permute_dims(weight))))
    moved = builder.emit(relax.op.add(product, bias))
    shift = relax.const(np.arange(6, dtype=np.float32))
    return [builder.emit(relax.op.add(moved, shift))]


def values(*shape: int) -> np.ndarray[Any, Any]:
    """The same float32 numbers each time."""
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def close(a: Any, b: Any) -> None:
    """Assert that two arrays of float32 differ by their rounding alone."""
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def expected(x: np.ndarray[Any, Any], weights: Any = WEIGHTS) -> np.ndarray[Any, Any]:
    """What the functions of `mlp` return."""
    return x @ weights["fc.weight"].T + weights["fc.bias"] + np.arange(6, dtype=np.float32)


def mlp(target: Any = None) -> tuple[bytes, Manifest]:
    """Two functions over one weight set, each with a transform of its own; one is symbolic."""
    made = Builder()
    rows = [("fc.weight", (6, 4), "float32"), ("fc.bias", (6,), "float32")]
    functions = []
    for name, count in (("prefill", "n"), ("decode", 1)):
        made.add(name, [("x", (count, 4), "float32")], rows, linear)
        functions.append(
            Function(
                name=name,
                parameters=(Parameter("x", shape=(count, 4), dtype="float32"),),
                arguments=(("x", At(0)),),
                results=(Result(shape=(count, 6), dtype="float32"),),
                output=Several("tuple", (At(0),)) if name == "prefill" else At(0),
                weights=("fc.weight", "fc.bias"),
                transform=f"{name}_transform_params",
            )
        )
    manifest = Manifest(
        functions=tuple(functions),
        weights=tuple(Weight(*row) for row in rows),
        sizes=(WIDE,),
        **versions(),
    )
    return made.code(target), manifest


def counter() -> tuple[bytes, Manifest]:
    """A state that grows, an argument that is written to, and a size that no tensor shows."""
    made = Builder()

    def step(builder: Any, x: Any, total: Any) -> list[Any]:
        grown = builder.emit(relax.op.add(total, x))
        doubled = builder.emit(relax.op.multiply(grown, relax.const(2, "float32")))
        return [doubled, builder.emit(relax.op.negative(x)), grown]

    def line(builder: Any, count: Any, scale: Any) -> list[Any]:
        ones = builder.emit(relax.op.full(count, relax.const(1, "float32"), "float32"))
        return [builder.emit(relax.op.multiply(ones, scale))]

    made.add("step", [("x", (3,), "float32"), ("total", (3,), "float32")], [], step)
    made.add("line", [("count", ("m",), "shape"), ("scale", (), "float32")], [], line)
    vector = Result(shape=(3,), dtype="float32")
    manifest = Manifest(
        functions=(
            Function(
                name="step",
                parameters=(
                    Parameter("x", shape=(3,), dtype="float32"),
                    Parameter("total", kind="state"),
                ),
                arguments=(("x", At(0)),),
                results=(
                    vector,
                    Result(shape=(3,), dtype="float32", argument=0),
                    Result(shape=(3,), dtype="float32", state="total"),
                ),
                output=At(0),
            ),
            Function(
                name="line",
                parameters=(
                    Parameter("count", kind="size", shape=("m",)),
                    Parameter("scale", shape=(), dtype="float32"),
                ),
                arguments=(("count", At(0)), ("scale", At(1))),
                results=(Result(shape=("m",), dtype="float32"),),
                output=At(0),
            ),
        ),
        states=(State("total", (3,), "float32"),),
        sizes=(Size("m", multiple_of=2),),
        **versions(),
    )
    return made.code(lift=False), manifest


def saved(folder: Path, made: tuple[bytes, Manifest], weights: Any = None) -> Path:
    """An artifact in a folder."""
    deploy.save(folder, made[0], WEIGHTS if weights is None else weights, made[1])
    return folder
