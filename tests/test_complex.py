"""Complex tensors: two real ones in a graph, and eager's results, layouts and aliases outside."""

import math

import pytest
import torch
from torch import nn

import fx2relax
from fx2relax.converters.complex_parts import _ALIKE
from fx2relax.registry import lookup, lookup_complex
from fx2relax.testing import assert_matches_eager

INF, NAN = math.inf, math.nan


def z(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, dtype=torch.complex64, generator=generator)


def arithmetic(a, b):
    return a + b, a - b, a * b, a / b, -a, a.conj(), 1 / a, a**2, a**3, a == b, a != b


def numbers(a):
    return a * 2, a * 2j, 1j * a, a + 1, a + 1j, a - 2, 2 - a, a / 2, a / 2j, 2 / a


def with_real(a, r):
    return a * r, r * a, a + r, r - a, a / r, r / a


def parts(a):
    whole = a * 2
    return whole.abs(), whole.angle(), whole.sgn(), whole.real, whole.imag, whole.conj().imag


def kinds(a):
    return a.isnan(), a.isinf(), a.isfinite(), a.abs(), a.angle(), a.sgn(), a == a, a != a


def made(r):
    both = torch.complex(r, r + 1)
    return both, torch.polar(r.abs(), r), r.cfloat(), r.cdouble(), torch.exp(1j * r)


def filled(a):
    ones = torch.ones_like(a), a.new_ones(3), torch.ones(2, dtype=torch.complex64)
    return *ones, torch.full_like(a, 2j), torch.full((2,), 1j), torch.eye(3, dtype=a.dtype)


def moved(a, b):
    padded = nn.functional.pad(a, (1, 1), value=2.0)
    masked = a.masked_fill(a.real > 0, 1j)
    first = a.t(), a[1:], a[:, 1], a.flip(0), a.roll(1, 0), a.unfold(1, 2, 1), a.diagonal()
    return *first, torch.stack([a, b]), torch.cat([a, b]), padded, masked


def joined(a, r):
    real = torch.cat([a, r]), torch.cat([r.long(), a]), torch.stack([a, r > 0])
    return *real, torch.cat([a, r.double()])


def added(a, b):
    return a.sum(), a.sum(0), a.mean(1), a.cumsum(0), torch.where(a.real > 0, a, b)


def products(a, b):
    return a @ b.t(), a.mT @ b, torch.einsum("ij,kj->ik", a, b), torch.vdot(a[0], b[0]), a @ b[0]


