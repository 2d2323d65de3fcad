"""Attention: masks, causality, scale, shared heads, and PyTorch's modules of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx2relax.testing import assert_matches_eager

INF = float("inf")


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _heads(length: int = 5, keys: int = 7, heads: int = 4, shared: int = 4) -> list[torch.Tensor]:
    return [
        _normal(2, heads, length, 8, seed=1),
        _normal(2, shared, keys, 8, seed=2),
        _normal(2, shared, keys, 8, seed=3),
    ]


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    "settings",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"scale": 0.2, "is_causal": True}],
    ids=str,
)
def test_without_a_mask(settings: dict[str, Any]) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, **settings)

    assert_matches_eager(attend, *_heads(), grad=True)
    assert_matches_eager(attend, *_heads(7, 5), dynamic=True)
    assert_matches_eager(attend, *[t[0] for t in _heads()], grad=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    assert_matches_eager(attend, *[t.to(dtype) for t in _heads()], grad=True)


MASKS = {
    "bool": _normal(5, 7) > -0.5,
    "rows": _normal(2, 1, 5, 7, seed=4) > 0,
    "bias": _normal(5, 7),
    "heads": _normal(2, 4, 5, 7, seed=4),
    "infinite": torch.zeros(5, 7).masked_fill(_normal(5, 7) > 0.5, -INF),
    "expanded": _normal(2, 1, 1, 7) > -0.5,
}


@pytest.mark.sweep
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks(mask: torch.Tensor) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, m)

    q, k, v = (t.requires_grad_() for t in _heads())
    assert_matches_eager(attend, q, k, v, mask, grad=True)


def test_rows_that_see_nothing() -> None:
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, m)

    q, k, v = (t.requires_grad_() for t in _heads())
    assert_matches_eager(attend, q, k, v, mask, grad=True)


@pytest.mark.parametrize("shared", [1, 2])
def test_shared_heads(shared: int) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    assert_matches_eager(attend, *_heads(shared=shared), grad=True)


def test_layouts_and_empty_batches() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    inputs = _heads()
    swapped = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs]
    assert_matches_eager(attend, *swapped, grad=True)
    assert_matches_eager(attend, *[t[..., ::2] for t in inputs])
    assert_matches_eager(attend, *[t[:0] for t in inputs])


def test_dropout_draws_as_eager_does() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)

    assert_matches_eager(attend, *_heads(), seed=1, torch_calls=True)


def test_generated_kernels() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    assert_matches_eager(attend, *_heads(), grad=True, options={"library": "none"})


def test_written_out() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -INF).softmax(-1) @ v

    assert_matches_eager(attend, *_heads(7, 7), grad=True)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    "settings",
    [
        {"need_weights": False},
        {"need_weights": True},
        {"average_attn_weights": False},
        {"attn_mask": _normal(5, 5).triu(1) < 0, "need_weights": False},
        {"key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])},
    ],
    ids=lambda s: "-".join(s),
)
@pytest.mark.parametrize("training", [True, False])
def test_multi_head(settings: dict[str, Any], training: bool) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> Any:
            return self.attention(x, x, x, **settings)

    with torch.set_grad_enabled(training):
        assert_matches_eager(Attention().train(training), _normal(2, 5, 16), grad=training)


def test_multi_head_of_other_widths() -> None:
    torch.manual_seed(0)
    cross = nn.MultiheadAttention(16, 2, kdim=6, vdim=10, add_bias_kv=True, add_zero_attn=True)
    inputs = _normal(5, 2, 16), _normal(7, 2, 6), _normal(7, 2, 10)
    assert_matches_eager(cross, *inputs, grad=True)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_encoder(norm_first: bool, training: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        16, 4, 32, dropout=0.0, batch_first=True, norm_first=norm_first, activation="gelu"
    )
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    with torch.set_grad_enabled(training):
        assert_matches_eager(net, _normal(2, 5, 16), grad=training, tol=1e-4)


def test_encoder_with_padding() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [True] * 5])
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)

    def encode(x: torch.Tensor, padding: torch.Tensor, causal: torch.Tensor) -> object:
        return net(x, src_key_padding_mask=padding), net(x, mask=causal)

    with torch.no_grad():
        assert_matches_eager(encode, _normal(3, 5, 16), padding, causal, tol=1e-4)


def test_decoder() -> None:
    torch.manual_seed(0)
    net = nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    causal = nn.Transformer.generate_square_subsequent_mask(5)

    def decode(x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return net(x, memory, tgt_mask=mask, tgt_is_causal=True)

    inputs = _normal(2, 5, 16).requires_grad_(), _normal(2, 7, 16).requires_grad_()
    assert_matches_eager(decode, *inputs, causal, grad=True, tol=1e-4)
