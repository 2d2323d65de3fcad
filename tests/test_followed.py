"""Every kind of kernel, followed in it by every kind of work on another size or order of elements.

The whole table takes ten minutes; `test_sizes_after_products.py` is what always runs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = pytest.mark.whole

torch.manual_seed(0)
W, WINDOW, SCALE, TABLE = (
    torch.randn(sizes) for sizes in ((70, 40), (8, 3, 3, 3), (40,), (11, 40))
)

KERNELS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "matrix": (lambda x: x @ W.T, (9, 40)),
    "double": (lambda x: (x.double() @ W.T.double()).float(), (9, 40)),
    "bfloat16": (lambda x: (x.bfloat16() @ W.T.bfloat16()).float() / 8, (9, 40)),
    "integers": (lambda x: ((x * 3).long() @ (x * 2).long().mT).float(), (2, 9, 40)),
    "batch": (lambda x: x @ x.mT, (2, 9, 40)),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), (2, 2, 9, 16)),
    "line": (lambda x: F.conv1d(x, WINDOW[:, :, 0]), (2, 3, 40)),
    "plane": (lambda x: F.conv2d(x, WINDOW, padding=1), (2, 3, 13, 40)),
    "transposed": (
        lambda x: F.conv_transpose2d(x, WINDOW.transpose(0, 1), stride=2),
        (2, 3, 7, 9),
    ),
    "sum": (lambda x: x.sum(-1), (3, 9, 40)),
    "outer sum": (lambda x: x.sum(0), (9, 5, 40)),
    "added sum": (lambda x: x.sum(-1, keepdim=True) + x, (9, 40)),
    "mean": (lambda x: x.mean(1), (3, 9, 40)),
    "product": (lambda x: (x / 3).prod(-1), (3, 9, 10)),
    "variance": (lambda x: x.var(-1), (3, 9, 40)),
    "maximum": (lambda x: x.max(-1)[0], (3, 9, 40)),
    "maximum of two axes": (lambda x: x.amax((0, 2)), (3, 9, 40)),
    "place of the maximum": (lambda x: x.argmax(-1).float(), (3, 9, 40)),
    "norm": (lambda x: x / x.norm(dim=-1, keepdim=True), (5, 9, 40)),
    "softmax": (lambda x: x.softmax(-1), (5, 9, 40)),
    "outer softmax": (lambda x: x.softmax(1), (5, 9, 40)),
    "log softmax": (lambda x: x.log_softmax(-1), (9, 40)),
    "layer norm": (lambda x: F.layer_norm(x, (40,), SCALE), (5, 9, 40)),
    "group norm": (lambda x: F.group_norm(x, 2), (2, 8, 5, 5)),
    "scan": (lambda x: x.cumsum(-1), (5, 40)),
    "outer scan": (lambda x: x.cumsum(0), (9, 40)),
    "sorted": (lambda x: x.sort(-1)[0], (5, 40)),
    "transpose": (lambda x: x.mT, (5, 9, 40)),
    "permutation": (lambda x: x.permute(2, 0, 1), (5, 9, 40)),
    "rows of a table": (lambda x: TABLE[(x.abs() * 3).long().clamp(0, 10)], (3, 5)),
    "maximum of windows": (lambda x: F.max_pool2d(x, 3, 2, 1), (2, 3, 13, 40)),
    "mean of windows": (lambda x: F.avg_pool2d(x, 2), (2, 3, 13, 40)),
    "larger": (lambda x: F.interpolate(x, scale_factor=2), (2, 3, 5, 40)),
}


def _padded_rows(x: Tensor) -> Tensor:
    return F.pad(x, (*[0, 0] * (x.dim() - 1), 0, 2))


FOLLOWED: dict[str, Callable[[Tensor], Tensor | tuple[Tensor, ...]]] = {
    "padded behind": lambda x: F.pad(x, (0, 3)).relu(),
    "padded": lambda x: F.pad(x, (2, 1)).relu(),
    "padded with twos": lambda x: F.pad(x, (0, 1), value=2.0) * 2,
    "padded outside": _padded_rows,
    "cut by padding": lambda x: F.pad(x, (0, -1)).relu(),
    "rows": lambda x: x[:5].relu(),
    "first row": lambda x: x[0].sin(),
    "begin": lambda x: x[..., :3].sin() + 1,
    "end": lambda x: x[..., -3:].exp(),
    "all but the last": lambda x: x[..., :-1].relu(),
    "first": lambda x: x[..., 0].sin(),
    "first kept": lambda x: x[..., :1].sin(),
    "every second": lambda x: x[..., ::2].relu(),
    "differences": lambda x: x[..., 1:] - x[..., :-1],
    "beside the first": lambda x: x + x[..., :1],
    "two results": lambda x: (x[..., :2].relu(), x.sigmoid()),
    "flipped": lambda x: x.flip(-1).relu(),
    "rolled": lambda x: x.roll(1, -1) * 2,
    "a triangle": lambda x: x.unsqueeze(0).tril().relu(),
    "joined": lambda x: torch.cat([x, x.relu()], -1).sin(),
    "stacked": lambda x: torch.stack([x, x * 2], -1),
    "repeated": lambda x: x[None].expand(3, *x.shape).relu(),
}


@pytest.mark.parametrize("library", ["none", "torch"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("after", FOLLOWED)
@pytest.mark.parametrize("kernel", KERNELS)
def test_it_is_as_in_eager(kernel: str, after: str, dynamic: bool, library: str) -> None:
    function, sizes = KERNELS[kernel]

    def run(x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return FOLLOWED[after](function(x))

    torch._dynamo.reset()
    options = {"library": library, "never_slower": False}
    fast = torch.compile(run, backend="relax", dynamic=dynamic, options=options)
    x = torch.randn(*sizes, generator=torch.Generator().manual_seed(1))
    tolerance = 0.05 if kernel == "bfloat16" else 1e-4  # sums, rounded once or at each step
    with torch.no_grad():
        torch.testing.assert_close(
            fast(x), run(x), atol=tolerance, rtol=tolerance, equal_nan=True, check_stride=False
        )
