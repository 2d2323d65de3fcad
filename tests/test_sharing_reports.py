"""What a shared transform finds that TVM's does not, and what it says of the rest."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from sharing_cases import SQUARE, assert_same_numbers, module, values
from tvm import relax, te, tirx

from fx2relax.pipeline import SharedWeightsError, lift_weights, share_transforms

op = relax.op
T = op.permute_dims
ONE = {"w": (8, 8)}


def checked(mod, shared, weights=ONE, x=(4, 8)):
    x, *given = values([x, *weights.values()])
    assert_same_numbers(mod, shared, x, given)


def why(shared, name):
    return next(k.why for k in shared.kept if k.name == name)


def plain(s, x, w):
    return op.matmul(x, s.w_t(T(w)))


def test_an_expression_written_twice():
    def twice(s, x, w):
        first = s.y(op.matmul(x, s.w_t(T(w))))
        return op.matmul(first, s.again(T(w)))

    mod = module({"func1": twice, "func2": plain}, ONE)
    shared = share_transforms(mod)
    assert shared.weights("func1") == ["w_t"]
    assert len(shared.lifted) == 1
    checked(mod, shared)


def test_a_match_cast_of_an_input():
    def body(s, x, w):
        y = s.y(op.matmul(x, s.w_t(T(w))))
        flat = s.builder.emit(op.reshape(y, [-1]))
        return s.builder.match_cast(flat, relax.TensorType([tirx.Var("m", "int64")], "float32"))

    mod = module({"func1": body, "func2": body}, ONE)
    shared = share_transforms(mod)
    assert shared.weights("func1") == ["w_t"]
    checked(mod, shared)


def test_a_match_cast_of_a_weight():
    def body(s, x, w):
        seen = s.builder.match_cast(w, relax.TensorType([8, 8], "float32"))
        return op.matmul(x, s.w_t(T(seen)))

    mod = module({"func1": body, "func2": body}, ONE)
    shared = share_transforms(mod)
    assert shared.weights("func1") == ["w_t"]
    checked(mod, shared)


def test_outside_dataflow_blocks():
    mod = module({"func1": plain, "func2": plain}, ONE, dataflow=False)
    shared = share_transforms(mod)
    assert shared.weights("func2") == ["w_t"]
    checked(mod, shared)


def test_a_chain_is_one_result():
    def body(s, x, w, v):
        joined = s.joined(op.concat([w, v], axis=0))
        return op.matmul(x, s.turned(T(joined)))

    weights = {"w": (8, 8), "v": (3, 8)}
    mod = module({"func1": body, "func2": body}, weights)
    shared = share_transforms(mod)
    (lifted,) = shared.lifted
    assert (lifted.name, lifted.bytes, lifted.sources) == ("turned", 11 * 8 * 4, ("w", "v"))
    assert lifted.what == "permute_dims(concat(w, v))"
    assert shared.weights("func1") == ["turned"]
    checked(mod, shared, weights)


def test_a_step_of_a_chain_that_all_do():
    def longer(s, x, w):
        return op.matmul(x, s.negative(op.negative(s.w_t(T(w)))))

    mod = module({"func1": plain, "func2": longer}, ONE)
    shared = share_transforms(mod)
    assert shared.weights("func2") == ["w_t"]
    assert why(shared, "negative") == "only in func2; func1 uses w in another way"
    checked(mod, shared)


def test_parts_of_a_split_weight():
    def body(s, x, w):
        parts = s.parts(op.split(w, 2, axis=1))
        left = s.left(op.matmul(x, s.first(relax.TupleGetItem(parts, 0))))
        return op.add(left, s.right(op.matmul(x, s.second(relax.TupleGetItem(parts, 1)))))

    def part(s, x, w):
        return op.matmul(x, s.first(relax.TupleGetItem(s.parts(op.split(w, 2, axis=1)), 0)))

    mod = module({"func1": body, "func2": part}, ONE)
    shared = share_transforms(mod)
    assert shared.weights("func2") == ["first", "second"]
    checked(mod, shared)


def test_generated_parameters():
    """The gate and up projections of a Llama MLP as one, written by the user."""

    def mlp(s, x, gate, up, down):
        weight = s.gate_up_proj_weights(op.concat([gate, up], axis=0))
        both = s.both(op.matmul(x, s.gate_up_t(T(weight))))
        parts = s.parts(op.split(both, 2, axis=-1))
        gate, up = (s.part(relax.TupleGetItem(parts, n)) for n in (0, 1))
        inner = s.inner(op.multiply(s.relu(op.nn.relu(gate)), up))
        return op.matmul(inner, s.down_t(T(down)))

    weights = {"gate_proj.weight": (16, 8), "up_proj.weight": (16, 8), "down_proj.weight": (8, 16)}
    mod = module({"forward": mlp}, weights, x=("batch_size", 8))
    shared = lift_weights(mod)
    assert shared.weights("forward") == ["gate_up_t", "down_t"]
    checked(mod, shared, weights)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int32", "bool"])
def test_dtypes(dtype):
    weights = {"w": (8, 8, dtype)}
    body = lambda s, x, w: op.matmul(x, s.cast(op.astype(s.w_t(T(w)), "float32")))  # noqa: E731
    shared = share_transforms(module({"func1": body}, weights))
    factor = {"float64": 4, "int32": 4, "float16": 2, "bfloat16": 2, "bool": 1}[dtype]
    if factor >= 2:
        assert [x.name for x in shared.lifted] == ["cast"]
    else:
        assert [x.name for x in shared.lifted] == ["w_t"]
        assert "more than 2 times" in why(shared, "cast")


def test_a_broadcast_stays():
    def body(s, x, row):
        wide = s.wide(op.broadcast_to(s.negative(op.negative(row)), [4, 8]))
        return op.add(x, wide)

    weights = {"row": (1, 8)}
    mod = module({"func1": body, "func2": body}, weights)
    shared = share_transforms(mod)
    assert shared.weights("func1") == ["negative"]
    assert (
        why(shared, "wide") == "it is more than 2 times as large as the weights that it comes from"
    )
    checked(mod, shared, weights)


def test_what_is_large_on_the_way_is_lifted():
    def body(s, x, row):
        wide = s.wide(op.broadcast_to(row, [40, 8]))
        return op.add(x, s.total(op.sum(wide, axis=[0])))

    weights = {"row": (1, 8)}
    mod = module({"func1": body}, weights)
    shared = share_transforms(mod)
    assert shared.weights("func1") == ["total"]
    checked(mod, shared, weights)


def test_a_weight_in_another_order_that_is_needed_as_it_is():
    def tied(s, x, w):
        return op.matmul(s.y(op.matmul(x, w)), s.w_t(T(w)))

    mod = module({"func1": tied, "func2": tied}, ONE)
    shared = share_transforms(mod)
    assert why(shared, "w_t") == "it shows w, which is needed as it is, in another order"
    assert shared.mod is mod


def test_effects_and_callbacks():
    def body(s, x, w):
        drawn = s.drawn(op.call_pure_packed("test.noise", w, ty_args=w.ty))
        held = s.held(op.builtin.stop_lift_params(w))
        y = s.y(op.matmul(x, s.drawn_t(T(drawn))))
        return op.add(y, s.z(op.matmul(x, held)))

    shared = share_transforms(module({"func1": body}, ONE))
    assert why(shared, "drawn") == "test.noise may draw random numbers or have an effect"
    assert why(shared, "drawn_t") == "it reads drawn, which stays"
    assert why(shared, "held") == "held by stop_lift_params"


def test_what_has_an_effect_stays_and_is_done():
    def printing(s, x, w):
        s.printed(op.print(w, format="{}"))
        return op.matmul(x, s.w_t(T(w)))

    shared = share_transforms(module({"func1": printing}, ONE, dataflow=False, pure=False))
    assert why(shared, "printed") == "it has an effect"
    assert "relax.print" in str(shared.mod["func1"]) or "R.print" in shared.mod["func1"].script()
    assert [x.name for x in shared.lifted] == []  # what is printed is the weight as it was


def test_a_mutation_stays():
    def body(s, x, w):
        filled = op.call_inplace_packed("test.fill", w, inplace_indices=[0], ty_args=w.ty)
        return op.matmul(x, s.turned(T(s.filled(filled))))

    shared = share_transforms(module({"func1": body}, ONE))
    assert why(shared, "filled") == "test.fill may draw random numbers or have an effect"
    assert why(shared, "turned") == "it reads filled, which stays"


def test_sizes_that_depend_on_data():
    def body(s, x, w):
        found = s.found(op.nonzero(w))
        return op.add(x, s.count(op.astype(op.sum(found), "float32")))

    mod = module({"func1": body}, ONE)
    shared = share_transforms(mod)
    assert why(shared, "found") == "its size depends on data"
    assert shared.mod is mod


def test_branches():
    builder = relax.BlockBuilder()
    x, flag = (
        relax.Var(n, t)
        for n, t in (
            ("x", relax.TensorType([8, 8], "float32")),
            ("flag", relax.TensorType([], "bool")),
        )
    )
    w = relax.Var("w", relax.TensorType([8, 8], "float32"))
    inner = relax.BlockBuilder()

    def branch(expr):
        value = inner.normalize(expr)
        var = relax.Var("inside", value.ty)
        return relax.SeqExpr([relax.BindingBlock([relax.VarBinding(var, value)])], var)

    with builder.function("main", [x, flag, w], attrs={"num_input": 2}):
        chosen = builder.emit(relax.If(flag, branch(T(w)), branch(op.negative(x))), "chosen")
        turned = builder.emit(op.negative(w), "turned")
        builder.emit_func_output(builder.emit(op.add(chosen, turned)))
    shared = share_transforms(builder.get())
    assert [x.name for x in shared.lifted] == ["turned"]
    assert why(shared, "inside") == "it is inside a branch or a function, chosen"
    assert next(k for k in shared.kept).what == "permute_dims(w)"
    relax.analysis.well_formed(shared.mod)


def test_kernels_that_are_equal_but_for_their_names():
    def kernel(name, factor):
        a = te.placeholder((8, 8), "float32", name="a")
        func = te.create_prim_func([a, te.compute((8, 8), lambda i, j: a[j, i] * factor)])
        return func.with_attr("global_symbol", name)  # else a builder makes one of equal ones

    factors = {"turn1": 2.0, "turn2": 2.0, "other": 3.0}
    kernels = {name: kernel(name, factor) for name, factor in factors.items()}

    def calling(name):
        def body(s, x, w):
            return op.matmul(x, s.w_t(op.call_tir(s.kernels[name], [w], w.ty)))

        return body

    bodies = {"func1": calling("turn1"), "func2": calling("turn2")}
    mod = module(bodies, ONE, kernels=kernels)
    shared = share_transforms(mod)
    assert shared.weights("func1") == ["w_t"]
    checked(mod, shared)
    shared = share_transforms(module({**bodies, "func3": calling("other")}, ONE, kernels=kernels))
    assert shared.lifted == ()


def test_constants_are_no_weights():
    def body(s, x, w):
        ones = s.ones(op.ones([8, 8], "float32"))
        y = s.y(op.matmul(x, s.more(op.add(s.w_t(T(w)), ones))))
        return op.add(y, s.z(op.matmul(x, ones)))

    mod = module({"func1": body, "func2": body}, ONE)
    shared = share_transforms(mod)
    assert shared.weights("func1") == ["more"]
    checked(mod, shared)


def test_names_that_are_taken_or_made_up():
    def body(s, x, w):
        y = s.y(op.matmul(x, s.turned(T(w))))
        z = s.z(op.matmul(y, s.turned(op.multiply(w, w))))
        made = s.builder.emit(op.negative(w))
        return op.add(z, s.u(op.matmul(s.v(op.matmul(x, made)), s.t_3(T(s.abs(op.abs(w)))))))

    mod = module({"func1": body}, ONE)
    shared = share_transforms(mod)
    assert shared.weights("func1") == ["turned", "turned_1", "w_negative", "w_t"]
    checked(mod, shared)


def test_a_weight_that_is_the_result():
    def body(s, x, w):
        return s.w_t(T(w))

    def raw(s, x, w):
        return w

    mod = module({"func1": body, "func2": body}, ONE)
    shared = share_transforms(mod)
    checked(mod, shared)
    mod = module({"func1": raw, "func2": body}, ONE)
    assert share_transforms(mod).lifted == ()


def test_a_caller_of_the_function():
    builder = relax.BlockBuilder(module({"func1": plain}, ONE))
    a, w = (relax.Var(n, relax.TensorType([k, 8], "float32")) for n, k in (("a", 4), ("w", 8)))
    callee = builder.get().get_global_vars()[0]
    with builder.function("main", [a, w]):
        builder.emit_func_output(builder.emit(relax.Call(callee, [a, w])))
    with pytest.raises(SharedWeightsError, match="'main' calls 'func1'"):
        share_transforms(builder.get())


def symbolic(s, x, w, b):
    return op.add(s.y(op.matmul(x, s.w_t(T(w)))), b)


@pytest.mark.parametrize("size", [1, 3, 0])
def test_symbolic_weights_whose_sizes_stay_visible(size):
    weights = {"w": ("n", 4), "b": ("n",)}
    mod = module({"func1": symbolic, "func2": symbolic}, weights, x=("rows", 4))
    shared = share_transforms(mod)
    assert shared.weights("func1") == ["b", "w_t"]
    x, *given = values([(5, 4), (size, 4), (size,)])
    if size:
        assert_same_numbers(mod, shared, x, given)
    relax.analysis.well_formed(shared.mod)


def test_symbolic_weights_whose_sizes_are_passed_on():
    def body(s, x, w, v):
        y = s.y(op.matmul(x, s.both_t(T(s.both(op.concat([w, v], axis=0))))))
        return op.reshape(y, [y.ty.shape[0], 2, w.ty.shape[0]])

    weights = {"w": ("n", 4), "v": ("n", 4)}
    mod = module({"func1": body, "func2": body}, weights, x=("rows", 4))
    shared = share_transforms(mod)
    assert shared.weights("func1") == ["weight_sizes", "both_t"]
    x, *given = values([(5, 4), (3, 4), (3, 4)])
    assert_same_numbers(mod, shared, x, given)


def test_symbols_of_the_same_name_are_two_sizes():
    def first(s, x, w, b):
        return s.y(op.matmul(x, s.w_t(T(w))))

    n, m = tirx.Var("n", "int64"), tirx.Var("n", "int64")
    one = module({"func1": first}, {"w": ("n", 4), "b": ("n",)}, x=("rows", 4))
    two = module({"func2": first}, {"w": ("n", 4), "b": ("m",)}, x=("rows", 4))
    both = tvm.IRModule({"func1": one["func1"], "func2": two["func2"]})
    assert not n.same_as(m)
    with pytest.raises(SharedWeightsError, match=r"shape: 'b' is \(n,?\) float32 in func1"):
        share_transforms(both)


def test_zero_sized_and_0d_weights():
    def body(s, x, w, scale):
        none = s.none(op.sum(s.none_t(T(w)), axis=[0, 1]))
        return op.multiply(s.shifted(op.add(x, none)), s.negative(op.negative(scale)))

    weights = {"w": (0, 8), "scale": ()}
    mod = module({"func1": body}, weights)
    shared = share_transforms(mod)
    checked(mod, shared, weights)


def test_nan_and_infinity_survive():
    def body(s, x, w):
        return op.add(x, s.more(op.multiply(w, w)))

    weights = {"w": (8,)}
    mod = module({"func1": body}, weights)
    x, _ = values([(4, 8), (8,)])
    given = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1, 2, 3], "float32")
    assert_same_numbers(mod, share_transforms(mod), x, [given])


def test_the_module_is_not_changed():
    mod = module({"func1": plain}, ONE)
    text = mod.script()
    share_transforms(mod)
    lift_weights(mod, False)
    assert mod.script() == text
    assert tvm_ffi.structural_equal(mod, module({"func1": plain}, ONE))
    assert SQUARE
