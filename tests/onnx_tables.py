"""Exports to ONNX in quick succession."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch.export import decomp_utils, exported_program
from torch.onnx._internal.exporter._registration import ONNXRegistry


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Tables that PyTorch makes for each export, most of its time on one operator, made once."""
    with contextlib.ExitStack() as stack:
        for owner, name, function in _TABLES:
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


_TABLES: list[tuple[Any, str, Any]] = [
    (ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
]
for _user in (exported_program, decomp_utils):
    if hasattr(_user, _COMPOSITE := "_collect_all_valid_cia_ops"):
        _TABLES.append((_user, _COMPOSITE, functools.cache(getattr(_user, _COMPOSITE))))
