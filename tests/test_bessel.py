"""Bessel functions, Airy's and the scaled error function, against eager and against mpmath."""

import mpmath
import numpy as np
import pytest
import torch
from special_values import INF, NAN, seeded

import fx2relax
from fx2relax.compat import relax, tvm
from fx2relax.pipeline import build
from fx2relax.testing import assert_matches_eager

pytestmark = pytest.mark.sweep

EXACT = {
    "airy_ai": mpmath.airyai,
    "bessel_j0": lambda x: mpmath.besselj(0, x),
    "bessel_j1": lambda x: mpmath.besselj(1, x),
    "bessel_y0": lambda x: mpmath.bessely(0, x),
    "bessel_y1": lambda x: mpmath.bessely(1, x),
    "modified_bessel_i0": lambda x: mpmath.besseli(0, x),
    "modified_bessel_i1": lambda x: mpmath.besseli(1, x),
    "modified_bessel_k0": lambda x: mpmath.besselk(0, x),
    "modified_bessel_k1": lambda x: mpmath.besselk(1, x),
    "scaled_modified_bessel_k0": lambda x: mpmath.besselk(0, x) * mpmath.exp(x),
    "scaled_modified_bessel_k1": lambda x: mpmath.besselk(1, x) * mpmath.exp(x),
    "spherical_bessel_j0": lambda x: mpmath.sin(x) / x,
    "erfcx": lambda x: mpmath.exp(x * x) * mpmath.erfc(x),
}
ARGUMENTS = [0.0, -0.0, 1e-30, 1e-4, 0.3, -0.3, 1.0, -1.0, 2.0, 2.09, 2.1, -2.1, 3.99, -4.0, -4.1]
ARGUMENTS += [5.0, -5.0, 7.99, 8.0, 8.01, -9.0, 26.0, 30.0, -30.0, 120.0, 800.0, INF, -INF, NAN]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", EXACT)
def test_functions(name, dtype):
    function = getattr(torch.special, name)
    tol = (1e-4, 1e-4) if dtype == torch.float32 else None
    assert_matches_eager(function, torch.tensor(ARGUMENTS, dtype=dtype), tol=tol)


@pytest.mark.parametrize("name", EXACT)
def test_digits(name):
    torch._dynamo.reset()
    x = torch.linspace(0.01, 40, 301, dtype=torch.float64)
    if name in ("airy_ai", "erfcx", "spherical_bessel_j0", "bessel_j0", "bessel_j1"):
        x = torch.cat([x, -x[x < 20]])
    found = torch.compile(getattr(torch.special, name), backend="relax")(x)
    exact = [float(EXACT[name](mpmath.mpf(v))) for v in x.tolist()]
    # Eager's approximations of some are not of more digits, and are followed.
    coarse = name in ("airy_ai", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1")
    rtol = 3e-5 if coarse else 1e-13
    np.testing.assert_allclose(found.numpy(), exact, rtol=rtol, atol=rtol / 10)


def test_sizes_and_dtypes():
    def fn(x):
        return [getattr(torch.special, name)(x) for name in EXACT]

    tol = (1e-4, 1e-4)
    assert_matches_eager(fn, seeded(3, 7).abs(), dynamic=True, tol=tol)
    assert_matches_eager(fn, torch.tensor([1, 2, 3]), tol=tol)
    assert_matches_eager(fn, torch.tensor(0.3), tol=tol)
    assert_matches_eager(fn, torch.ones(0, 2))


def test_gradients():
    def fn(x):
        return torch.special.erfcx(x), torch.special.log_ndtr(x)

    assert_matches_eager(fn, seeded(3, 4), grad=True)


def test_logarithm_of_the_normal_distribution():
    x = torch.tensor([0.0, 1.0, -1.0, -30.0, 30.0, INF, -INF, NAN])
    assert_matches_eager(torch.special.log_ndtr, x)
    assert_matches_eager(torch.special.log_ndtr, x.double())


def test_without_the_library():
    class Functions(torch.nn.Module):
        def forward(self, x):
            return [getattr(torch.special, name)(x) for name in EXACT]

    x = seeded(3, 7).abs()
    mod = fx2relax.from_fx(torch.fx.symbolic_trace(Functions()), [x])
    machine = relax.VirtualMachine(build(mod, library="none"), tvm.cpu())
    ours = machine["main"](tvm.runtime.tensor(x.numpy()))
    for value, expected in zip(ours, Functions()(x), strict=True):
        torch.testing.assert_close(torch.from_numpy(value.numpy()), expected, rtol=1e-4, atol=1e-4)
