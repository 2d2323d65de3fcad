"""What a failed factorisation raises."""

from __future__ import annotations

from typing import Any

import torch

from .common import const, converts, emit, ndim, op, tirx
from .linalg_kernel import lead, matrix_kernel
from .opaque import loops, require

aten = torch.ops.aten

# Eager's words, less the number of the matrix and of the pivot: a kernel's messages are fixed.
_REASONS = {
    "inv": "The inversion could not be completed because the input matrix is singular.",
    "solve": "The solver failed because the input matrix is singular.",
    "cholesky": "The factorization could not be completed because the input is not "
    "positive-definite.",
    "lstsq": "The least squares solution could not be computed because the input matrix does not "
    "have full rank.",
    "eig": "The algorithm failed to converge because the input matrix is ill-conditioned or has "
    "too many repeated eigenvalues.",
    "svd": "The algorithm failed to converge because the input matrix is ill-conditioned or has "
    "too many repeated singular values.",
}
_OTHER = "The input matrix is singular."


def _message(api_name: str) -> str:
    reason = next((r for key, r in _REASONS.items() if key in api_name), _OTHER)
    return f"{api_name}: {reason}"


@converts(aten._linalg_check_errors.default)
def linalg_check_errors(info: Any, api_name: str, *, is_matrix: bool) -> Any:
    """LinAlgError where a factorisation's `info` is not 0 throughout."""
    kind = "RuntimeError" if "lu_factor" in api_name else "LinAlgError"

    def before(ins: Any) -> None:
        with loops([ins[0].shape[0]]) as (index,):
            require(ins[0][index].equal(tirx.const(0, "int32")), _message(api_name), kind)

    def body(index: Any, ins: Any, outs: Any) -> None:
        outs[0][index] = tirx.const(0, "int8")

    return matrix_kernel(
        "check_errors",
        body,
        [info],
        lambda _: [((), "int8")],
        aten._linalg_check_errors.default,
        batch=[] if is_matrix else lead(info, 0),
        results=[],
        before=before,
        api_name=api_name,
        is_matrix=is_matrix,
    )[0]


def checked(result: Any, info: Any, api_name: str, core: int = 2) -> Any:
    """A result that is there only once its `info` has been found to be 0."""
    single = ndim(result) == core
    passed = emit(linalg_check_errors(info, api_name, is_matrix=single))
    if not single:
        passed = op.expand_dims(passed, [ndim(info) + axis for axis in range(core)])
    return op.where(op.equal(passed, const(0, passed)), result, const(0, result))
