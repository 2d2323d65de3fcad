"""Artifacts whose functions take and give structures, constants, sizes, and any dtype."""

from __future__ import annotations

import deploy_cases as cases
import numpy as np
import pytest
import torch
from deploy_cases import close, values

from fx2relax import deploy
from fx2relax.deploy import Function, Manifest, Parameter, Result, Size, State, Weight
from fx2relax.deploy.structure import Argument, At, Constant, Keyed, Several, SizeOf
from fx2relax.errors import ArgumentError


def test_structures_constants_and_symbolic_weights(tmp_path):
    """A dict and tuples, a tied weight, a constant, a derived size, and one width for all."""
    made = cases.Builder()

    def body(builder, first, second, weight):
        both = builder.emit(tvm_op().concat([first, second], axis=0))
        scaled = builder.emit(tvm_op().multiply(both, weight))
        return [scaled, builder.emit(tvm_op().negative(first)), weight]

    shapes = [("first", ("n", "k"), "float32"), ("second", ("n", "k"), "float32")]
    made.add("run", shapes, [("w", ("k",), "float32")], body)
    tensor = {"shape": ("n", "k"), "dtype": "float32"}
    function = Function(
        name="run",
        parameters=(Parameter("first", **tensor), Parameter("second", **tensor)),
        arguments=(
            ("pair", Keyed((("a", At(0)), ("b", Several("tuple", (At(1),)))))),
            ("mode", Constant("sum")),
        ),
        results=(
            Result(shape=("2 * n", "k"), dtype="float32"),
            Result(**tensor),
            Result(shape=("k",), dtype="float32"),
        ),
        output=Keyed(
            (
                ("all", Several("list", (At(0), At(1)))),
                ("rows", SizeOf("2 * n")),
                ("same", Argument(0)),
                ("none", Constant(None)),
                ("weight", At(2)),
            )
        ),
        weights=("tied",),
    )
    manifest = Manifest(
        functions=(function,),
        weights=(Weight("w", ("k",), "float32"), Weight("tied", ("k",), "float32", same_as="w")),
        sizes=(Size("n"), Size("k")),
        **cases.versions(),
    )
    deploy.save(tmp_path / "a", made.code(lift=False), {"w": values(5)}, manifest)
    artifact = deploy.load(tmp_path / "a")
    assert len(artifact.weights) == 2
    close(artifact.weights["tied"], values(5))
    x, y = values(2, 5), values(2, 5) + 1
    found = artifact.run({"a": x, "b": (y,)})
    close(found["all"][0], np.concatenate([x, y]) * values(5))
    close(found["all"][1], -x)
    assert found["rows"] == 4
    assert found["same"] is x
    assert found["none"] is None
    found["weight"][:] = 0  # a copy: the weights stay
    close(artifact.weights["w"], values(5))
    for given, message in (
        ({"a": x}, r"'pair': expected a dict with the keys \['a', 'b'\]"),
        ({"a": x, "b": [y, y]}, r"\"pair\['b'\]\": expected a tuple of 1, got a list of 2"),
        ({"a": x, "b": (values(3, 5),)}, r"'n' is 3 in axis 0 of .*\['b'\]\[0\].* and 2 in axis 0"),
        ({"a": values(2, 3), "b": (values(2, 3),)}, "'k' is 3 in axis 1 .* and 5 in the weights"),
    ):
        with pytest.raises(ArgumentError, match=message):
            artifact.run(given)
    with pytest.raises(ArgumentError, match="exported for 'sum', got 'mean'"):
        artifact.run({"a": x, "b": (y,)}, mode="mean")
    artifact.weights.load_state_dict({"tied": values(3)})  # another width, the same library
    x = values(1, 3)
    close(artifact.run({"a": x, "b": (x,)})["all"][0], np.concatenate([x, x]) * values(3))


def tvm_op():
    from tvm import relax

    return relax.op


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "bool", "int64", "float8_e4m3fn"])
def test_dtypes(tmp_path, dtype):
    """Arguments, results, weights and states of dtypes that NumPy does not have."""
    from fx2relax.deploy.dtypes import numpy_dtype

    made = cases.Builder()

    def body(builder, x, state, weight):
        row = builder.emit(tvm_op().reshape(x, (1, 3)))
        return [builder.emit(tvm_op().concat([row, weight], axis=0)), x]

    shape = {"shape": (3,), "dtype": dtype}
    rows = [("x", (3,), dtype), ("s", (3,), dtype)]
    made.add("run", rows, [("w", (2, 3), dtype)], body)
    function = Function(
        name="run",
        parameters=(Parameter("x", **shape), Parameter("s", kind="state")),
        arguments=(("x", At(0)),),
        results=(Result(shape=(3, 3), dtype=dtype), Result(**shape, state="s")),
        output=At(0),
        weights=("w",),
    )
    manifest = Manifest(
        functions=(function,),
        weights=(Weight("w", (2, 3), dtype),),
        states=(State("s", (3,), dtype, zeros=True),),
        **cases.versions(),
    )
    kind = numpy_dtype(dtype)
    weight, x = np.array([[0, 1, 2], [3, 1, 0]]).astype(kind), np.array([1, 0, 2]).astype(kind)
    deploy.save(tmp_path / "a", made.code(lift=False), [("w", weight)], manifest)
    artifact = deploy.load(tmp_path / "a")
    found = artifact.run(x)
    assert found.dtype == kind
    assert (found == np.concatenate([x[None], weight])).all()
    assert (artifact.states["s"] == x).all()
    assert (artifact.weights["w"] == weight).all()
    if dtype not in ("bool", "float8_e4m3fn"):
        given = torch.tensor([1, 0, 2], dtype=getattr(torch, dtype))
        assert (artifact.run(given) == found).all()
        assert deploy.load(tmp_path / "a", out="torch").run(given).dtype is given.dtype
