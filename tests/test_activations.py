"""Activations with their gradients, half precision and special values, against eager."""

import pytest
import torch
import torch.nn.functional as F
from special_values import FLOATS, NAN, odd, seeded
from torch import nn

from fx2relax.testing import assert_matches_eager

ACTIVATIONS = [
    nn.ReLU(),
    nn.ReLU6(),
    nn.LeakyReLU(),
    nn.LeakyReLU(-0.3),
    nn.PReLU(),
    nn.ELU(),
    nn.ELU(0.3),
    nn.SELU(),
    nn.CELU(),
    nn.CELU(2.0),
    nn.GELU(),
    nn.GELU("tanh"),
    nn.SiLU(),
    nn.Mish(),
    nn.Sigmoid(),
    nn.LogSigmoid(),
    nn.Tanh(),
    nn.Hardtanh(-0.5, 2.0),
    nn.Hardsigmoid(),
    nn.Hardswish(),
    nn.Hardshrink(0.3),
    nn.Softshrink(0.3),
    nn.Tanhshrink(),
    nn.Softsign(),
    nn.Softplus(),
    nn.Softplus(beta=2, threshold=1),
    nn.Threshold(0.1, 20.0),
]


def groups(count):
    """The activations in lists of so many, as one compilation takes several."""
    return [ACTIVATIONS[i : i + count] for i in range(0, len(ACTIVATIONS), count)]


class All(nn.Module):
    """All of some modules of one input."""

    def __init__(self, modules):
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, x):
        return [part(x) for part in self.parts]


def names(modules):
    return "-".join(type(m).__name__ for m in modules)


@pytest.mark.parametrize("modules", groups(7), ids=names)
def test_gradients(modules):
    assert_matches_eager(All(modules), seeded(5, 9) * 3, grad=True)


@pytest.mark.parametrize("modules", groups(14), ids=names)
@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values(modules, dtype):
    x = odd(dtype)
    if any(isinstance(m, nn.GELU) for m in modules):  # eager's library gives NaN for infinities
        x = x[~x.isinf()]
    assert_matches_eager(All(modules).to(dtype).requires_grad_(False), x)


def test_nan_has_a_gradient():
    x = torch.tensor([NAN, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 6.0, 3.0, -3.0])
    modules = [nn.ReLU(), nn.ReLU6(), nn.Hardtanh(), nn.LeakyReLU(), nn.ELU(), nn.Hardswish()]
    assert_matches_eager(All([*modules, nn.Threshold(0.5, 1.0), nn.Hardsigmoid()]), x, grad=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients(dtype):
    modules = [nn.GELU(), nn.SiLU(), nn.Softplus(), nn.ELU(), nn.LogSigmoid(), nn.Mish()]
    assert_matches_eager(All(modules), seeded(5, 9, dtype=dtype), grad=True, tol=2e-2)


SHAPED = {
    "glu": lambda x: (F.glu(x), F.glu(x, 1), F.glu(x, -3)),
    "softmax": lambda x: (F.softmax(x, -1), F.softmax(x, 0), F.softmin(x, 1)),
    "log_softmax": lambda x: (F.log_softmax(x, 1), F.log_softmax(x, -1, dtype=torch.float64)),
    "gumbel-free": lambda x: torch.logsumexp(x, (0, 2)) + torch.logcumsumexp(x, 2).sum(),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.1, 0.2, -0.3, 0.4])),
    "normalize": lambda x: (F.normalize(x), F.normalize(x, p=1, dim=-1), F.normalize(x * 0)),
    "inplace": lambda x: F.relu_(x * 2) + F.elu_(x + 1) + F.hardtanh_(x - 1),
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.3, training=False),
}


@pytest.mark.parametrize("name", SHAPED)
def test_with_an_axis(name):
    assert_matches_eager(SHAPED[name], seeded(2, 4, 6), grad=True)


@pytest.mark.parametrize("dtype", [*FLOATS])
def test_softmax_of_special_values(dtype):
    x = odd(dtype).repeat(3, 1)
    x[0] = -torch.inf
    x[1, 11:] = -torch.inf

    def fn(x):
        return x.softmax(1), x.log_softmax(1), x.softmax(0), x.double().softmax(-1)

    assert_matches_eager(fn, x)


def test_softmax_of_little():
    def fn(a, b, c):
        return a.softmax(0), a.log_softmax(-1), b.softmax(1), b.log_softmax(0), c.softmax(-1)

    assert_matches_eager(fn, torch.tensor(2.0), torch.empty(3, 0), torch.zeros(3, 1))


def test_softmax_in_another_dtype():
    def fn(x, i):
        return (
            x.half().softmax(1, dtype=torch.float32),
            i.softmax(1, dtype=torch.float32),
            x.log_softmax(0, dtype=torch.float64),
        )

    assert_matches_eager(fn, seeded(4, 5), seeded(4, 5, dtype=torch.int64))


def test_sizes_change():
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4), nn.Softmax(-1)).eval()
    compiled = torch.compile(model, backend="relax", dynamic=True)
    for rows in (3, 7, 2):
        x = seeded(rows, 6)
        torch.testing.assert_close(compiled(x), model(x))


def test_dropout_in_eval_is_nothing():
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout2d(0.5), nn.AlphaDropout(0.2)).eval()
    assert_matches_eager(lambda x: model(x) + 1, seeded(2, 3, 4, 4), grad=True)


@pytest.mark.parametrize("module", [nn.Dropout(0.3), nn.Dropout2d(0.3), nn.AlphaDropout(0.3)])
def test_dropout_draws_what_eager_draws(module):
    assert_matches_eager(module, seeded(4, 30, 5, 5), grad=True, seed=1, torch_calls=True)


def test_the_gradient_of_hardsigmoid_has_float32s_sixth():
    x = torch.linspace(-4, 4, 17, dtype=torch.float64)
    assert_matches_eager(F.hardsigmoid, x, grad=True, tol=1e-15)
