"""What PyTorch refuses while it runs: its own error, and not a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fx2relax

BOOLS = torch.tensor([True, False])
BYTES = torch.tensor([3, 4], dtype=torch.int8)
FLOATS = torch.tensor([1.5, -2.0])
NOTHING = torch.empty(0, 3)

CASES: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "bool - int": (lambda x: x - 1, BOOLS),
    "int - bool": (lambda x: x.long() - x, BOOLS),
    "float - True": (lambda x: x - True, FLOATS),
    "rsub": (lambda x: torch.rsub(x, 1), BOOLS),
    "negative power": (lambda x: x**-1, BYTES),
    "negative power in place": (lambda x: x.pow_(-2), BYTES),
    "negative power of bytes": (lambda x: x.view(torch.uint8) ** -2, BYTES),
    "max of nothing": (lambda x: x.max(), NOTHING),
    "min over nothing": (lambda x: x.min(0), NOTHING),
    "argmax of booleans": (lambda x: x.argmax(), BOOLS),
    "abs of booleans": (lambda x: x.abs(), BOOLS),
    "floor of booleans": (lambda x: x.floor(), BOOLS),
    "gcd of floats": (lambda x: torch.gcd(x, x), FLOATS),
    "fill beyond": (lambda x: x.fill_(300), BYTES),
    "full beyond": (lambda x: torch.full_like(x, 300), BYTES),
    "mask beyond": (lambda x: x.masked_fill(x > 3, 300), BYTES),
    "mask beyond half": (lambda x: x.half().masked_fill(x > 0, -1e9), FLOATS),
    "clamp beyond": (lambda x: x.clamp(-1000, 1000), BYTES),
    "alpha beyond": (lambda x: torch.add(x, x, alpha=300), BYTES),
    "softplus of integers": (F.softplus, BYTES),
    "median of booleans": (lambda x: x.median(), BOOLS),
    "power of booleans": (lambda x: x**x, BOOLS),
    "lerp of integers": (lambda x: torch.lerp(x, x, 0.5), BYTES),
    "glu of integers": (F.glu, BYTES),
    "variance of integers": (lambda x: x.var(), BYTES),
    "addcdiv of booleans": (lambda x: torch.addcdiv(x, x, x), BOOLS),
    "max_unpool1d of integers": (
        lambda x: F.max_unpool1d(x[None, None], torch.tensor([[[0, 1]]]), 1),
        BYTES,
    ),
    "pooling of integers": (lambda x: F.adaptive_avg_pool2d(x.view(1, 2, 1), 2), BYTES),
    "average of complex numbers": (lambda x: x.to(torch.complex64).nansum(), FLOATS),
    "logaddexp in a longer graph": (lambda x: torch.logaddexp(x + 1, x * 2) - 1, BYTES),
    "polynomial of halves": (
        lambda x: torch.special.laguerre_polynomial_l(x.half(), 2),
        FLOATS,
    ),
    "select in nothing": (lambda x: x.index_select(0, torch.tensor([0])), NOTHING),
    "scatter into nothing": (
        lambda x: x.scatter(0, torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1)),
        NOTHING,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    fn, x = CASES[name]
    with pytest.raises((RuntimeError, IndexError, NotImplementedError)) as eager:
        fn(x.clone())
    with pytest.raises(type(eager.value)) as compiled:
        torch.compile(fn, backend="relax", fullgraph=True)(x.clone())
    assert str(eager.value).splitlines()[0] in str(compiled.value)


def test_numbers_that_fit_are_taken() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x.clamp(-128, 127), x.clamp(max=1.5), x + 300, y.half() + 1e9, F.relu(x) ** 2

    for actual, expected in zip(
        torch.compile(fn, backend="relax")(BYTES, FLOATS), fn(BYTES, FLOATS), strict=True
    ):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


def test_kernels_are_asked_of_large_tensors_too() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.mish(x)

    with pytest.raises(NotImplementedError, match="mish_cpu"):
        torch.compile(fn, backend="relax")(torch.ones(300, 300, dtype=torch.int64))


def test_from_fx_asks_of_halves_as_of_floats() -> None:
    """The graph may run on a device whose kernels take them."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool3d(x, 2)

    graph = torch.fx.symbolic_trace(fn)
    text = fx2relax.from_fx(graph, [((1, 2, 4, 4, 4), torch.float16)]).script()
    assert "float16" in text
    with pytest.raises(fx2relax.UnsupportedOpError, match="not implemented for 'Int'"):
        fx2relax.from_fx(graph, [((1, 2, 4, 4, 4), torch.int32)])
