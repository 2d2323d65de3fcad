"""Where importers go wrong without a word: each case through both doors, against eager."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fx2relax
from fx2relax.compat import relax, tvm
from fx2relax.pipeline import build
from fx2relax.runtime.boundary import ready
from fx2relax.testing import assert_matches_eager, close

NAN = float("nan")
FLOATS = torch.tensor([[1.5, NAN, -2.0, 0.0], [float("inf"), -0.0, 3.25, -float("inf")]])
INTS = torch.tensor([[7, -7, 5, -5], [2, 1, -9, 8]])


class Pool(nn.Module):
    def forward(self, x):
        return F.max_pool2d(x, 2, stride=1, return_indices=True)


class Assign(nn.Module):
    def forward(self, x):
        y = x.clone()
        y[1:, 0] = 3.0
        y.add_(1)
        return y


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, scale=0.125)


QKV = [torch.randn(2, 3, 5, 8) for _ in range(3)]
IMAGE = torch.randn(2, 3, 6, 6)

CASES = {
    "index": (lambda x: x[0], [FLOATS]),
    "last index": (lambda x: x[-1, 1:], [FLOATS]),
    "narrow": (lambda x: x.narrow(1, 1, 2), [FLOATS]),
    "integer division": (lambda x, y: x / y, [INTS, INTS.flip(1)]),
    "floor division": (lambda x, y: x // y, [INTS, INTS.flip(1)]),
    "truncated division": (
        lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        [INTS, INTS.flip(1)],
    ),
    "remainder": (lambda x, y: x % y, [INTS, INTS.flip(1)]),
    "integer times float": (lambda x: x * 0.5, [INTS]),
    "integer plus float": (lambda x: x + 0.75, [INTS]),
    "add with alpha": (lambda x, y: torch.add(x, y, alpha=2), [INTS, INTS]),
    "subtract with alpha": (lambda x, y: torch.sub(x, y, alpha=0.5), [FLOATS, FLOATS]),
    "hardtanh": (nn.Hardtanh(-0.5, 2.5), [FLOATS]),
    "elu": (nn.ELU(alpha=0.3), [FLOATS]),
    "gelu tanh": (nn.GELU(approximate="tanh"), [torch.randn(4, 5)]),
    "gelu": (nn.GELU(), [torch.randn(4, 5)]),
    "leaky relu": (nn.LeakyReLU(0.2), [FLOATS]),
    "softplus": (nn.Softplus(beta=2, threshold=1), [torch.randn(4, 5)]),
    "attention with scale": (attention, QKV),
    "std": (lambda x: (x.std(), x.std(dim=1), x.var(dim=0, correction=0)), [torch.randn(4, 5)]),
    "writes in place": (Assign(), [FLOATS]),
    "max pool with indices": (Pool(), [IMAGE]),
    "nan through relu": (lambda x: torch.relu(x), [FLOATS]),
    "nan through maximum": (
        lambda x, y: (torch.maximum(x, y), torch.minimum(x, y)),
        [FLOATS, -FLOATS],
    ),
    "nan through clamp": (lambda x: (x.clamp(0, 1), x.clamp_max(0.5), x.clamp(min=0)), [FLOATS]),
    "nan through reductions": (lambda x: (x.max(), x.amin(1), x.argmax(1)), [FLOATS]),
    "batch norm in eval": (nn.Sequential(nn.BatchNorm2d(3)).eval(), [IMAGE]),
    "half sum": (lambda x: x.sum(), [torch.ones(4096, dtype=torch.float16)]),
    "half mean": (lambda x: x.mean(1), [torch.randn(4, 3000, dtype=torch.bfloat16)]),
    "integer sum": (lambda x: x.sum(), [INTS.to(torch.int32)]),
    "zero-size": (lambda x: (x.sum(1), torch.cat([x, x], 1) * 2), [torch.empty(3, 0)]),
}

UNTRACEABLE = {"writes in place": "fx.symbolic_trace knows no assignment to an index"}


@pytest.mark.parametrize("name", CASES)
def test_compiled(name):
    fn, inputs = CASES[name]
    assert_matches_eager(fn, *inputs)


@pytest.mark.parametrize("name", [n for n in CASES if n not in UNTRACEABLE])
def test_imported(name):
    fn, inputs = CASES[name]
    graph = fx.symbolic_trace(fn)
    mod, params = relax.frontend.detach_params(fx2relax.from_fx(graph, inputs))
    machine = relax.VirtualMachine(build(mod, library="none"), tvm.cpu())
    result = machine["main"](*[ready(i.clone()) for i in inputs], *params.get("main", []))
    expected = fn(*inputs)
    many = isinstance(expected, (tuple, list))
    pairs = zip(result, expected, strict=True) if many else [(result, expected)]
    for ours, eager in pairs:
        assert ours.dtype == eager.dtype
        assert ours.shape == eager.shape
        close(ours, eager)


def test_mutated_input():
    def fn(x):
        x[0] = 1.0
        return x.mul_(2).sum()

    assert_matches_eager(fn, torch.randn(3, 4))


def test_imported_mutation_is_returned():
    def fn(x):
        x.mul_(2)
        return x + 1

    x = torch.randn(3, 4)
    mod = fx2relax.from_fx(fx.symbolic_trace(fn), [x])
    result = relax.VirtualMachine(build(mod), tvm.cpu())["main"](x)
    close(result[0], x * 2 + 1)
    close(result[1], x * 2)


def test_dropout_in_training_draws_what_eager_draws():
    model = nn.Dropout(0.4).train()
    assert_matches_eager(model, torch.randn(50, 20), grad=True, seed=3, torch_calls=True)


def test_random_numbers_are_not_baked_in():
    torch._dynamo.reset()
    fn = torch.compile(lambda x: x + torch.randn(6), backend="relax", fullgraph=True)
    x = torch.zeros(6)
    torch.manual_seed(1)
    first, second = fn(x), fn(x)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    close(torch.randn(6), first)
    close(torch.randn(6), second)


def test_misaligned_input():
    assert_matches_eager(lambda x: x * 2 + 1, torch.randn(1025)[1:])


@pytest.mark.parametrize("size", [5, 300])
def test_long_expressions_in_a_branch(size):
    """What is bound in the branch of a condition doubled in length with every binding."""

    def fn(x):
        return torch.cat([F.mish(x), x], 1), F.pad(F.mish(x), (1, 1)) * 2, F.mish(x).flip(-1)

    assert_matches_eager(fn, torch.randn(4, 3, size))


INF, NAN = float("inf"), float("nan")


def test_gradient_of_smooth_l1_loss_keeps_nan():
    def fn(x, y):
        return F.smooth_l1_loss(x, y, beta=0.5)

    x = torch.tensor([INF, NAN, -INF, 1.0, INF, 0.2])
    assert_matches_eager(fn, x, torch.tensor([1.0, 1.0, 1.0, NAN, INF, 0.3]), grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("eps", [1e-3, 1e-5, 0.1])
def test_bounds_of_logit_are_of_its_dtype(dtype, eps):
    def fn(x):
        return torch.logit(x, eps=eps)

    x = torch.tensor([-1.0, 0.5, 2.0, 0.9995, 0.001, 0.0, 1.0, 0.3], dtype=dtype)
    assert_matches_eager(fn, x, grad=dtype is torch.float32)


def test_nothing_is_read_where_nothing_results():
    def fn(x, y, i):
        return x[:, i], y[i]

    assert_matches_eager(fn, torch.zeros(0, 1), torch.zeros(3, 0), torch.tensor([1, 7]))


def test_strides_that_the_first_operand_decides():
    def fn(x, sign, row):
        return torch.copysign(x, sign), F.bilinear(row, row, torch.ones(2, 1, 1))

    sign = torch.ones(2, 2, 1, 3).permute(1, 2, 3, 0)
    assert_matches_eager(fn, torch.ones(2, 2, 3, 2), sign, torch.ones(1, 3).t())


ELEMENTWISE = (
    *(torch.add, torch.lt, torch.logical_and, torch.logical_or, torch.logical_xor),
    *(torch.copysign, torch.heaviside, torch.hypot, torch.ldexp, torch.logaddexp),
    *(torch.logaddexp2, torch.nextafter, torch.special.xlog1py, torch.xlogy),
)
PAIRS = ["whole turned", "turned whole", "row turned", "turned row", "plane last", "row last"]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("pair", PAIRS)
def test_results_lie_as_eager_lays_them(pair):
    """Also where fake tensors, and PyTorch's decompositions, lay them out otherwise."""
    x = torch.rand(3, 5, 4) + 0.1
    layouts = {
        "whole": x,
        "turned": x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        "row": x[0, 0].clone(),
        "plane": x[:, :1].clone(),
        "last": x.mT.contiguous().mT,
    }
    operands = [layouts[name] for name in pair.split()]
    assert_matches_eager(lambda a, b: [f(a, b) for f in ELEMENTWISE], *operands)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("value", [2.0, torch.tensor(2.0)], ids=["number", "tensor"])
