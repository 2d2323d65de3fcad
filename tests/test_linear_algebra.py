"""Products of matrices and vectors, sums of products along named axes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fx2relax.testing import assert_matches_eager

pytestmark = pytest.mark.sweep

NAN, INF = float("nan"), float("inf")
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def _normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def _integers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randint(-9, 9, shape, generator=generator).to(dtype)


def _products(m: torch.Tensor, n: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    batch = m.expand(3, -1, -1)
    return (
        m @ n,
        m.mm(n),
        m.mv(v),
        v.dot(v),
        torch.inner(v, v),
        torch.vdot(v, v),
        torch.bmm(batch, n.expand(3, -1, -1)),
        v @ n,
        m @ v,
        batch @ v,
        v @ batch.mT,
        torch.outer(v, v),
        torch.kron(m, n),
        torch.linalg.multi_dot([v, n, m]),
        torch.matrix_power(m @ n, 3),
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_products(dtype: torch.dtype) -> None:
    inputs = _normal(4, 5, dtype=dtype), _normal(5, 4, dtype=dtype), _normal(5, dtype=dtype)
    assert_matches_eager(_products, *inputs, grad=dtype is not torch.float16)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
def test_integer_products_wrap_around(dtype: torch.dtype) -> None:
    m, n, v = (100 * _integers(*s, dtype=dtype) for s in ((4, 5), (5, 4), (5,)))
    assert_matches_eager(_products, m, n, v)


def test_products_with_symbolic_sizes() -> None:
    assert_matches_eager(_products, _normal(4, 5), _normal(5, 4), _normal(5), dynamic=True)


def _sums(
    m: torch.Tensor, a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    u, v = a[:, 0], b[0]
    return (
        torch.addmm(m, a, b, beta=2, alpha=3),
        torch.addmm(m[0], a, b, alpha=-1),
        torch.addmv(u, a, b[:, 0], beta=3, alpha=2),
        torch.addr(m, u, v, beta=2, alpha=3),
        torch.baddbmm(m, x, y, beta=3, alpha=2),
        torch.addbmm(m, x, y, beta=2, alpha=-2),
        torch.addmm(m, a, b, beta=0, alpha=0),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32])
def test_products_added(dtype: torch.dtype) -> None:
    make = _normal if dtype.is_floating_point else _integers
    inputs = [make(*s, dtype=dtype) for s in ((4, 3), (4, 5), (5, 3), (2, 4, 5), (2, 5, 3))]
    assert_matches_eager(_sums, *inputs, grad=dtype.is_floating_point)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_products_added_are_rounded_once(dtype: torch.dtype) -> None:
    m, a, b = _normal(4, 3, dtype=dtype), _normal(4, 64, dtype=dtype), _normal(64, 3, dtype=dtype)
    assert_matches_eager(torch.addmm, m, a, b, grad=True)
    ones = torch.ones(1, 4096, dtype=dtype)
    assert_matches_eager(lambda a: a @ a.T, ones)


def test_a_factor_of_zero_ignores_the_tensor() -> None:
    nan, a = torch.full((2, 2), NAN), torch.ones(2, 2)
    for left, right, beta, alpha in ((nan, a, 0, 1), (a, nan, 1, 0), (nan, nan, 0, 0)):

        def function(m: torch.Tensor, a: torch.Tensor, b: int = beta, c: int = alpha) -> object:
            return (
                torch.addmm(m, a, a, beta=b, alpha=c),
                torch.addmv(m[0], a, a[0], beta=b, alpha=c),
                torch.addr(m, a[0], a[0], beta=b, alpha=c),
                torch.addbmm(m, a[None], a[None], beta=b, alpha=c),
            )

        assert_matches_eager(function, left, right)


def test_booleans() -> None:
    m, u, v = (_integers(*s) > 0 for s in ((3, 4), (3,), (4,)))
    assert_matches_eager(
        lambda m, u, v: (torch.addr(m, u, v), torch.addr(m, u, v, beta=0, alpha=0), u.outer(v)),
        *(m, u, v),
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_layers(dtype: torch.dtype) -> None:
    x, y = _normal(2, 3, 4, dtype=dtype), _normal(2, 3, 5, dtype=dtype)
    w, b = _normal(6, 4, dtype=dtype), _normal(6, dtype=dtype)
    cube = _normal(6, 4, 5, dtype=dtype)

    def layers(*t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, y, w, b, cube = t
        return F.linear(x, w, b), F.linear(x[0, 0], w), F.bilinear(x, y, cube, b)

    tol = 4e-2 if dtype is torch.bfloat16 else None
    assert_matches_eager(layers, x, y, w, b, cube, grad=True, tol=tol)
    assert_matches_eager(lambda x, w: F.linear(x, w[0]), x, w)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk->ik", [(3, 4), (4, 5)]),
        ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)]),
        ("i,j->ij", [(3,), (4,)]),
        ("ii->i", [(4, 4)]),
        ("ii", [(4, 4)]),
        ("bhid,bhjd->bhij", [(2, 3, 4, 5), (2, 3, 6, 5)]),
        ("...ij,...jk", [(2, 1, 3, 4), (5, 4, 2)]),
        ("ijk,jl,kl->il", [(2, 3, 4), (3, 5), (4, 5)]),
        ("ij->ji", [(3, 4)]),
        ("ij->", [(3, 4)]),
        ("a,b,c->cab", [(2,), (3,), (4,)]),
    ],
)
def test_sums_of_products(equation: str, shapes: list[tuple[int, ...]]) -> None:
    inputs = [_normal(*s) + 0.5 for s in shapes]
    assert_matches_eager(lambda *t: torch.einsum(equation, *t), *inputs, grad=True)


@pytest.mark.parametrize("dims", [0, 1, 2, ([0, 2], [1, 0]), ([-1], [0])])
def test_axes_contracted(dims: object) -> None:
    a, b = _normal(3, 4, 3), _normal(3, 3, 5) if dims != 2 else _normal(4, 3, 5)
    contract: Callable[..., torch.Tensor] = torch.tensordot
    assert_matches_eager(lambda a, b: contract(a, b, dims=dims), a, b, grad=True)


def test_cross_products_and_norms() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            torch.linalg.cross(a, b),
            torch.linalg.cross(a, b[:1]),
            torch.linalg.vander(a[0]),
            torch.linalg.vector_norm(a, 3, dim=-1, keepdim=True),
            torch.linalg.vector_norm(a, -INF),
            torch.linalg.matrix_norm(a),
            torch.linalg.matrix_norm(a, 1),
            torch.linalg.matrix_norm(a, -INF),
            torch.linalg.norm(a, dim=0),
            torch.trace(a),
            torch.linalg.vecdot(a, b),
        )

    assert_matches_eager(function, _normal(3, 3), _normal(3, 3) + 1, grad=True)


@pytest.mark.parametrize("sizes", [(0, 3, 2), (2, 0, 3), (2, 3, 0)])
def test_empty(sizes: tuple[int, int, int]) -> None:
    rows, inner, columns = sizes
    a, b, m = _normal(rows, inner), _normal(inner, columns), _normal(rows, columns)

    def function(a: torch.Tensor, b: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            a @ b,
            torch.addmm(m, a, b, beta=2),
            a[None] @ b[None],
            torch.baddbmm(m[None], a[None], b[None]),
            a @ b[:, 0] if b.shape[1] else a,
            F.linear(a, b.T),
            torch.einsum("ij,jk->k", a, b),
        )

    assert_matches_eager(function, a, b, m, grad=True)


def test_layouts() -> None:
    a, b = _normal(8, 6), _normal(6, 10)
    function = lambda a, b: (a @ b, torch.addmm(a[:, 0], b.T, a.T))  # noqa: E731
    for left, right in (
        (a[::2], b),
        (_normal(6, 8).T, _normal(10, 6).T),
        (a[:, :1].expand(8, 6), b[:, 3:]),
        (a, b[:, :1].expand(6, 8)),
    ):
        assert_matches_eager(function, left, right, grad=True)
    assert_matches_eager(lambda x: x @ x.mT, _normal(2, 3, 4, 5).transpose(1, 2))


def test_result_that_keeps_more_digits() -> None:
    a, b = _integers(17, 16, dtype=torch.int8), _integers(16, 8, dtype=torch.int8)
    assert_matches_eager(torch._int_mm, a, b)
