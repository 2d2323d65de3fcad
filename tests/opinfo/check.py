"""One row of the sweep: every sample compiled and compared with eager."""

from __future__ import annotations

import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from both_sides import Heard, values
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils import _pytree as pytree

import fx2relax
from fx2relax.testing import assert_matches_eager, copied, is_further

from .rows import OPS, Row, samples, unseeded

# How many samples one compiled function takes; where it differs from eager, each is tried alone.
PACK = 6
# How much of two messages is compared: what differs, not by how much.
_SAME = 40
# What eager leaves in memory is not specified: shapes, dtypes and strides are compared.
UNSPECIFIED = (
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
)

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


@dataclass
class Outcome:
    """What became of a row.

    Attributes:
        tried: samples that eager runs.
        passed: samples that give what eager gives.
        failures: for each other sample, what it is and what differs.
        upstream: the same for samples that differ so under ``backend="aot_eager"`` too.
        torch_calls: operators that ran in PyTorch inside compiled graphs, with their number.
        breaks: reasons for which a sample was not traced, or a graph of it not compiled.
    """

    op: str
    dtype: str
    manner: str
    tried: int = 0
    passed: int = 0
    failures: list[str] = field(default_factory=list)
    upstream: list[str] = field(default_factory=list)
    torch_calls: dict[str, int] = field(default_factory=dict)
    breaks: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def run(row: Row, limit: int) -> Outcome:
    """Compare the samples of a row with eager, at most about `limit` of them."""
    outcome = Outcome(row.op, row.dtype, row.manner)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = samples(row, limit)
        checked = _Checked(row, outcome, given)
        calls = [_call(s) for s in given]
        calls = [c for c in calls if checked.runs_in_eager(c)]
        outcome.tried = len(calls)
        for start in range(0, len(calls), PACK):
            checked.together(calls[start : start + PACK])
    outcome.passed = outcome.tried - len(outcome.failures) - len(outcome.upstream)
    outcome.seconds = round(time.perf_counter() - began, 2)
    return outcome


def _call(sample: SampleInput) -> Call:
    return sample.input, sample.args, sample.kwargs


