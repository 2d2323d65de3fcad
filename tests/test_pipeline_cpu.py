"""Scheduled kernels against PyTorch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_cases import module, run
from tvm.script import relax as R

CASES: list[tuple[str, Any, Any, list[tuple[int, ...]]]] = [
    ("add", lambda b, x, y: R.add(x, y), lambda x, y: x + y, [(7, 33), (7, 33)]),
    ("broadcast", lambda b, x, y: R.add(x, y), lambda x, y: x + y, [(3, 5, 70), (5, 1)]),
    ("scalar", lambda b, x, y: R.multiply(x, y), lambda x, y: x * y, [(), ()]),
    ("gelu", lambda b, x: R.nn.gelu(x), F.gelu, [(64, 1003)]),
    (
        "bias gelu residual",
        lambda b, x, y: R.add(b.emit(R.nn.gelu(b.emit(R.add(x, y)))), x),
        lambda x, y: F.gelu(x + y) + x,
        [(130, 512), (512,)],
    ),
    ("softmax", lambda b, x: R.nn.softmax(x, -1), lambda x: x.softmax(-1), [(5, 9, 131)]),
    ("softmax wide", lambda b, x: R.nn.softmax(x, -1), lambda x: x.softmax(-1), [(1, 50257)]),
    ("softmax narrow", lambda b, x: R.nn.softmax(x, -1), lambda x: x.softmax(-1), [(500, 3)]),
    ("softmax axis 1", lambda b, x: R.nn.softmax(x, 1), lambda x: x.softmax(1), [(3, 7, 65)]),
    ("softmax axis 0", lambda b, x: R.nn.softmax(x, 0), lambda x: x.softmax(0), [(77, 65)]),
    ("log_softmax", lambda b, x: R.nn.log_softmax(x, -1), lambda x: x.log_softmax(-1), [(9, 100)]),
    (
        "layer_norm",
        lambda b, x, g, c: R.nn.layer_norm(x, g, c, -1),
        lambda x, g, c: F.layer_norm(x, (x.shape[-1],), g, c),
        [(4, 33, 777), (777,), (777,)],
    ),
    (
        "rms_norm",
        lambda b, x, g: R.nn.rms_norm(x, g, -1, epsilon=1e-6),
        lambda x, g: F.rms_norm(x, (x.shape[-1],), g, 1e-6),
        [(65, 768), (768,)],
    ),
    (
        "group_norm",
        lambda b, x, g, c: R.nn.group_norm(x, g, c, 4, 1, [2, 3]),
        lambda x, g, c: F.group_norm(x, 4, g, c),
        [(2, 12, 9, 11), (12,), (12,)],
    ),
    ("sum all", lambda b, x: R.sum(x), lambda x: x.sum(), [(37, 1001)]),
    ("sum last", lambda b, x: R.sum(x, -1), lambda x: x.sum(-1), [(37, 1001)]),
    ("sum keep", lambda b, x: R.sum(x, -1, keepdims=True), lambda x: x.sum(-1, True), [(5, 999)]),
    ("sum first", lambda b, x: R.sum(x, 0), lambda x: x.sum(0), [(1001, 37)]),
    ("sum first wide", lambda b, x: R.sum(x, 0), lambda x: x.sum(0), [(101, 3001)]),
    ("sum middle", lambda b, x: R.sum(x, 1), lambda x: x.sum(1), [(3, 101, 70)]),
    ("sum outer two", lambda b, x: R.sum(x, [0, 2, 3]), lambda x: x.sum((0, 2, 3)), [(4, 9, 7, 6)]),
    ("mean", lambda b, x: R.mean(x, [2, 3]), lambda x: x.mean((2, 3)), [(4, 9, 7, 7)]),
    ("max", lambda b, x: R.max(x, -1), lambda x: x.amax(-1), [(40, 555)]),
    ("min first", lambda b, x: R.min(x, 0), lambda x: x.amin(0), [(40, 555)]),
    ("prod", lambda b, x: R.prod(x, -1), lambda x: x.prod(-1), [(40, 35)]),
    ("variance", lambda b, x: R.variance(x, -1), lambda x: x.var(-1, correction=0), [(40, 355)]),
    ("transpose", lambda b, x: R.permute_dims(x), lambda x: x.mT, [(133, 257)]),
    (
        "heads",
        lambda b, x: R.permute_dims(x, [0, 2, 1, 3]),
        lambda x: x.permute(0, 2, 1, 3),
        [(2, 65, 12, 64)],
    ),
    (
        "channels last",
        lambda b, x: R.permute_dims(x, [0, 2, 3, 1]),
        lambda x: x.permute(0, 2, 3, 1),
        [(2, 19, 15, 17)],
    ),
    (
        "concat",
        lambda b, x, y: R.concat([x, y], 1),
        lambda x, y: torch.cat([x, y], 1),
        [(9, 5, 40), (9, 6, 40)],
    ),
    (
        "concat last",
        lambda b, x, y: R.concat([x, y], -1),
        lambda x, y: torch.cat([x, y], -1),
        [(99, 50), (99, 63)],
    ),
    (
        "slice",
        lambda b, x: R.strided_slice(x, [1], [3], [60], [2]),
        lambda x: x[:, 3:60:2],
        [(9, 65)],
    ),
    ("matmul", lambda b, x, y: R.matmul(x, y), lambda x, y: x @ y, [(65, 77), (77, 131)]),
    (
        "matmul batch",
        lambda b, x, y: R.matmul(x, y),
        lambda x, y: x @ y,
        [(3, 5, 17, 33), (5, 33, 19)],
    ),
    (
        "linear gelu",
        lambda b, x, w, c: R.nn.gelu(
            b.emit(R.add(b.emit(R.matmul(x, b.emit(R.permute_dims(w)))), c))
        ),
        lambda x, w, c: F.gelu(F.linear(x, w, c)),
        [(65, 77), (131, 77), (131,)],
    ),
    ("matvec", lambda b, x, y: R.matmul(x, y), lambda x, y: x @ y, [(65, 300), (300,)]),
    (
        "conv2d",
        lambda b, x, w: R.nn.conv2d(x, w, strides=2, padding=1),
        lambda x, w: F.conv2d(x, w, stride=2, padding=1),
        [(2, 3, 33, 35), (8, 3, 3, 3)],
    ),
    (
        "depthwise",
        lambda b, x, w: R.nn.relu(b.emit(R.nn.conv2d(x, w, padding=1, groups=8))),
        lambda x, w: F.conv2d(x, w, padding=1, groups=8).relu(),
        [(1, 8, 28, 28), (8, 1, 3, 3)],
    ),
    (
        "conv1d",
        lambda b, x, w: R.nn.conv1d(x, w, padding=2),
        lambda x, w: F.conv1d(x, w, padding=2),
        [(2, 8, 100), (16, 8, 5)],
    ),
    (
        "max_pool",
        lambda b, x: R.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1, 1, 1)),
        lambda x: F.max_pool2d(x, 3, 2, 1),
        [(2, 5, 33, 31)],
    ),
    (
        "avg_pool",
        lambda b, x: R.nn.avg_pool2d(x, (2, 2), (2, 2)),
        lambda x: F.avg_pool2d(x, 2, 2),
        [(2, 5, 34, 32)],
    ),
    ("cumsum", lambda b, x: R.cumsum(x, 1), lambda x: x.cumsum(1), [(9, 300)]),
    ("empty", lambda b, x: R.add(x, x), lambda x: x + x, [(0, 5)]),
    ("empty sum", lambda b, x: R.sum(x, 0), lambda x: x.sum(0), [(0, 5)]),
    (
        "two steps of different rank",
        lambda b, x: R.subtract(x, b.emit(R.mean(x, [1], keepdims=True))),
        lambda x: x - x.mean(1, keepdim=True),
        [(45, 77)],
    ),
    (
        "column means",
        lambda b, x: R.subtract(x, b.emit(R.mean(x, [0], keepdims=True))),
        lambda x: x - x.mean(0, keepdim=True),
        [(77, 77)],
    ),
]


def check(out: torch.Tensor, x64: torch.Tensor, x32: torch.Tensor) -> None:
    """No further from float64 than four times eager's distance and a little."""
    assert out.shape == x64.shape
    scale = 1 + x64.abs().max().item() if x64.numel() else 1
    allowed = 4 * (x32.double() - x64).abs().max().item() if x64.numel() else 0
    torch.testing.assert_close(out.double(), x64, rtol=0, atol=allowed + 4e-7 * scale)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize(("name", "body", "eager", "shapes"), CASES, ids=[c[0] for c in CASES])
def test_kernel(name: str, body: Any, eager: Any, shapes: Any, symbolic: bool) -> None:
    if symbolic and name in ("scalar",):
        pytest.skip("no size to leave open")
    torch.manual_seed(0)
    inputs = [torch.randn(s) for s in shapes]
    declared: list[Any] = [list(s) for s in shapes]
    if symbolic:
        first = shapes[0][0]
        declared[0][0] = "n"
        for shape in declared[1:]:
            # A size shared with the first input's leading one stays the same size.
            if len(shape) == len(declared[0]) and shape[0] == first and "concat" in name:
                shape[0] = "n"
        if name in ("add",):
            declared[1][0] = "n"
    out = run(module(body, *declared), *inputs)
    check(out, eager(*[x.double() for x in inputs]), eager(*inputs))
