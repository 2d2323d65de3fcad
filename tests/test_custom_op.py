"""`custom_op`: one operator of a kernel in each language, on each route, with its gradient."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fx2relax
from fx2relax import custom_op, pipeline, report
from fx2relax.compat import op, relax, te, tirx, tvm
from fx2relax.extern import ExternFunction
from fx2relax.spec import Tensor
from fx2relax.testing import assert_matches_eager

FLOATS = ["float32", "float64"]
MATRIX, ROW = Tensor(("n", "m")), Tensor(("m",))
RULE = ExternFunction([MATRIX, ROW, float], MATRIX).for_dtypes(FLOATS)
SCHEMA = "(Tensor x, Tensor w, float shift=1.0) -> Tensor"


def backward(ctx, grad):
    x, w = ctx.saved_tensors
    return grad * w, (grad * x).sum(0), None


def in_te(x, w, shift):
    return te.compute(x.shape, lambda i, j: x[i, j] * w[j] + tirx.const(shift, x.dtype))


def in_relax(x, w, shift):
    return op.add(op.multiply(x, w), relax.const(shift, x.ty.dtype))


def in_tir(x, w, shift):
    """A PrimFunc, made by TE's own way to one."""
    n, m = (tirx.Var(name, "int64") for name in "nm")
    a = te.placeholder((n, m), x.dtype, name="a")
    b = te.placeholder((m,), w.dtype, name="b")
    return te.create_prim_func([a, b, in_te(a, b, shift)])


CODE = r"""
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
template <typename T>
static void run(DLTensor* x, DLTensor* w, double shift, DLTensor* y) {
  int64_t n = x->shape[0], m = x->shape[1];
  for (int64_t i = 0; i < n * m; ++i)
    static_cast<T*>(y->data)[i] = static_cast<T*>(x->data)[i] * static_cast<T*>(w->data)[i % m]
                                  + static_cast<T>(shift);
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(affine_f32, run<float>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(affine_f64, run<double>);
"""
TABLE = ExternFunction([MATRIX, ROW, float], MATRIX).for_dtypes(
    {"float32": "affine_f32", "float64": "affine_f64"}
)
AFFINE = fx2relax.extern.source(CODE, functions={"affine": TABLE})["affine"]


def expected(x, w, shift=1.0):
    return x * w + shift


def make(language):
    name = f"fx2relax_tests::affine_{language}"
    common = {"schema": SCHEMA, "gradient": backward}
    if language == "cpp":
        return custom_op(name, AFFINE, **common)
    function = {"te": in_te, "relax": in_relax, "tir": in_tir, "torch": expected}[language]
    return custom_op(name, function, language=language, rule=RULE, **common)


OPERATORS = {language: make(language) for language in ("te", "tir", "relax", "cpp", "torch")}
languages = pytest.mark.parametrize("language", OPERATORS)
compiled_languages = pytest.mark.parametrize("language", ["te", "tir", "relax", "cpp"])


# -- routes -----------------------------------------------------------------------------------


@languages
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eager(language, dtype):
    operator = OPERATORS[language]
    w = torch.randn(3, dtype=dtype)
    for x in (
        torch.randn(4, 3),
        torch.randn(3, 5).t(),
        torch.randn(0, 3),
        torch.randn(1, 6)[:, ::2],
    ):
        x = x.to(dtype)
        result = operator(x, w, 0.5)
        torch.testing.assert_close(result, expected(x, w, 0.5))
        assert result.is_contiguous()
    torch.testing.assert_close(operator(x, w), expected(x, w))
    torch.testing.assert_close(operator(x, w, shift=2), expected(x, w, 2))


@languages
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_with_gradients(language, dynamic):
    operator = OPERATORS[language]
    assert_matches_eager(
        lambda x, w: operator(x * 2, w, 0.5).sin(),
        torch.randn(4, 3),
        torch.randn(3),
        dynamic=dynamic,
        grad=True,
        torch_calls=language == "torch",
    )


@languages
def test_a_compiled_graph_of_the_operator_alone(language):
    operator = OPERATORS[language]
    assert_matches_eager(
        lambda x, w: operator(x.t(), w), torch.randn(3, 4), torch.randn(3),
        torch_calls=language == "torch",
    )  # fmt: skip


@compiled_languages
def test_no_compiled_graph_calls_pytorch(language):
    operator = OPERATORS[language]
    report.reset_stats()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, w: operator(x, w).relu(), backend="relax", options={"on_unsupported": "raise"}
    )
    compiled(torch.randn(4, 3), torch.randn(3))
    assert report.stats()["nodes_fallback"] == 0


@languages
def test_the_gradient(language):
    operator = OPERATORS[language]
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(operator, (x, w, 0.5))
    assert torch.autograd.gradcheck(
        lambda x, w: operator(x.t(), w), (x.detach().t().contiguous().requires_grad_(), w)
    )


@languages
def test_what_pytorch_asks_of_an_operator(language):
    x, w = torch.randn(4, 3, requires_grad=True), torch.randn(3)
    torch.library.opcheck(OPERATORS[language], (x, w, 0.5))
    torch.library.opcheck(OPERATORS[language], (x.detach().t(), torch.randn(4)))


@compiled_languages
@pytest.mark.parametrize("sizes", [("n", 3), (4, 3), ("n", "m")])
def test_from_fx(language, sizes):
    graph = torch.fx.symbolic_trace(lambda x, w: OPERATORS[language](x, w, 0.5) * 2)
    mod = fx2relax.from_fx(graph, [(sizes, "float32"), (sizes[1:], "float32")])
    machine = relax.VirtualMachine(pipeline.build(mod, library="none"), tvm.cpu())
    x, w = torch.randn(4, 3), torch.randn(3)
    torch.testing.assert_close(torch.from_dlpack(machine["main"](x, w)), expected(x, w, 0.5) * 2)


