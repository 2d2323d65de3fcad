"""Scans along every axis: vectors of rows, squares of elements, and what is left of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from tvm import tirx

from fx2relax.pipeline import vector
from fx2relax.pipeline.tir import Rewriter
from fx2relax.testing import assert_matches_eager

SCANS: dict[str, Callable[[Tensor, int], Any]] = {
    "cumsum": torch.cumsum,
    "cumprod": torch.cumprod,
    "cummax": torch.cummax,
    "cummin": torch.cummin,
    "logcumsumexp": torch.logcumsumexp,
}
SHAPES = [(5,), (1000,), (37, 70), (33, 130), (2, 100, 1), (3, 50, 67), (4, 6, 2), (70, 8, 3)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int32]


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.5
    if dtype.is_floating_point:
        x.view(-1)[1::50] = -0.0
        x.view(-1)[17::97] = float("nan")
        x.view(-1)[60::211] = float("inf")
    return x.to(dtype)


def along_all(scan: Callable[[Tensor, int], Any]) -> Callable[[Tensor], list[Any]]:
    return lambda x: [scan(x, dim) for dim in range(x.dim())]


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SCANS)
def test_every_axis(name: str, dtype: torch.dtype) -> None:
    if name == "logcumsumexp" and not dtype.is_floating_point:
        pytest.skip("there is none of integers")
    for shape in SHAPES:
        assert_matches_eager(along_all(SCANS[name]), numbers(shape, dtype))


@pytest.mark.parametrize("name", SCANS)
def test_sizes_that_change(name: str) -> None:
    compiled = torch.compile(along_all(SCANS[name]), backend="relax", dynamic=True)
    for shape in ((40, 30), (5, 100), (100, 5), (33, 33)):
        x = numbers(shape, torch.float32)
        expected = along_all(SCANS[name])(x)
        torch.testing.assert_close(compiled(x), expected, equal_nan=True)


def test_a_sum_that_cancels() -> None:
    """Each row is added up in its order: what another order would round away stays."""
    x = torch.tensor([3e38, 3e38, -3e38, -3e38, 1.0, 1e-8, -1.0, 1e30] * 40).repeat(40, 1)
    assert_matches_eager(lambda x: (x.cumsum(1), x.t().contiguous().cumsum(0)), x, tol=0)


class _Vectors(Rewriter):
    """Looks for the longest vector of a statement."""

    longest = 0

    def visit_For(self, node: Any) -> Any:
        if node.kind == tirx.ForKind.VECTORIZED:
            self.longest = max(self.longest, int(node.extent))
        return self.default(node)


@pytest.mark.parametrize(
    ("name", "shape", "dim"),
    [
        ("cumsum", (64, 256), 1),
        ("cumsum", (64, 256), 0),
        ("cumprod", (4, 64, 20), 1),
        ("cummax", (64, 250), 1),
        ("logcumsumexp", (64, 256), 0),
    ],
)
def test_in_vectors(
    name: str, shape: tuple[int, ...], dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loops of a scan become vectors of 16 rows."""
    found = _Vectors()
    scanned: Callable[[Any], Any] = vector.__dict__["scanned"]

    def noted(loop: Any) -> Any:
        made = scanned(loop)
        found.stmt(made)
        return made

    monkeypatch.setattr(vector, "scanned", noted)
    x = numbers(shape, torch.float32)
    assert_matches_eager(lambda x: SCANS[name](x, dim), x, options={"cache": False})
    assert found.longest == 16
