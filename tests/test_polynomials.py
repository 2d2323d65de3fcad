"""Orthogonal polynomials, against eager."""

import pytest
import torch
from special_values import INF, NAN, seeded

import fx2relax
from fx2relax.compat import relax, tvm
from fx2relax.pipeline import build
from fx2relax.testing import assert_matches_eager

pytestmark = pytest.mark.sweep

NAMES = [
    *[f"chebyshev_polynomial_{kind}" for kind in "tuvw"],
    *[f"shifted_chebyshev_polynomial_{kind}" for kind in "tuvw"],
    "hermite_polynomial_h",
    "hermite_polynomial_he",
    "laguerre_polynomial_l",
    "legendre_polynomial_p",
]
ARGUMENTS = [0.0, -0.0, 1.0, -1.0, 0.3, -0.7, 0.999999, 1e-30, 2.5, -2.5, INF, -INF]
DEGREES = [-1.0, -0.5, 0.0, 1.0, 2.0, 2.9, 3.0, 6.0, 7.0, 8.0, 9.0, 30.0, 129.0, 600.0, NAN, INF]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_polynomials(name, dtype):
    x = torch.tensor(ARGUMENTS, dtype=dtype)[:, None]
    n = torch.tensor(DEGREES, dtype=dtype)
    function = getattr(torch.special, name)
    tol = (1e-4, 1e-4) if dtype == torch.float32 else None
    assert_matches_eager(
        lambda x, n: (function(x, n), function(x, 3), function(2.5, n)), x, n, tol=tol
    )


def test_sizes_and_dtypes():
    def fn(x, n):
        return [getattr(torch.special, name)(x, n) for name in NAMES]

    tol = (1e-4, 1e-4)
    assert_matches_eager(fn, seeded(3, 7), torch.arange(7), dynamic=True, tol=tol)
    assert_matches_eager(fn, torch.tensor([0, 1, 2, -3]), torch.arange(4), tol=tol)
    assert_matches_eager(fn, torch.tensor(0.3), torch.tensor(5), tol=tol)
    assert_matches_eager(fn, torch.ones(0, 2), torch.ones(2))


def test_without_the_library():
    class Expansion(torch.nn.Module):
        def forward(self, x, n):
            return [getattr(torch.special, name)(x, n) for name in NAMES]

    x, n = seeded(3, 7), torch.arange(7.0)
    mod = fx2relax.from_fx(torch.fx.symbolic_trace(Expansion()), [x, n])
    machine = relax.VirtualMachine(build(mod, library="none"), tvm.cpu())
    ours = machine["main"](*(tvm.runtime.tensor(t.numpy()) for t in (x, n)))
    for value, expected in zip(ours, Expansion()(x, n), strict=True):
        torch.testing.assert_close(torch.from_numpy(value.numpy()), expected, rtol=1e-4, atol=1e-4)
