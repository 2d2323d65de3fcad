"""Arithmetic, division, bits, comparison and choice between elements, against eager."""

import operator

import pytest
import torch
from special_values import FLOATS, INF, INTEGERS, NAN, odd, pairs, seeded

from fx2relax.testing import assert_matches_eager

ARITHMETIC = [torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, torch.fmax, torch.fmin]
COMPARE = [torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge]
LOGICAL = [torch.logical_and, torch.logical_or, torch.logical_xor]
BITS = [torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor]
SHIFTS = [torch.bitwise_left_shift, torch.bitwise_right_shift]


def each(*functions):
    """One function that returns what all of these do."""
    return lambda *inputs: [f(*inputs) for f in functions]


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_special_values(dtype):
    assert_matches_eager(each(*ARITHMETIC, *COMPARE, *LOGICAL), *pairs(dtype))


def test_booleans():
    chosen = [f for f in [*ARITHMETIC, *COMPARE, *LOGICAL, *BITS] if f is not torch.sub]
    assert_matches_eager(each(*chosen), *pairs(torch.bool))


@pytest.mark.parametrize("dtype", FLOATS)
def test_float_quotients(dtype):
    def fn(a, b):
        return (
            a / b,
            a // b,
            a % b,
            torch.fmod(a, b),
            torch.div(a, b, rounding_mode="trunc"),
            torch.div(a, b, rounding_mode="floor"),
        )

    assert_matches_eager(fn, *pairs(dtype))
    assert_matches_eager(fn, seeded(20, 9, dtype=dtype) * 50, seeded(9, dtype=dtype, seed=1))


