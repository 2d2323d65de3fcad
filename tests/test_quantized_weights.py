"""Products with weights of eight and four bits, as PyTorch's kernels for them give them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from fx2relax.int4 import layout
from fx2relax.testing import assert_matches_eager

aten = torch.ops.aten
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
# A sum of so many products in another order; half precision is rounded once.
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def seeded(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def numbers(low: int, high: int, *sizes: int) -> Tensor:
    return torch.randint(low, high, sizes, generator=torch.Generator().manual_seed(0))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 4, 9])
@pytest.mark.parametrize(
    ("columns", "depth", "group"), [(64, 64, 32), (176, 128, 64), (48, 256, 256)]
)
def test_int4_product(dtype, rows, columns, depth, group):
    packed = aten._convert_weight_to_int4pack_for_cpu(
        numbers(0, 16, columns, depth).to(torch.int32), 1
    )
    scales = torch.stack(
        [seeded(depth // group, columns).abs() / 8, seeded(depth // group, columns, seed=1)], -1
    ).to(dtype)

    def run(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
        return aten._weight_int4pack_mm_for_cpu(x, packed, group, scales)

    x = seeded(rows, depth).to(dtype)
    whole = run(x, packed, scales).abs().max().item()
    assert_matches_eager(run, x, packed, scales, tol=(4 * BOUND[dtype], BOUND[dtype] * whole))


def test_int4_product_of_any_rows():
    packed = aten._convert_weight_to_int4pack_for_cpu(numbers(0, 16, 64, 64).to(torch.int32), 1)
    scales = seeded(2, 64, 2)

    def run(x: Tensor) -> Tensor:
        return aten._weight_int4pack_mm_for_cpu(x, packed, 32, scales)

    compiled = torch.compile(run, backend="relax", dynamic=True, fullgraph=True)
    for rows in (5, 1, 8, 17):
        x = seeded(rows, 64)
        torch.testing.assert_close(compiled(x), run(x), rtol=1e-5, atol=1e-4)
    x[2, 3], x[4, 5] = float("nan"), float("inf")
    torch.testing.assert_close(compiled(x), run(x), rtol=1e-5, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize(("rows", "columns"), [(16, 2), (64, 64), (176, 6), (112, 32)])
def test_int4_packing(rows, columns):
    def run(w: Tensor) -> Tensor:
        return aten._convert_weight_to_int4pack_for_cpu(w, 1)

    assert_matches_eager(run, numbers(0, 16, rows, columns).to(torch.int32), tol=(0, 0))


@pytest.mark.parametrize("level", ["default", "avx2", "avx512"])
def test_int4_layout_is_known(level):
    """PyTorch's kernels for lesser processors, each in a process of its own."""
    code = "from fx2relax.int4 import layout; print(layout())"
    env = {**os.environ, "ATEN_CPU_CAPABILITY": level}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True
    )
    assert "block=" in found.stdout, found.stderr
    assert layout() is not None


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rows", [1, 4, 6])
@pytest.mark.parametrize(("columns", "depth"), [(8, 32), (5, 64), (1, 96), (35, 128)])
def test_int8_product(dtype, rows, columns, depth):
    """Depths are multiples of 32: with others PyTorch's kernel reads stray memory."""

    def run(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
        return aten._weight_int8pack_mm(x, w, scales)

    x, w = seeded(rows, depth).to(dtype), numbers(-128, 128, columns, depth).to(torch.int8)
    scales = seeded(columns).abs().to(dtype) / 50
    whole = run(x, w, scales).abs().max().item()
    assert_matches_eager(run, x, w, scales, tol=(4 * BOUND[dtype], BOUND[dtype] * whole))
