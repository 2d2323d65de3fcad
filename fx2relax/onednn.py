"""What PyTorch's oneDNN can do here."""

from __future__ import annotations

import functools

import torch


def usable() -> bool:
    """Whether it is there and nobody has switched it off."""
    mkldnn = torch.backends.mkldnn
    return bool(mkldnn.is_available() and mkldnn.enabled)


@functools.cache
def computes_in(dtype: str) -> bool:
    """Whether its products are made of numbers of this dtype on this processor."""
    known = {"float16": "_is_mkldnn_fp16_supported", "bfloat16": "_is_mkldnn_bf16_supported"}
    if dtype not in known:
        return True
    supported = getattr(torch.ops.mkldnn, known[dtype], None)
    return torch.backends.mkldnn.is_available() and supported is not None and bool(supported())
