"""Functions of one element, casts between dtypes, and special functions, against eager."""

import pytest
import torch
from special_values import FLOATS, INTEGERS, NAN, odd, seeded

from fx2relax.testing import assert_matches_eager

MATHS = "acos acosh asin asinh atan atanh cos cosh erf erfc exp exp2 expm1 lgamma log log10 log1p"
MATHS += " log2 reciprocal rsqrt sigmoid sin sinh sqrt square tan tanh logit sinc deg2rad rad2deg"
ROUNDING = "abs ceil floor frac neg positive round sign sgn trunc relu"
TESTS = "isnan isinf isfinite isposinf isneginf isreal signbit logical_not"


def each(names):
    """One function that returns what all the named ones do."""
    functions = [getattr(torch, name) for name in names.split()]
    return lambda x: [f(x) for f in functions]


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", FLOATS)
def test_maths(dtype):
    tol = (1e-4, 1e-5) if dtype == torch.float32 else None
    assert_matches_eager(each(MATHS), odd(dtype)[1:], tol=tol)
    assert_matches_eager(each(f"{ROUNDING} {TESTS}"), odd(dtype))


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool])
def test_maths_of_integers(dtype):
    x = odd(dtype) if dtype == torch.bool else torch.tensor([0, 1, 2, 3, 9]).to(dtype)
    names = MATHS.replace(" square", "") if dtype == torch.bool else MATHS
    assert_matches_eager(each(names), x)
    rounding = "sign sgn" if dtype == torch.bool else ROUNDING.replace(" frac", "")
    assert_matches_eager(each(f"{rounding} {TESTS}"), odd(dtype))


def test_gradients():
    smooth = "acos asin asinh atan atanh cos cosh erf erfc exp exp2 expm1 sigmoid sin sinh sinc"
    x = seeded(3, 4).tanh() * 0.9
    assert_matches_eager(each(f"{smooth} tan tanh abs frac relu sgn neg deg2rad"), x, grad=True)
    positive = "log log10 log1p log2 rsqrt sqrt reciprocal lgamma logit"
    assert_matches_eager(each(positive), seeded(3, 4).sigmoid(), grad=True, tol=(1e-4, 1e-5))
    assert_matches_eager(lambda x: x.acosh(), seeded(3, 4).abs() + 1.5, grad=True)


def test_gradients_where_there_is_a_choice():
    x = torch.tensor([0.0, -0.0, 1.0, -1.0])
    assert_matches_eager(lambda x: (x.abs(), x.relu(), x.clamp(0, 1), x.clamp(-1)), x, grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rounding_to_decimals(dtype):
    x = seeded(4, 5, dtype=dtype) * 1234

    def fn(x):
        return [x.round(decimals=d) for d in (0, 1, 3, -2)], (x / 100).round().to(torch.int32)

    assert_matches_eager(fn, x)
    assert_matches_eager(torch.round, torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -0.2]))


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", FLOATS)
def test_not_a_number_is_replaced(dtype):
    def fn(x):
        return x.nan_to_num(), x.nan_to_num(7.0, 1.0, -1.0), torch.nan_to_num(x, posinf=3.0)

    assert_matches_eager(fn, odd(dtype))


CASTS = [*FLOATS, *INTEGERS, torch.bool, torch.int8, torch.int16]


@pytest.mark.sweep
@pytest.mark.parametrize("source", CASTS)
def test_casts(source):
    x = odd(source) if source not in (torch.int8, torch.int16) else odd(torch.uint8).to(source)
    assert_matches_eager(lambda x: [x.to(target) for target in CASTS], x)


def test_large_floats_as_integers():
    x = torch.tensor([3e9, -3e9, 1e19, -1e19, 2.0**31, -(2.0**31), 255.9, 256.0, -1.0, NAN])
    kinds = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
    assert_matches_eager(lambda x: [x.to(k) for k in kinds], x)
    assert_matches_eager(lambda x: [x.to(k) for k in kinds], x.double())


def test_gradients_of_casts():
    def fn(x):
        return x.half().float() * 2, x.double().sin(), x.bfloat16() + 1, x.to(torch.float16).sum()

    assert_matches_eager(fn, seeded(3, 4), grad=True)


def test_bits_seen_as_another_dtype():
    def fn(x, i):
        return x.view(torch.int32), i.view(torch.float64), x.half().view(torch.int16)

    assert_matches_eager(fn, seeded(3, 4), seeded(3, 4, dtype=torch.int64))


SPECIAL = "digamma erfinv i0 i0e i1 i1e ndtr ndtri entr"


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", FLOATS)
def test_special_functions(dtype):
    functions = [getattr(torch.special, name) for name in SPECIAL.split()]
    if dtype in (torch.float16, torch.bfloat16):  # which eager has no ndtri for
        functions.remove(torch.special.ndtri)

    def fn(x):
        return [f(x) for f in functions], torch.polygamma(1, x.abs()), torch.polygamma(3, x.abs())

    assert_matches_eager(fn, odd(dtype), tol=(1e-4, 1e-5) if dtype == torch.float32 else None)


def test_gradients_of_special_functions():
    def fn(x):
        return x.lgamma(), x.digamma(), torch.special.i0(x), torch.special.i1e(x), x.erfinv()

    assert_matches_eager(fn, seeded(3, 4).sigmoid(), grad=True, tol=(1e-4, 1e-4))


def test_zeta():
    x = torch.tensor([[0.5], [1.0], [2.0], [3.5], [NAN]])
    assert_matches_eager(torch.special.zeta, x, odd()[:-2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_mantissa_and_exponent(dtype):
    x = torch.tensor([0.0, -0.0, 1.0, -0.3, 1e-6, 1000.0, 2.0**-14, 5e-324]).to(dtype)
    assert_matches_eager(lambda x: (*torch.frexp(x), torch.ldexp(*torch.frexp(x))), x)


def test_functions_of_functions():
    # Each binds values of the one before it: what is written out in full grows without end.
    def fn(x):
        for _ in range(4):
            x = torch.nn.functional.mish(x) + torch.logaddexp(x, x.sin())
        return x

    assert_matches_eager(fn, seeded(3, 40), grad=True, tol=(1e-3, 1e-4))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3, 17)])
def test_shapes(shape):
    x = torch.ones(shape) if 0 in shape else seeded(*shape)
    assert_matches_eager(lambda x: (x.exp(), x.abs(), x.isnan(), x.erfinv(), x.round()), x)


def test_layouts():
    x = seeded(2, 6, 4, 5)

    def fn(x):
        return x.exp(), -x, x.tanh().floor()

    for y in (x.transpose(1, 3), x[:, ::2], x.to(memory_format=torch.channels_last)):
        assert_matches_eager(fn, y, dynamic=True)
