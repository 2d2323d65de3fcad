"""Attention of one query, as a decoder has it, and of heads that share keys."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

OPTIONS = {"never_slower": False}


@pytest.fixture(autouse=True)
def _afresh() -> None:
    torch._dynamo.reset()


def _exactly(function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    return function(*(a.double() for a in arguments))


@pytest.mark.sweep
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)])
@pytest.mark.parametrize("mask", ["none", "one", "heads", "rows hidden"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("written_out", [False, True])
def test_attention_of_one_query(
    heads: tuple[int, int], mask: str, dtype: torch.dtype, written_out: bool
) -> None:
    """Heads that share keys are as many queries."""
    torch.manual_seed(0)
    many, few = heads
    q = torch.randn(2, many, 1, 16, dtype=dtype)
    k, v = torch.randn(2, 2, few, 40, 16, dtype=dtype)
    bias = None
    if mask == "one":
        bias = torch.randn(1, 40, dtype=dtype)
    elif mask == "heads":
        bias = torch.randn(2, many, 1, 40, dtype=dtype)
    elif mask == "rows hidden":
        bias = torch.zeros(2, 1, 1, 40, dtype=dtype)
        bias[0] = float("-inf")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = None if bias is None else bias.to(q.dtype)
        if written_out:
            b, n, s, d = k.shape
            k = k[:, :, None].expand(b, n, many // few, s, d).reshape(b, many, s, d)
            v = v[:, :, None].expand(b, n, many // few, s, d).reshape(b, many, s, d)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=own)
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=own, enable_gqa=many != few
        )

    with torch.no_grad():
        expected, exact = attend(q, k, v), _exactly(attend, q, k, v)
        for library in ("torch", "none"):
            fast = torch.compile(attend, backend="relax", options={"library": library, **OPTIONS})
            if dtype is torch.bfloat16:  # eager rounds the weights as well
                off, allowed = ((r.double() - exact).abs().max() for r in (fast(q, k, v), expected))
                assert off <= allowed
            else:
                torch.testing.assert_close(fast(q, k, v), expected)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("grad", [False, True])
def test_attention_of_heads_whose_numbers_vary(grad: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    fast = torch.compile(attend, backend="relax", options=OPTIONS, dynamic=True)
    for heads, length in ((6, 7), (9, 30), (3, 5)):
        given = [torch.randn(2, heads, 4, 16), *torch.randn(2, 2, 3, length, 16)]
        other = [x.clone().requires_grad_(grad) for x in given]
        given = [x.requires_grad_(grad) for x in given]
        result, expected = fast(*given), attend(*other)
        torch.testing.assert_close(result, expected)
        if grad:
            result.cos().sum().backward()
            expected.cos().sum().backward()
            for x, y in zip(given, other, strict=True):
                torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("shared", [1, 4])
@pytest.mark.parametrize("queries", [1, 3])
def test_keys_are_read_from_a_part_of_their_cache(dynamic: bool, shared: int, queries: int) -> None:
    """As Llama's own code has it: positions before heads, in a cache for more than this batch."""
    torch.manual_seed(0)
    cache = torch.randn(2, 3, 50, 2, 16)

    def attend(q: Tensor, length: int) -> Tensor:
        keys, values = (c[: q.shape[0], :length].transpose(1, 2) for c in cache)
        q = q[:, :queries].transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    for library in ("torch", "none"):
        options = {**OPTIONS, "library": library}
        fast = torch.compile(attend, backend="relax", options=options, dynamic=dynamic)
        with torch.no_grad():
            for length in (20, 21, 49):
                q = torch.randn(2, 5, 2 * shared, 16)
                torch.testing.assert_close(fast(q, length), attend(q, length))
