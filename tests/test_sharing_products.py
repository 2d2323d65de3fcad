"""Products of one input with several weights as one product."""

import numpy as np
import pytest
import torch
import tvm
import tvm_ffi
from sharing_cases import arrays, assert_same_numbers, module, tensors, values
from torch import nn
from tvm import relax

import fx2relax
from fx2relax import pipeline
from fx2relax.pipeline import combine_products, lift_weights

op = relax.op
T = op.permute_dims
QKV = {
    **{f"attn.{x}.weight": (n, 8) for x, n in (("q", 16), ("k", 4), ("v", 4))},
    **{f"attn.{x}.bias": (n,) for x, n in (("q", 16), ("k", 4), ("v", 4))},
}


def projections(biases=(1, 1, 1), order=(0, 1, 2), turned=True, combine=None):
    """Products of the input with three weights; `biases` says which have one."""

    def body(s, x, *weights):
        made = {}
        for n in order:
            weight = s.t(T(weights[n])) if turned else weights[n]
            y = s.y(op.matmul(x, weight))
            made[n] = s.z(op.add(y, weights[3 + n])) if biases[n] else y
        parts = [made[n] for n in range(3)]
        return combine(parts) if combine else op.concat(parts, axis=-1)

    return body


def products(mod, name):
    """How many products a function has, and how many parts it joins them of."""
    counts = {}

    def visit(expr):
        called = str(getattr(getattr(expr, "op", None), "name", ""))
        counts[called] = counts.get(called, 0) + 1

    relax.analysis.post_order_visit(mod[name], visit)
    return counts.get("relax.matmul", 0)


def check(mod, weights, x, products_left, dtype="float32"):
    """The combined module gives the same, before its weights are lifted and after."""
    combined = combine_products(mod)
    relax.analysis.well_formed(combined)
    for name, func in mod.functions_items():
        if isinstance(func, relax.Function):
            assert products(combined, name.name_hint) == products_left
    shared = lift_weights(combined)
    x, *given = values([x, *weights])
    assert_same_numbers(mod, shared, x, given)
    return shared


def test_queries_keys_and_values():
    mod = module({"prefill": projections(), "decode": projections(order=(2, 0, 1))}, QKV)
    shared = check(mod, QKV.values(), (4, 8), 1)
    assert shared.weights("prefill") == shared.weights("decode")
    assert shared.weights("decode") == ["attn.q+k+v.weight_t", "attn.q+k+v.bias"]
    assert shared.kept == ()


@pytest.mark.sweep(6)
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize(("lead", "rows"), [((), "rows"), ((2,), 5), (("batch", 3), "rows")])
def test_sizes_of_the_input(turned, lead, rows):
    weights = {n: s if turned or len(s) == 1 else s[::-1] for n, s in QKV.items()}
    x = (*lead, rows, 8)
    mod = module({"main": projections(turned=turned)}, weights, x=x)
    check(mod, weights.values(), [n if isinstance(n, int) else 3 for n in x], 1)


def test_a_vector():
    mod = module({"main": projections()}, QKV, x=(8,))
    check(mod, QKV.values(), (8,), 1)


@pytest.mark.parametrize("biases", [(0, 0, 0), (1, 0, 1), (0, 1, 1)])
def test_which_have_a_bias(biases):
    mod = module({"main": projections(biases)}, QKV)
    check(mod, QKV.values(), (4, 8), 1)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("names", ["nnn", "nnm", "nml"])
def test_symbolic_widths(names):
    weights = {f"w{n}": (size, 8) for n, size in enumerate(names)}
    weights |= {f"b{n}": (size,) for n, size in enumerate(names)}
    mod = module({"main": projections()}, weights, x=("rows", 8))
    sizes = {"n": 3, "m": 7, "l": 1}
    numbers = [tuple(sizes.get(n, n) for n in shape) for shape in weights.values()]
    shared = check(mod, numbers, (5, 8), 1)
    assert shared.weights("main") == ["weight_sizes", "w0+w1+w2_t", "b0+b1+b2"]


