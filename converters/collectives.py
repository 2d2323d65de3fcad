"""Waiting for what several processes have computed together."""

from __future__ import annotations

from typing import Any

import torch

from .common import converts

if torch.distributed.is_available():
    _WAIT = torch.ops._c10d_functional.wait_tensor.default

    @converts(_WAIT)
    @converts(_WAIT, complex_numbers=True)
    def wait_tensor(tensor: Any) -> Any:
        """Its operand: a call into PyTorch waits for its own result, and the caller for inputs."""
        return tensor
