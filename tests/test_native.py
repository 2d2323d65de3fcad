"""The library's functions in C++ give the very bits of the Python functions they stand in for."""

import functools
import itertools

import pytest
import torch
import tvm
import tvm_ffi

from fx2relax.runtime import library, native
from fx2relax.testing import assert_matches_eager

pytestmark = pytest.mark.skipif(not native.use(), reason="no C++ compiler")

HALF = [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, torch.float64, *HALF]


@functools.cache
def compiled(name):
    """A native function that must not fall back."""
    return tvm.get_global_func(library.PREFIX + name)


def random(*sizes, dtype=torch.float32):
    return torch.randn(*sizes).to(dtype)


def passed(value):
    return tvm_ffi.from_dlpack(value) if isinstance(value, torch.Tensor) else value


def check(name, *arguments, out, declined=0):
    """Run both on copies of `out`, and compare their bytes, NaN and signs of zero included."""
    out.fill_(7)
    expected, got = out.clone(), out.clone()
    before = native.declined()
    library.FUNCTIONS[name](*map(passed, arguments), passed(expected))
    compiled(name)(*map(passed, arguments), passed(got))
    assert native.declined() - before == declined
    assert torch.equal(got.flatten().view(torch.uint8), expected.flatten().view(torch.uint8))


def product(a, b, left=False, right=False, dtype=None):
    x, y = (a.mT if left else a), (b.mT if right else b)
    return torch.empty(torch.matmul(x.float(), y.float()).shape, dtype=dtype or a.dtype)


def flags(left, right):
    return f"matmul_{'nt'[left]}{'nt'[right]}"


