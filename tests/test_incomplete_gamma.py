"""The regularised incomplete gamma functions, against eager and against mpmath."""

import mpmath
import numpy as np
import pytest
import torch
from special_values import FLOATS, INF, NAN, seeded

import fx2relax
from fx2relax.compat import relax, tvm
from fx2relax.pipeline import build
from fx2relax.testing import assert_matches_eager

pytestmark = pytest.mark.sweep

VALUES = [0.0, -0.0, 1e-30, 1e-3, 0.3, 0.9, 1.0, 1.2, 3.0, 20.0, 31.0, 45.0, 200.0, 310.0, 1e4]
VALUES += [1.02e4, -1.0, INF, -INF, NAN]


def both(a, x):
    return torch.igamma(a, x), torch.igammac(a, x)


@pytest.mark.parametrize("dtype", FLOATS)
def test_functions(dtype):
    x = torch.tensor(VALUES, dtype=dtype)
    assert_matches_eager(both, x[:, None], x, tol=(1e-4, 1e-5) if dtype == torch.float32 else None)


def exactly(a, x):
    """P and Q, by the series of P."""
    with mpmath.workdps(350):
        factor = mpmath.exp(a * mpmath.log(x) - x - mpmath.loggamma(a + mpmath.mpf(1)))
        lower = factor * mpmath.hyp1f1(1, a + mpmath.mpf(1), x, maxterms=10**6)
        return float(lower), float(1 - lower)


def test_digits():
    torch._dynamo.reset()
    logs = seeded(2, 400, dtype=torch.float64)
    a, x = (logs * 2.5).exp()
    x[200:] = a[200:] * (1 + 0.3 * logs[1, 200:] / (1 + a[200:].sqrt()))
    a[:50] = 30 + a[:50] * 100
    x[:50] = a[:50] * (1 + 0.1 * logs[1, :50])
    exact = [exactly(p, q) for p, q in zip(a.tolist(), x.tolist(), strict=True)]
    found = torch.stack(torch.compile(both, backend="relax")(a, x), 1)
    np.testing.assert_allclose(found.numpy(), exact, rtol=2e-12)


def test_sizes_and_dtypes():
    a, x = seeded(3, 1, 5).abs(), seeded(4, 5, seed=1).abs()
    assert_matches_eager(both, a, x, dynamic=True)
    assert_matches_eager(both, a, torch.tensor(2.0, dtype=torch.float64))
    assert_matches_eager(both, torch.tensor(2.0), torch.tensor(0.5))
    assert_matches_eager(both, torch.ones(0, 2), torch.ones(2))
    assert_matches_eager(both, a, torch.tensor([1, 2, 3, 0, 4]))


def test_gradients():
    a, x = seeded(3, 4).abs() + 0.1, seeded(3, 4, seed=1).abs() + 0.1
    assert_matches_eager(both, a, x.requires_grad_(), grad=True)


def test_without_the_library():
    class Both(torch.nn.Module):
        def forward(self, a, x):
            return both(a, x)

    a, x = seeded(3, 4).abs() * 40, seeded(3, 4, seed=1).abs() * 40
    mod = fx2relax.from_fx(torch.fx.symbolic_trace(Both()), [a, x])
    machine = relax.VirtualMachine(build(mod, library="none"), tvm.cpu())
    ours = machine["main"](*(tvm.runtime.tensor(t.numpy()) for t in (a, x)))
    for value, expected in zip(ours, both(a, x), strict=True):
        torch.testing.assert_close(torch.from_numpy(value.numpy()), expected, rtol=1e-4, atol=1e-5)
