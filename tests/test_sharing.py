"""One transform of the weights for several functions.

The first tests are twins of those of TVM's `LiftTransformParams(shared_transform=...)`.
"""

import pytest
import tvm_ffi
from sharing_cases import SQUARE, assert_same_numbers, module, values
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from fx2relax.errors import Fx2RelaxError
from fx2relax.pipeline import SharedWeightsError, lift_weights, share_transforms

op = relax.op
T = op.permute_dims


def both(combine):
    """Two products with the transposes of both weights."""

    def body(s, x, w1, w2):
        y1 = s.y1(op.matmul(x, s.w1_t(T(w1))))
        return combine(y1, s.y2(op.matmul(x, s.w2_t(T(w2)))))

    return body


def both_backwards(s, x, w1, w2):
    w2_t = s.w2_t(T(w2))
    w1_t = s.w1_t(T(w1))
    return op.add(s.y1(op.matmul(x, w1_t)), s.y2(op.matmul(x, w2_t)))


def only(which):
    def body(s, x, w1, w2):
        name, weight = (("w1_t", w1), ("w2_t", w2))[which]
        return op.matmul(x, getattr(s, name)(T(weight)))

    return body


def checked(mod, shared, weights=((8, 8), (8, 8)), x=(4, 8), dtype="float32"):
    x, *given = values([x, *weights], dtype=dtype)
    assert_same_numbers(mod, shared, x, given)


def why(shared, name):
    return next(k.why for k in shared.kept if k.name == name)


def test_identical_transforms():
    mod = module({"func1": both(op.add), "func2": both(op.multiply)})
    shared = share_transforms(mod)
    assert shared.weights("func1") == shared.weights("func2") == ["w1_t", "w2_t"]
    assert shared.transforms == {"func1": "transform_params", "func2": "transform_params"}
    assert [str(x) for x in shared.lifted] == [
        "w1_t = permute_dims(w1)  (256 bytes; func1, func2)",
        "w2_t = permute_dims(w2)  (256 bytes; func1, func2)",
    ]
    assert shared.kept == ()
    checked(mod, shared)


def test_the_module_is_the_one_that_tvm_documents():
    @I.ir_module
    class Expected:
        @R.function
        def transform_params(
            params: R.Tuple(R.Tensor((8, 8), "float32"), R.Tensor((8, 8), "float32")),
        ):
            R.func_attr({"num_input": 0})
            with R.dataflow():
                w1 = params[0]
                w1_t = R.permute_dims(w1)
                w2 = params[1]
                w2_t = R.permute_dims(w2)
                output = (w1_t, w2_t)
                R.output(output)
            return output

        @R.function
        def func1(
            x: R.Tensor((4, 8), "float32"),
            w1_t: R.Tensor((8, 8), "float32"),
            w2_t: R.Tensor((8, 8), "float32"),
        ) -> R.Tensor((4, 8), "float32"):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                y1 = R.matmul(x, w1_t)
                y2 = R.matmul(x, w2_t)
                output = R.add(y1, y2)
                R.output(output)
            return output

    shared = share_transforms(module({"func1": both(op.add)}))
    for name in ("func1", "transform_params"):
        plain = shared.mod[name].without_attr("fx2relax.transforms")
        assert tvm_ffi.structural_equal(plain, Expected[name]), name


def test_intersecting_transforms():
    def fused(s, x, w1, w2):
        y1 = s.y1(op.matmul(x, s.w1_t(T(w1))))
        return op.add(y1, s.y2(op.matmul(x, w2)))  # the weight itself

    mod = module({"func1": both(op.add), "func2": fused})
    shared = share_transforms(mod)
    assert shared.weights("func1") == shared.weights("func2") == ["w2", "w1_t"]
    assert why(shared, "w2_t") == "only in func1; func2 uses w2 in another way"
    checked(mod, shared)


def test_differently_ordered_bindings():
    mod = module({"func1": both_backwards, "func2": both(op.multiply)})
    shared = share_transforms(mod)
    assert shared.weights("func1") == shared.weights("func2") == ["w2_t", "w1_t"]
    checked(mod, shared)


def test_the_order_is_that_of_the_names_and_not_of_the_module():
    mod = module({"func2": both(op.multiply), "func1": both_backwards})
    assert share_transforms(mod).weights("func2") == ["w2_t", "w1_t"]
    assert share_transforms(mod, ["func2", "func1"]).weights("func2") == ["w2_t", "w1_t"]


def test_functions_that_become_identical_are_both_kept():
    mod = module({"func1": both_backwards, "func2": both(op.add)})
    shared = share_transforms(mod)
    names = [g.name_hint for g in shared.mod.get_global_vars()]
    assert sorted(names) == ["func1", "func2", "transform_params"]
    first, second = (shared.mod[n].without_attr("global_symbol") for n in ("func1", "func2"))
    assert tvm_ffi.structural_equal(first, second)
    checked(mod, shared)


