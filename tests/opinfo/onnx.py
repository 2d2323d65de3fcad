"""One operator's samples through the export to ONNX, and what the sides say of each."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from onnx_tables import remembered
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils import _pytree as pytree

from fx2relax.onnx_check import AGREES, OnnxComparison, compare_with_onnx

from .check import UNSPECIFIED, describe
from .rows import OPS, Row, rows, samples, spread, tensors, unseeded

SIDES = ("reference", "tvm")


@dataclass
class Found:
    """The verdicts on one sample; see `fx2relax.onnx_check.OnnxComparison`."""

    sample: str
    ours: str
    reference: str
    tvm: str
    ours_reference: str
    ours_tvm: str
    exporter: str

    @property
    def compared(self) -> bool:
        """Whether ours was compared with a result of someone else."""
        return any(not v.startswith("cannot") for v in (self.ours_reference, self.ours_tvm))

    @property
    def agrees(self) -> bool:
        """Whether everyone agrees."""
        return self.ours == self.reference == self.tvm == AGREES


@dataclass
class OnnxOutcome:
    """What became of an operator.

    Attributes:
        found: one entry for each sample that eager runs.
        failure: why there is none: the process crashed or did not end.
    """

    op: str
    found: list[Found] = field(default_factory=list)
    failure: str = ""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def of(cls, given: dict[str, Any]) -> OnnxOutcome:
        """From JSON."""
        return cls(**{**given, "found": [Found(**f) for f in given["found"]]})

    @property
    def exportable(self) -> bool:
        """Whether any sample can be exported."""
        return any(f.exporter for f in self.found)

    @property
    def compared(self) -> bool:
        """Whether ours was compared on any sample."""
        return any(f.compared for f in self.found)

    @property
    def wrong(self) -> list[str]:
        """Where ours differs, or fails in another way than by lacking an operator."""
        lacking = ("cannot: UnsupportedOpError", "cannot: torch.export", "cannot: not tried")
        return [
            f"{f.sample}: {f.ours}"
            for f in self.found
            if f.ours != AGREES and not f.ours.startswith(lacking)
        ]

    def differing(self, side: str) -> list[str]:
        """Where a side of `SIDES` differs from eager."""
        verdicts = ((f.sample, getattr(f, side)) for f in self.found)
        return [f"{sample}: {v}" for sample, v in verdicts if v.startswith("differs")]


def onnx_rows() -> Iterator[Row]:
    """Every operator in float32 whose result PyTorch specifies."""
    return rows(("float32",), ("forward",), lambda name: name not in UNSPECIFIED)


def run_onnx(row: Row, limit: int, exporter: str | None = "dynamo") -> OnnxOutcome:
    """Compare about `limit` samples of an operator, by one exporter or the first that can."""
    outcome = OnnxOutcome(row.op)
    began = time.perf_counter()
    with warnings.catch_warnings(), remembered():
        warnings.simplefilter("ignore")
        given = _chosen(samples(row, limit + 2), limit)
        target = unseeded(OPS[row.op].get_op(), given[0]) if given else None
        given = [s for s in given if _runs(target, s)]
        outcome.found = _compared(target, given, exporter)
    outcome.seconds = round(time.perf_counter() - began, 2)
    return outcome


def _chosen(given: Sequence[SampleInput], limit: int) -> list[SampleInput]:
    """Samples with elements before those without, and none in two layouts: ONNX knows one."""
    dense = [s for s in given if all(t.layout is torch.strided for t in tensors(s))]
    compact = [s for s in dense if all(t.is_contiguous() for t in tensors(s))] or dense
    full = [s for s in compact if all(t.numel() for t in tensors(s))]
    return spread(full or compact, limit)


def _compared(target: Any, given: Sequence[SampleInput], exporter: str | None) -> list[Found]:
    """Several samples as one model; each as its own where that tells more."""
    if not given:
        return []
    found = _found(target, given, exporter)
    if len(given) == 1:
        return [found]
    captured = not found.ours.startswith("cannot: torch.export")
    if found.agrees or (captured and not found.exporter):
        return [Found(_described(s), *list(asdict(found).values())[1:]) for s in given]
    return [_found(target, [s], exporter) for s in given]


def _found(target: Any, given: Sequence[SampleInput], exporter: str | None) -> Found:
    def model(calls: list[Any]) -> list[Any]:
        return [target(first, *args, **kwargs) for first, args, kwargs in calls]

    found: OnnxComparison = compare_with_onnx(
        model, [_call(s) for s in given], exporter=exporter, exported_only=True
    )
    return Found(
        _described(given[0]),
        found.ours,
        found.reference,
        found.tvm,
        found.ours_reference,
        found.ours_tvm,
        found.exporter,
    )


def _runs(target: Any, sample: SampleInput) -> bool:
    """Whether PyTorch takes a sample, and gives a tensor."""
    try:
        torch.manual_seed(0)
        result = target(sample.input, *sample.args, **sample.kwargs)
    except Exception:  # whatever PyTorch says
        return False
    leaves = pytree.tree_leaves(result)
    return any(isinstance(t, torch.Tensor) and t.layout is torch.strided for t in leaves)


def _call(sample: SampleInput) -> list[Any]:
    return [sample.input, list(sample.args), dict(sample.kwargs)]


def _described(sample: SampleInput) -> str:
    return describe((sample.input, sample.args, sample.kwargs))
