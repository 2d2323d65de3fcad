"""Extremes and products of many elements, whose parts the threads share."""

import pytest
import torch

COMPILED = {"never_slower": False, "library": "none", "on_unsupported": "raise"}
SHAPES = [(3_000_001,), (1999, 1501), (65_537,), (7, 300_007)]
FUNCTIONS = {
    "all": lambda x: (x.max(), x.min(), x.argmax(), x.argmin()),
    "few columns": lambda x: (x.view(-1, 1).amax(0), x.flatten()[:60_000].view(-1, 3).amin(0)),
    "rows": lambda x: (x.view(x.shape[0], -1).amax(1)[:2], x.aminmax()),
    "of a chain": lambda x: ((x * 2 + 1).abs().max(), (-x).clamp(max=0).min()),
}


def exactly(f, x, dynamic=None):
    torch._dynamo.reset()
    compiled = torch.compile(f, backend="relax", dynamic=dynamic, options=COMPILED)
    got, wanted = (
        torch.utils._pytree.tree_leaves(compiled(x)),
        torch.utils._pytree.tree_leaves(f(x)),
    )
    for ours, eager in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=0, equal_nan=True)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_extremes(shape, dtype):
    torch.manual_seed(0)
    x = (torch.randn(shape) * 1000).to(dtype)
    for f in FUNCTIONS.values():
        exactly(f, x)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 70_000, 2_999_999])
def test_one_special_value(value, place, dynamic):
    """Whichever part it lies in."""
    x = torch.linspace(-2, 2, 3_000_000)
    x[place] = value
    exactly(FUNCTIONS["all"], x, dynamic)


@pytest.mark.parametrize("value", [-float("inf"), float("inf"), float("nan"), 0.0, -1.5])
def test_equal_elements(value):
    exactly(FUNCTIONS["all"], torch.full((100_003,), value))


@pytest.mark.parametrize("dynamic", [False, True])
def test_products(dynamic):
    compiled = torch.compile(lambda x: x.prod(), backend="relax", dynamic=dynamic, options=COMPILED)
    torch.manual_seed(0)
    for x in (1 + torch.randn(1 << 20) / 1000, torch.linspace(0.999, 1.001, 300_001)):
        exact = x.double().prod()
        # Each factor rounds once, and about as often up as down.
        assert abs(compiled(x) - exact) <= 4 * len(x) ** 0.5 * 2.0**-24 * abs(exact)
    x = torch.ones(300_001)
    x[[3, 150_000, 299_999]] = torch.tensor([-1.0, -1.0, -2.0])
    assert compiled(x) == -2
    numbers = torch.ones(300_001, dtype=torch.int64)
    numbers[[5, 200_000]] = 3
    assert torch.compile(lambda x: x.prod(), backend="relax", options=COMPILED)(numbers) == 9


def test_as_many_threads_as_there_are():
    x, before = torch.randn(1_000_003), torch.get_num_threads()
    compiled = torch.compile(lambda x: (x.max(), x.prod()), backend="relax", options=COMPILED)
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(compiled(x * 1.2))
    finally:
        torch.set_num_threads(before)
    assert [torch.equal(a, b) for a, b in zip(*found, strict=True)] == [True, True]
