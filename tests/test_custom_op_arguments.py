"""`custom_op`: arguments, results and kernels of every kind, and gradients that are operators."""

from __future__ import annotations

import pytest
import torch
from extern_sources import CODE as NATIVE
from extern_sources import kernels

from fx2relax import custom_op, extern
from fx2relax.compat import op, te, tirx, topi
from fx2relax.extern import ExternFunction
from fx2relax.spec import Tensor
from fx2relax.testing import assert_matches_eager


def spread(x, k, bias, *, sign):
    def at(i, j):
        value = x[i] * (j + 1 if sign else -j - 1).astype(x.dtype)
        return value if bias is None else value + bias[j]

    wide = te.compute((x.shape[0], k), at, name="wide")
    axis = te.reduce_axis((0, k))
    return wide, te.compute((x.shape[0],), lambda i: te.sum(wide[i, axis], axis), name="total")


def spread_in_torch(x, k, sign=True, bias=None):
    wide = x[:, None] * torch.arange(1, k + 1) * (1 if sign else -1)
    wide = wide if bias is None else wide + bias
    return wide, wide.sum(1)


SPREAD = custom_op(
    "fx2relax_tests::spread",
    spread,
    schema="(Tensor x, int k, Tensor? bias=None, *, bool sign=True) -> (Tensor, Tensor)",
    rule=ExternFunction(
        [Tensor(("n",)), "k", Tensor(("k",)), bool], (Tensor(("n", "k")), Tensor(("n",)))
    ),
)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("bias", [None, torch.randn(3)], ids=["no bias", "bias"])
@pytest.mark.parametrize("sign", [True, False])
def test_several_results_numbers_and_an_optional_tensor(dynamic, bias, sign):
    x = torch.randn(4)
    for result, wanted in zip(
        SPREAD(x, 3, sign=sign, bias=bias), spread_in_torch(x, 3, sign, bias), strict=True
    ):
        torch.testing.assert_close(result, wanted)
    assert_matches_eager(lambda x: SPREAD(x * 2, 3, sign=sign, bias=bias), x, dynamic=dynamic)


def test_a_tensor_that_is_left_out_of_a_native_kernel():
    matrix = Tensor(("n", "w"))
    rule = ExternFunction([matrix, Tensor(("w",)), int, bool], matrix)
    kernel = extern.source(NATIVE, functions={"widen": rule})["widen"]
    made = custom_op(
        "fx2relax_tests::shift",
        kernel,
        schema="(Tensor x, Tensor? bias=None, int k=0, *, bool negate=False) -> Tensor",
    )
    x, bias = torch.randn(2, 3), torch.randn(3)
    torch.testing.assert_close(made(x), x)
    torch.testing.assert_close(made(x, bias, negate=True), -(x + bias))
    for dynamic in (False, True):
        assert_matches_eager(lambda x: made(x * 2, negate=True), x, dynamic=dynamic)
        assert_matches_eager(lambda x, b: made(x * 2, b), x, bias, dynamic=dynamic)


def test_an_int_that_is_a_size_of_the_graph():
    assert_matches_eager(lambda x: SPREAD(x, x.shape[0] + 1)[0], torch.randn(4), dynamic=True)


def test_tensors_without_axes_and_without_elements():
    made = custom_op(
        "fx2relax_tests::twice",
        lambda x: topi.add(x, x),
        schema="(Tensor x) -> Tensor",
        fake=torch.empty_like,
    )
    for x in (torch.tensor(3.0), torch.randn(0), torch.randn(2, 0, 3), torch.arange(3)):
        torch.testing.assert_close(made(x), x + x)
        assert_matches_eager(lambda x: made(x), x)
    x = torch.randn(2, 3, 4)
    strided = x.permute(2, 0, 1)
    torch.testing.assert_close(made(strided), strided + strided)
    torch.library.opcheck(made, (strided,))
    assert_matches_eager(lambda x: made(x.permute(2, 0, 1)), x)


