"""How results and gradients lie in memory where PyTorch's own rules forget it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fx2relax.testing import assert_matches_eager, copied

pytestmark = pytest.mark.sweep

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "permuted": lambda: torch.randn(6, 4, 3).permute(0, 2, 1),
    "channels_last": lambda: torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(3, 2, 6, 6).transpose(0, 1),
    "a part": lambda: torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last)[:, :3],
    "expanded": lambda: torch.randn(3, 1, 4).expand(3, 5, 4).transpose(0, 1),
}


def _batch_norm(x: Tensor, training: bool) -> Tensor:
    mean, var = torch.zeros(x.shape[1]), torch.ones(x.shape[1])
    return F.batch_norm(x, mean, var, training=training)


def _ones(loss: Callable[..., Tensor], reduction: str) -> Callable[[Tensor], Tensor]:
    return lambda x: loss(x, torch.ones(x.shape), reduction=reduction)


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "roll": lambda x: (x.roll(1, 1), x.roll((1, 2), (0, -1)), x.roll(x.shape[2], 2), x.roll(3)),
    "batch_norm": lambda x: (
        F.batch_norm(x, None, None, training=True),
        _batch_norm(x, True),
        _batch_norm(x, False),
    ),
    "logsigmoid": F.logsigmoid,
    "scalar powers": lambda x: (2**x, torch.float_power(2.0, x)),
    "rrelu": F.rrelu,
    "complex": lambda x: (
        torch.complex(x, x.sin()),
        torch.polar(x.abs(), x) * 2,
        torch.complex(x, x.cos()).angle(),
    ),
    "max_pool1d": lambda x: F.max_pool1d(x if x.dim() == 3 else x[0], 2),
    "losses in the order of their input": lambda x: (
        _ones(F.soft_margin_loss, "none")(x),
        _ones(F.binary_cross_entropy, "none")(x.sigmoid()),
    ),
    "losses": lambda x: tuple(
        _ones(loss, reduction)(x)
        for loss in (F.mse_loss, F.smooth_l1_loss, F.huber_loss)
        for reduction in ("none", "mean")
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", RESULTS)
def test_results(name: str, layout: str) -> None:
    assert_matches_eager(RESULTS[name], LAYOUTS[layout](), torch_calls=name in ("rrelu", "complex"))


@pytest.mark.parametrize("name", ["roll", "batch_norm", "logsigmoid"])
def test_results_of_any_size(name: str) -> None:
    x = LAYOUTS["channels_last"]()
    assert_matches_eager(RESULTS[name], x, dynamic=True)


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "mse_loss": _ones(F.mse_loss, "mean"),
    "smooth_l1_loss": _ones(F.smooth_l1_loss, "mean"),
    "huber_loss": _ones(F.huber_loss, "sum"),
    "max_pool1d": lambda x: F.max_pool1d(x if x.dim() == 3 else x[0], 2),
    "each loss": _ones(F.mse_loss, "none"),
    "logsigmoid": F.logsigmoid,
    "soft_margin_loss": _ones(F.soft_margin_loss, "none"),
    "binary_cross_entropy": lambda x: _ones(F.binary_cross_entropy, "mean")(x.sigmoid()),
    "batch_norm": lambda x: _batch_norm(x, True),
    "batch_norm of known numbers": lambda x: _batch_norm(x, False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str, layout: str) -> None:
    fn = GRADIENTS[name]
    assert_matches_eager(fn, LAYOUTS[layout](), grad=True)
    x = LAYOUTS[layout]()
    grads = []
    for side in (torch.compile(fn, backend="relax"), fn):
        [leaf] = copied([x], grad=True)
        out = side(leaf)
        out.backward(torch.ones(out.shape))
        grads.append(leaf.grad)
    assert grads[0].stride() == grads[1].stride()
