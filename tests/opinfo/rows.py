"""What the sweep runs: operators of `op_db`, dtypes, and samples of each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from fx2relax import coverage

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in coverage.DTYPES}
GRADIENTS = ("float32", "float64")


@dataclass(frozen=True, order=True)
class Row:
    """One operator in one dtype, in one manner.

    Attributes:
        op: the OpInfo's full name, its variant included.
        dtype: a key of `DTYPES`.
        manner: ``"forward"``, ``"gradient"`` or ``"inplace"``.
    """

    op: str
    dtype: str
    manner: str

    def __str__(self) -> str:
        return f"{self.op} {self.dtype} {self.manner}"


OPS: dict[str, OpInfo] = {op.full_name: op for op in op_db}


def rows(
    dtypes: Sequence[str] = tuple(DTYPES),
    manners: Sequence[str] = ("forward", "gradient", "inplace"),
    wanted: Callable[[str], bool] = lambda name: True,
) -> Iterator[Row]:
    """Every row that PyTorch says an operator supports on a CPU."""
    for name, op in OPS.items():
        if not wanted(name):
            continue
        for dtype in dtypes:
            if DTYPES[dtype] not in op.supported_dtypes("cpu"):
                continue
            for manner in manners:
                if _supported(op, dtype, manner):
                    yield Row(name, dtype, manner)


def _supported(op: OpInfo, dtype: str, manner: str) -> bool:
    if manner == "gradient":
        backward = DTYPES[dtype] in op.supported_backward_dtypes("cpu")
        return dtype in GRADIENTS and op.supports_autograd and backward
    if manner == "inplace":
        return op.inplace_variant is not None
    return True


def samples(row: Row, limit: int) -> list[SampleInput]:
    """At most `limit` samples of a row, and some of the same once more, non-contiguous.

    They are spread evenly over what PyTorch gives; 0-d and empty ones come first.
    """
    op, dtype = OPS[row.op], DTYPES[row.dtype]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = list(op.sample_inputs("cpu", dtype, requires_grad=row.manner == "gradient"))
    if row.manner == "inplace":
        given = [s for s in given if isinstance(s.input, torch.Tensor) and _takes(op, s)]
    first = [s for s in (_first(given, _has_scalar), _first(given, _has_empty)) if s is not None]
    rest = [s for s in given if not any(s is f for f in first)]
    chosen = [*first, *spread(rest, limit - len(first))]
    large = [s for s in chosen if _size(s) > 1 and _dense(s)][: max(limit // 4, 1)]
    return [*chosen, *(s.noncontiguous() for s in large)]


class _Found(Exception):
    def __init__(self, operator: Any, *_: Any, **__: Any) -> None:
        self.operator = operator
        raise self


def unseeded(function: Any, sample: SampleInput) -> Any:
    """What an OpInfo's function calls under a seed of its own; other functions as they are.

    Dynamo does not look into `torch.testing`, and the sweep sets the seed.
    """
    if "wrapper_set_seed" not in getattr(getattr(function, "__code__", None), "co_names", ()):
        return function
    with mock.patch.object(common_methods_invocations, "wrapper_set_seed", _Found):
        try:
            function(sample.input, *sample.args, **sample.kwargs)
        except _Found as found:
            return found.operator
    return function


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of the items, at even distances."""
    if len(items) <= count:
        return list(items)
    return [items[i * len(items) // count] for i in range(max(count, 0))]


def tensors(sample: SampleInput) -> list[torch.Tensor]:
    """The tensors among a sample's arguments."""
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [t for t in leaves if isinstance(t, torch.Tensor)]


def _first(given: Sequence[SampleInput], wanted: Callable[[SampleInput], bool]) -> Any:
    return next((s for s in given if wanted(s)), None)


def _has_scalar(sample: SampleInput) -> bool:
    return any(t.dim() == 0 for t in tensors(sample))


def _has_empty(sample: SampleInput) -> bool:
    return any(t.numel() == 0 for t in tensors(sample))


def _size(sample: SampleInput) -> int:
    return max((t.numel() for t in tensors(sample) if t.layout is torch.strided), default=0)


def _dense(sample: SampleInput) -> bool:
    return all(t.layout is torch.strided for t in tensors(sample))


def _takes(op: OpInfo, sample: SampleInput) -> bool:
    """Whether eager can write the result into the input."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            op.inplace_variant(sample.input.clone(), *sample.args, **sample.kwargs)
    except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
        return False
    return True
