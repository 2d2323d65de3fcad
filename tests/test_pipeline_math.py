"""Vector math against float64, in units in the last place, and at the edges."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pipeline_cases import module, run
from tvm import te, tirx
from tvm.script import relax as R

from fx2relax.pipeline.vectormath import DOUBLES
from fx2relax.pipeline.vectormath import FUNCTIONS as POLYNOMIALS
from fx2relax.testing import assert_matches_eager

NAN, INF = math.nan, math.inf
EDGES = [
    0.0,
    -0.0,
    NAN,
    INF,
    -INF,
    1e-45,
    -1e-45,
    1e-38,
    3e38,
    -3e38,
    1.0,
    -1.0,
    88.8,
    -87.4,
    -103.9,
]


def through(function: Any, x: torch.Tensor) -> torch.Tensor:
    """A TE kernel of one function, as a user would write it."""

    def body(b: Any, v: Any) -> Any:
        return b.emit_te(lambda a: te.compute(a.shape, lambda *i: function(a(*i)), name="f"), v)

    out: torch.Tensor = run(module(body, x.shape, dtypes=str(x.dtype).removeprefix("torch.")), x)
    return out


def ulps(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error in units in the last place of float32, denormals included."""
    with_inf = exact.float()
    assert torch.equal(got.isnan(), exact.isnan())
    finite = with_inf.isfinite() & got.isfinite()
    assert torch.equal(got[~finite & ~got.isnan()], with_inf[~finite & ~got.isnan()])
    exponent = torch.frexp(exact[finite].abs().clamp(min=2.0**-126))[1].double()
    return ((got[finite].double() - exact[finite]).abs() / 2 ** (exponent - 24)).max().item()


def grid(low: float, high: float) -> torch.Tensor:
    """Numbers between two bounds, numbers of every exponent, and the edges."""
    every = torch.arange(-(2**31), 2**31, 2**32 // 200_003).to(torch.int32).view(torch.float32)
    close = torch.linspace(low, high, 200_003, dtype=torch.float64).float()
    return torch.cat([close, every, torch.tensor(EDGES)])


def libm(name: str) -> Any:
    return lambda *x: tirx.call_pure_extern("float32", name, *x)


def as_eager_ends(x: torch.Tensor) -> torch.Tensor:
    """The sigmoid, and 0 from where eager's of float32 is."""
    return torch.where(x.float().sigmoid() == 0, 0, x.sigmoid())


FUNCTIONS: list[tuple[str, Any, Any, float, float]] = [
    ("tirx.exp", tirx.exp, torch.exp, -110, 95),
    ("tirx.exp2", tirx.exp2, torch.exp2, -152, 130),
    ("expm1f", libm("expm1f"), torch.expm1, -20, 90),
    ("tirx.log", tirx.log, torch.log, 0, 4),
    ("prim.log2", tirx.log2, torch.log2, 0, 4),
    ("tirx.log10", tirx.log10, torch.log10, 0, 4),
    ("tirx.log1p", tirx.log1p, torch.log1p, -1, 4),
    ("tirx.sigmoid", tirx.sigmoid, torch.sigmoid, -110, 110),
    ("fx2relax.gate", libm("fx2relax.gate"), as_eager_ends, -90, 110),
    ("tirx.tanh", tirx.tanh, torch.tanh, -3, 3),
    ("tirx.erf", tirx.erf, torch.erf, -4, 4),
    ("erfcf", libm("erfcf"), torch.erfc, -5, 11),
    ("sinhf", libm("sinhf"), torch.sinh, -5, 5),
    ("coshf", libm("coshf"), torch.cosh, -5, 5),
    ("tirx.asinh", tirx.asinh, torch.asinh, -4, 4),
    ("tirx.acosh", tirx.acosh, torch.acosh, 1, 4),
    ("atanhf", libm("atanhf"), torch.atanh, -1, 1),
    ("tirx.asin", tirx.asin, torch.asin, -1, 1),
    ("tirx.acos", tirx.acos, torch.acos, -1, 1),
    ("tirx.atan", tirx.atan, torch.atan, -6, 6),
    ("fx2relax.bounded.sin", tirx.sin, torch.sin, -2000, 2000),
    ("fx2relax.bounded.cos", tirx.cos, torch.cos, -2000, 2000),
    ("fx2relax.bounded.tan", tirx.tan, torch.tan, -2000, 2000),
]


@pytest.mark.parametrize(
    ("name", "function", "exact", "low", "high"), FUNCTIONS, ids=[f[0] for f in FUNCTIONS]
)
def test_float32(name: str, function: Any, exact: Any, low: float, high: float) -> None:
    x = grid(low, high)
    if name.endswith(("sin", "cos", "tan")):
        # The floats nearest to their zeros, and vectors of which one element is far from zero.
        x = torch.cat([x, (torch.arange(1, 500_000).double() * math.pi / 2).float()])
    got, expected = through(function, x), exact(x.double())
    assert ulps(got, expected) <= POLYNOMIALS[name][1]
    signed = ~got.isnan()
    assert torch.equal(got.signbit()[signed], expected.float().signbit()[signed])


@pytest.mark.parametrize("turned", [False, True])
def test_a_sigmoid_that_is_a_factor_ends_where_eager_s_does(turned: bool) -> None:
    """Products of less are denormals, which slow down whatever reads them."""

    def gated(x: Any) -> Any:
        return tirx.sigmoid(x) * x if turned else x * tirx.sigmoid(x)

    x = grid(-110, 110)
    got, eager = through(gated, x), torch.nn.functional.silu(x)
    assert torch.equal(got == 0, eager == 0)
    torch.testing.assert_close(got, eager, rtol=1e-6, atol=1e-40, equal_nan=True)


def test_every_polynomial_is_tested() -> None:
    assert {name for name, *_ in FUNCTIONS} | {"atan2f", "fx2relax.bounded.fmod"} == set(
        POLYNOMIALS
    )


@pytest.mark.parametrize(
    ("function", "exact", "limit"),
    [(tirx.sqrt, torch.sqrt, 1), (tirx.rsqrt, torch.rsqrt, 2)],
    ids=["sqrt", "rsqrt"],
)
def test_roots(function: Any, exact: Any, limit: float) -> None:
    x = grid(-1, 100)
    assert ulps(through(function, x), exact(x.double())) <= limit


def test_angles_of_points() -> None:
    edges = torch.tensor(EDGES)
    points = torch.cartesian_prod(edges, edges)
    turns = torch.linspace(-math.pi, math.pi, 20_011, dtype=torch.float64)
    for size in (1e-30, 1.0, 1e30):
        around = torch.stack([turns.sin() * size, turns.cos() * size], 1).float()
        points = torch.cat([points, around])
    y, x = points[:, 0].clone(), points[:, 1].clone()

    def body(b: Any, v: Any, w: Any) -> Any:
        def angle(a: Any, c: Any) -> Any:
            return te.compute(a.shape, lambda i: libm("atan2f")(a[i], c[i]), name="f")

        return b.emit_te(angle, v, w)

    got = run(module(body, y.shape, x.shape), y, x)
    expected = torch.atan2(y.double(), x.double())
    assert ulps(got, expected) <= POLYNOMIALS["atan2f"][1]
    signed = ~got.isnan()
    assert torch.equal(got.signbit()[signed], expected.signbit()[signed])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["exp", "log", "erf", "tanh", "sigmoid"])
