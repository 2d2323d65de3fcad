"""Vector math against float64, in units in the last place, and at the edges."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pipeline_cases import module, run
from tvm import te, tirx
from tvm.script import relax as R

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
    wide = torch.linspace(low, high, 200_003, dtype=torch.float64).float()
    tiny = torch.logspace(-44, 1, 20_001, dtype=torch.float64).float()
    tiny = tiny[(tiny <= high)]
    return torch.cat([wide, tiny, -tiny[-tiny >= low], torch.tensor(list(EDGES))])


FUNCTIONS: list[tuple[str, Any, Any, float, float, float]] = [
    ("exp", tirx.exp, torch.exp, -110, 95, 2),
    ("log", tirx.log, torch.log, -1, 100, 2),
    ("erf", tirx.erf, torch.erf, -6, 6, 4),
    ("tanh", tirx.tanh, torch.tanh, -12, 12, 4),
    ("sigmoid", tirx.sigmoid, torch.sigmoid, -110, 110, 4),
    ("log1p", tirx.log1p, torch.log1p, -1.5, 100, 4),
    ("log2", tirx.log2, torch.log2, -1, 100, 4),
    ("log10", tirx.log10, torch.log10, -1, 100, 4),
    ("sqrt", tirx.sqrt, torch.sqrt, -1, 100, 1),
    ("rsqrt", tirx.rsqrt, torch.rsqrt, -1, 100, 2),
    ("sin", tirx.sin, torch.sin, -1000, 1000, 4),
    ("cos", tirx.cos, torch.cos, -1000, 1000, 4),
]


@pytest.mark.parametrize(
    ("name", "function", "exact", "low", "high", "limit"), FUNCTIONS, ids=[f[0] for f in FUNCTIONS]
)
def test_float32(
    name: str, function: Any, exact: Any, low: float, high: float, limit: float
) -> None:
    x = grid(low, high)
    if name in ("sin", "cos"):
        x = x[x.abs() < 1e30]
    assert ulps(through(function, x), exact(x.double())) <= limit


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


@pytest.mark.parametrize("name", ["exp", "log", "erf", "tanh"])
def test_float64_is_exact(name: str) -> None:
    x = torch.linspace(-5, 5, 10_001, dtype=torch.float64)
    torch.testing.assert_close(
        through(getattr(tirx, name), x),
        getattr(torch, name)(x),
        rtol=1e-14,
        atol=1e-14,
        equal_nan=True,
    )


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