def test_a_list_of_tensors():
    made = custom_op(
        "fx2relax_tests::total",
        lambda xs: op.add(xs[0], op.multiply(xs[1], xs[2])),
        language="relax",
        schema="(Tensor[] xs) -> Tensor",
        fake=lambda xs: torch.empty_like(xs[0]),
    )
    xs = [torch.randn(3) for _ in range(3)]
    torch.testing.assert_close(made(xs), xs[0] + xs[1] * xs[2])
    assert_matches_eager(lambda *xs: made(list(xs)), *xs)


def test_prim_funcs_of_several_dtypes():
    def func(dtype):
        n = tirx.Var("n", "int64")
        a = te.placeholder((n,), dtype, name="a")
        twice = te.compute((n,), lambda i: a[i] + a[i])
        return te.create_prim_func([a, twice, te.compute((n,), lambda i: twice[i] * a[i])])

    made = custom_op(
        "fx2relax_tests::powers",
        [func("float32"), func("int64")],
        schema="(Tensor x) -> (Tensor, Tensor)",
    )
    for x in (torch.randn(5), torch.arange(5), torch.randn(0)):
        twice, square = made(x)
        torch.testing.assert_close(twice, x + x)
        torch.testing.assert_close(square, 2 * x * x)
        assert_matches_eager(lambda x: made(x + 1), x, dynamic=True)
    with pytest.raises(ValueError, match=r"powers: 'x' is float64; it takes \(float32\) or"):
        made(torch.randn(3).double())


def test_a_kernel_in_tvm_script():
    from tvm.script import tirx as T

    @T.prim_func(s_tir=True)
    def shifted(a: T.handle, b: T.handle):
        n = T.int64()
        x = T.match_buffer(a, (n,), "float32")
        y = T.match_buffer(b, (n,), "float32")
        for i in T.serial(n):
            with T.sblock("shifted"):
                v = T.axis.spatial(n, i)
                y[v] = x[v] + T.float32(1)

    made = custom_op("fx2relax_tests::shifted", shifted, schema="(Tensor x) -> Tensor")
    x = torch.randn(6)
    torch.testing.assert_close(made(x), x + 1)
    assert_matches_eager(lambda x: made(x.sin()).cos(), x)


def test_the_decorator_reads_annotations():
    @custom_op(
        "fx2relax_tests::decorated", rule=ExternFunction([Tensor(("n",)), float], Tensor(("n",)))
    )
    def decorated(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
        """Its own words."""
        return te.compute(x.shape, lambda i: x[i] * tirx.const(by, x.dtype))

    assert decorated.__doc__ == "Its own words."
    torch.testing.assert_close(decorated(torch.ones(3), by=3.0), torch.full((3,), 3.0))

    @custom_op("fx2relax_tests::stub", kernels()["scale"])
    def stub(x: torch.Tensor, factor: float) -> torch.Tensor:
        """Only its annotations are looked at."""

    torch.testing.assert_close(stub(torch.ones(2, 3), 3.0), torch.full((2, 3), 3.0))


def test_an_own_setup_of_the_gradient():
    made = custom_op(
        "fx2relax_tests::square",
        lambda x: topi.multiply(x, x),
        schema="(Tensor x) -> Tensor",
        fake=torch.empty_like,
        gradient=lambda ctx, grad: 2 * grad * ctx.x,
        setup_context=lambda ctx, inputs, output: setattr(ctx, "x", inputs[0]),
    )
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(made, (x,))


def test_the_gradient_may_be_an_operator_too():
    slope = custom_op(
        "fx2relax_tests::slope",
        lambda x, grad: te.compute(x.shape, lambda i: 3 * x[i] * x[i] * grad[i]),
        schema="(Tensor x, Tensor grad) -> Tensor",
        fake=lambda x, grad: torch.empty_like(x),
    )
    cube = custom_op(
        "fx2relax_tests::cube",
        lambda x: te.compute(x.shape, lambda i: x[i] * x[i] * x[i]),
        schema="(Tensor x) -> Tensor",
        fake=torch.empty_like,
        gradient=lambda ctx, grad: slope(*ctx.saved_tensors, grad),
    )
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(cube, (x,))
    assert_matches_eager(lambda x: cube(x).sin(), torch.randn(4), grad=True)
    assert_matches_eager(lambda x: cube(x).sin(), torch.randn(4), grad=True, dynamic=True)
