"""Losses and distances: reductions, weights, ignored classes, gradients, against eager."""

import pytest
import torch
import torch.nn.functional as F
from special_values import INF, seeded

import fx2relax
from fx2relax.testing import assert_matches_eager

pytestmark = pytest.mark.sweep

REDUCTIONS = ("none", "mean", "sum")
TARGET = torch.tensor([1, 0, 4, 2, -100, 3])
SHARES = seeded(6, 5, seed=3).softmax(1)
WEIGHT = torch.tensor([0.2, 1.0, 0.5, 2.0, 0.0])


def reductions(loss):
    """A loss with each of its reductions."""
    return lambda *inputs: [loss(*inputs, reduction=r) for r in REDUCTIONS]


CLASSES = {
    "cross entropy": lambda x, **k: F.cross_entropy(x, TARGET, **k),
    "weights": lambda x, **k: F.cross_entropy(x, TARGET, WEIGHT, **k),
    "smoothing": lambda x, **k: F.cross_entropy(x, TARGET, label_smoothing=0.2, **k),
    "both": lambda x, **k: F.cross_entropy(x, TARGET, WEIGHT, label_smoothing=0.2, **k),
    "ignored": lambda x, **k: F.cross_entropy(x, TARGET.clamp(0), ignore_index=0, **k),
    "probabilities": lambda x, **k: F.cross_entropy(x, SHARES, **k),
    "nll": lambda x, **k: F.nll_loss(x.log_softmax(1), TARGET, WEIGHT, **k),
    "margins": lambda x, **k: F.multi_margin_loss(x, TARGET.clamp(0), p=2, weight=WEIGHT, **k),
    "labels": lambda x, **k: F.multilabel_soft_margin_loss(x, x.detach().gt(0).float(), **k),
}


@pytest.mark.parametrize("name", CLASSES)
def test_classes(name):
    assert_matches_eager(reductions(CLASSES[name]), seeded(6, 5), grad=True)


def test_classes_of_pixels_and_of_one():
    pixels = TARGET[:4].clamp(0)[None, :, None].expand(2, 4, 3).clone()
    pixels[0, 1] = -100

    def fn(x, one):
        return (
            F.cross_entropy(x, pixels, WEIGHT),
            F.cross_entropy(x, pixels, label_smoothing=0.1, reduction="none"),
            F.cross_entropy(one, torch.tensor(3)),
            F.nll_loss(one.log_softmax(0), torch.tensor(1), reduction="none"),
        )

    assert_matches_eager(fn, seeded(2, 5, 4, 3), seeded(5), grad=True)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="came with torch 2.13")
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["plain", "weights"])
def test_linear_and_loss_in_chunks(weight):
    options = torch.nn.LinearCrossEntropyOptions(
        allow_retain_graph=True, batch_chunk_size=2, chunking_method=None
    )

    def fn(x, matrix, bias, **settings):
        settings = {"weight": weight, "linear_bias": bias, "options": options, **settings}
        return F.linear_cross_entropy(x, matrix, TARGET, **settings)

    fx2relax.reset_stats()
    assert_matches_eager(reductions(fn), seeded(6, 7), seeded(5, 7), seeded(5), grad=True)
    assert fx2relax.stats()["nodes_fallback"] == 0


def test_nothing_but_ignored_targets():
    def fn(x):
        ignored = torch.full((6,), -100)
        return F.cross_entropy(x, ignored), F.cross_entropy(x, ignored, reduction="sum")

    assert_matches_eager(fn, seeded(6, 5), grad=True)


PAIRS = {
    "l1": F.l1_loss,
    "mse": F.mse_loss,
    "smooth l1": lambda x, y, **k: F.smooth_l1_loss(x, y, beta=0.5, **k),
    "huber": lambda x, y, **k: F.huber_loss(x, y, delta=0.7, **k),
    "kl": lambda x, y, **k: F.kl_div(x.log_softmax(1), y.softmax(1), **k),
    "kl of logarithms": lambda x, y, **k: F.kl_div(x, y, log_target=True, **k),
    "binary": lambda x, y, **k: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), WEIGHT, **k),
    "binary with logits": lambda x, y, **k: F.binary_cross_entropy_with_logits(
        x, y.sigmoid(), WEIGHT, pos_weight=WEIGHT + 1, **k
    ),
    "poisson": lambda x, y, **k: F.poisson_nll_loss(x, y.abs() * 3, full=True, **k),
    "gaussian": lambda x, y, **k: F.gaussian_nll_loss(x, y, y.detach().abs() + 0.1, **k),
    "hinge": lambda x, y, **k: F.hinge_embedding_loss(x, y.detach().sign(), 0.8, **k),
    "soft margin": lambda x, y, **k: F.soft_margin_loss(x, y.detach().sign(), **k),
    "ranking": lambda x, y, **k: F.margin_ranking_loss(x, y, torch.ones(6, 5), 0.3, **k),
    "cosine": lambda x, y, **k: F.cosine_embedding_loss(x, y, torch.ones(6), 0.1, **k),
    "triplet": lambda x, y, **k: F.triplet_margin_loss(x, y, y.flip(0), 1.5, swap=True, **k),
}


