"""`custom_op`: what it refuses, and what its operators say of wrong arguments and kernels."""

from __future__ import annotations

import pytest
import torch
from extern_sources import kernels

import fx2relax
from fx2relax import custom_op
from fx2relax.compat import op, te, tirx
from fx2relax.errors import ArgumentError, BuildFailure, KernelFailure, RegistrationError
from fx2relax.extern import ExternFunction, source
from fx2relax.spec import Tensor

ROW = Tensor(("n",))
ONE = ExternFunction([ROW], ROW)
PAIR = ExternFunction([ROW, Tensor(("n", 2)), float], ROW)
SCHEMA = "(Tensor x) -> Tensor"


def pair(x, y, factor):
    return te.compute(x.shape, lambda i: x[i] * y[i, 1] * tirx.const(factor, "float32"))


PAIRED = custom_op(
    "fx2relax_errors::pair",
    pair,
    rule=PAIR,
    schema="(Tensor x, Tensor y, float factor=1.0) -> Tensor",
)


# -- definitions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "rule", "message"),
    [
        (SCHEMA, None, "needs rule= or fake="),
        ("(Tensor x, Tensor y) -> Tensor", ONE, "takes 2 arguments and returns 1, its rule 1 and"),
        (
            "(Tensor x) -> (Tensor, Tensor)",
            ONE,
            "takes 1 arguments and returns 2, its rule 1 and 1",
        ),
        ("(Tensor(a!) x) -> Tensor", ONE, "has to return new tensors"),
        ("(Tensor x) -> Tensor[]", ONE, "has to return new tensors"),
        ("(Tensor x) -> int", ONE, "has to return new tensors"),
        ("(Tensor x) -> ()", ONE, "has to return new tensors"),
    ],
)
def test_a_definition_that_is_refused(schema, rule, message):
    with pytest.raises(RegistrationError, match=message) as caught:
        custom_op("fx2relax_errors::refused", lambda x: x, schema=schema, rule=rule)
    assert str(caught.value).startswith("fx2relax_errors::refused")


def test_an_unknown_language():
    with pytest.raises(ValueError, match="language='triton'; it takes 'te', 'tir', 'relax'"):
        custom_op("fx2relax_errors::refused", lambda x: x, language="triton")


def prim_func(buffers=2):
    a = te.placeholder((tirx.Var("n", "int64"),), "float32", name="a")
    values = [a]
    for _ in range(buffers - 1):
        values.append(te.compute(a.shape, lambda i: a[i] + a[i]))
    return te.create_prim_func(values)


@pytest.mark.parametrize(
    ("kernel", "schema", "message"),
    [
        (prim_func(), "(Tensor x, float y) -> Tensor", "a PrimFunc takes tensors alone"),
        (prim_func(1), SCHEMA, "a PrimFunc of 1 buffers has none for a result"),
        (prim_func(3), SCHEMA, "returns 1, its rule 1 and 2"),
        (3, SCHEMA, "3 is no kernel"),
    ],
)
def test_a_kernel_that_does_not_fit_its_schema(kernel, schema, message):
    with pytest.raises(RegistrationError, match=message):
        custom_op("fx2relax_errors::refused", kernel, schema=schema)


def test_a_function_without_annotations():
    with pytest.raises(ValueError, match="must have a type annotation"):

        @custom_op("fx2relax_errors::refused", rule=ONE)
        def refused(x):
            return x


# -- arguments --------------------------------------------------------------------------------

WRONG = [
    (
        (torch.ones(3), torch.ones(4, 2)),
        r"argument 'y' has the shape \(4, 2\), it takes \(n, 2\), ",
    ),
    ((torch.ones(3), torch.ones(3, 3)), r"argument 'y' has the shape \(3, 3\)"),
    ((torch.ones(3, 1), torch.ones(3, 2)), r"argument 'x' has 2 axes, it takes 1: \(n,\)"),
    ((torch.ones(3).double(), torch.ones(3, 2)), "argument 'x' is float64, it takes float32"),
    ((torch.ones(3), torch.ones(3, 2).half()), "argument 'y' is float16, it takes float32"),
]


@pytest.mark.parametrize(("args", "message"), WRONG)
def test_wrong_arguments_in_eager(args, message):
    with pytest.raises(ValueError, match=f"fx2relax_errors::pair: {message}"):
        PAIRED(*args)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("args", "message"), WRONG[:4])
def test_wrong_arguments_while_a_graph_is_captured(args, message, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y: PAIRED(x, y) * 2, backend="relax", dynamic=dynamic)
    if dynamic:  # whose sizes have names of PyTorch's
        message = message.partition(" has the shape")[0]
    with pytest.raises(Exception, match=f"fx2relax_errors::pair: {message}"):
        compiled(*args)


@pytest.mark.parametrize(("args", "message"), WRONG[:4])
def test_wrong_arguments_on_fake_tensors(args, message):
    with (
        torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode,
        pytest.raises(ValueError, match=f"fx2relax_errors::pair: {message}"),
    ):
        PAIRED(*(mode.from_tensor(a) for a in args))


