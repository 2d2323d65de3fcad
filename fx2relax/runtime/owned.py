"""Results on a GPU in the memory of PyTorch's allocator, and not only at its address.

What comes back from TVM is a tensor of foreign memory to PyTorch: its allocator takes no notice of
`Tensor.record_stream` then, and gives the memory to the next who asks while another stream reads.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

# What programs were given, by its address: the storage lives as long as the memory is in use.
_storages: dict[int, Any] = {}
_MANY = 4096


def remember(tensor: torch.Tensor) -> None:
    """Note whose memory a tensor is that TVM is given."""
    if len(_storages) >= _MANY:
        for address, storage in list(_storages.items()):
            if storage() is None:
                _storages.pop(address, None)
    _storages[tensor.data_ptr()] = weakref.ref(tensor.untyped_storage())


def owned(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor in the storage that was noted; itself where none was."""
    found = _storages.get(tensor.data_ptr())
    storage = found() if found is not None else None
    if storage is None:
        return tensor
    offset = (tensor.data_ptr() - storage.data_ptr()) // tensor.element_size()
    fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return fresh.set_(storage, offset, tensor.shape, tensor.stride())
