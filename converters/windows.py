"""Windows of pooling: which inputs an output covers, and which outputs an input is covered by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from .common import Unsupported, te_call, tirx

Size = Any  # an int or a TIR expression


class Window(Protocol):
    """The windows of one axis.

    Attributes:
        inputs, outputs: how long the axis is before and after.
        taps: how many positions a window has at most.
        covers: how many windows hold one input at most.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def inputs(self) -> Size: ...
    @property
    def outputs(self) -> Size: ...
    @property
    def taps(self) -> Size: ...
    @property
    def covers(self) -> Size: ...

    def source(self, output: Any, tap: Any) -> tuple[Any, Any]:
        """A tap's input position, and whether there is one."""

    def inside(self, output: Any, tap: Any) -> Any:
        """A tap's input position; where there is none, that of the window's nearest that has.

        Which is all that a maximum needs, and spares its kernel every condition.
        """

    def target(self, position: Any, cover: Any) -> tuple[Any, Any]:
        """An output that may hold an input position, and whether it does."""

    def count(self, output: Any, padded: bool) -> Any:
        """How many positions a window averages over, those in the padding included or not."""


@dataclass(frozen=True)
class Sliding:
    """Windows of one length at equal distances."""

    inputs: Size
    outputs: Size
    taps: int
    stride: int
    padding: int = 0
    dilation: int = 1
    overhang: bool = False

    @property
    def covers(self) -> Size:
        return self.taps

    def source(self, output: Any, tap: Any) -> tuple[Any, Any]:
        position = output * self.stride - self.padding + tap * self.dilation
        if self.padding == 0 and not self.overhang:
            return position, tirx.const(True, "bool")
        return position, tirx.all(position >= 0, position < self.inputs)

    def inside(self, output: Any, tap: Any) -> Any:
        position = output * self.stride - self.padding + tap * self.dilation
        if self.padding == 0 and not self.overhang:
            return position
        if self.dilation == 1:
            return tirx.min(tirx.max(position, 0), self.inputs - 1)
        if not isinstance(self.inputs, int) or self.inputs < self.dilation:
            raise Unsupported("windows that may lie in the padding alone")
        after = tirx.floordiv(position - self.inputs + self.dilation, self.dilation)
        position = tirx.Select(position < 0, tirx.floormod(position, self.dilation), position)
        return position - tirx.max(after, 0) * self.dilation

    def target(self, position: Any, cover: Any) -> tuple[Any, Any]:
        offset = position + self.padding - cover * self.dilation
        output = tirx.truncdiv(offset, self.stride)
        exact = tirx.truncmod(offset, self.stride) == 0
        return output, tirx.all(offset >= 0, exact, output < self.outputs)

    def count(self, output: Any, padded: bool) -> Any:
        start = output * self.stride - self.padding
        end = tirx.min(start + self.taps, self.inputs + self.padding)
        if padded:
            return end - start
        return tirx.min(end, self.inputs) - tirx.max(start, 0)


@dataclass(frozen=True)
class Adaptive:
    """As many windows as there are outputs, spread evenly; neighbours may overlap."""

    inputs: Size
    outputs: Size

    @property
    def taps(self) -> Size:
        if self._divides:
            return self.inputs // self.outputs
        return _ceildiv(self.inputs, _at_least_one(self.outputs)) + 1

    @property
    def covers(self) -> Size:
        return 1 if self._divides else _ceildiv(self.outputs, _at_least_one(self.inputs)) + 1

    @property
    def _divides(self) -> bool:
        if not isinstance(self.inputs, int) or not isinstance(self.outputs, int):
            return False
        return self.outputs > 0 and self.inputs % self.outputs == 0

    def _start(self, output: Any) -> Any:
        return tirx.floordiv(output * self.inputs, self.outputs)

    def _end(self, output: Any) -> Any:
        return tirx.floordiv((output + 1) * self.inputs + self.outputs - 1, self.outputs)

    def source(self, output: Any, tap: Any) -> tuple[Any, Any]:
        position = self._start(output) + tap
        return position, position < self._end(output)

    def inside(self, output: Any, tap: Any) -> Any:
        return tirx.min(self._start(output) + tap, self._end(output) - 1)

    def target(self, position: Any, cover: Any) -> tuple[Any, Any]:
        output = tirx.floordiv(position * self.outputs, self.inputs) + cover
        covered = tirx.all(self._start(output) <= position, position < self._end(output))
        return output, tirx.all(output < self.outputs, covered)

    def count(self, output: Any, padded: bool) -> Any:
        return self._end(output) - self._start(output)


def sliding(
    sizes: Sequence[Size],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] | None = None,
    ceil: bool = False,
) -> list[Sliding]:
    """One `Sliding` per axis; an empty stride means as far as the kernel is long."""
    count = len(sizes)
    axes = [_spread(v, count) for v in (kernel, stride or kernel, padding, dilation or [1])]
    return [
        Sliding(size, _outputs(size, k, s, p, d, ceil), k, s, p, d, ceil)
        for size, k, s, p, d in zip(sizes, *axes, strict=True)
    ]


def _outputs(size: Size, taps: int, stride: int, padding: int, dilation: int, ceil: bool) -> Size:
    reach = size + 2 * padding - dilation * (taps - 1) - 1
    if not ceil:
        return _floordiv(reach, stride) + 1
    count = _floordiv(reach + stride - 1, stride) + 1
    # A last window that would start in the right padding is dropped.
    dropped = (count - 1) * stride >= size + padding
    if isinstance(count, int):
        return count - bool(dropped)
    return tirx.Select(dropped, count - 1, count)


def on_windows(
    function: Callable[..., Any], tensors: Sequence[Any], windows: Sequence[Window], name: str
) -> Any:
    """Call a TE function of tensors and windows; symbolic sizes reach it as its arguments."""

    def kernel(*args: Any) -> Any:
        *operands, inputs, outputs = args
        sizes = zip(windows, inputs, outputs, strict=True)
        return function(*operands, [replace(w, inputs=i, outputs=o) for w, i, o in sizes])

    inputs, outputs = [w.inputs for w in windows], [w.outputs for w in windows]
    return te_call(kernel, *tensors, inputs, outputs, primfunc_name_hint=name)


def _spread(value: Any, count: int) -> list[int]:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * count if len(values) == 1 else values


def _floordiv(a: Size, b: Size) -> Size:
    return a // b if isinstance(a, int) and isinstance(b, int) else tirx.floordiv(a, b)


def _ceildiv(a: Size, b: Size) -> Size:
    return _floordiv(a + b - 1, b)


def _at_least_one(size: Size) -> Size:
    return max(size, 1) if isinstance(size, int) else tirx.max(size, 1)