def test_half_precision_is_rounded_once(name: str, dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    got = through(getattr(tirx, name), x)
    exact = getattr(torch, name)(x.double())
    torch.testing.assert_close(
        got,
        exact.to(dtype),
        rtol=2**-10 if dtype == torch.float16 else 2**-7,
        atol=1e-7,
        equal_nan=True,
    )


FLOAT64: list[tuple[str, Any, float, float]] = [
    ("tirx.exp", tirx.exp, -750, 712),
    ("expm1", None, -40, 712),
    ("tirx.log", tirx.log, 0, 4),
    ("tirx.log1p", tirx.log1p, -1, 4),
    ("tirx.sigmoid", tirx.sigmoid, -708, 40),
    ("tanh", tirx.tanh, -23, 23),
    ("tirx.erf", tirx.erf, -7, 7),
    ("erfc", None, -7, 27.5),
]


@pytest.mark.parametrize(("name", "function", "low", "high"), FLOAT64, ids=[f[0] for f in FLOAT64])
def test_float64(name: str, function: Any, low: float, high: float) -> None:
    generator = torch.Generator().manual_seed(0)
    close = torch.rand(100_000, generator=generator, dtype=torch.float64) * (high - low) + low
    small = 10 ** (torch.rand(50_000, generator=generator, dtype=torch.float64) * 300 - 300)
    edges = [*EDGES, 5e-324, -5e-324, 1e-310, 1e308, 709.8, -745.2, 22.0, 1.0000000000000002]
    x = torch.cat([close, small, -small, torch.tensor(edges, dtype=torch.float64)])
    if name == "tirx.sigmoid":  # where eager's own goes to zero at once
        x = x[~(x < -708)]
    short = name.removeprefix("tirx.")
    libm = function or (lambda v: tirx.call_pure_extern("float64", short, v))
    got, eager = through(libm, x), getattr(torch, short)(x)
    assert torch.equal(got.isnan(), eager.isnan())
    known = eager.isfinite()
    assert torch.equal(got[~known & ~eager.isnan()], eager[~known & ~eager.isnan()])
    exponent = torch.frexp(eager[known].abs().clamp(min=2.0**-1022))[1]
    apart = torch.ldexp((got[known] - eager[known]).abs(), 53 - exponent)
    # Eager's vector functions are within a unit of the exact value themselves.
    assert apart.max().item() <= DOUBLES[name][1] + 1
    signed = known & ((eager != 0) | (x == 0))
    assert torch.equal(got[signed].signbit(), eager[signed].signbit())


def test_every_float64_polynomial_is_tested() -> None:
    assert {name for name, *_ in FLOAT64} | {"fx2relax.bounded.fmod"} == set(DOUBLES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["fmod", "remainder", "floor_divide"])
def test_remainders_are_exact(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    count, bits = 20_000, torch.int32 if dtype == torch.float32 else torch.int64
    limits = torch.iinfo(bits)

    def whole(most: int) -> torch.Tensor:
        return torch.randint(-most, most, (count,), generator=generator).to(dtype)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(count, generator=generator, dtype=dtype) * scale

    divisor = normal(1)
    pairs = [
        (whole(10**7), whole(50)),
        (normal(3e3), normal(1)),
        (divisor * whole(4_000_000), divisor),
        (normal(1e-40), normal(1e-39)),
    ]
    edges = torch.tensor(EDGES, dtype=dtype)
    pairs.append(tuple(torch.cartesian_prod(edges, edges).T))
    pairs.append(
        tuple(
            torch.randint(limits.min, limits.max, (2, count), generator=generator, dtype=bits).view(
                dtype
            )
        )
    )
    x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    # Eager's own loses itself where a quotient is huge.
    huge = (x.abs() >= y.abs() * 2.0**20) & x.isfinite() & (y != 0)
    x, y = x[~huge], y[~huge]
    assert_matches_eager(getattr(torch, name), x, y, tol=0)


def test_large_integer_remainders_compile() -> None:
    # TVM unrolls a loop of nothing but checks, however long it is.
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(1, 999, (300, 400), generator=generator) for _ in "ab")
    assert_matches_eager(lambda x, y: (x % y, x // y, torch.fmod(x, y)), x - 500, y)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("body", "eager"),
    [
        (lambda b, x, y: R.maximum(x, y), torch.maximum),
        (lambda b, x, y: R.minimum(x, y), torch.minimum),
        (lambda b, x, y: R.nn.relu(x), lambda x, y: torch.relu(x)),
        (lambda b, x, y: R.clip(x, -0.5, 0.5), lambda x, y: x.clamp(-0.5, 0.5)),
        (lambda b, x, y: R.max(x, -1), lambda x, y: x.amax(-1)),
        (lambda b, x, y: R.min(x, 0), lambda x, y: x.amin(0)),
    ],
    ids=["maximum", "minimum", "relu", "clip", "max", "min"],
)
def test_nan_goes_through(body: Any, eager: Any, dtype: str) -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(9, 131).to(getattr(torch, dtype)) for _ in range(2))
    for t in (x, y):
        t.view(-1)[torch.randperm(t.numel())[:20]] = NAN
        t.view(-1)[torch.randperm(t.numel())[:20]] = INF
        t.view(-1)[torch.randperm(t.numel())[:20]] = -INF
    got = run(module(body, x.shape, y.shape, dtypes=dtype), x, y)
    torch.testing.assert_close(got, eager(x, y), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_extremes_of_infinities(dtype: str) -> None:
    for width in (5, 100):
        x = torch.full((3, width), -INF, dtype=getattr(torch, dtype))
        largest = module(lambda b, x: R.max(x, -1), x.shape, dtypes=dtype)
        smallest = module(lambda b, x: R.min(x, -1), x.shape, dtypes=dtype)
        assert run(largest, x).tolist() == [-INF] * 3
        assert run(smallest, -x).tolist() == [INF] * 3


def test_a_bfloat16_cast_in_between_rounds() -> None:
    def body(b: Any, x: Any, y: Any) -> Any:
        total = x
        for _ in range(12):
            half = b.emit(R.astype(b.emit(R.add(total, y)), "bfloat16"))
            total = b.emit(R.astype(half, "float32"))
        return total

    x, y = torch.randn(33), torch.randn(33)
    expected = x
    for _ in range(12):
        expected = (expected + y).bfloat16().float()
    got = run(module(body, x.shape, y.shape), x, y)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_functions_of_functions_build_in_time_that_grows_with_their_number() -> None:
    # Bound values written out in full would double with each of these.
    x = torch.randn(3, 40)
    got = through(lambda a: tirx.tanh(tirx.log1p(tirx.exp(tirx.tanh(tirx.log1p(tirx.exp(a)))))), x)
    softplus = x.double().exp().log1p()
    torch.testing.assert_close(got, softplus.tanh().exp().log1p().tanh().float())
