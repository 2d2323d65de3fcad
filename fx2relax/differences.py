"""How far two tensors are apart, and whether that is what rounding leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

#: The largest error of a value, over the largest value of its tensor, that is rounding.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}
# Elements of tensors that are compared at a time.
_PIECE = 1 << 19
# How much further from a run in float64 than PyTorch, or than other inputs within their rounding
# lead, a result may be; and how many roundings of the largest value are none of its errors. Sums of
# half precision are taken in float32: their order does not show, but only what is rounded between.
_FACTOR, _UNITS = 8.0, 4
_HALF = {torch.float16, torch.bfloat16}
_HALF_FACTOR, _HALF_UNITS = 2.0, 2
# Inputs are moved so often by this many roundings: first to see how far a result moves, then
# whether a number that is no fraction becomes another one.
_NEAR = (1.0,) * 3
_FAR = (16.0,) * 8
# And so often, until it does, where one is infinite or none: half of what cancels out does so to
# the last digit, and leaves another number than nothing where it does not.
_OFTEN = (16.0,) * 40
# No input is moved further than this part of it to see how far results leap: roundings of bfloat16
# are so large that sixteen of them would be another input.
_LEAP = 1 / 64

#: Runs nodes in PyTorch on inputs by their names: as they are, or in float64 throughout.
Run = Callable[[Mapping[str, Any], bool], torch.Tensor]


def difference(got: torch.Tensor, expected: torch.Tensor) -> tuple[float, str]:
    """The largest error over the largest expected value, and what it is in words."""
    inf = math.inf
    if got.shape != expected.shape:
        return inf, f"shape {tuple(got.shape)}, and not {tuple(expected.shape)}"
    if got.dtype != expected.dtype:
        return inf, f"{got.dtype}, and not {expected.dtype}"
    if not expected.numel():
        return 0.0, ""
    if not (expected.is_floating_point() or expected.is_complex()):
        wrong = got != expected
        count = int(wrong.sum())
        return (inf, _words(count, wrong, got, expected)) if count else (0.0, "")
    apart = largest = 0.0
    where = 0, got, expected
    start = 0
    for one, other in _pieces(got, expected):
        finite = other.isfinite()
        odd = (one.isfinite() != finite) | (one.isnan() != other.isnan())
        odd |= ~finite & ~other.isnan() & (one != other)
        if odd.any():
            return inf, _words(int(odd.sum()), odd, one, other, start)
        found = _apart(one, other).max().item()
        if found > apart:
            apart, where = found, (start, one, other)
        largest = max(largest, other.nan_to_num(0.0, 0.0, 0.0).abs_().max().item())
        start += len(one) if one.dim() else 0
    if not apart:
        return 0.0, ""
    start, one, other = where
    marked = _apart(one, other) == apart
    return apart / largest if largest else apart, _words(0, marked, one, other, start)


def _apart(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """How far two tensors are apart where they are finite."""
    return (one - other).abs_().nan_to_num_(0.0, 0.0, 0.0)


def _pieces(
    got: torch.Tensor, expected: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Two tensors side by side: what is made of them on the way is as large as a piece."""
    if not expected.dim():
        yield got, expected
        return
    rows = max(1, _PIECE * len(expected) // expected.numel())
    yield from zip(got.split(rows), expected.split(rows), strict=True)


def _words(
    count: int, marked: torch.Tensor, got: torch.Tensor, expected: torch.Tensor, first: int = 0
) -> str:
    place = tuple(int(i) for i in marked.nonzero()[0])
    start = f"{count} of {expected.numel()} elements, such as " if count else ""
    shown = [place[0] + first, *place[1:]] if place else []
    return f"{start}{got[place].item()} at {shown}, and not {expected[place].item()}"


def is_rounding(
    got: torch.Tensor,
    expected: torch.Tensor,
    inputs: Mapping[str, Any],
    run: Run,
    steps: bool = False,
) -> bool:
    """Whether a difference is what rounding leaves, as of sums whose terms cancel out.

    A run in float64 says what is exact. Results may be some times as far from it as PyTorch's
    own are, or as those move when the inputs are moved by less than a rounding. Where a number is
    no fraction (an index, a comparison), or no number (NaN, infinity), it has to be one that the
    same nodes give for such inputs.

    Args:
        got: a kernel's result.
        expected: PyTorch's, of the same shape and dtype.
        inputs: what the nodes read, by name.
        run: the nodes in PyTorch; it gives a tensor of the same shape.
        steps: whether there are whole numbers on the way, so that a result may leap.
    """
    if not any(_is_float(value) for value in inputs.values()):
        return False
    exact = _wide(inputs, run)
    centre = expected if exact is None else exact
    fractions = expected.is_floating_point() or expected.is_complex()
    odd = _kind(got) != _kind(expected)
    if odd.any() and not _explained(got, odd, inputs, run, exact):
        return False
    if not fractions:
        return True
    wide = torch.complex128 if expected.is_complex() else torch.float64
    both = got.isfinite() & expected.isfinite() & centre.isfinite()
    if not both.any():
        return True
    apart = _errors(got, centre, both, wide)
    allowed = _errors(expected, centre, both, wide)
    near = tuple(min(far, _LEAP / _eps(inputs)) for far in _FAR) if steps else _NEAR
    for each in _samples(inputs, run, near):
        allowed = torch.maximum(allowed, _errors(each, centre, both, wide))
    half = expected.dtype in _HALF
    units, factor = (_HALF_UNITS, _HALF_FACTOR) if half else (_UNITS, _FACTOR)
    unit = units * torch.finfo(expected.dtype).eps * centre.to(wide).abs()[both].max().item()
    # As many results may be so far off as of PyTorch, but for a factor, and not the furthest alone.
    fewer = allowed[torch.arange(len(allowed)) // 2]
    return bool((apart <= factor * fewer + unit).all())


def _eps(inputs: Mapping[str, Any]) -> float:
    """The largest rounding of an input."""
    return max(torch.finfo(v.dtype).eps for v in inputs.values() if _is_float(v))


def _kind(value: torch.Tensor) -> torch.Tensor:
    """What is to be equal: numbers that are no fractions, and which of the others are finite."""
    if value.is_complex():
        return _kind(torch.view_as_real(value.resolve_conj())).sum(-1)
    if not value.is_floating_point():
        return value
    infinite = torch.where(value > 0, 1, 2) * value.isinf()
    return torch.where(value.isnan(), 3, infinite)


def _explained(
    got: torch.Tensor,
    odd: torch.Tensor,
    inputs: Mapping[str, Any],
    run: Run,
    exact: torch.Tensor | None,
) -> bool:
    """Whether what is odd is what the nodes give for inputs nearby."""
    wanted, left = _kind(got), odd
    if exact is not None:
        left = left & (_kind(exact.to(got.dtype)) != wanted)
    if not left.any():
        return True
    fractions = got.is_floating_point() or got.is_complex()
    for sample in _samples(inputs, run, _OFTEN if fractions else _FAR):
        left = left & (_kind(sample.to(got.dtype)) != wanted)
        if not left.any():
            return True
    return False


def _samples(
    inputs: Mapping[str, Any], run: Run, roundings: tuple[float, ...]
) -> Iterator[torch.Tensor]:
    """What the nodes give for inputs nearby, in float64 where that is possible."""
    dice = torch.Generator().manual_seed(0)
    for far in roundings:
        moved = {name: _moved(value, far, dice) for name, value in inputs.items()}
        made = _wide(moved, run)
        if made is None:
            made = run({name: _as(v, inputs[name]) for name, v in moved.items()}, False)
        yield made


def _moved(value: Any, far: float, dice: torch.Generator) -> Any:
    if not _is_float(value):
        return value
    eps = far * torch.finfo(value.dtype).eps
    shift = torch.rand(value.shape, generator=dice, dtype=torch.float64) * 2 - 1
    return value.double() * (1 + eps * shift)


def _as(value: Any, like: Any) -> Any:
    return value.to(like.dtype) if _is_float(like) else value


def _wide(inputs: Mapping[str, Any], run: Run) -> torch.Tensor | None:
    """The nodes in float64; None where an operator is not to be had in it."""
    try:
        return run({name: widened(value) for name, value in inputs.items()}, True)
    except Exception:  # a kernel of one dtype, an operator of the user's
        return None


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 0


_WIDE = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}


def widened(value: Any) -> Any:
    """A tensor or a dtype in float64, if it is of fractions; all else as it is."""
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else _WIDE.get(value, value)
    if isinstance(value, torch.Tensor):
        return value.to(widened(value.dtype))
    return value


def _errors(
    value: torch.Tensor, centre: torch.Tensor, where: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """How far the elements are apart, from the largest error on."""
    apart = (value.to(dtype) - centre.to(dtype)).abs()[where].nan_to_num(0.0, 0.0, 0.0)
    return apart.sort(descending=True).values