def test_a_symbolic_depth():
    weights = {"w0": (4, "k"), "w1": (3, "k"), "w2": (2, "k"), "b0": (4,), "b1": (3,), "b2": (2,)}
    mod = module({"main": projections()}, weights, x=("rows", "k"))
    check(mod, [(4, 6), (3, 6), (2, 6), (4,), (3,), (2,)], (5, 6), 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int32", "int8"])
def test_dtypes(dtype):
    mod = module({"main": projections()}, QKV, dtypes={"main": dtype})
    combined = combine_products(mod)
    assert products(combined, "main") == 1
    assert combined["main"].ret_ty.dtype == dtype
    if dtype == "bfloat16":  # NumPy has none
        return
    given = tensors(values([(4, 8), *QKV.values()], dtype=dtype))
    old, new = (
        relax.VirtualMachine(pipeline.build(m, library="none"), tvm.cpu())["main"](*given)
        for m in (mod, combined)
    )
    np.testing.assert_array_equal(arrays(old)[0], arrays(new)[0])


def test_mixed_dtypes_stay_apart():
    weights = {"a": (4, 8), "b": (4, 8, "float64")}

    def body(s, x, a, b):
        wide = s.wide(op.astype(x, "float64"))
        return op.add(
            s.y(op.astype(s.a(op.matmul(x, s.at(T(a)))), "float64")),
            s.b(op.matmul(wide, s.bt(T(b)))),
        )

    mod = module({"main": body}, weights)
    assert combine_products(mod) is mod


def test_another_input_stays_apart():
    def body(s, x, w1, w2):
        return op.add(
            s.a(op.matmul(x, s.at(T(w1)))), s.b(op.matmul(s.n(op.negative(x)), s.bt(T(w2))))
        )

    mod = module({"main": body})
    assert combine_products(mod) is mod


def pair(s, x, w1, w2):
    return op.add(s.a(op.matmul(x, s.at(T(w1)))), s.b(op.matmul(x, s.bt(T(w2)))))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_reshapes_of_one_input(order):
    def body(s, x, *weights):
        made = {}
        for n in order:
            flat = s.flat(op.reshape(x, [8, 8]))
            made[n] = s.y(op.matmul(flat, s.t(T(weights[n]))))
        return op.subtract(made[0], made[1])

    mod = module({"main": body}, x=(2, 4, 8))
    check(mod, [(8, 8), (8, 8)], (2, 4, 8), 1)


def test_an_input_that_is_drawn_twice():
    def body(s, x, w1, w2):
        some, other = (
            s.drawn(op.call_pure_packed("test.noise", x, ty_args=x.ty)) for _ in range(2)
        )
        first = s.a(op.matmul(some, s.at(T(w1))))
        return op.add(first, s.b(op.matmul(other, s.bt(T(w2)))))

    mod = module({"main": body})
    assert combine_products(mod) is mod


def test_a_weight_with_another_reader_stays_apart():
    def tied(s, x, w1, w2):
        return op.matmul(s.y(pair(s, x, w1, w2)), w1)

    mod = module({"main": tied})
    assert combine_products(mod) is mod


def test_a_function_that_reads_a_weight_otherwise():
    def other(s, x, w1, w2):
        return op.matmul(x, w1)

    mod = module({"main": pair, "other": other})
    assert combine_products(mod) is mod


def test_a_function_that_uses_only_some():
    def keys(s, x, q, k, v, *biases):
        return op.concat([s.k(op.matmul(x, s.kt(T(k)))), s.v(op.matmul(x, s.vt(T(v))))], axis=-1)

    mod = module({"all": projections((0, 0, 0)), "keys": keys}, QKV)
    combined = combine_products(mod)
    assert (products(combined, "all"), products(combined, "keys")) == (2, 1)
    shared = lift_weights(combined)
    assert shared.weights("keys") == shared.weights("all")
    x, *given = values([(4, 8), *QKV.values()])
    assert_same_numbers(mod, shared, x, given)


def test_an_unused_weight_does_not_hinder():
    mod = module({"main": pair, "idle": lambda s, x, w1, w2: op.negative(x)})
    combined = combine_products(mod)
    assert products(combined, "main") == 1
    assert tvm_ffi.structural_equal(combined["idle"], mod["idle"])


def test_weights_that_are_made_of_others():
    """LoRA: each weight is a sum, bound right before its product."""
    weights = {"q": (8, 8), "k": (8, 8), "down": (2, 8), "up": (8, 2)}

    def body(s, x, q, k, down, up):
        delta = s.delta(op.matmul(up, down))
        y = s.y(op.matmul(x, s.qt(T(s.q_merged(op.add(q, delta))))))
        y = s.r(op.nn.relu(y))
        return op.add(y, s.z(op.matmul(x, s.kt(T(s.k_merged(op.subtract(k, delta)))))))

    mod = module({"main": body}, weights)
    shared = check(mod, weights.values(), (4, 8), 1 + 1)  # one of them makes a weight
    assert shared.weights("main") == ["q_merged+k_merged_t"]


def test_weights_that_are_drawn_in_each_call():
    def body(s, x, w1, w2):
        first = s.a(op.matmul(x, s.at(T(w1))))
        noise = s.noise(op.call_pure_packed("test.noise", w2, ty_args=w2.ty))
        return op.add(first, s.b(op.matmul(x, s.bt(T(s.some(op.add(noise, noise)))))))

    mod = module({"main": body})
    assert combine_products(mod) is mod

    def third(s, x, w1, w2, w3):
        return op.add(s.y(body(s, x, w1, w2)), s.c(op.matmul(x, s.ct(T(w3)))))

    mod = module({"main": third}, {"w1": (8, 8), "w2": (8, 8), "w3": (8, 8)})
    combined = combine_products(mod)
    assert products(combined, "main") == 2
    assert relax.analysis.well_formed(combined) in (None, True)


def test_biases_that_are_drawn_in_each_call():
    def body(s, x, w1, w2, b1, b2):
        first = s.a(op.add(s.y(op.matmul(x, s.at(T(w1)))), b1))
        noise = s.noise(op.call_pure_packed("test.noise", b2, ty_args=b2.ty))
        return op.add(first, s.b(op.add(s.z(op.matmul(x, s.bt(T(w2)))), noise)))

    weights = {"w1": (8, 8), "w2": (8, 8), "b1": (8,), "b2": (8,)}
    combined = combine_products(module({"main": body}, weights))
    assert products(combined, "main") == 1
    assert relax.analysis.well_formed(combined) in (None, True)


def test_constants_stay_apart():
    def body(s, x):
        one, two = (s.made(op.full([8, 8], relax.const(n, "float32"))) for n in (1.0, 2.0))
        return op.add(s.a(op.matmul(x, one)), s.b(op.matmul(x, two)))

    def with_weight(s, x, w1):
        return op.matmul(s.y(body(s, x)), w1)

    mod = module({"main": with_weight}, {"w1": (8, 8)})
    assert combine_products(mod) is mod


def test_empty_weights_stay_apart():
    mod = module({"main": pair}, {"w1": (0, 8), "w2": (0, 8)})
    assert combine_products(mod) is mod


def test_functions_with_weights_of_their_own():
    other = {"a": (3, 8), "b": (3, 8), "c": (2, 2)}

    def body(s, x, a, b, c):
        return pair(s, x, a, b)

    mod = module({"one": pair, "two": body}, {"one": {"w1": (8, 8), "w2": (8, 8)}, "two": other})
    combined = combine_products(mod)
    assert (products(combined, "one"), products(combined, "two")) == (1, 1)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(8, 20, bias=False), nn.Linear(8, 20, bias=False)
        self.down = nn.Linear(20, 8, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("library", ["none", "torch"])
def test_gate_and_up_of_a_torch_module(library):
    model, x = Mlp().eval(), torch.randn(2, 3, 8)
    mod = fx2relax.from_fx(torch.export.export(model, (x,)).module(), [x])
    combined = combine_products(mod)
    assert products(combined, "main") == 2
    lowered = pipeline.lower(combined, library=library, lift_weights=True)
    machine = relax.VirtualMachine(pipeline.assemble(lowered), tvm.cpu())
    state = model.state_dict()
    weights = [tvm.runtime.tensor(state[p.name].numpy()) for p in mod["main"].params[1:]]
    made = machine["main_transform_params"](weights)
    result = machine["main"](tvm.runtime.tensor(x.numpy()), *made)
    got = result.numpy() if hasattr(result, "numpy") else result[0].numpy()
    torch.testing.assert_close(torch.from_numpy(got), model(x).detach(), rtol=1e-5, atol=1e-5)


def test_nan_stays_in_its_part():
    mod = module({"main": pair})
    shared = lift_weights(combine_products(mod))
    x, w1, w2 = values([(4, 8), (8, 8), (8, 8)])
    w1[2, 3], w2[5, 1] = np.nan, np.inf
    assert_same_numbers(mod, shared, x, [w1, w2])


def test_the_module_is_not_changed():
    mod = module({"main": pair})
    text = mod.script()
    combine_products(mod)
    assert mod.script() == text