def test_a_meta_tensor_has_a_result():
    result = PAIRED(torch.ones(3, device="meta"), torch.ones(3, 2, device="meta"))
    assert result.shape == (3,)
    assert result.device.type == "meta"


# -- kernels ----------------------------------------------------------------------------------


def test_a_python_kernel_that_raises():
    def fails(x):
        raise KeyError("nothing here")

    made = custom_op("fx2relax_errors::fails", fails, language="torch", rule=ONE, schema=SCHEMA)
    match = "the kernel of fx2relax_errors::fails raised KeyError: 'nothing here'"
    with pytest.raises(KernelFailure, match=match) as caught:
        made(torch.ones(3))
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(KernelFailure, match=match):
        torch.compile(lambda x: made(x) + 1, backend="relax")(torch.ones(3))


@pytest.mark.parametrize("name", ["refuse", "crash"])
def test_a_native_kernel_that_raises(name):
    made = custom_op(f"fx2relax_errors::{name}", kernels()[name], schema=SCHEMA)
    match = f"the kernel of fx2relax_errors::{name} raised .*: (no such thing|out of luck)"
    for function in (made, torch.compile(lambda x: made(x) + 1, backend="relax")):
        with pytest.raises(KernelFailure, match=match):
            function(torch.ones(3))


def test_one_of_two_native_kernels_raises():
    one, two = (
        custom_op(f"fx2relax_errors::{name}", kernels()[name], schema=SCHEMA)
        for name in ("refuse", "crash")
    )
    with pytest.raises(KernelFailure, match=r"fx2relax_errors::refuse or fx2relax_errors::crash"):
        torch.compile(lambda x: two(one(x)), backend="relax")(torch.ones(3))


@pytest.mark.parametrize("language", ["te", "relax", "tir"])
def test_a_function_that_raises_while_it_makes_its_kernel(language):
    def fails(x):
        raise KeyError("nothing here")

    name = f"fx2relax_errors::making_{language}"
    made = custom_op(name, fails, language=language, rule=ONE, schema=SCHEMA)
    with pytest.raises(fx2relax.ImportFailure, match=f"making_{language}.*KeyError: 'nothing"):
        made(torch.ones(3))


@pytest.mark.parametrize(
    ("language", "kernel"),
    [
        ("te", lambda x: te.compute((2,), lambda i: x[i])),
        ("relax", lambda x: op.astype(x, "float64")),
        ("relax", lambda x: "text"),
    ],
)
def test_a_kernel_that_disagrees_with_its_rule(language, kernel):
    name = f"fx2relax_errors::disagrees_{language}"
    made = custom_op(name, kernel, language=language, rule=ONE, schema=SCHEMA)
    # Sizes that are symbols are compared when they are there.
    errors = (fx2relax.ImportFailure, KernelFailure)
    with pytest.raises(errors, match=rf"fx2relax_errors(\.|::)disagrees_{language}"):
        made(torch.ones(3))


def test_a_kernel_that_declines():
    def declines(x):
        raise fx2relax.Unsupported("vectors")

    made = custom_op("fx2relax_errors::declines", declines, rule=ONE, schema=SCHEMA)
    with pytest.raises(fx2relax.UnsupportedOpError, match=r"fx2relax_errors.declines.*\(vectors\)"):
        made(torch.ones(3))


def test_source_that_does_not_compile_is_the_operators_error():
    kernel = source("int main( {", functions={"x": ONE}, name="wrong.cpp")["x"]
    made = custom_op("fx2relax_errors::wrong_source", kernel, schema=SCHEMA)
    with pytest.raises(BuildFailure, match=r"wrong.cpp does not compile"):
        made(torch.ones(3))
    compiled = torch.compile(
        lambda x: made(x), backend="relax", options={"on_unsupported": "raise"}
    )
    with pytest.raises(Exception, match=r"wrong.cpp does not compile"):
        compiled(torch.ones(3))


def test_an_argument_of_another_kind():
    scale = custom_op(
        "fx2relax_errors::scale", kernels()["scale"], schema="(Tensor x, float factor) -> Tensor"
    )
    with pytest.raises(RuntimeError):  # PyTorch's own
        scale(torch.ones(2, 2), "two")
    with pytest.raises(ArgumentError, match=r"'x' is int64; it takes \(float32\) or \(float64\)"):
        scale(torch.ones(2, 2).long(), 2.0)


def test_a_number_that_is_known_only_at_run_time():
    scale = custom_op(
        "fx2relax_errors::scale_by",
        kernels()["scale"],
        schema="(Tensor x, Scalar factor) -> Tensor",
    )
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(lambda x, y: scale(x, y.item()) + 1, backend="relax")
        x = torch.randn(2, 3)
        for value in (2.0, 3.5):
            torch.testing.assert_close(compiled(x, torch.tensor(value)), x * value + 1)
