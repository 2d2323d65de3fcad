"""How far two tensors may be apart, and whether they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

#: How many elements are compared at a time.
_PART = 1 << 20

# Per dtype: relative and absolute tolerance for one operator against eager in the same dtype.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-9, 1e-11),
    torch.float32: (1.3e-5, 1e-5),
    torch.float16: (2e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.complex64: (1.3e-5, 1e-5),
    torch.complex128: (1e-9, 1e-11),
}


def is_further(
    actual: torch.Tensor,
    expected: torch.Tensor,
    exact: torch.Tensor,
    factor: float = 4.0,
    unit: float | None = None,
) -> bool:
    """Whether a result is further from a run in float64 than `factor` times eager's own distance.

    Args:
        actual: what was computed, of any shape and dtype.
        expected: what eager computed.
        exact: the same computed in float64 (complex128).
        factor: how much further is still good.
        unit: an error that is good always; a rounding of the largest value when left out.

    Returns:
        True as well where shape, dtype or strides differ, where infinities or NaNs stand
        elsewhere, and where numbers that are not floating-point are not equal.
    """
    for attribute in ("shape", "dtype"):
        if getattr(actual, attribute) != getattr(expected, attribute):
            return True
    if strides(actual) != strides(expected):
        return True
    if actual.is_complex():
        actual, expected, exact = (
            torch.view_as_real(t.resolve_conj()) for t in (actual, expected, exact)
        )
    if not actual.is_floating_point():
        return not torch.equal(actual, expected)
    ours, eager, real = (t.double() for t in (actual, expected, exact))
    finite = eager.isfinite()
    if not torch.equal(ours[~finite].nan_to_num(1.5), eager[~finite].nan_to_num(1.5)):
        return True
    if not bool(ours[finite].isfinite().all()):
        return True
    finite &= real.isfinite()
    if not finite.any():
        return False
    if unit is None:
        unit = torch.finfo(actual.dtype).eps * max(float(real[finite].abs().max()), 1.0)
    own, theirs = (float((t - real)[finite].abs().max()) for t in (ours, eager))
    return own > factor * theirs + unit


def strides(tensor: torch.Tensor, every: bool = False) -> list[int]:
    """The strides of a tensor that has elements, of axes that have more than one or of all."""
    if tensor.numel() == 0:
        return []
    found = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in found if every or size > 1]


def close(actual: torch.Tensor, expected: torch.Tensor, tol: Any = None, where: str = "") -> None:
    """Assert that two tensors hold the same values within a tolerance; NaN equals NaN.

    Args:
        actual: what is judged, of any shape and dtype.
        expected: what it should be, of the same.
        tol: relative and absolute tolerance, or one figure for both; that of the dtype in
            `TOLERANCES` when left out, and none for integers.
        where: what it is, for the message.

    Raises:
        AssertionError: they differ.
    """
    rtol, atol = TOLERANCES.get(expected.dtype, (0.0, 0.0))
    if isinstance(tol, tuple):
        rtol, atol = tol
    elif tol is not None and expected.dtype in TOLERANCES:
        rtol = atol = tol
    torch.testing.assert_close(
        actual.detach(),
        expected.detach(),
        rtol=rtol,
        atol=atol,
        equal_nan=True,
        msg=lambda text: f"{where}: {text}",
    )


def difference(
    actual: torch.Tensor,
    expected: torch.Tensor,
    exact: torch.Tensor | None = None,
    tol: float | tuple[float, float] | None = None,
) -> str | None:
    """What differs between two results whose strides do not matter; None where they agree.

    Args:
        actual: what is judged; a real tensor of pairs may stand for a complex one.
        expected: what it should be.
        exact: the same in float64 (complex128): where no `tol` is given, `actual` is right too
            where it is no further from it than 4 times the distance of `expected`.
        tol: relative and absolute tolerance, or one figure for both, instead of the dtype's own.

    Returns:
        the first that differs: dtype, shape, where NaNs and infinities stand, or values, with
        how many and by how much.
    """
    kind = expected.dtype
    if expected.is_complex() and not actual.is_complex() and actual.dim() > expected.dim():
        expected, exact = _pairs(expected), _pairs(exact)
    for attribute in ("dtype", "shape"):
        ours, theirs = getattr(actual, attribute), getattr(expected, attribute)
        if ours != theirs:
            return f"{attribute} {_plain(ours)}, expected {_plain(theirs)}"
    a, e = actual.contiguous(), expected.contiguous()
    if a.is_complex():
        a, e, exact = _pairs(a), _pairs(e), _pairs(exact)
    if not a.is_floating_point():
        wrong = a != e
        return _counted(wrong, a, e) if bool(wrong.any()) else None
    for name, test in (("NaN", torch.isnan), ("infinite", torch.isinf)):
        wrong = test(a) != test(e)
        if name == "infinite":
            wrong |= torch.isinf(a) & (a != e)
        if bool(wrong.any()):
            return f"{name} elsewhere: {_counted(wrong, a, e)}"
    rtol, atol = TOLERANCES.get(kind, (0.0, 0.0))
    if tol is not None:
        rtol, atol = tol if isinstance(tol, tuple) else (tol, tol)
    if not any(bool(_beyond(x, y, rtol, atol).any()) for x, y in _parts(a, e)):
        return None
    wrong = _beyond(a, e, rtol, atol)
    if tol is None and exact is not None and exact.shape == e.shape:
        wide = exact.dtype is torch.float64
        if wide and not is_further(a, e, exact.contiguous()):
            return None
    return _counted(wrong, a, e)


def _parts(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Tensors of one size, some of their elements at a time: they are widened to be compared."""
    return zip(*(t.reshape(-1).split(_PART) for t in tensors), strict=True)


def _beyond(actual: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float) -> torch.Tensor:
    """Where two tensors are further apart than is allowed."""
    finite = expected.isfinite()
    real = expected.double()
    apart = (actual.double() - real).abs().where(finite, 0.0)
    return apart > atol + rtol * real.abs().where(finite, 0.0)


def _pairs(tensor: Any) -> Any:
    """A complex tensor as a real one of pairs; anything else unchanged."""
    complex_ = isinstance(tensor, torch.Tensor) and tensor.is_complex()
    return torch.view_as_real(tensor.resolve_conj()) if complex_ else tensor


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, torch.Size) else value


def _counted(wrong: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor) -> str:
    """How many of how many values are wrong, and the worst of them."""
    apart = (actual.double() - expected.double()).abs().nan_to_num(float("inf"))
    worst = int(apart.where(wrong, -1.0).flatten().argmax())
    ours, theirs = (_written(t.flatten()[worst].item()) for t in (actual, expected))
    where = list(map(int, torch.unravel_index(torch.tensor(worst), actual.shape)))
    return f"{int(wrong.sum())} of {wrong.numel()} values, {ours} at {where}, expected {theirs}"


def _written(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)
