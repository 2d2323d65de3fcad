"""Calls of an operator that are alike have one kernel, and no others do."""

import pytest
import tvm_ffi

from fx2relax.compat import op, relax, tirx
from fx2relax.pipeline import repeats
from fx2relax.pipeline.flow import name_of
from fx2relax.pipeline.legalize import legalize


def _legal(emit):
    """The kernels called by a function of two (4, 6) tensors and one (4, 1)."""
    builder = relax.BlockBuilder()
    types = [relax.TensorType(sizes, "float32") for sizes in ([4, 6], [4, 6], [4, 1])]
    params = [relax.Var(name, type_) for name, type_ in zip("xyz", types, strict=True)]
    with builder.function("main", params):
        with builder.dataflow():
            outs = [builder.emit(value) for value in emit(*params)]
            out = builder.emit_output(relax.Tuple(outs))
        builder.emit_func_output(out)
    mod = legalize(builder.get())
    values = [b.value for block in mod["main"].body.blocks for b in block.bindings]
    calls = [v for v in values if name_of(v) == "relax.call_tir"]
    return mod, [(str(v.args[0].name_hint), [str(x) for x in v.args[1].fields]) for v in calls]


def test_calls_that_are_alike_have_one_kernel(monkeypatch):
    made = []
    monkeypatch.setattr(
        repeats._Made, "call", lambda *a, old=repeats._Made.call: made.append(a) or old(*a)
    )
    _, calls = _legal(lambda x, y, z: [op.subtract(x, y), op.subtract(y, x), op.subtract(x, y)])
    assert calls == [("subtract", ["x", "y"]), ("subtract", ["y", "x"]), ("subtract", ["x", "y"])]
    assert len(made) == 2


@pytest.mark.parametrize(
    "emit",
    [
        lambda x, y, z: [op.add(x, y), op.add(x, x)],
        lambda x, y, z: [op.add(x, y), op.add(x, z), op.add(z, x)],
        lambda x, y, z: [op.add(x, relax.const(n, "float32")) for n in (0.0, -0.0, 1.0, 2.0)],
        lambda x, y, z: [op.sum(x, axis=n, keepdims=k) for n in (0, 1) for k in (False, True)],
        lambda x, y, z: [op.astype(x, "float64"), op.astype(x, "int32"), op.astype(z, "int32")],
        lambda x, y, z: [op.concat([x, y], 1), op.concat([x, x], 1), op.concat([x, z], 1)],
        lambda x, y, z: [op.reshape(x, n) for n in ([24], [6, 4], [2, 12])],
        lambda x, y, z: [op.broadcast_to(z, [4, n]) for n in (2, 3)],
    ],
)
def test_others_have_their_own(emit, monkeypatch):
    """What is made is what TVM makes of each call by itself."""
    kept, calls = _legal(emit)
    monkeypatch.setattr(repeats.Repeats, "once", lambda self, rule: rule)
    each, alone = _legal(emit)
    assert calls == alone
    assert tvm_ffi.structural_equal(kept, each)


def test_sizes_that_are_symbols_are_left_to_the_rule():
    x = relax.Var("x", relax.TensorType([n := tirx.Var("n", "int64"), 4]))
    y = relax.Var("y", relax.TensorType([1, 4]))
    for call in (op.abs(x), op.broadcast_to(y, relax.ShapeExpr([n, 4]))):
        assert repeats._Described(call).key() is None
