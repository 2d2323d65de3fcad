"""`torch.linalg.lstsq` by LAPACK's drivers."""

from __future__ import annotations

import pytest
import torch

from fx2relax.testing import assert_matches_eager

Tensor = torch.Tensor


def _matrix(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("driver", [None, "gels", "gelsy", "gelss", "gelsd"])
@pytest.mark.parametrize("sizes", [(2, 3), (3, 3), (5, 3), (2, 4, 3), (2, 2, 3, 4)])
def test_drivers(driver: str | None, sizes: tuple[int, ...]) -> None:
    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.linalg.lstsq(a, b, driver=driver))

    tall = driver in ("gelss", "gelsd") and sizes[-2] > sizes[-1]  # then sizes depend on data
    a, b = _matrix(*sizes), _matrix(*sizes[:-1], 2).cos()
    assert_matches_eager(fn, a, b, fullgraph=not tall)
    assert_matches_eager(fn, a, b[..., 0], fullgraph=not tall)


def test_gradients() -> None:
    for sizes in ((3, 3), (5, 3), (2, 2, 4)):
        assert_matches_eager(
            lambda a, b: torch.linalg.lstsq(a, b, driver="gels").solution.sin(),
            _matrix(*sizes),
            _matrix(*sizes[:-1], 2).cos(),
            grad=True,
        )


def test_a_matrix_that_lacks_rank() -> None:
    a = torch.tensor([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]])
    b = torch.tensor([[1.0], [2.0], [4.0]])
    assert_matches_eager(lambda a, b: torch.linalg.lstsq(a, b).solution, a, b)
    assert_matches_eager(lambda a, b: torch.linalg.lstsq(a, b, rcond=0.9).rank, a + b, b)


def test_full_rank_is_taken_for_granted() -> None:
    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.linalg.lstsq(a, b, driver="gels"))

    a, b = _matrix(2, 3, 2), _matrix(2, 3, 1).cos()
    a[1] = 0  # of a matrix of zeros LAPACK says nothing
    assert_matches_eager(fn, a, b)
    a[1, :, 0] = 2
    for call in (fn, torch.compile(fn, backend="relax")):
        with pytest.raises(torch.linalg.LinAlgError, match="full rank"):
            call(a, b)