def test_filled_by_a_mask_lies_in_order(value, dynamic):
    """However its operands lie; what comes of it lies as it does."""

    def fn(x, mask):
        filled = x.masked_fill(mask, value)
        return filled, filled * 2, mask[...]

    whole, turned = torch.randn(3, 4), torch.randn(4, 3).t()
    for x, mask in ((turned, turned > 0), (turned, whole > 0), (turned, (whole > 0)[0])):
        assert_matches_eager(fn, x, mask, dynamic=dynamic)
    assert_matches_eager(fn, turned, torch.randn(3, 4, 2).permute(2, 0, 1) > 0, dynamic=dynamic)


def test_the_gradient_of_dropout_lies_as_its_operands():
    backward = torch.ops.aten.native_dropout_backward
    slope, mask = (
        torch.randn(2, 3, 4).permute(2, 1, 0),
        (torch.rand(2, 3, 4) > 0.5).permute(2, 1, 0),
    )
    assert_matches_eager(lambda s, m: backward(s, m, 2.0), slope, mask)
    assert_matches_eager(lambda s, m: backward(s, m, 2.0), slope, mask.contiguous())


def test_gradients_of_what_lies_otherwise():
    """What is kept for the gradient lies as eager lays it, which the trace did not know."""

    def fn(row, x):
        return torch.where(row.logical_or(x), row, x), torch.logaddexp(row, x)

    row, x = torch.rand(4, requires_grad=True), torch.rand(4, 5).t()
    assert_matches_eager(fn, row, x.requires_grad_(), grad=True)


@pytest.mark.parametrize(
    ("fn", "x"),
    [
        (lambda x: torch.sgn(torch.exp(x)).max(0)[0], torch.ones(4, 3)),
        (lambda x: F.pad(x, (-1, 1)) - 1, torch.zeros(3, 1, dtype=torch.uint8)),
        (lambda x: (F.silu(x).view(torch.int32) - 2, x.clone() < F.silu(x)), torch.tensor(0.5)),
    ],
)
def test_kernels_that_tvm_refused(fn, x):
    assert_matches_eager(fn, x)
