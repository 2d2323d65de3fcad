"""Hashes of tensors, against eager."""

import pytest
import torch
from special_values import FLOATS, INTEGERS, NAN, odd, seeded

import fx2relax
from fx2relax.compat import relax, tvm
from fx2relax.pipeline import build
from fx2relax.testing import assert_matches_eager


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool, torch.int8])
def test_hashes(dtype):
    x = seeded(3, 4, 5).to(dtype)

    def fn(x):
        return (
            torch.hash_tensor(x),
            torch.hash_tensor(x, dim=1),
            torch.hash_tensor(x, dim=(0, -1), keepdim=True),
            torch.hash_tensor(x[1, 2, 3], dim=0),
            torch.hash_tensor(x[:, :0], dim=2),
        )

    assert_matches_eager(fn, x)


def test_sizes_and_special_values():
    assert_matches_eager(lambda x: torch.hash_tensor(x, dim=1), seeded(6, 10), dynamic=True)
    assert_matches_eager(torch.hash_tensor, odd())
    assert_matches_eager(torch.hash_tensor, torch.tensor([NAN]))


def test_nothing_to_hash_is_an_error():
    torch._dynamo.reset()
    fn = torch.compile(lambda x: torch.hash_tensor(x), backend="relax")
    with pytest.raises(Exception, match="Expected reduction dim"):
        fn(torch.ones(0, 2))


def test_without_the_library():
    class Hash(torch.nn.Module):
        def forward(self, x):
            return torch.hash_tensor(x, dim=0).view(torch.int64)

    x = seeded(4, 5)
    mod = fx2relax.from_fx(torch.fx.symbolic_trace(Hash()), [x])
    machine = relax.VirtualMachine(build(mod, library="none"), tvm.cpu())
    ours = machine["main"](tvm.runtime.tensor(x.numpy()))
    assert torch.equal(torch.from_numpy(ours.numpy()), Hash()(x))
