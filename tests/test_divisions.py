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


@pytest.mark.parametrize("divisor", [n - 3, n * 6 - 18, m * (n * 3 - 9), tirx.max(n, -5)], ids=str)
def test_divisions_by_a_size_are_truncated(divisor):
    rewriter = Divisions(leasts(n - 3, m))
    for of, to in ((tirx.floordiv, tirx.Div), (tirx.floormod, tirx.Mod)):
        assert isinstance(rewriter.expr(of(m * 7 + 2, divisor)), to)


@pytest.mark.parametrize("divisor", [n - 4, m - 1, m - n, tirx.min(n, -5)], ids=str)
def test_divisions_by_what_may_be_negative_are_rounded(divisor):
    rewriter = Divisions(leasts(n - 3, m))
    for of in (tirx.floordiv, tirx.floormod):
        assert isinstance(rewriter.expr(of(m, divisor)), tirx.Select)
