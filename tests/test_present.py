"""Kernels that hold nothing for a rewriter are left alone, and no others."""

import pytest
import tvm
from tvm import tirx

from fx2relax.compat import op, relax
from fx2relax.pipeline import codegen, lower, shared, tir
from fx2relax.pipeline.present import always, present
from fx2relax.pipeline.target import as_target


def body(value, dtype="float32"):
    """A store of what is made of an element."""
    x, y = (tirx.decl_buffer((8,), dtype, name) for name in "xy")
    i = tirx.Var("i", "int32")
    store = tirx.BufferStore(y, value(tirx.BufferLoad(x, [i]), i), [i])
    return tirx.For(i, tirx.const(0, "int32"), tirx.const(8, "int32"), tirx.ForKind.SERIAL, store)


def test_a_node_is_found_wherever_it_is():
    inside = body(lambda x, i: tirx.Select(i < 3, tirx.exp(x + 1.0), x))
    assert present(inside, {tirx.Select: always})
    assert present(inside, {tirx.LT: always})
    assert present(inside, {tvm.ir.Call: lambda call: call.op.name == "tirx.exp"})
    assert not present(inside, {tvm.ir.Call: lambda call: call.op.name == "tirx.log"})
    assert not present(inside, {tirx.Let: always, tirx.Mul: always})


def test_the_first_that_is_found_ends_the_walk():
    asked = []

    def first(node):
        asked.append(node)
        return True

    assert present(body(lambda x, i: x + x + x + x), {tirx.Add: first})
    assert len(asked) == 1


def compiled(monkeypatch, dtype, build, walks):
    """The kernels of a function as LLVM is given them, and what was rewritten."""
    rewritten = []

    def told(stmt, wanted):
        found = True if walks else present(stmt, wanted)
        rewritten.append(found)
        return found

    monkeypatch.setattr(tir, "present", told)
    monkeypatch.setattr(codegen, "present", told)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([3, 37], dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(build(x))
        builder.emit_func_output(out)
    target = as_target(None)
    mod = lower(builder.get(), library="none", target=target)
    mod = relax.transform.AttachGlobalSymbol()(mod)
    kernels = {g: f for g, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)}
    done = shared._lowered(tvm.IRModule(kernels), target, codegen.NAME)
    return [f.body for _, f in done.functions_items()], rewritten


CASES = {
    "copy": ("float32", op.permute_dims),
    "sum": ("float32", lambda x: op.sum(op.multiply(x, x), 1)),
    "gelu": ("float32", op.nn.gelu),
    "half": ("bfloat16", lambda x: op.add(op.exp(x), x)),
    "integers": ("int32", lambda x: op.multiply(op.add(x, x), x)),
    "rounded": ("int64", lambda x: op.floor_divide(x, x)),
    "joined": ("float32", lambda x: op.concat([x, op.negative(x)], 1)),
    "double": ("float64", lambda x: op.tanh(op.nn.softmax(x, 1))),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_walked_through_would_not_change(name, monkeypatch):
    dtype, build = CASES[name]
    every, all_walked = compiled(monkeypatch, dtype, build, walks=True)
    some, walked = compiled(monkeypatch, dtype, build, walks=False)
    assert all(all_walked)
    assert not all(walked), "there is something to be spared in each of these"
    for a, b in zip(every, some, strict=True):
        tvm.ir.assert_structural_equal(a, b, map_free_vars=True)
