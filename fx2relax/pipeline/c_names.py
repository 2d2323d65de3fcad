"""Names that a kernel's source in C can have."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx


def with_c_names(function: Any) -> Any:
    """A kernel none of whose variables has a name that begins with a digit.

    Those of the weights of an `nn.Sequential` do, and TVM's code generator for CUDA writes them as
    they are, but for the characters that no name has.
    """
    if not any(_is_bad(parameter) for parameter in function.params):
        return function
    named: dict[Any, Any] = {}

    def rename(var: Any) -> Any:
        if not _is_bad(var):
            return var
        if var not in named:
            named[var] = tirx.Var(f"p{var.name}", var.ty)
        return named[var]

    return tvm_ffi.structural_map(function, (tirx.Var, rename))


def _is_bad(var: Any) -> bool:
    return bool(var.name[:1].isdigit())
