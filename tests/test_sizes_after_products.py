"""What follows a generated product, convolution or attention and is of another size than it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import tvm
from pipeline_cases import module
from torch import Tensor
from tvm import relax
from tvm.script import relax as R

from fx2relax.pipeline import build, lower
from fx2relax.runtime.program import _kernel
from fx2relax.testing import assert_matches_eager

torch.manual_seed(0)
W, PLANE = torch.randn(70, 40), torch.randn(8, 3, 3, 3)
LINE, EACH = torch.randn(64, 1, 4), torch.randn(8, 1, 3, 3)


def _causal(x: Tensor) -> Tensor:
    return F.silu(F.conv1d(x, LINE, padding=3, groups=64)[..., : x.shape[-1]])


def _with_first(x: Tensor) -> Tensor:
    product = x @ W.T
    return product + product[:, :1]


def _two(x: Tensor) -> tuple[Tensor, Tensor]:
    product = x @ W.T
    return product[:, :33].relu(), product.sigmoid()


def _same_size(x: Tensor) -> Tensor:
    wide = F.conv2d(x, EACH, padding=2, groups=8)
    return wide[:, :3, : x.shape[2], : x.shape[3]].relu()


CASES: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[int, ...]]]] = {
    "causal convolution": (_causal, lambda n: (2, 64, n)),
    "rows": (lambda x: torch.relu((x @ W.T)[:5]), lambda n: (n, 40)),
    "columns": (lambda x: torch.relu((x @ W.T)[:, :33] + 1), lambda n: (n, 40)),
    "first row": (lambda x: (x @ W.T)[0].sin(), lambda n: (n, 40)),
    "first column": (lambda x: (x @ W.T)[:, 0].sin(), lambda n: (n, 40)),
    "first row kept": (lambda x: (x @ W.T)[:1].sin(), lambda n: (n, 40)),
    "beside the first column": (_with_first, lambda n: (n, 40)),
    "two results": (_two, lambda n: (n, 40)),
    "part of a part": (
        lambda x: ((x @ W.T)[:6].relu()[:, :20].sin() * 2)[:, :9],
        lambda n: (n, 40),
    ),
    "batch": (lambda x: torch.relu((x @ x.mT)[:1, :4, :3]), lambda n: (2, n, n + 3)),
    "padded": (lambda x: F.pad(x @ W.T, (0, 3, 0, 2)).relu(), lambda n: (n, 40)),
    "padded along the rows": (lambda x: F.pad(x @ W.T, (0, 0, 0, 2)) + 1, lambda n: (n, 40)),
    "part of padded": (lambda x: F.pad(x @ W.T, (0, 3))[:5, :72].exp(), lambda n: (n, 40)),
    "padded plane": (
        lambda x: F.pad(F.conv2d(x, PLANE, padding=1), (0, 1, 0, 2)).relu(),
        lambda n: (2, 3, n, n + 1),
    ),
    "plane": (
        lambda x: F.conv2d(x, PLANE, padding=1)[:, :, :-1, :-2].relu(),
        lambda n: (2, 3, n, n + 1),
    ),
    "channels": (
        lambda x: F.conv2d(x, PLANE, padding=1)[:, :5].relu() + 1,
        lambda n: (2, 3, n, n + 1),
    ),
    "depthwise": (_same_size, lambda n: (2, 8, n, n + 1)),
    "attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x)[:, :, :2, :3].relu(),
        lambda n: (2, 2, n, n + 3),
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("size", [9, 80])
@pytest.mark.parametrize("name", CASES)
def test_it_is_as_in_eager(name: str, size: int, dynamic: bool) -> None:
    function, sizes = CASES[name]
    torch._dynamo.reset()
    fast = torch.compile(
        function, backend="relax", dynamic=dynamic, options={"library": "none"}, fullgraph=True
    )
    x = torch.randn(*sizes(size))
    torch.testing.assert_close(fast(x), function(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("rows", "columns"), [(5, 70), (9, 33), (1, 70), (9, 1), (4, 3)])
def test_nothing_is_written_beyond_it(rows: int, columns: int) -> None:
    def body(builder: Any, x: Any, y: Any) -> Any:
        product = builder.emit(R.matmul(x, y))
        part = builder.emit(relax.op.strided_slice(product, [0, 1], [0, 0], [rows, columns]))
        return R.nn.relu(part)

    mod = module(body, (9, 40), (40, 70))
    (name,) = [
        gvar.name_hint
        for gvar, function in lower(mod, library="none").functions_items()
        if isinstance(function, tvm.tirx.PrimFunc)
    ]
    kernel = _kernel(relax.VirtualMachine(build(mod, library="none"), tvm.cpu()).module, name)
    assert kernel is not None
    x, memory = torch.randn(9, 40), torch.full((9 * 70 + 64,), 7.0)
    result = memory[: rows * columns].view(rows, columns)
    y = W.T.contiguous()
    kernel(*(tvm.runtime.from_dlpack(t) for t in (x, y, result)))
    torch.testing.assert_close(result, (x @ y)[:rows, :columns].relu(), atol=1e-4, rtol=1e-4)
    assert (memory[rows * columns :] == 7).all()


def test_by_the_measured_way() -> None:
    """Where both programs are there, and take turns."""
    net = torch.nn.Conv1d(64, 64, 4, padding=3, groups=64).eval()
    x = torch.randn(2, 64, 50)
    assert_matches_eager(lambda x: F.silu(net(x)[..., :50]), x, tol=1e-5)