TURNS = list(itertools.product((False, True), repeat=2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("left", "right"), TURNS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("matrix", [False, True])
def test_products(dtype, left, right, biased, batch, matrix):
    """A matrix or a batch on the right, each transposed or not, with and without a bias."""
    m, k, n = 5, 16, 9
    a = random(*batch, *((k, m) if left else (m, k)), dtype=dtype)
    b = random(*(() if matrix else batch), *((n, k) if right else (k, n)), dtype=dtype)
    bias = [random(n, dtype=dtype)] if biased else []
    check(flags(left, right), a, b, *bias, out=product(a, b, left, right))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("left", "right"), TURNS)
def test_half_operands_with_a_float_sum(dtype, left, right):
    a = random(*((16, 5) if left else (5, 16)), dtype=dtype)
    b = random(*((9, 16) if right else (16, 9)), dtype=dtype)
    bias = random(9, dtype=dtype)
    out = product(a, b, left, right, torch.float32)
    check(flags(left, right), a, b, out=out)
    check(flags(left, right), a, b, bias, out=out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("a", "b"),
    [((16,), (16,)), ((16,), (16, 9)), ((5, 16), (16,)), ((2, 5, 16), (16,)), ((16,), (2, 16, 9))],
)
def test_vectors(dtype, a, b):
    a, b = random(*a, dtype=dtype), random(*b, dtype=dtype)
    check("matmul_nn", a, b, out=product(a, b))


@pytest.mark.parametrize(
    ("a", "b"),
    [((1, 5, 16), (3, 16, 9)), ((2, 1, 5, 16), (3, 16, 9)), ((5, 16), (3, 16, 9))],
)
@pytest.mark.parametrize("biased", [False, True])
def test_batches_that_are_broadcast(a, b, biased):
    a, b = random(*a), random(*b)
    check("matmul_nn", a, b, *([random(9)] if biased else []), out=product(a, b))


@pytest.mark.parametrize(("m", "k", "n"), [(0, 4, 3), (5, 0, 3), (5, 4, 0), (0, 0, 0)])
@pytest.mark.parametrize("batch", [(), (0,), (2,), (2, 3)])
@pytest.mark.parametrize("biased", [False, True])
def test_empty_sizes(m, k, n, batch, biased):
    a, b = random(*batch, m, k), random(k, n)
    check("matmul_nn", a, b, *([random(n)] if biased else []), out=product(a, b))
    c = random(*batch, n, k)
    check("matmul_nt", a, c, out=product(a, c, right=True))


def test_strided_operands():
    a, b = random(16, 5).t(), random(9, 32)[:, ::2]
    check("matmul_nt", a, b, random(9), out=torch.empty(5, 9))
    check("matmul_nn", a, b.t(), out=torch.empty(5, 9))
    wide = random(2, 5, 32)[..., ::2]
    check("matmul_nt", wide, b, out=torch.empty(2, 5, 9), declined=1)
    batches = random(3, 16, 5).mT
    check("matmul_nn", batches, random(3, 16, 9), out=torch.empty(3, 5, 9))


def test_special_values():
    a = random(5, 16)
    a[0, 0], a[1, 1], a[2, 2], a[3] = float("nan"), float("inf"), -float("inf"), -0.0
    check("matmul_nn", a, random(16, 9), random(9), out=torch.empty(5, 9))


def convolved(x, weight, bias, settings, n):
    values = list(settings)
    options = (values[:n], values[n : 2 * n], values[2 * n : 3 * n], bool(values[-1]))
    shape = torch.convolution(x.float(), weight.float(), None, *options, values[3 * n : 4 * n],
                              values[-2]).shape  # fmt: skip
    arguments = [x, weight, *([] if bias is None else [bias]), tvm_ffi.Shape(settings)]
    check(f"conv{n}d", *arguments, out=torch.empty(shape, dtype=x.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions(dtype, n, biased, transposed, groups):
    x = random(2, 4, *[7] * n, dtype=dtype)
    weight = random(*((4, 6 // groups) if transposed else (6, 4 // groups)), *[3] * n, dtype=dtype)
    settings = (*[2] * n, *[1] * n, *[1] * n, *[int(transposed)] * n, groups, int(transposed))
    convolved(x, weight, random(6, dtype=dtype) if biased else None, settings, n)


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("channels", [4, 64])
def test_convolutions_of_other_sizes(batch, channels):
    x = random(batch, channels, 40, 40)
    convolved(x, random(channels, 1, 3, 3), None, (1, 1, 1, 1, 1, 1, 0, 0, channels, 0), 2)
    convolved(x, random(8, channels, 1, 1), random(8), (1, 1, 0, 0, 1, 1, 0, 0, 1, 0), 2)
    convolved(x, random(8, channels, 3, 3), None, (1, 1, 2, 2, 2, 2, 0, 0, 1, 0), 2)


def test_a_convolution_of_half_operands_with_a_float_sum():
    x, weight, bias = (random(*s, dtype=torch.bfloat16) for s in ((1, 3, 8, 8), (4, 3, 3, 3), (4,)))
    settings = tvm_ffi.Shape((1, 1, 0, 0, 1, 1, 0, 0, 1, 0))
    check("conv2d", x, weight, bias, settings, out=torch.empty(1, 4, 6, 6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", range(8))
@pytest.mark.parametrize("causal", [0, 1, 2])
@pytest.mark.parametrize("masked", [None, torch.float32, torch.bool])
def test_attention(dtype, order, causal, masked):
    b, s, t, h, d = 2, 5, 7, 4, 8
    lengths = (s, t, t)
    q, k, v = (
        random(b, *((h, n) if order >> i & 1 else (n, h)), d, dtype=dtype)
        for i, n in enumerate(lengths)
    )
    mask = []
    if masked is torch.bool:
        mask = [torch.rand(b, 1, s, t) > 0.5]
    elif masked is not None:
        mask = [random(b, h, s, t, dtype=dtype)]
    rare = causal == 2 or (causal == 1 and masked is not None)
    arguments = [q, k, v, *mask, tvm_ffi.Shape((causal, order)), 0.3]
    check("attention", *arguments, out=torch.empty(b, s, h, d, dtype=dtype), declined=int(rare))


@pytest.mark.parametrize("heads", [1, 2])
def test_attention_with_fewer_key_heads(heads):
    q, k = random(2, 5, 4, 8), random(2, 7, heads, 8)
    check("attention", q, k, k, tvm_ffi.Shape((0, 0)), 0.3, out=torch.empty(2, 5, 4, 8))


@pytest.mark.parametrize(("b", "s", "t"), [(0, 5, 7), (2, 0, 7), (2, 300, 300)])
def test_attention_of_other_sizes(b, s, t):
    q, k = random(b, s, 4, 8), random(b, t, 4, 8)
    check("attention", q, k, k, tvm_ffi.Shape((0, 0)), 0.3, out=torch.empty(b, s, 4, 8))


def test_an_error_is_pytorch_s_own():
    with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied"):
        compiled("matmul_nt")(*map(passed, (random(5, 16), random(9, 15), torch.empty(5, 9))))
    settings = tvm_ffi.Shape((1, 1, 0, 0, 1, 1, 0, 0, 1, 0))
    operands = random(1, 3, 2, 2), random(4, 3, 3, 3)
    with pytest.raises(RuntimeError, match="Kernel size can't be greater than actual input size"):
        compiled("conv2d")(*map(passed, operands), settings, passed(torch.empty(1, 4, 1, 1)))


def test_no_argument_at_all_is_an_error():
    with pytest.raises((TypeError, ValueError)):
        compiled("matmul_nt")()


def test_symbolic_sizes():
    conv = torch.nn.Conv1d(4, 9, 3)
    compiled_conv = torch.compile(conv, backend="relax", dynamic=True)
    with torch.no_grad():
        for length in (5, 3, 12, 40):
            x = random(2, 4, length)
            assert torch.equal(compiled_conv(x), conv(x))


def test_autocast_around_the_call_changes_nothing():
    x, weight = random(1, 3, 8, 8), random(4, 3, 3, 3)
    assert_matches_eager(torch.nn.functional.conv2d, x, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        settings = tvm_ffi.Shape((1, 1, 0, 0, 1, 1, 0, 0, 1, 0))
        check("conv2d", x, weight, settings, out=torch.empty(1, 4, 6, 6))


def test_gradients_being_recorded_changes_nothing():
    linear = torch.nn.Linear(16, 9)
    assert_matches_eager(linear, random(5, 16), grad=True)