def test_from_fx_refuses_what_pytorch_runs():
    graph = torch.fx.symbolic_trace(lambda x, w: OPERATORS["torch"](x, w))
    with pytest.raises(fx2relax.UnsupportedOpError, match=r"fx2relax_tests.affine_torch.default"):
        fx2relax.from_fx(graph, [((4, 3), "float32"), ((3,), "float32")])
    mod = fx2relax.from_fx(graph, [((4, 3), "float32"), ((3,), "float32")], on_unsupported="torch")
    machine = relax.VirtualMachine(pipeline.build(mod), tvm.cpu())
    x, w = torch.randn(4, 3), torch.randn(3)
    torch.testing.assert_close(torch.from_dlpack(machine["main"](x, w)), expected(x, w))


def test_torch_export():
    class Model(torch.nn.Module):
        def forward(self, x, w):
            return OPERATORS["cpp"](x, w)

    program = torch.export.export(Model(), (torch.randn(4, 3), torch.randn(3)))
    mod = fx2relax.from_fx(program)
    assert 'R.call_dps_packed("affine_f32"' in mod.script()


@compiled_languages
def test_a_graph_of_two_calls(language):
    operator = OPERATORS[language]
    assert_matches_eager(
        lambda x, w: operator(operator(x, w, 0.5), w, 2.0) + operator(x, w, 0.5),
        torch.randn(4, 3),
        torch.randn(3),
    )


def test_operators_of_all_languages_in_one_graph():
    def network(x, w):
        for language in ("te", "tir", "relax", "cpp", "torch"):
            x = OPERATORS[language](x, w)
        return x

    assert_matches_eager(network, torch.randn(4, 3), torch.randn(3), grad=True, torch_calls=True)


# -- sizes, numbers, results ------------------------------------------------------------------


def test_eager_compiles_once_for_all_sizes(monkeypatch):
    made = custom_op("fx2relax_tests::once", in_te, rule=RULE, schema=SCHEMA)
    from fx2relax import programs

    built, build = [], programs.build
    monkeypatch.setattr(programs, "build", lambda *a: built.append(1) or build(*a))
    for n in (2, 5, 9):
        x = torch.randn(n + 1, n)
        torch.testing.assert_close(made(x, x[0]), expected(x, x[0]))
    assert len(built) == 1
    made(torch.randn(4, 4), torch.randn(4))  # sizes that are equal
    made(torch.randn(1, 4), torch.randn(4))  # a size that broadcasts
    made(torch.randn(5, 4).double(), torch.randn(4).double())
    made(torch.randn(5, 4), torch.randn(4), 3.0)
    assert len(built) == 5


def test_several_threads_share_an_operator():
    made = custom_op("fx2relax_tests::threads", in_te, rule=RULE, schema=SCHEMA)

    def work(n):
        for m in (3, 4, 5):
            x, w = torch.randn(n, m), torch.randn(m)
            torch.testing.assert_close(made(x, w), expected(x, w))
        return n

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(2, 8))) == list(range(2, 8))


def test_a_kernel_that_needs_a_size_as_a_number():
    def unrolled(x):
        n = int(x.shape[0])
        return te.compute((1,), lambda i: sum((x[j] for j in range(1, n)), x[0]))

    made = custom_op(
        "fx2relax_tests::unrolled",
        unrolled,
        rule=ExternFunction([Tensor(("n",))], Tensor((1,))),
        schema="(Tensor x) -> Tensor",
    )
    with pytest.raises((fx2relax.ImportFailure, TypeError)):
        made(torch.randn(3))
    torch._dynamo.reset()
    x = torch.randn(3)
    compiled = torch.compile(lambda x: made(x) * 2, backend="relax", dynamic=False)
    torch.testing.assert_close(compiled(x), x.sum()[None] * 2)


def test_values_that_are_no_numbers():
    x = torch.tensor([[math.nan, math.inf, -math.inf, -0.0]])
    for operator in OPERATORS.values():
        torch.testing.assert_close(
            operator(x, torch.ones(4), 0.0), expected(x, 1.0, 0.0), equal_nan=True
        )


def test_eager_may_have_an_implementation_of_its_own():
    calls = []

    def own(x, w, shift=1.0):
        calls.append(1)
        return (x * w + shift).t().contiguous().t()

    made = custom_op("fx2relax_tests::own", in_te, rule=RULE, schema=SCHEMA, eager=own)
    x, w = torch.randn(4, 3), torch.randn(3)
    assert made(x, w).is_contiguous()
    assert calls == [1]
    assert_matches_eager(lambda x, w: made(x, w), x, w)


def test_defining_an_operator_again_replaces_it():
    def define(factor):
        return custom_op(
            "fx2relax_tests::again",
            lambda x: te.compute(x.shape, lambda i: x[i] * tirx.const(factor, "float32")),
            schema="(Tensor x) -> Tensor",
            rule=ExternFunction([Tensor(("n",))], Tensor(("n",))),
        )

    x = torch.ones(3)
    for factor in (2.0, 3.0):
        made = define(factor)
        torch._dynamo.reset()
        assert made(x)[0] == factor
        assert torch.compile(lambda x, made=made: made(x), backend="relax")(x)[0] == factor
