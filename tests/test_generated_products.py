"""Products, convolutions and attention in tiles, without a library, against PyTorch in float64."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import tvm
from pipeline_cases import module, run
from torch import Tensor, nn
from tvm import relax
from tvm.script import relax as R

from fx2relax.pipeline import assemble, build, lower
from fx2relax.pipeline.tiles import lanes_of
from fx2relax.testing import assert_matches_eager

INF, NAN = float("inf"), float("nan")


def _normal(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64).to(dtype)


def _tiled(mod: Any) -> int:
    """How many kernels of a module sum in tiles."""
    lowered = lower(mod, library="none")
    kernels = [f for _, f in lowered.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]
    return sum("sums" in str(f) for f in kernels)


def _close(result: Tensor, expected: Tensor, depth: int) -> None:
    """Within what the order of a sum of so many products may make of it."""
    eps = torch.finfo(result.dtype).eps
    tol = 4 * eps if eps > 1e-4 else 4 * eps * max(depth, 4) ** 0.5
    scale = max(expected.abs().max().item(), 1.0)
    torch.testing.assert_close(
        result.double(), expected.double(), rtol=0, atol=tol * scale, equal_nan=True
    )


SIZES = [
    (5, 1, 1),
    (6, 5, 7),
    (7, 3, 100),
    (33, 65, 70),
    (64, 384, 16),
    (12, 385, 17),
    (300, 20, 48),
    (13, 1000, 65),
    (128, 64, 130),
]


@pytest.mark.sweep
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("turned", ["nn", "nt", "tn", "tt"])
def test_matrices(size: tuple[int, int, int], turned: str) -> None:
    m, k, n = size
    a = _normal(*((k, m) if turned[0] == "t" else (m, k)))
    b = _normal(*((n, k) if turned[1] == "t" else (k, n)))

    def body(builder: Any, x: Any, y: Any) -> Any:
        x = builder.emit(R.permute_dims(x)) if turned[0] == "t" else x
        y = builder.emit(R.permute_dims(y)) if turned[1] == "t" else y
        return R.matmul(x, y)

    mod = module(body, a.shape, b.shape)
    assert _tiled(mod) == 1
    left = a.double().mT if turned[0] == "t" else a.double()
    right = b.double().mT if turned[1] == "t" else b.double()
    _close(run(mod, a, b), left @ right, k)


BATCHES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((3, 7, 5), (3, 5, 9)),
    ((2, 3, 33, 20), (2, 3, 20, 17)),
    ((2, 1, 9, 20), (1, 3, 20, 17)),
    ((2, 3, 9, 20), (20, 17)),
    ((9, 20), (2, 20, 17)),
    ((3, 1, 20), (3, 20, 17)),
    ((4, 20), (20, 1)),
    ((1, 20), (20, 40)),
]


@pytest.mark.parametrize(("left", "right"), BATCHES, ids=str)
def test_batches(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b = _normal(*left), _normal(*right)
    mod = module(lambda _, x, y: R.matmul(x, y), left, right)
    _close(run(mod, a, b), a.double() @ b.double(), left[-1])


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("rows", [3, 33])
def test_dtypes(dtype: str, rows: int) -> None:
    kind = getattr(torch, dtype)
    a, b = _normal(rows, 500, dtype=kind), _normal(500, 33, dtype=kind)
    mod = module(lambda _, x, y: R.matmul(x, y), a.shape, b.shape, dtypes=dtype)
    result = run(mod, a, b)
    assert result.dtype == kind
    _close(result, a.double() @ b.double(), 500)
    ones = torch.ones(rows, 4096, dtype=kind), torch.ones(4096, 17, dtype=kind)
    mod = module(lambda _, x, y: R.matmul(x, y), ones[0].shape, ones[1].shape, dtypes=dtype)
    assert (run(mod, *ones) == 4096).all()


@pytest.mark.parametrize("sizes", [(1, 1, 1), (5, 7, 9), (70, 400, 33)])
def test_symbolic_sizes(sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    mod = module(
        lambda builder, x, y: R.matmul(x, builder.emit(R.permute_dims(y))), ("m", "k"), ("n", "k")
    )
    assert _tiled(mod) == 1
    a, b = _normal(m, k), _normal(n, k)
    _close(run(mod, a, b), a.double() @ b.double().mT, k)


def test_symbolic_rows_of_a_batch() -> None:
    mod = module(lambda _, x, y: R.matmul(x, y), ("b", "s", 40), (40, 50))
    y = _normal(40, 50)
    for sizes in ((2, 3), (1, 1), (3, 17)):
        x = _normal(*sizes, 40)
        result = run(mod, x, y)
        assert result.shape == (*sizes, 50)
        _close(result, x.double() @ y.double(), 40)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("sizes", [(0, 3, 5), (3, 0, 5), (3, 5, 0)])
def test_empty(sizes: tuple[int, int, int], dynamic: bool) -> None:
    m, k, n = sizes
    function = torch.compile(
        lambda x, y, z: x @ y + z, backend="relax", dynamic=dynamic, options={"library": "none"}
    )
    if dynamic:
        function(torch.ones(4, 6), torch.ones(6, 9), torch.ones(4, 9))
    given = torch.ones(m, k), torch.ones(k, n), torch.ones(m, n)
    torch.testing.assert_close(function(*given), given[2])


def test_not_finite() -> None:
    a, b = _normal(20, 30), _normal(30, 21)
    a[3, 4], a[19, 0], a[5, 5], b[29, 20], b[7, 2], b[0, 0] = NAN, INF, 0.0, INF, NAN, 0.0
    a[19, 5], b[5, 3] = -INF, 0.0
    mod = module(lambda _, x, y: R.matmul(x, y), a.shape, b.shape)
    _close(run(mod, a, b).nan_to_num(7, 8, 9), (a @ b).nan_to_num(7, 8, 9), 30)


EPILOGUES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "bias": (lambda b, p, r, c: R.add(p, c), lambda p, r, c: p + c),
    "gelu": (
        lambda b, p, r, c: R.nn.gelu(b.emit(R.add(p, c))),
        lambda p, r, c: F.gelu(p + c),
    ),
    "residual": (
        lambda b, p, r, c: R.nn.relu(b.emit(R.add(b.emit(R.add(p, c)), r))),
        lambda p, r, c: F.relu(p + c + r),
    ),
    "half": (
        lambda b, p, r, c: R.astype(b.emit(R.multiply(p, r)), "float16"),
        lambda p, r, c: (p * r).half(),
    ),
    "used twice": (
        lambda b, p, r, c: R.multiply(b.emit(R.tanh(p)), p),
        lambda p, r, c: torch.tanh(p) * p,
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.parametrize("size", [(7, 30, 37), (64, 400, 64)], ids=str)
def test_what_follows(name: str, size: tuple[int, int, int]) -> None:
    m, k, n = size
    body, eager = EPILOGUES[name]
    mod = module(
        lambda b, x, y, r, c: body(b, b.emit(R.matmul(x, y)), r, c), (m, k), (k, n), (m, n), (n,)
    )
    lowered = lower(mod, library="none")
    kernels = [f for _, f in lowered.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]
    assert len(kernels) == 1
    assert "sums" in str(kernels[0])
    inputs = [_normal(m, k) / k**0.5, _normal(k, n), _normal(m, n), _normal(n)]
    a, b, r, c = [x.double() for x in inputs]
    result = run(mod, *inputs)
    expected = eager(a @ b, r, c)
    torch.testing.assert_close(
        result.double(), expected.double(), rtol=2e-3 if name == "half" else 1e-5, atol=2e-5
    )


@pytest.mark.sweep
@pytest.mark.parametrize("rows", [1, 2, 5, 64, "n"])
@pytest.mark.parametrize("turned", [False, True])
def test_weights_are_packed_once(rows: int | str, turned: bool) -> None:
    weight = _normal(*((70, 33) if turned else (33, 70)))
    builder = relax.BlockBuilder()
    n = tvm.tirx.Var("n", "int64") if rows == "n" else rows
    x = relax.Var("x", relax.TensorType([n, 33], "float32"))
    w = relax.Var("w", relax.TensorType(weight.shape, "float32"))
    with builder.function("main", [x, w], attrs={"num_input": 1}):
        with builder.dataflow():
            y = builder.emit(R.permute_dims(w)) if turned else w
            out = builder.emit_output(builder.normalize(R.matmul(x, y)))
        builder.emit_func_output(out)
    lowered = lower(builder.get(), library="none", lift_weights=True)
    assert any("sums" in str(f) for f in lowered.functions.values())
    machine = relax.VirtualMachine(assemble(lowered), tvm.cpu())
    packed = machine["main_transform_params"]([tvm.runtime.from_dlpack(weight)])
    assert tuple(packed[0].shape)[1] == 33
    given = _normal(9 if rows == "n" else int(rows), 33)
    right = weight.double().mT if turned else weight.double()
    result = torch.from_dlpack(machine["main"](tvm.runtime.from_dlpack(given), *packed))
    _close(result, given.double() @ right, 33)


CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1x1": (lambda: nn.Conv2d(8, 20, 1), (2, 8, 15, 14)),
    "1x1 by 2": (lambda: nn.Conv2d(8, 20, 1, 2), (2, 8, 15, 14)),
    "3x3": (lambda: nn.Conv2d(3, 8, 3, padding=1), (2, 3, 9, 7)),
    "3x3 inside": (lambda: nn.Conv2d(3, 8, 3), (1, 3, 8, 8)),
    "by 2": (lambda: nn.Conv2d(8, 20, 3, 2, 1), (2, 8, 15, 14)),
    "by 3, wide padding": (lambda: nn.Conv2d(3, 5, 3, 3, 4), (1, 3, 10, 11)),
    "dilated, in groups": (lambda: nn.Conv2d(8, 20, 3, 1, 2, 2, 4), (2, 8, 15, 14)),
    "depthwise": (lambda: nn.Conv2d(8, 8, 5, 1, 2, groups=8), (2, 8, 15, 14)),
    "depthwise by 2": (lambda: nn.Conv2d(8, 16, 3, 2, 1, groups=8), (2, 8, 15, 40)),
    "depthwise of small planes": (lambda: nn.Conv2d(9, 9, 3, 1, 1, groups=9), (2, 9, 7, 7)),
    "depthwise by 3": (lambda: nn.Conv2d(5, 5, 5, 3, 4, groups=5), (1, 5, 20, 31)),
    "depthwise, dilated": (lambda: nn.Conv2d(5, 5, 3, 2, 3, 3, 5), (1, 5, 20, 31)),
    "depthwise of tall planes": (lambda: nn.Conv2d(2, 2, 7, 1, 3, groups=2), (1, 2, 150, 130)),
    "depthwise, oblong": (lambda: nn.Conv2d(4, 4, (1, 5), (2, 1), (0, 2), 1, 4), (1, 4, 9, 33)),
    "oblong": (lambda: nn.Conv2d(8, 16, (3, 5), (1, 2), (0, 3)), (2, 8, 15, 300)),
    "deep": (lambda: nn.Conv2d(130, 10, 3, 1, 1), (1, 130, 6, 21)),
    "signal": (lambda: nn.Conv1d(8, 16, 5, padding=3), (2, 8, 151)),
    "long signal": (lambda: nn.Conv1d(8, 16, 5, 3, 3, 2), (2, 8, 700)),
    "one element": (lambda: nn.Conv2d(8, 9, 3), (1, 8, 3, 3)),
    "volume": (lambda: nn.Conv3d(4, 6, 3, padding=1), (2, 4, 5, 6, 7)),
    "turned": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, 1), (2, 4, 5, 6)),
    "turned in groups": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 5, 6)),
    "turned signal": (lambda: nn.ConvTranspose1d(4, 6, 4, 2, 1), (2, 4, 9)),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str) -> None:
    make, size = CONVOLUTIONS[name]
    layer, x = make(), _normal(*size)
    function = torch.compile(
        nn.Sequential(layer, nn.ReLU()), backend="relax", options={"library": "none"}
    )
    with torch.no_grad():
        _close(function(x), F.relu(layer.double()(x.double())), 64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_convolution_dtypes(dtype: torch.dtype) -> None:
    layer, x = nn.Conv2d(8, 9, 3, padding=1).to(dtype), _normal(1, 8, 9, 10, dtype=dtype)
    function = torch.compile(layer, backend="relax", options={"library": "none"})
    with torch.no_grad():
        result = function(x)
        assert result.dtype == dtype
        _close(result, layer.double()(x.double()), 72)


def test_convolution_not_finite() -> None:
    """Zeros of the padding are not multiplied into infinities of another place."""
    layer, x = nn.Conv2d(2, 3, 3, padding=1), _normal(1, 2, 9, 17)
    x[0, 0, 0, 0], x[0, 1, 4, 16], x[0, 1, 8, 3] = INF, NAN, -INF
    function = torch.compile(layer, backend="relax", options={"library": "none"})
    with torch.no_grad():
        torch.testing.assert_close(function(x), layer(x), equal_nan=True)


@pytest.mark.parametrize("layer", [nn.Conv2d(3, 8, 3, 2, 1), nn.Conv1d(3, 8, 3, padding=1)])
def test_convolution_of_symbolic_sizes(layer: nn.Module) -> None:
    function = torch.compile(layer, backend="relax", dynamic=True, options={"library": "none"})
    one = isinstance(layer, nn.Conv1d)
    with torch.no_grad():
        for batch, height, width in ((2, 9, 7), (3, 20, 90), (2, 5, 300)):
            x = _normal(batch, 3, *([width] if one else [height, width]))
            torch.testing.assert_close(function(x), layer(x), rtol=1e-4, atol=1e-5)


def test_training_step() -> None:
    def loss(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = F.conv2d(x, w, stride=2, padding=1).relu().flatten(1)
        return (y @ v).square().sum()

    inputs = [_normal(2, 3, 9, 9), _normal(4, 3, 3, 3), _normal(100, 6) / 10]
    assert_matches_eager(loss, *inputs, grad=True, tol=1e-4, options={"library": "none"})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_attention(causal: bool, masked: bool) -> None:
    if causal and masked:
        pytest.skip("PyTorch takes one of the two")
    mask = None
    if masked:
        mask = _normal(2, 1, 17, 21)
        mask[:, :, 3] = -INF
        mask[0, 0, 5, 2] = NAN

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, scale=0.4 if masked else None
        )

    q, k, v = _normal(2, 3, 17, 8), _normal(2, 3, 21, 8), _normal(2, 3, 21, 8)
    for heads_first in (True, False):
        given = [q, k, v]
        if not heads_first:
            given = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in given]
        function = torch.compile(attend, backend="relax", options={"library": "none"})
        torch.testing.assert_close(function(*given), attend(*given), equal_nan=True)


@pytest.mark.parametrize(
    ("shape", "is_long"),
    [
        ((1, 2048, 8, 16), True),
        ((1, 256, 8, 16), False),
        (("b", "n", 8, 16), False),
        (("b", 2048, 8, 16), True),
    ],
    ids=str,
)
def test_scores_of_a_long_attention_are_not_held(
    shape: tuple[int | str, ...], is_long: bool
) -> None:
    """It is left to PyTorch's kernel, whatever else is generated; sizes may be unknown."""
    mod = module(lambda _, q, k, v: R.nn.attention(q, k, v), shape, shape, shape)
    assert ("fx2relax.library.attention" in str(lower(mod, library="generated"))) == is_long
    assert "fx2relax.library.attention" not in str(lower(mod, library="none"))


