"""Dense linear algebra by PyTorch's LAPACK, which gives eager's own numbers."""

from __future__ import annotations

import pytest
import torch
from special_values import seeded
from torch import linalg

import fx2relax
from fx2relax.testing import assert_matches_eager

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.filterwarnings(
        "ignore:torch.(cholesky|lu|qr|triangular_solve|lu_solve) is deprecated"
    ),
]


def square(*batch: int, n: int = 5, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Matrices that are far from singular."""
    return seeded(*batch, n, n, dtype=dtype) + 3 * torch.eye(n, dtype=dtype)


def positive(*batch: int, n: int = 5, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Matrices that have a Cholesky factor."""
    a = seeded(*batch, n, n, dtype=dtype)
    return a @ a.mT + torch.eye(n, dtype=dtype)


def triangular(a, b):
    return [
        [
            linalg.solve_triangular(a, b, upper=upper, unitriangular=unit),
            linalg.solve_triangular(a, b.mT, upper=upper, left=False, unitriangular=unit),
            torch.triangular_solve(b, a, upper, True, unit),
        ]
        for upper in (True, False)
        for unit in (True, False)
    ]


def cholesky(a, b):
    a = a @ a.mT
    low, high = linalg.cholesky(a), linalg.cholesky(a, upper=True)
    return [
        [low, high, torch.cholesky(a), linalg.cholesky_ex(a)[0]],
        [torch.cholesky_solve(b, low), torch.cholesky_solve(b, high, upper=True)],
        [torch.cholesky_inverse(low), torch.cholesky_inverse(high, upper=True)],
    ]


def factors(a, b):
    lu, pivots = linalg.lu_factor(a)
    return [
        [linalg.lu(a)[1:], linalg.lu(b)[1:], linalg.lu(b.mT)[1:]],
        [linalg.lu_factor_ex(b)[0], torch.lu_unpack(lu, pivots)[1:]],
        [linalg.lu_solve(lu, pivots, b), linalg.lu_solve(lu, pivots, b, adjoint=True)],
        linalg.lu_solve(lu, pivots, b.mT, left=False),
    ]


def square_systems(a, b):
    return [
        [linalg.solve(a, b), linalg.solve(a.mT, b), linalg.solve(a, b.mT, left=False)],
        [linalg.solve(a, b[..., 0]), linalg.solve(a[0], b), linalg.inv(a), linalg.inv_ex(a)[0]],
        [linalg.det(a), linalg.det(a.mT), linalg.slogdet(a), torch.logdet(a @ a.mT)],
        linalg.matrix_power(a, -2),
    ]


def orthogonal(a, b):
    reflections = b / linalg.vector_norm(b, dim=-2, keepdim=True)
    factor = reflections[..., 0, :].contiguous()
    return [
        [linalg.qr(a), linalg.qr(b), linalg.qr(b.mT), torch.qr(b)],
        linalg.householder_product(reflections, factor),
        [torch.ormqr(reflections, factor, a, transpose=True)],
    ]


def decompositions(a, b):
    symmetric = a + a.mT
    return [
        [linalg.eigvalsh(symmetric), linalg.eigh(symmetric)[1].abs()],
        [linalg.svdvals(b), linalg.svd(b, full_matrices=False)[2].abs()],
        [linalg.pinv(b), linalg.pinv(symmetric, hermitian=True), torch.pinverse(b)],
        [torch.linalg.matrix_norm(b, "nuc"), linalg.cond(a), torch.matrix_exp(a / 4)],
    ]


FAMILIES = [triangular, cholesky, factors, square_systems, orthogonal, decompositions]


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    assert_matches_eager(family, square(2), seeded(2, 5, 3, dtype=torch.float64), grad=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_symbolic_sizes(family):
    a, b = square(2, n=4), seeded(2, 4, 3, dtype=torch.float64)
    assert_matches_eager(family, a, b, dynamic=True)


def without_gradients(a, b):
    symmetric = a + a.mT
    ld = linalg.ldl_factor(symmetric)
    return [
        [linalg.lu(b), linalg.lu_factor_ex(b), torch.lu_unpack(*linalg.lu_factor(a), False)[0]],
        [linalg.qr(b, "complete"), linalg.qr(b, "r"), torch.geqrf(b), linalg.inv_ex(a)],
        [ld, linalg.ldl_solve(*ld, b), linalg.ldl_factor_ex(symmetric, hermitian=True)],
        [linalg.eigh(a, UPLO="U"), linalg.svd(b), linalg.svd(b.mT), linalg.cholesky_ex(a)[1]],
        [linalg.matrix_rank(b), linalg.pinv(b, rtol=torch.tensor(0.5, dtype=b.dtype))],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_has_no_gradient(dtype):
    assert_matches_eager(without_gradients, square(2, dtype=dtype), seeded(2, 5, 3, dtype=dtype))


def test_strides_of_the_operands():
    a, b = square(2), seeded(2, 3, 5, dtype=torch.float64)
    assert_matches_eager(square_systems, a.mT, b.mT, grad=True)


def test_batches_broadcast():
    def fn(a, b, c):
        return [
            [linalg.solve_triangular(a, b, upper=True), torch.cholesky_solve(b, a)],
            [linalg.solve(a, b), linalg.lu_solve(*linalg.lu_factor(a), b), linalg.solve(c, b)],
        ]

    a, b = square(2, 1), seeded(3, 5, 2, dtype=torch.float64)
    assert_matches_eager(fn, a, b, a[0, 0], grad=True)


@pytest.mark.parametrize("library", ["torch", "none"])
@pytest.mark.parametrize("shape", [(0, 0), (0, 3, 3), (2, 0, 0)])
def test_nothing(shape, library):
    def fn(a, b):
        return [
            [linalg.solve(a, b), linalg.inv(a), linalg.det(a), linalg.slogdet(a), linalg.lu(a)],
            [linalg.qr(a), linalg.eigh(a), linalg.svd(a), linalg.pinv(b), linalg.cholesky(a)],
            [torch.matrix_exp(a), linalg.ldl_factor(a), linalg.solve_triangular(a, b, upper=True)],
        ]

    a = torch.ones(shape)
    assert_matches_eager(fn, a, a[..., :2], options={"library": library})


@pytest.mark.parametrize("library", ["torch", "none"])
def test_no_columns(library):
    def fn(x):
        return [linalg.qr(x, "complete"), linalg.svd(x), linalg.svd(x, False), linalg.lu(x)]

    assert_matches_eager(fn, torch.ones(2, 3, 0), options={"library": library})


FAILURES = {
    "solve": lambda x: linalg.solve(x, x),
    "inv": linalg.inv,
    "cholesky": linalg.cholesky,
    "old cholesky": torch.cholesky,
    "checked cholesky": lambda x: linalg.cholesky_ex(x, check_errors=True)[0],
    "factor": lambda x: linalg.lu_factor(x)[0],
    "not a number": lambda x: linalg.svdvals(x / 0.0 * 0.0),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("library", ["torch", "none"])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_failures(name, library, batch):
    x = torch.tensor([[1.0, 2.0], [2.0, 4.0]])
    if "cholesky" in name:
        x = -x
    x = x.expand(*batch, 2, 2).contiguous()
    torch._dynamo.reset()
    fx2relax.reset_stats()
    with pytest.raises(RuntimeError) as eager:
        FAILURES[name](x)
    compiled = torch.compile(FAILURES[name], backend="relax", options={"library": library})
    with pytest.raises(RuntimeError) as ours:
        compiled(x)
    assert type(ours.value) is type(eager.value)
    if library == "torch":
        assert str(ours.value) == str(eager.value)
    else:  # a kernel's messages are fixed
        assert str(ours.value).split(":")[0] == str(eager.value).split(":")[0]
    assert fx2relax.stats()["nodes_fallback"] == 0


def test_the_library_is_called():
    fx2relax.reset_stats()
    torch._dynamo.reset()
    torch.compile(linalg.qr, backend="relax")(square(2))
    assert fx2relax.stats()["library_calls"] == 2


def test_complex_matrices_run_in_pytorch():
    def fn(a, b):
        return linalg.solve(a, b), linalg.det(a), linalg.slogdet(a), linalg.inv(a), linalg.pinv(b)

    a = torch.complex(square(2), seeded(2, 5, 5, dtype=torch.float64))
    assert_matches_eager(fn, a, a[..., :3], grad=True, torch_calls=True)