@pytest.mark.parametrize("dtype", FLOATS)
def test_quotients_by_numbers(dtype):
    def fn(x):
        return (
            [x / 0.3, x // 0.3, x % 0.3, 7.5 % x, 2.5 // x, x / 3, x / 0],
            [torch.fmod(x, -0.3), torch.div(x, 0.3, rounding_mode="trunc"), 1 / x],
        )

    assert_matches_eager(fn, odd(dtype))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_quotients(dtype):
    a, b = odd(dtype)[:, None], odd(dtype)[odd(dtype) != 0]

    def fn(a, b):
        return (
            [a / b, a // b, a % b, torch.fmod(a, b), torch.div(a, b, rounding_mode="trunc")],
            [a // 3, a % 7, torch.fmod(a, 5), 100 // b, 100 % b, a / 4],
        )

    assert_matches_eager(fn, a, b)


@pytest.mark.parametrize("op", [operator.floordiv, operator.mod, torch.fmod])
def test_integers_by_zero(op):
    compiled = torch.compile(lambda a, b: op(a, b), backend="relax")
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        compiled(torch.tensor([1, 2]), torch.tensor([1, 0]))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_bits(dtype):
    a, b = pairs(dtype)
    shifts = torch.tensor([0, 1, 3, 7, 8, 31, 32, 63, 64, 100]).to(dtype)

    def fn(a, b, n):
        return [f(a, b) for f in BITS], [f(a, n) for f in SHIFTS], ~a, a & 3, 5 | a, a << 2, a >> 1

    assert_matches_eager(fn, a, b, shifts)


def test_powers():
    x, y = pairs()

    def fn(x, y):
        known = [x**p for p in (0, 1, 2, 3, 5, 0.5, -0.5, -1, -2, 1.7, -3.3)]
        return known, x**y, 2**y, 1**y, 0.5**x

    assert_matches_eager(fn, x, y)
    assert_matches_eager(fn, seeded(3, 5).abs() + 0.1, seeded(5), grad=True)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_powers(dtype):
    base = torch.tensor([0, 1, 2, 3, 7, 11]).to(dtype)
    exponent = torch.tensor([[0], [1], [2], [5], [30], [63]]).to(dtype)

    def fn(x, y):
        return x**y, x**2, x**5, x**0, 3**y

    assert_matches_eager(fn, base, exponent)
    if dtype != torch.uint8:
        assert_matches_eager(lambda x, y: x**y, base - 3, exponent - 5)


PROMOTION = {
    "int and float numbers": lambda i, f, b, u: (i + 0.5, i * 2, u - 1, b + 1, b * 0.5, f + 1),
    "tensors": lambda i, f, b, u: (i + f, b * u, u + i, b / b, i / u.clamp(min=1), f - b.float()),
    "0-d tensors give way": lambda i, f, b, u: (
        u + i.flatten()[0],
        i * f.flatten()[0],
        f.half() * f.flatten()[0],
        i.int() + i.flatten()[0],
    ),
    "half and float": lambda i, f, b, u: (
        f.half() + f,
        f.bfloat16() * f.half(),
        f.half() + i,
        f.double() * f,
    ),
    "alpha": lambda i, f, b, u: (
        torch.add(i, u, alpha=3),
        torch.sub(f, i, alpha=0.5),
        torch.rsub(i, 7, alpha=2),
        torch.add(b, b, alpha=True),
    ),
    "comparisons": lambda i, f, b, u: (i > 0.5, u == f, b < i, f.half() >= 0.1, u != -1, i <= f),
    "where": lambda i, f, b, u: (
        torch.where(b, i, f),
        torch.where(b, i, 0.5),
        torch.where(f > 0, 1, 2),
        torch.where(b, f.half(), f),
    ),
    "bits": lambda i, f, b, u: (i & b, u | i.int(), u ^ 3),
}


@pytest.mark.parametrize("name", PROMOTION)
def test_promotion(name):
    i, f = seeded(3, 4, dtype=torch.int64), seeded(3, 4, seed=1)
    assert_matches_eager(
        PROMOTION[name], i, f, seeded(4, seed=2) > 0, seeded(3, 1, dtype=torch.uint8)
    )


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_clamp(dtype):
    x = odd(dtype)
    low, high = seeded(len(x), dtype=dtype, seed=3), seeded(len(x), dtype=dtype, seed=4)

    def fn(x, low, high):
        return (
            [x.clamp(1, 5), x.clamp(max=2), x.clamp(min=3), x.clamp(5, 1), x.clamp_min(low)],
            [x.clamp(low, high), x.clamp(max=high), x.clamp_max(2), x.clip(0, 3)],
        )

    assert_matches_eager(fn, x, low, high)


def test_clamp_by_nan():
    x = odd()
    fn = each(torch.clamp_min, torch.clamp_max, torch.maximum, torch.fmin)
    assert_matches_eager(fn, x, torch.tensor([[NAN], [INF], [0.0], [-0.0]]))


MIXED = {
    "lerp": lambda a, b, c: (torch.lerp(a, b, 0.3), torch.lerp(a, b, c), torch.lerp(a, b, 0.7)),
    "addcmul": lambda a, b, c: (torch.addcmul(a, b, c, value=0.5), torch.addcmul(a, b, c)),
    "addcdiv": lambda a, b, c: torch.addcdiv(a, b, c.abs() + 1, value=-2),
    "hypot": lambda a, b, c: (torch.hypot(a, b), torch.atan2(a, b), torch.copysign(a, b)),
    "logaddexp": lambda a, b, c: (torch.logaddexp(a, b), torch.logaddexp2(a, c)),
    "xlogy": lambda a, b, c: (torch.xlogy(a, c.abs() + 1), torch.special.xlog1py(b, c.abs())),
    "heaviside": lambda a, b, c: torch.heaviside(a.detach(), b.detach()) + c,
    "where": lambda a, b, c: torch.where(c > 0, a, b).masked_fill(a > 1, 0.5),
    "float_power": lambda a, b, c: torch.float_power(a.abs() + 1, b),
    "ldexp": lambda a, b, c: torch.ldexp(a, torch.tensor([1, 2, -3, 0])) + b + c,
    "dist": lambda a, b, c: (torch.dist(a, b), torch.dist(a, c, 1), torch.dist(b, c, INF)),
    "fmod": lambda a, b, c: (torch.fmod(a, 0.7), torch.remainder(b, c.abs() + 0.5)),
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", MIXED)
def test_gradients(name):
    assert_matches_eager(MIXED[name], *(seeded(3, 4, seed=s) for s in range(3)), grad=True)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rare_pairs(dtype):
    fn = each(torch.atan2, torch.copysign, torch.nextafter, torch.heaviside, torch.hypot)
    assert_matches_eager(fn, *pairs(dtype))


def test_integer_pairs():
    a, b = seeded(4, 5, dtype=torch.int64), seeded(5, dtype=torch.int64, seed=1)
    assert_matches_eager(each(torch.gcd, torch.lcm, torch.true_divide, torch.ldexp), a, b)


def test_nan_is_never_equal_to_itself():
    def fn(x):
        same = (x == x, x != x, x <= x, x >= x, x < x)
        return same, torch.isclose(x, x, equal_nan=True), torch.isclose(x, x), torch.equal(x, x)

    assert_matches_eager(fn, odd(), fullgraph=False)


LAYOUTS = {
    "transposed": lambda: (seeded(4, 3).t(), seeded(3, 4)),
    "both transposed": lambda: (seeded(4, 3).t(), seeded(4, 3, seed=1).t()),
    "broadcast": lambda: (seeded(2, 1, 4), seeded(3, 1)),
    "channels last": lambda: (
        seeded(2, 3, 4, 5).to(memory_format=torch.channels_last),
        seeded(3, 1, 1),
    ),
    "expanded": lambda: (seeded(1, 4).expand(3, 4), seeded(3, 1)),
    "strided": lambda: (seeded(6, 8)[::2, 1::2], seeded(3, 4)),
    "misaligned": lambda: (seeded(13)[1:].view(3, 4), seeded(3, 4)),
    "0-d": lambda: (torch.tensor(1.5), torch.tensor(-2.0)),
    "0-d and more": lambda: (torch.tensor(1.5), seeded(3, 4)),
    "empty": lambda: (torch.empty(0, 4), torch.ones(1, 4)),
}


def mixed(a, b):
    return a + b, torch.maximum(a, b) - b.abs().sqrt(), torch.where(a > b, a, 0.0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name):
    assert_matches_eager(mixed, *LAYOUTS[name]())


@pytest.mark.parametrize("name", ["transposed", "broadcast", "empty"])
def test_layouts_with_gradients(name):
    assert_matches_eager(mixed, *LAYOUTS[name](), dynamic=True, grad=True)


def test_sizes_change():
    compiled = torch.compile(lambda a, b: (a + b) // 2, backend="relax", dynamic=True)
    for rows in (2, 5, 1):
        a, b = seeded(rows, 4), seeded(4)
        torch.testing.assert_close(compiled(a, b), (a + b) // 2)
