"""Shared transforms of weights whose sizes are symbols, or known only in a call."""

import pytest
import tvm
from sharing_cases import assert_same_numbers, module, values
from tvm import relax, tirx

from fx2relax.pipeline import SharedWeightsError, share_transforms

op = relax.op
T = op.permute_dims
ONE = {"w": (8, 8)}


def checked(mod, shared, weights=ONE, x=(4, 8)):
    x, *given = values([x, *weights.values()])
    assert_same_numbers(mod, shared, x, given)


def why(shared, name):
    return next(k.why for k in shared.kept if k.name == name)


def test_sizes_that_depend_on_data():
    def body(s, x, w):
        found = s.found(op.nonzero(w))
        return op.add(x, s.count(op.astype(op.sum(found), "float32")))

    mod = module({"func1": body}, ONE)
    shared = share_transforms(mod)
    assert why(shared, "found") == "its size depends on data"
    assert shared.mod is mod


def test_sizes_that_only_a_call_knows():
    def body(s, x, w):
        rows = x.ty.shape[0]
        wide = s.wide(op.broadcast_to(s.row(op.negative(w)), [rows, 8]))
        return op.add(x, s.more(op.add(wide, s.ones(op.ones([rows, 8], "float32")))))

    weights = {"w": (1, 8)}
    mod = module({"func1": body, "func2": body}, weights, x=("rows", 8))
    shared = share_transforms(mod)
    assert shared.weights("func2") == ["row"]
    assert why(shared, "wide") == "its size is known only in a call"
    assert why(shared, "more") == "its size is known only in a call"
    checked(mod, shared, weights)


def test_a_weight_of_no_known_size():
    def body(s, x, w):
        ty = relax.TensorType([8, tirx.Var("m", "int64")], "float32")
        return op.matmul(x, s.negative(op.negative(s.builder.match_cast(w, ty))))

    mod = module({"func1": body}, ONE)
    func = mod["func1"]
    free = relax.Var("w", relax.TensorType(dtype="float32", ndim=2))
    inputs = [func.params[0], free]
    loose = relax.utils.copy_with_new_vars(
        relax.Function(inputs, relax.SeqExpr(_cast_of(free, func), func.body.body), func.ret_ty)
    ).with_attrs({"num_input": 1, "global_symbol": "func1"})
    shared = share_transforms(tvm.IRModule({"func1": loose}))
    assert shared.lifted == ()
    assert "its size is known only in a call" in {k.why for k in shared.kept}


def _cast_of(free, func):
    """The blocks of a function with another variable for its weight."""
    weight = func.params[1]
    blocks = []
    for block in func.body.blocks:
        made = [
            relax.MatchCast(b.var, free, b.ty)
            if isinstance(b, relax.MatchCast) and b.value.same_as(weight)
            else b
            for b in block.bindings
        ]
        blocks.append(type(block)(made))
    return blocks


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
