"""Distinct slices, sorted and consecutive, against eager."""

import pytest
import torch
from special_values import FLOATS, NAN, seeded

import fx2relax
from fx2relax.compat import relax, tvm
from fx2relax.pipeline import build
from fx2relax.testing import assert_matches_eager

pytestmark = pytest.mark.sweep


def everything(x, dim):
    both = {"return_inverse": True, "return_counts": True, "dim": dim}
    return (
        torch.unique(x, **both),
        torch.unique(x, dim=dim),
        torch.unique(x, dim=dim, return_counts=True),
        torch.unique_consecutive(x, **both),
        torch.unique_consecutive(x, dim=dim),
        torch.unique_consecutive(x, dim=dim, return_inverse=True),
    )


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8, torch.bool])
def test_slices(dtype):
    x = (seeded(37, 2, dtype=torch.int64).abs() // 4).to(dtype)
    assert_matches_eager(lambda x: everything(x, 0), x)


@pytest.mark.parametrize("dim", [1, 2, -1])
def test_axes(dim):
    x = seeded(3, 4, 5, dtype=torch.int64)[:, [0, 1, 1, 3]][:, :, [4, 4, 0, 2, 0]] * 1.0
    assert_matches_eager(lambda x: everything(x, dim), x)
    assert_matches_eager(lambda x: everything(x, dim), x.transpose(0, 2), dynamic=True)


def test_sizes():
    x = seeded(9, 3, dtype=torch.int64) // 4
    assert_matches_eager(lambda x: everything(x, 0), x, dynamic=True)
    for size in (0, 1, 2, 300):
        x = seeded(size, 1, dtype=torch.int64)
        assert_matches_eager(lambda x: everything(x, 0), x)


def test_nan_differs_from_itself():
    x = torch.tensor([[1.0, 2.0], [0.0, 5.0], [1.0, 2.0], [NAN, 1.0], [NAN, 1.0], [-0.0, 5.0]])
    assert_matches_eager(lambda x: everything(x, 0)[3:], x)
    assert_matches_eager(lambda x: torch.unique(x, dim=0), x[3:5])


def test_no_elements_are_an_error():
    torch._dynamo.reset()
    fn = torch.compile(lambda x: torch.unique(x, dim=0), backend="relax")
    with pytest.raises(Exception, match="0 sized dimensions"):
        fn(torch.ones(2, 0))


def test_without_the_library():
    class Unique(torch.nn.Module):
        def forward(self, x):
            return torch.ops.aten.unique_dim(x, 0, True, True, True)

    x = seeded(20, 1, dtype=torch.int64)
    program = torch.export.export(Unique(), (x,))
    machine = relax.VirtualMachine(build(fx2relax.from_fx(program), library="none"), tvm.cpu())
    ours = machine["main"](tvm.runtime.tensor(x.numpy()))
    for value, expected in zip(ours, Unique()(x), strict=True):
        assert torch.equal(torch.from_numpy(value.numpy()), expected)
