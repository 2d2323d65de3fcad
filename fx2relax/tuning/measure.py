"""A candidate beside our own kernel: whether it computes the same, and how long either takes."""

from __future__ import annotations

import contextlib
import math
import socket
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fx2relax.compat import rpc, tvm
from fx2relax.errors import OptionError
from fx2relax.pipeline.shared import library_of
from fx2relax.tune_options import Fleet

#: A schedule is accepted that takes less than this share of our own kernel's time at its best...
CLEAR = 0.95
# ...and is faster in all rounds but so many.
_LOST = 2
_FIRST, _ALL = 3, 15
# What takes as many times as long as our own kernel is not timed twice.
_HOPELESS = 3.0
# Seconds of one timing: a clock that is asked too often says nothing.
_SPAN = 4e-3
_MOST = 2000
# Relative to the largest value: sums are taken in another order.
_TOLERANCES = {"float64": 1e-11, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


class Differs(Exception):
    """A candidate computes something else."""


@dataclass
class Timed:
    """Two kernels, timed in turns.

    Attributes:
        own: seconds of our own kernel, the least.
        ratio: a candidate's least seconds over our own's.
        accepted: whether it is clearly faster.
    """

    own: float
    ratio: float
    accepted: bool


class Here:
    """This process."""

    width = 1

    @contextlib.contextmanager
    def opened(self) -> Iterator[tuple[Any, Any]]:
        """The device, and what makes code run there."""
        yield tvm.cpu(), lambda code, name: code


class Remote:
    """Devices that a tracker of TVM's RPC knows by one key.

    Args:
        fleet: the tracker and the key.
        target: what code is compiled for.
        timeout: seconds that a measurement may take.
    """

    def __init__(self, fleet: Fleet, target: Any, timeout: int) -> None:
        self._fleet, self._target, self._timeout = fleet, target, timeout
        host, _, port = fleet.tracker.rpartition(":")
        self._address = host, int(port)
        try:
            # TVM's client waits for a minute where nobody answers.
            socket.create_connection(self._address, 10).close()
            summary = rpc().connect_tracker(*self._address).summary()
        except (OSError, RuntimeError) as error:
            raise OptionError(
                f"no tracker answers at {fleet.tracker} ({error}); start one by "
                f"`python -m tvm.exec.rpc_tracker --port {port}`"
            ) from error
        servers = [one["key"] for one in summary["server_info"]]
        self.width = servers.count(f"server:{fleet.key}")
        if not self.width:
            raise OptionError(
                f"the tracker {fleet.tracker} knows no device {fleet.key!r}; start one by "
                f"`python -m tvm.exec.rpc_server --tracker {fleet.tracker} --key {fleet.key}`"
            )

    @contextlib.contextmanager
    def opened(self) -> Iterator[tuple[Any, Any]]:
        """The device that is free next, and what makes code run there."""
        tracker = rpc().connect_tracker(*self._address)
        session = tracker.request(self._fleet.key, session_timeout=self._timeout)

        def load(code: Any, name: str) -> Any:
            with tempfile.TemporaryDirectory(prefix="fx2relax-") as folder:
                path = Path(folder) / f"{name}.so"
                library_of(code, self._target, str(path))
                session.upload(str(path))
            return session.load_module(path.name)

        yield session.cpu(0), load


def compare(
    place: Any, arguments: Sequence[tuple[tuple[int, ...], str]], own: Any, other: Any, name: str
) -> Timed:
    """Time a candidate beside our own kernel, once both compute the same.

    Args:
        place: `Here` or `Remote`.
        arguments: the shape and dtype of each tensor.
        own: the code of our own kernel.
        other: the candidate's.
        name: seeds the values.

    Raises:
        Differs: the candidate's results differ from our own kernel's.
        what the kernels raise.
    """
    with place.opened() as (device, load):
        ours, theirs = load(own, "own"), load(other, "other")
        values = _same_results(device, arguments, ours, theirs, name)
        tensors = [_sent(value, device) for value in values]
        return _timed(ours, theirs, device, tensors)


def seconds(place: Any, arguments: Sequence[tuple[tuple[int, ...], str]], own: Any) -> float:
    """What our own kernel takes."""
    with place.opened() as (device, load):
        ours = load(own, "own")
        values = _values(arguments, "seconds", special=False)
        tensors = [_sent(value, device) for value in values]
        try:
            ours["main"](*tensors)
        except Exception:
            tensors = [_sent(np.zeros_like(value), device) for value in values]
        return _once(ours, device, tensors, _turns(_once(ours, device, tensors, 1)))


def _same_results(
    device: Any, arguments: Sequence[tuple[tuple[int, ...], str]], ours: Any, theirs: Any, name: str
) -> list[Any]:
    """Values that both kernels make the same of; raises where they do not."""
    usual = _values(arguments, name, special=False)
    try:
        expected = _run(ours, usual, device)
    except Exception:
        # Random indices lie outside of a tensor: 0 is in any.
        usual = [v if v.dtype.kind not in "iu" else np.zeros_like(v) for v in usual]
        expected = _run(ours, usual, device)
    _agree(_run(theirs, usual, device), expected)
    special = _values(arguments, name, special=True)
    special = [u if u.dtype.kind in "iub" else s for u, s in zip(usual, special, strict=True)]
    _agree(_run(theirs, special, device), _run(ours, special, device))
    return usual


def _run(module: Any, values: Sequence[Any], device: Any) -> list[Any]:
    tensors = [_sent(value, device) for value in values]
    module["main"](*tensors)
    return [tensor.numpy() for tensor in tensors]


def _agree(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    for place, (a, b) in enumerate(zip(actual, expected, strict=True)):
        kind = str(b.dtype)
        if kind not in _TOLERANCES:
            if not np.array_equal(a, b):
                raise Differs(f"tensor {place} differs")
            continue
        a, b = a.astype("float64"), b.astype("float64")
        finite = np.isfinite(b)
        if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            raise Differs(f"tensor {place} has its infinities and NaNs elsewhere")
        left, right = a[finite], b[finite]
        if not np.isfinite(left).all():
            raise Differs(f"tensor {place} is not finite where it should be")
        if left.size == 0:
            continue
        error = float(np.max(np.abs(left - right)))
        if error > _TOLERANCES[kind] * max(float(np.max(np.abs(right))), 1e-30):
            raise Differs(f"tensor {place} differs by {error:.3g}")


def _values(
    arguments: Sequence[tuple[tuple[int, ...], str]], name: str, special: bool
) -> list[Any]:
    """Random values: of floats some are infinite or NaN where that is wanted."""
    chance = np.random.default_rng([zlib.crc32(name.encode()), special])
    found = []
    for shape, dtype in arguments:
        kind, size = _numpy(dtype), math.prod(shape)
        if kind.kind in "iub":
            value = chance.integers(0, 2, size).astype(kind)
        else:
            value = chance.standard_normal(size, dtype="float32").astype(kind)
            if special and size:
                for number in (math.nan, math.inf, -math.inf):
                    value[chance.integers(0, size, max(size // 256, 1))] = number
        found.append(value.reshape(shape))
    return found


def _numpy(dtype: str) -> Any:
    """NumPy's dtype of TVM's name, those that ml_dtypes adds among them."""
    try:
        return np.dtype(dtype)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, dtype))


def _sent(value: Any, device: Any) -> Any:
    return tvm.runtime.tensor(value, device)


def _timed(ours: Any, theirs: Any, device: Any, tensors: Sequence[Any]) -> Timed:
    turns = _turns(_once(ours, device, tensors, 1))
    own, first = (_once(module, device, tensors, 1) for module in (ours, theirs))
    if first > _HOPELESS * own:
        own, first = (_once(module, device, tensors, 1) for module in (ours, theirs))
        if first > _HOPELESS * own:
            return Timed(own, first / own, False)
    times: list[tuple[float, float]] = []
    for count in (_FIRST, _ALL):
        while len(times) < count:
            # Whoever comes first finds what the other left in the cache.
            order = (ours, theirs) if len(times) % 2 else (theirs, ours)
            taken = [_once(module, device, tensors, turns) for module in order]
            times.append((taken[0], taken[1]) if order[0] is ours else (taken[1], taken[0]))
        found = judged(times)
        if found.ratio > CLEAR:
            break
    return found


def judged(times: Sequence[tuple[float, float]]) -> Timed:
    """What rounds of (our own kernel's seconds, the candidate's) say; too few accept nothing.

    What else the machine does only adds to a time: the least of either say the most.
    """
    own = min(own for own, _ in times)
    ratio = min(other for _, other in times) / own
    won = sum(other < own for own, other in times)
    clear = len(times) >= _ALL and ratio <= CLEAR and won >= len(times) - _LOST
    return Timed(own, ratio, clear)


def _once(module: Any, device: Any, tensors: Sequence[Any], turns: int) -> float:
    timer = module.time_evaluator("main", device, number=turns, repeat=1)
    return max(float(timer(*tensors).results[0]), 1e-9)


def _turns(taken: float) -> int:
    return min(max(round(_SPAN / taken), 1), _MOST)
