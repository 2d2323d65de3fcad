"""Reductions of segments, against eager."""

import pytest
import torch
from special_values import FLOATS, NAN, seeded

import fx2relax
from fx2relax.compat import relax, tvm
from fx2relax.pipeline import build
from fx2relax.testing import assert_matches_eager

pytestmark = pytest.mark.sweep

REDUCTIONS = ["max", "min", "mean", "sum", "prod"]
LENGTHS = torch.tensor([3, 2, 3, 0, 1, 2])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("initial", [None, 3.0, 0.0])
def test_reductions(dtype, initial):
    x = torch.tensor([1.0, 1.0, 2.0, NAN, 5.0, 0.0, 0.0, 4.0, 0.0, 3.0, 2.0], dtype=dtype)
    ends = torch.tensor([0, 3, 3, 7, 11])

    def fn(x):
        return [
            (
                torch.segment_reduce(x, r, lengths=LENGTHS, initial=initial),
                torch.segment_reduce(x, r, offsets=ends, initial=initial),
            )
            for r in REDUCTIONS
        ]

    assert_matches_eager(fn, x, grad=dtype in (torch.float32, torch.float64))


def test_axes_and_sizes():
    x, lengths = seeded(2, 5, 3), torch.tensor([[1, 4], [2, 3]], dtype=torch.int32)

    def fn(x, lengths):
        return [torch.segment_reduce(x, r, lengths=lengths, axis=1) for r in REDUCTIONS]

    assert_matches_eager(fn, x, lengths, grad=True)
    assert_matches_eager(fn, x, lengths, dynamic=True)

    def rows(x, lengths):
        return [torch.segment_reduce(x, r, lengths=lengths, unsafe=True) for r in REDUCTIONS]

    assert_matches_eager(rows, seeded(5, 3).T, torch.tensor([1, 1]))
    assert_matches_eager(rows, torch.ones(0, 2), torch.tensor([0, 0]))
    assert_matches_eager(rows, torch.ones(4, 0), torch.tensor([1, 3]))
    assert_matches_eager(rows, seeded(5, 3), torch.tensor([], dtype=torch.int64))


@pytest.mark.parametrize("lengths", [[2, 2], [2, -1, 4]])
def test_wrong_lengths_are_errors(lengths):
    torch._dynamo.reset()
    fn = torch.compile(lambda x, n: torch.segment_reduce(x, "sum", lengths=n), backend="relax")
    with pytest.raises(RuntimeError, match="lengths"):
        fn(torch.ones(5), torch.tensor(lengths))


def test_wrong_offsets_are_errors():
    torch._dynamo.reset()
    fn = torch.compile(lambda x, n: torch.segment_reduce(x, "sum", offsets=n), backend="relax")
    with pytest.raises(RuntimeError, match="segment_length"):
        fn(torch.ones(5), torch.tensor([0, 4, 2, 5]))
    with pytest.raises(RuntimeError, match="outside"):
        fn(torch.ones(5), torch.tensor([0, 4, 5, 6]))


def test_without_the_library():
    class Sums(torch.nn.Module):
        def forward(self, x, lengths):
            return [torch.segment_reduce(x, r, lengths=lengths) for r in REDUCTIONS]

    x, lengths = seeded(5, 3), torch.tensor([2, 3])
    mod = fx2relax.from_fx(torch.fx.symbolic_trace(Sums()), [x, lengths])
    machine = relax.VirtualMachine(build(mod, library="none"), tvm.cpu())
    ours = machine["main"](*(tvm.runtime.tensor(t.numpy()) for t in (x, lengths)))
    for value, expected in zip(ours, Sums()(x, lengths), strict=True):
        torch.testing.assert_close(torch.from_numpy(value.numpy()), expected)
