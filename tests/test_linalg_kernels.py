"""Dense linear algebra by generated kernels: signs are free, products and values are not."""

from __future__ import annotations

import pytest
import torch
import tvm
from networks.check import export, run_without_torch
from special_values import seeded
from test_linalg import FAMILIES, orthogonal, square, triangular
from torch import linalg, nn
from torch.utils import _pytree as pytree
from tvm.relax.frontend import detach_params

import fx2relax
from fx2relax.testing import assert_matches_eager

NONE = {"library": "none"}
pytestmark = [
    pytest.mark.sweep,
    pytest.mark.filterwarnings(
        "ignore:torch.(cholesky|lu|qr|triangular_solve|lu_solve) is deprecated"
    ),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    a, b = square(2), seeded(2, 5, 3, dtype=torch.float64)
    assert_matches_eager(family, a, b, grad=True, options=NONE, tol=1e-8)
    assert fx2relax.stats()["tir_kernels"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_symbolic_sizes(family):
    a, b = square(2, n=4), seeded(2, 4, 3, dtype=torch.float64)
    assert_matches_eager(family, a, b, dynamic=True, options=NONE, tol=1e-8)


@pytest.mark.parametrize("family", [triangular, orthogonal])
def test_single_precision(family):
    a, b = square(2, dtype=torch.float32), seeded(2, 5, 3)
    assert_matches_eager(family, a, b, options=NONE, tol=1e-4)


def spectra(x):
    """Singular values, and what the vectors must give."""
    results = []
    for whole in (True, False):
        u, s, vh = linalg.svd(x, full_matrices=whole)
        k = s.shape[-1]
        product = u[..., :k] @ torch.diag_embed(s) @ vh[..., :k, :]
        results += [s, product, u.mT @ u, vh @ vh.mT]
    return [*results, linalg.svdvals(x)]


MATRICES = {
    "tall": seeded(2, 7, 4),
    "wide": seeded(2, 4, 7),
    "alone": seeded(6, 6),
    "deficient": seeded(2, 6, 2) @ seeded(2, 2, 6),
    "zero": torch.zeros(3, 4),
    "large": 1e15 * seeded(5, 3),
}


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_values(name, dtype):
    x = MATRICES[name].to(dtype)
    size = float(x.abs().max().clamp(min=1))
    tol = (1e-5, 1e-5 * size) if dtype == torch.float32 else (1e-10, 1e-11 * size)
    assert_matches_eager(spectra, x, options=NONE, tol=tol)


def test_tall_or_wide_is_seen_at_the_call():
    torch._dynamo.reset()
    compiled = torch.compile(spectra, backend="relax", dynamic=True, options=NONE)
    for name in ("tall", "wide"):
        x = MATRICES[name].double()
        for ours, eager in zip(compiled(x), spectra(x), strict=True):
            torch.testing.assert_close(ours, eager)


def eigenvectors(x):
    results = []
    for uplo, a in (("L", x.tril()), ("U", x.triu())):
        values, vectors = linalg.eigh(x, UPLO=uplo)
        both = a + a.mT - torch.diag_embed(x.diagonal(0, -2, -1))
        results += [values, vectors @ torch.diag_embed(values) @ vectors.mT - both]
        results += [vectors.mT @ vectors, linalg.eigvalsh(x, UPLO=uplo)]
    return results


def test_eigenvalues():
    x = seeded(2, 9, 9, dtype=torch.float64)
    assert_matches_eager(eigenvectors, x, options=NONE)
    assert_matches_eager(eigenvectors, torch.ones(4, 4), options=NONE, tol=1e-5)


def test_eigenvalues_of_what_is_not_a_number():
    assert_matches_eager(linalg.eigvalsh, torch.full((2, 2), torch.nan), options=NONE)
    torch._dynamo.reset()
    with pytest.raises(linalg.LinAlgError, match="failed to converge"):
        torch.compile(linalg.eigvalsh, backend="relax", options=NONE)(torch.full((3, 3), torch.nan))


@pytest.mark.parametrize("n", [1, 2, 9, 40])
def test_symmetric_indefinite(n):
    def fn(a, b):
        factor, pivots, info = linalg.ldl_factor_ex(a)
        return factor, pivots, info, linalg.ldl_solve(factor, pivots, b)

    a = seeded(2, n, n, dtype=torch.float64)
    a = a + a.mT
    a[1].fill_diagonal_(0.0)  # takes blocks of two
    b = seeded(2, n, 3, dtype=torch.float64)
    assert_matches_eager(fn, a, b, options=NONE, tol=1e-8)


def test_factors_as_lapack_stores_them():
    def fn(a, b):
        lu, pivots, info = linalg.lu_factor_ex(a)
        return [
            [lu, pivots, info, linalg.lu(b), linalg.lu(b.mT), torch.geqrf(a), torch.geqrf(b)],
            [linalg.qr(b, mode) for mode in ("reduced", "complete", "r")],
        ]

    a, b = seeded(2, 6, 6, dtype=torch.float64), seeded(2, 6, 4, dtype=torch.float64)
    assert_matches_eager(fn, a, b, options=NONE)


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_matrix_exponential(size):
    x = size * seeded(2, 6, 6, dtype=torch.float64)
    assert_matches_eager(torch.matrix_exp, x, options=NONE, tol=1e-8)


class Everything(nn.Module):
    def forward(self, a, b):
        symmetric = a @ a.mT
        return [
            [linalg.solve(a, b), linalg.inv(a), linalg.det(a), linalg.cholesky(symmetric)],
            [linalg.qr(b), linalg.eigvalsh(symmetric), linalg.svdvals(b), linalg.pinv(b)],
            [torch.matrix_exp(a / 8), linalg.solve_triangular(a, b, upper=True)],
        ]


def test_without_pytorch():
    model, inputs = Everything(), (square(2), seeded(2, 5, 3, dtype=torch.float64))
    mod = fx2relax.from_fx(export(model, inputs, {}), inputs)
    expected = pytree.tree_leaves(model(*inputs))
    ours = run_without_torch(mod, {"main": []}, inputs)
    for mine, eager in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-7, atol=1e-8)


def test_imported_modules_raise():
    mod, _ = detach_params(fx2relax.from_fx(torch.fx.symbolic_trace(linalg_inv), [torch.eye(2)]))
    with pytest.raises(RuntimeError, match=r"linalg.inv.*singular"):
        run_without_torch(mod, {"main": []}, [torch.ones(2, 2)])


def linalg_inv(x):
    return torch.linalg.inv(x)


def test_kernels_are_named():
    mod = fx2relax.from_fx(torch.fx.symbolic_trace(linalg_inv), [torch.eye(2)])
    names = [v.name_hint for v in mod.get_global_vars()]
    assert {"lu_factor", "lu_solve", "check_errors"} <= set(names)
    assert isinstance(mod["lu_factor"], tvm.tirx.PrimFunc)


@pytest.mark.parametrize("function", [linalg.eigh, linalg.svd, linalg.inv])
def test_larger_matrices_are_compiled_as_fast(function):
    """What checks every element must not be unrolled or analysed for each of them."""
    x = seeded(200, 200, dtype=torch.float64)
    torch._dynamo.reset()
    for ours, eager in zip(
        pytree.tree_leaves(torch.compile(function, backend="relax", options=NONE)(x)),
        pytree.tree_leaves(function(x)),
        strict=True,
    ):
        torch.testing.assert_close(ours.abs(), eager.abs(), rtol=1e-6, atol=1e-8)