def test_permutations_that_undo_each_other() -> None:
    def body(builder: Any, x: Any) -> Any:
        return R.permute_dims(builder.emit(R.permute_dims(x, [0, 2, 1, 3])), [0, 2, 1, 3])

    x = _normal(2, 3, 4, 5)
    torch.testing.assert_close(run(module(body, x.shape), x), x)


@pytest.mark.parametrize(
    ("target", "lanes"),
    [
        ({"kind": "llvm", "mcpu": "x86-64"}, 8),
        ({"kind": "llvm", "mcpu": "haswell"}, 16),
        ({"kind": "llvm", "mcpu": "cascadelake"}, 32),
        ({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1"}, 16),
        ({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "generic"}, 16),
    ],
    ids=str,
)
def test_registers_of_a_target(target: dict[str, str], lanes: int) -> None:
    assert lanes_of(tvm.target.Target(target), "float32") == lanes
    assert lanes_of(tvm.target.Target(target), "float64") == lanes // 2
    mod = module(lambda _, x, y: R.matmul(x, y), (33, 20), (20, 50))
    executable = build(mod, target=target, library="none")
    if target["mcpu"] == "x86-64" and platform.machine() in ("x86_64", "AMD64"):
        a, b = _normal(33, 20), _normal(20, 50)
        result = relax.VirtualMachine(executable, tvm.cpu())["main"](a, b)
        _close(result, a.double() @ b.double(), 20)


@pytest.mark.parametrize("size", [(16, 64), (33, 100)])
def test_of_a_matrix_by_itself(size):
    def gram(x):
        return (x @ x.T) / 3 + 1, torch.cov(x), torch.corrcoef(x)

    options = {"library": "none", "never_slower": False, "on_unsupported": "raise"}
    x = _normal(*size)
    ours = torch.compile(gram, backend="relax", options=options)(x)
    for result, exact in zip(ours, gram(x.double()), strict=True):
        _close(result, exact, size[1])
