"""Kernels written as statements: loops whose order is part of the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fx2relax.bounds import wide
from fx2relax.compat import IRBuilder, T
from fx2relax.elements import Elements
from fx2relax.marks import CHANGES, COPIES

from .common import product, reshape, shape, te, te_call

__all__ = ["T", "copy", "fill", "is_large", "local", "loops", "opaque", "require", "wide"]

# TVM's kOpaque: fused with nothing. TVM takes a kernel without loops for an elementwise one.
_OPAQUE = 8

# Below this many elements one thread is done before others have started.
_PARALLEL = 1 << 15


def opaque(
    name: str,
    body: Callable[..., None],
    inputs: Sequence[Any],
    outputs: Callable[[list[Any]], Sequence[tuple[Any, str]]],
    sizes: Sequence[Any] = (),
    changes: bool = False,
) -> Any:
    """A kernel of plain loops over flat tensors, which no pass reorders or runs in parallel.

    Args:
        name: the kernel's name in the module.
        body: called as ``body(inputs, outputs, sizes)`` with flat buffers that are indexed and
            assigned like lists; emits the statements.
        inputs: Relax tensors of any shape.
        outputs: from the sizes to ``(count, dtype)`` of each flat output.
        sizes: ints and TIR expressions that the body uses.
        changes: whether its one output is the first input, which it copies by `copy`, changed.
    """
    flat = [reshape(x, [product(shape(x))]) for x in inputs]

    def kernel(tensors: Any, numbers: Any) -> Any:
        numbers = list(numbers)
        results = outputs(numbers)

        def statements(ins: Any, outs: Any) -> Any:
            with IRBuilder() as builder:
                with T.attr(0, "fx2relax", "statements"):
                    body([Elements(b) for b in ins], [Elements(b) for b in outs], numbers)
                return builder.get().body

        return te.extern(
            [(count,) for count, _ in results],
            list(tensors),
            statements,
            dtype=[dtype for _, dtype in results],
            name=name,
        )

    kernel.__name__ = name
    attrs = {"tirx.is_scheduled": True, "op_pattern": _OPAQUE, **({CHANGES: 1} if changes else {})}
    return te_call(kernel, flat, list(sizes), primfunc_attrs=attrs)


def loops(sizes: Sequence[Any], parallel: int | None = None, mark: str | None = None) -> Any:
    """Nested serial loops, the axis `parallel` shared among threads; gives their variables."""
    return _Loops(sizes, parallel, None if mark is None else {mark: 1})


class _Loops:
    def __init__(
        self, sizes: Sequence[Any], parallel: int | None, marks: dict[str, int] | None
    ) -> None:
        self.frames = [
            (T.parallel if axis == parallel else T.serial)(wide(0), wide(size), annotations=marks)
            for axis, size in enumerate(sizes)
        ]

    def __enter__(self) -> list[Any]:
        return [frame.__enter__() for frame in self.frames]

    def __exit__(self, *error: Any) -> None:
        for frame in reversed(self.frames):
            frame.__exit__(*error)


def fill(out: Any, count: Any, value: Callable[[Any], Any]) -> None:
    """``out[i] = value(i)``, over several threads where there is enough of it."""
    with loops([count], parallel=0 if is_large(count) else None) as (i,):
        out[i] = value(i)


def copy(out: Any, count: Any, source: Any) -> None:
    """``out[i] = source[i]``, which is left out where both turn out to be one."""
    with loops([count], parallel=0 if is_large(count) else None, mark=COPIES) as (i,):
        out[i] = source[i]


def is_large(count: Any) -> bool:
    """Whether a number of elements, known or not, is worth several threads."""
    return not isinstance(count, int) or count >= _PARALLEL


def local(dtype: str, count: int = 1) -> Any:
    """A few elements that one turn of a loop has to itself, on the stack."""
    # TVM puts small memory of this scope on the stack, and "local" on the heap.
    return Elements(T.alloc_buffer((count,), dtype, scope="global"))


def require(condition: Any, message: str, kind: str = "RuntimeError") -> None:
    """Raise a Python exception of a kind where the condition does not hold."""
    with T.Assert(condition, [message], kind):
        T.evaluate(0)
