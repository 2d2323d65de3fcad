"""Functions that hold transforms of `torch.func`: gradients, Jacobians, batches."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

from fx2relax.testing import assert_same_call


def enlarged(x):
    return F.interpolate(x, size=(7, 6), mode="bilinear")


def smooth(x):
    return enlarged(x).square().sum()


X = torch.linspace(0, 1, 24).view(1, 2, 3, 4)
COMPILED = {
    "gradient of resampling": (grad(smooth), X),
    "vjp": (lambda x: vjp(enlarged, x)[1](torch.ones(1, 2, 7, 6))[0], X),
    "jvp": (lambda x: jvp(enlarged, (x,), (x * 2,)), X),
    "batches": (vmap(enlarged), X.expand(3, 1, 2, 3, 4)),
    "gradients of samples": (vmap(grad(smooth)), X.expand(3, 1, 2, 3, 4)),
    "hessian": (hessian(lambda x: enlarged(x.view(1, 2, 3, 4)).pow(3).sum()), X.flatten()),
    "jacobian": (jacrev(lambda x: x.softmax(0) * x.norm()), X.flatten()),
    "pooling": (grad(lambda x: F.max_pool1d(x[0], 2).square().sum()), X),
    "classes": (vmap(lambda i: F.one_hot(i, 5)), torch.tensor([1, 3])),
    "attention": (grad(lambda q: F.scaled_dot_product_attention(q, q * 2, q).sum()), X),
}


# PyTorch scripts its decompositions for forward mode.
@pytest.mark.sweep(6)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", COMPILED)
def test_transforms(name):
    function, x = COMPILED[name]
    options = {"never_slower": False, "on_unsupported": "raise"}
    assert_same_call(torch.compile(function, backend="relax", options=options), function, x)


def of_weights(module):
    weights = dict(module.named_parameters())

    def loss(values, x):
        return functional_call(module, values, (x,))[0].square().mean()

    return lambda x: grad(loss)(weights, x)


def of_ctc(x):
    sizes = torch.tensor([6]), torch.tensor([2])
    return F.ctc_loss(x.log_softmax(-1), torch.tensor([[1, 2]]), *sizes)


LEFT_TO_EAGER = {
    "lstm": (of_weights(nn.LSTM(4, 5)), (3, 2, 4)),
    "gru": (of_weights(nn.GRU(4, 5)), (3, 2, 4)),
    "rnn": (of_weights(nn.RNN(4, 5)), (3, 2, 4)),
    "ctc loss": (grad(of_ctc), (6, 1, 4)),
    "nll loss": (grad(lambda x: F.gaussian_nll_loss(x, x * 2, torch.ones_like(x))), (6, 4)),
}


@pytest.mark.parametrize("name", LEFT_TO_EAGER)
def test_what_cannot_be_transformed(name):
    function, shape = LEFT_TO_EAGER[name]
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    assert_same_call(torch.compile(function, backend="relax"), function, x)