class _Checked:
    def __init__(self, row: Row, outcome: Outcome, given: Sequence[SampleInput]):
        self.row, self.outcome = row, outcome
        op = OPS[row.op]
        target = op.inplace_variant if row.manner == "inplace" else op.get_op()
        target = unseeded(target, given[0]) if given else target
        specified = row.op not in UNSPECIFIED
        self.run = _function(target, row.manner == "inplace", specified)

    def runs_in_eager(self, call: Call) -> bool:
        """Whether PyTorch itself takes a sample."""
        try:
            self.run([_detached(call)])
        except Exception:  # whatever PyTorch says
            return False
        return True

    def together(self, calls: Sequence[Call]) -> None:
        """Several samples in one function; where they differ from eager, each in its own."""
        if not calls:
            return
        error = self._differs(calls)
        if error is None:
            return
        if len(calls) == 1:
            other = self._differs(calls, "aot_eager") or ""
            upstream = other[:_SAME] == error[:_SAME]
            found = self.outcome.upstream if upstream else self.outcome.failures
            found.append(f"{describe(calls[0])}: {error}")
            return
        for call in calls:
            self.together([call])

    def _differs(self, calls: Sequence[Call], backend: str = "relax") -> str | None:
        fx2relax.reset_stats()
        torch._dynamo.utils.counters.clear()
        heard = Heard()
        logging.getLogger("fx2relax").addHandler(heard)
        error: str | None = None
        try:
            self._compare(calls, backend)
        except AssertionError as difference:
            if len(calls) > 1 or self._further(calls[0], backend):
                error = str(difference) or repr(difference)
        except Exception as failure:  # a crash of the compiler is a failure of the sample
            error = f"{type(failure).__name__}: {failure}"
        finally:
            logging.getLogger("fx2relax").removeHandler(heard)
        if error is None and heard.texts and len(calls) > 1:
            error = "one of them falls back"
        if backend == "relax" and (error is None or len(calls) == 1):
            self._count(heard.texts)
        return error

    def _compare(self, calls: Sequence[Call], backend: str, tol: float | None = None) -> None:
        # So that results whose sizes depend on data are compiled too.
        with torch._dynamo.config.patch(
            capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
        ):
            assert_matches_eager(
                self.run,
                list(calls),
                grad=self.row.manner == "gradient",
                torch_calls=True,
                fullgraph=False,
                seed=0,
                tol=tol,
                backend=backend,
                # What is complex comes out of PyTorch's operators, given compact operands.
                every_stride=self.row.dtype != "complex64",
            )

    def _count(self, warnings: Sequence[str]) -> None:
        found = Counter(self.outcome.torch_calls)
        found.update(fx2relax.stats()["fallback_ops"])
        self.outcome.torch_calls = dict(found)
        reasons = [*torch._dynamo.utils.counters["graph_break"], *warnings]
        if not fx2relax.stats()["graphs"] and not reasons:
            reasons = ["nothing was compiled"]
        for reason in reasons:
            short = " ".join(reason.split())[:200]
            if short not in self.outcome.breaks:
                self.outcome.breaks.append(short)

    def _further(self, call: Call, backend: str) -> bool:
        """Whether more differs than values, or these are over 4 times eager's from float64's."""
        grad = self.row.manner == "gradient"
        try:
            self._compare([call], backend, tol=1e30)
        except AssertionError:
            return True
        try:
            exact = _results(self.run, _wide(call), grad)
            eager = _results(self.run, _detached(call), grad)
            torch._dynamo.reset()
            ours = _results(
                torch.compile(self.run, backend=backend),
                _detached(call),
                grad,
            )
        except Exception:  # no float64 run to compare with
            return True
        if not len(exact) == len(eager) == len(ours):
            return True
        return any(is_further(o, e, x) for o, e, x in zip(ours, eager, exact, strict=True))


def _function(target: Callable[..., Any], inplace: bool, specified: bool) -> Callable[..., Any]:
    def run(calls: list[Call]) -> list[Any]:
        results = []
        for first, args, kwargs in calls:
            if inplace:
                first = first.clone()
            result = target(first, *args, **kwargs)
            results.append([result, first] if inplace else result)
        return results

    def blank(t: torch.Tensor) -> Any:
        return torch.zeros_like(t, memory_format=torch.contiguous_format), t.stride()

    def shapes(calls: list[Call]) -> list[Any]:
        return [pytree.tree_map_only(torch.Tensor, blank, r) for r in run(calls)]

    return run if specified else shapes


def _wide(call: Call) -> Call:
    def one(value: torch.Tensor) -> torch.Tensor:
        kind = value.dtype
        if value.is_floating_point():
            kind = torch.float64
        elif value.is_complex():
            kind = torch.complex128
        return value.detach().to(kind).requires_grad_(value.requires_grad)

    wide: Call = pytree.tree_map_only(torch.Tensor, one, call)
    return wide


def _detached(call: Call) -> Call:
    """The call on tensors of its own, so that nothing is written to the sample."""
    twin: Call = copied([call])[0]
    return twin


def _results(run: Callable[..., Any], call: Call, grad: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    outputs, slopes = values(run([call]), call, grad)
    return [*outputs, *slopes]


def describe(call: Call) -> str:
    """A call's arguments, short: ``f32[3, 4], dim=1``."""

    def one(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            name = str(value.dtype).removeprefix("torch.")
            plain = value.layout is torch.strided and value.is_contiguous()
            return f"{name}{list(value.shape)}{'' if plain else '/strided'}"
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(one(v) for v in value) + "]"
        return repr(value)[:60]

    first, args, kwargs = call
    parts = [one(v) for v in (first, *args)] + [f"{k}={one(v)}" for k, v in kwargs.items()]
    return ", ".join(parts)[:300]
