"""Which divisions of indices need no rounding down: of those by what no size makes negative."""

import pytest
import tvm
from tvm import tirx

from fx2relax.pipeline.divisions import Divisions, sizes_of

n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")


def leasts(*sizes):
    """Of the variables of a kernel on a tensor of these sizes."""
    return sizes_of(tirx.PrimFunc([tirx.decl_buffer(sizes, "float32", "x")], tirx.Evaluate(0)))


@pytest.mark.parametrize(
    ("size", "least"),
    [
        (n, 0),
        (n - 3, 3),
        (n + -3, 3),
        (n + 5, -5),
        (tirx.floordiv(n - 5, 2) + 1, 3),
        (tirx.floordiv(n - 5, 2), 5),
        (n * 4 - 6, 2),
        ((n - 3) * m, 3),
    ],
    ids=str,
)
def test_the_least_of_a_size(size, least):
    found = leasts(size)[n]
    assert found == max(least, 0)
    at = tvm.sym.Analyzer()
    at.bind(n, tirx.const(found, "int64"))
    at.bind(m, tirx.const(1, "int64"))
    assert int(at.simplify(size)) >= 0
    if least > 0:
        at = tvm.sym.Analyzer()
        at.bind(n, tirx.const(least - 1, "int64"))
        at.bind(m, tirx.const(1, "int64"))
        assert int(at.simplify(size)) < 0


TRUNCATED = [
    *(n - 3, n * 6 - 18, m * (n * 3 - 9), tirx.max(n, -5)),
    tirx.floordiv(m - 1, 2) * 2 + 2,
]


@pytest.mark.parametrize("divisor", TRUNCATED, ids=str)
def test_divisions_by_a_size_are_truncated(divisor):
    rewriter = Divisions(leasts(n - 3, m))
    for of, to in ((tirx.floordiv, tirx.Div), (tirx.floormod, tirx.Mod)):
        assert isinstance(rewriter.expr(of(m * 7 + 2, divisor)), to)


def test_a_sum_that_is_a_size():
    k = tirx.Var("k", "int64")
    sizes = (n + m) * tirx.floordiv(k, 48), n - k + 2, (n - 1) * 2 - 2 + (k - 1) + 2
    rewriter = Divisions(leasts(n, *sizes))
    for divisor in (n + m, (n + m) * 2 + 1, (n - k + 2) * k, n - k + 2 + 5, n * 2 + k - 3):
        assert rewriter.is_natural(divisor)
    for divisor in (m + k, n - m, n - k, n + m - 1, n + k - 3, m):
        assert not rewriter.is_natural(divisor)


def test_what_is_clamped_between_numbers():
    rewriter = Divisions({})
    for clamped in (
        tirx.max(tirx.min(4096, n), 0),
        tirx.Max(tirx.const(2, "int64"), tirx.Min(n, tirx.const(5, "int64"))),
    ):
        assert rewriter.is_natural(clamped + 3)
    for other in (
        tirx.max(n, 0),
        tirx.max(tirx.min(n, m), 0),
        tirx.max(tirx.min(n, 1 << 40), 0),
        tirx.max(tirx.min(n, 4), -1),
    ):
        assert not rewriter.is_natural(other + 0)


@pytest.mark.parametrize(
    "divisor", [n - 4, m - 1, m - n, tirx.min(n, -5), (m - 1) * 2 + 1], ids=str
)
def test_divisions_by_what_may_be_negative_are_rounded(divisor):
    rewriter = Divisions(leasts(n - 3, m))
    for of in (tirx.floordiv, tirx.floormod):
        assert isinstance(rewriter.expr(of(m, divisor)), tirx.Select)