def rotated(q, turns):
    pairs = torch.view_as_complex(q.reshape(*q.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2)


SPECIAL = torch.tensor(
    [complex(INF, 1), complex(1, NAN), complex(-0.0, 0.0), complex(0.0, -0.0), complex(3, -INF)]
)
CASES = {
    "arithmetic": (arithmetic, z(4, 5), z(4, 5, seed=1)),
    "broadcast": (arithmetic, z(4, 1), z(5, seed=1)),
    "zero_dimensions": (with_real, z(), torch.randn(3)),
    "numbers": (numbers, z(4, 5)),
    "numbers_and_infinities": (lambda a: (a * 2, a + 1, a * 1j, a / 2, 1 / a), SPECIAL),
    "real": (with_real, z(4, 5), torch.rand(4, 5) + 1),
    "double": (with_real, z(4, 5), torch.rand(4, 5, dtype=torch.float64) + 1),
    "parts": (parts, z(4, 5)),
    "kinds": (kinds, SPECIAL),
    "made": (made, torch.rand(3, 4) + 1),
    "filled": (filled, z(3, 4)),
    "moved": (moved, z(4, 5), z(4, 5, seed=1)),
    "joined": (joined, z(4, 5), torch.randn(4, 5)),
    "added": (added, z(4, 5), z(4, 5, seed=1)),
    "products": (products, z(4, 5), z(4, 5, seed=1)),
    "rotated": (rotated, torch.randn(2, 3, 4, 8), z(3, 1, 4).expand(3, 4, 4)),
    "transposed": (arithmetic, z(5, 4).t(), z(4, 5, seed=1)),
    "permuted": (lambda a: (a.permute(2, 0, 1) * 2, a + 1), z(2, 3, 4).permute(1, 2, 0)),
    "conjugate": (lambda a: (a * 2, a.imag + 1), z(4, 5).conj()),
    "empty": (lambda a: (a * 2, a.sum(), a.t()), z(0, 3)),
    "empty_and_masked": (lambda a, b: torch.addcmul(b, a, a).masked_fill(a == b, 1j), z(), z(0, 4)),
    "complex128": (arithmetic, z(3).cdouble(), z(3, seed=1).cdouble()),
    "strided": (lambda a: torch.as_strided(a, (2, 2), (1, 3)) * 1, z(4, 5)),
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", CASES)
def test_forward(name):
    function, *inputs = CASES[name]
    assert_matches_eager(function, *inputs, every_stride=True)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    "name", ["arithmetic", "numbers", "real", "parts", "products", "added", "rotated"]
)
def test_gradient(name):
    function, *inputs = CASES[name]
    inputs = [t.clone().requires_grad_(t.dtype != torch.bool) for t in inputs]

    def real(*args):
        found = function(*args)
        results = found if isinstance(found, tuple) else (found,)
        return [
            torch.view_as_real(r.resolve_conj()).sum() if r.is_complex() else r.float().sum()
            for r in results
            if r.requires_grad
        ]

    assert_matches_eager(real, *inputs, grad=True)


def test_fourier_transforms_are_library_calls():
    def transforms(a):
        whole = torch.fft.fft(a), torch.fft.fft2(a), torch.fft.ifft(a, norm="ortho")
        half = torch.fft.rfft(a.real), torch.fft.irfft(a), torch.fft.hfft(a)
        return *whole, *half, torch.fft.fftshift(a)

    assert_matches_eager(transforms, z(4, 6), every_stride=True)


@pytest.mark.parametrize("name", ["products", "rotated"])
def test_without_the_library(name):
    function, *inputs = CASES[name]
    assert_matches_eager(function, *inputs, options={"library": "none"})


def test_the_spectrogram_and_its_inverse():
    def there_and_back(x):
        window = torch.hann_window(16)
        spectrum = torch.stft(x, 16, window=window, return_complex=True)
        return spectrum.abs(), torch.istft(spectrum, 16, window=window, length=x.shape[-1])

    assert_matches_eager(there_and_back, torch.randn(2, 100))
    assert_matches_eager(there_and_back, torch.randn(2, 100), grad=True)


def test_eigenvalues():
    assert_matches_eager(lambda a: torch.linalg.eig(a), torch.randn(4, 4))


def test_writes_and_views():
    def write(a, b):
        a.mul_(2)
        c = a * b
        c[0] = 1j
        c[:, 1] += b[:, 0]
        return c, c.view(-1), torch.view_as_real(c), c.conj(), a[0]

    assert_matches_eager(write, z(4, 5), z(4, 5, seed=1))


def test_a_conjugate_is_one_in_eager_too():
    compiled = torch.compile(lambda a: (a * 2).conj(), backend="relax")
    assert compiled(z(3)).is_conj()


def test_a_choice_between_complex_branches():
    def choose(p, a):
        return torch.cond(p, lambda x: x * 2j, lambda x: x.conj() + 1, (a,))

    for chosen in (True, False):
        assert_matches_eager(choose, torch.tensor(chosen), z(3))


def test_what_has_no_converter_runs_in_pytorch():
    fx2relax.reset_stats()
    assert_matches_eager(lambda a: (a * 2).tanh() + a, z(3), torch_calls=True)
    assert fx2relax.stats()["fallback_ops"] == {"aten.tanh.default": 1}


def test_dynamic_sizes():
    compiled = torch.compile(lambda a, b: (a * b).abs(), backend="relax", dynamic=True)
    for n in (3, 5, 8):
        a, b = z(n, 4), z(4, seed=1)
        torch.testing.assert_close(compiled(a, b), (a * b).abs())


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(z(4))

    def forward(self, x):
        return torch.view_as_real(torch.view_as_complex(x) * self.weight)


def test_in_a_module_a_complex_weight_is_a_tensor_of_pairs():
    module = Scaled().eval()
    mod = fx2relax.from_fx(torch.fx.symbolic_trace(module), [((3, 4, 2), torch.float32)])
    weight = mod["main"].params[1]
    assert [int(s) for s in weight.ty.shape.values] == [4, 2]
    x = torch.randn(3, 4, 2)
    with torch.no_grad():
        compiled = torch.compile(module, backend="relax")
        torch.testing.assert_close(compiled(x), module(x))
        module.weight.mul_(2)
        torch.testing.assert_close(compiled(x), module(x))


def test_pairs_are_computed_together():
    """On a machine of several threads too; the last axis is that of the pairs, or even."""
    a = z(64, 1000)
    assert_matches_eager(lambda a: a * a, a)
    assert_matches_eager(lambda a: torch.view_as_real(a * a).flatten(1), a)
    assert_matches_eager(lambda a: a * a, a.flatten())


@pytest.mark.parametrize("target", _ALIKE, ids=str)
def test_what_is_done_to_either_part_has_a_converter(target):
    assert lookup(target) is not None
    assert lookup_complex(target) is not None