@pytest.mark.filterwarnings("ignore:reduction. .mean. divides:UserWarning")
@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name):
    x, y = seeded(6, 5), seeded(6, 5, seed=1)
    # The Gaussian one looks at its data.
    assert_matches_eager(reductions(PAIRS[name]), x, y, grad=True, fullgraph=name != "gaussian")


def test_certain_probabilities():
    def fn(p, y):
        return F.binary_cross_entropy(p, y, reduction="none"), F.binary_cross_entropy(p, y)

    p = torch.tensor([0.0, 1.0, 1e-30, 0.5])
    assert_matches_eager(fn, p.requires_grad_(), torch.tensor([1.0, 0.0, 1.0, 1.0]), grad=True)


REFUSED = {
    "class": lambda x, y: F.cross_entropy(x, y.long() * 7),
    "negative class": lambda x, y: F.cross_entropy(x, -y.long()),
    "class with weights": lambda x, y: F.cross_entropy(x, y.long() * 7, torch.ones(3)),
    "class of a pixel": lambda x, y: F.cross_entropy(x[..., None], y[:, None].long() * 3),
    "class of one": lambda x, y: F.nll_loss(x[0], y[0].long() * 3),
    "too likely": lambda x, y: F.binary_cross_entropy(x[0] + 1.5, x[1]),
    "no number": lambda x, y: F.binary_cross_entropy(x * torch.nan, x, reduction="none"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    x, y = torch.zeros(2, 3), torch.ones(2)
    with pytest.raises((IndexError, RuntimeError)) as eager:
        REFUSED[name](x, y)
    torch._dynamo.reset()
    words = str(eager.value).split()
    with pytest.raises(eager.type, match=f"{words[0]}.* {' '.join(words[2:])}"):
        torch.compile(REFUSED[name], backend="relax")(x, y)


def test_an_ignored_class_may_be_none():
    def fn(x, y):
        return F.cross_entropy(x, y, ignore_index=7), F.cross_entropy(x, y, WEIGHT, ignore_index=7)

    assert_matches_eager(fn, seeded(3, 5), torch.tensor([7, 1, 7]), grad=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    def fn(x, y):
        return (
            [F.cross_entropy(x, TARGET), F.mse_loss(x, y), F.l1_loss(x, y, reduction="none")],
            [F.huber_loss(x, y), F.smooth_l1_loss(x, y), F.soft_margin_loss(x * 20, y.sign())],
        )

    assert_matches_eager(fn, seeded(6, 5, dtype=dtype), seeded(6, 5, dtype=dtype, seed=1))


DISTANCES = {
    "cdist": lambda x, y: [torch.cdist(x, y, p) for p in (0, 1, 2, 3.5, INF)],
    "pdist": lambda x, y: [F.pdist(x, p) for p in (0, 1, 2, 3.5, INF)],
    "pairwise": lambda x, y: (F.pairwise_distance(x, y), F.pairwise_distance(x, y, 1)),
    "cosine": lambda x, y: (F.cosine_similarity(x, y), F.cosine_similarity(x, y * 0, dim=0)),
}


@pytest.mark.parametrize("name", DISTANCES)
def test_distances(name):
    x, y = seeded(4, 6), seeded(4, 6, seed=1)
    assert_matches_eager(DISTANCES[name], x, y, grad=True, tol=1e-4)


def test_distances_in_batches():
    x, y = seeded(2, 1, 4, 6), seeded(3, 5, 6, seed=1)
    assert_matches_eager(torch.cdist, x, y, grad=True, tol=1e-4)
    assert_matches_eager(lambda x, y: torch.cdist(x, y), torch.ones(3, 0), torch.ones(2, 0))


def test_sizes_change():
    def fn(x, y):
        return F.cross_entropy(x, y), F.mse_loss(x, x * 2)

    compiled = torch.compile(fn, backend="relax", dynamic=True)
    for rows in (3, 6, 4):
        x, y = seeded(rows, 5), TARGET[:rows].clamp(0)
        torch.testing.assert_close(compiled(x, y), fn(x, y))