def test_named_functions_only():
    def raw(s, x, w1, w2):
        return op.add(s.y1(op.matmul(x, w1)), s.y2(op.matmul(x, w2)))

    mod = module({"func1": both(op.add), "func2": only(0), "func3": raw})
    shared = lift_weights(mod, ["func1", "func2"])
    assert shared.weights("func1") == shared.weights("func2") == ["w1_t", "w2_t"]
    assert tvm_ffi.structural_equal(shared.mod["func3"], mod["func3"])
    assert "func3" not in shared.transforms
    checked(mod, shared)
    assert share_transforms(mod).lifted == ()


def test_unused_weights_do_not_hinder():
    mod = module({"func1": both(op.add), "func2": only(0)})
    shared = share_transforms(mod)
    assert shared.weights("func2") == ["w1_t", "w2_t"]
    checked(mod, shared)


def test_a_weight_that_nobody_reads_is_gone():
    mod = module({"func1": only(1), "func2": only(1)})
    shared = share_transforms(mod)
    assert shared.weights("func1") == ["w2_t"]
    checked(mod, shared)


def test_nothing_shared_is_lifted_all_the_same():
    mod = module({"func1": only(1), "func2": only(0)})
    shared = share_transforms(mod)
    assert shared.weights("func1") == shared.weights("func2") == ["w2_t", "w1_t"]
    checked(mod, shared)


def test_nothing_to_lift_is_the_same_module():
    mod = module({"func1": lambda s, x, w1, w2: op.matmul(x, w1)})
    shared = share_transforms(mod)
    assert shared.mod is mod
    assert (shared.lifted, shared.kept, shared.transforms) == ((), (), {})
    assert str(shared) == "lifted:\n  nothing\nkept:\n  nothing"


def test_another_number_of_weights():
    def one(s, x, w1):
        return op.matmul(x, s.w1_t(T(w1)))

    weights = {"func1": {"w1": (8, 8)}, "func2": SQUARE}
    mod = module({"func1": one, "func2": both(op.add)}, weights)
    with pytest.raises(SharedWeightsError) as error:
        share_transforms(mod)
    assert "number: func1 takes 1, func2 takes 2 ('w2' only in func2)" in str(error.value)
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, Fx2RelaxError)


def test_another_shape():
    weights = {"func1": SQUARE, "func2": {"w1": (6, 8), "w2": (6, 8)}}
    mod = module({"func1": both(op.add), "func2": both(op.multiply)}, weights)
    with pytest.raises(SharedWeightsError) as error:
        share_transforms(mod)
    for name in ("w1", "w2"):
        line = f"shape: {name!r} is (8, 8) float32 in func1, (6, 8) float32 in func2"
        assert line in str(error.value)


def test_another_dtype():
    bodies = {"func1": both(op.add), "func2": both(op.multiply)}
    with pytest.raises(SharedWeightsError) as error:
        share_transforms(module(bodies, dtypes={"func2": "float16"}))
    for name in ("w1", "w2"):
        line = f"dtype: {name!r} is (8, 8) float32 in func1, (8, 8) float16 in func2"
        assert line in str(error.value)


def test_another_order():
    weights = {"func1": SQUARE, "func2": {"w2": (8, 8), "w1": (8, 8)}}
    mod = module({"func1": both(op.add), "func2": both(op.add)}, weights)
    with pytest.raises(SharedWeightsError, match="name: weight 0 is 'w1' in func1, 'w2' in func2"):
        share_transforms(mod)


def test_names_of_no_function():
    mod = module({"func1": both(op.add)})
    with pytest.raises(SharedWeightsError, match="called 'main', 'x'; there is 'func1'"):
        share_transforms(mod, ["main", "func1", "x"])
    with pytest.raises(SharedWeightsError, match="a list of names"):
        share_transforms(mod, "func1")


def test_a_transform_of_each_function():
    mod = module({"func1": both(op.add), "func2": only(0)})
    shared = lift_weights(mod, shared=False)
    assert shared.weights("func1") == ["w1_t", "w2_t"]
    assert shared.weights("func2") == ["w1_t"]
    assert shared.transforms == {n: f"{n}_transform_params" for n in ("func1", "func2")}
    assert [x.functions for x in shared.lifted] == [("func1",), ("func1",), ("func2",)]
    checked(mod, shared)


def test_functions_without_weights_stand_aside():
    bodies = {"func1": both(op.add), "none": lambda s, x: op.negative(x)}
    mod = module(bodies, {"func1": SQUARE, "none": {}})
    shared = share_transforms(mod)
    assert shared.transforms == {"func1": "transform_params"}
    assert tvm_ffi.structural_equal(shared.mod["none"], mod["none"])


def test_the_second_time_is_an_error():
    shared = share_transforms(module({"func1": both(op.add)}))
    with pytest.raises(SharedWeightsError, match="'transform_params' already"):
        share_transforms(shared.mod)
