"""Whole networks in inference: under `torch.compile`, and imported from export and from a trace."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from networks import NETWORKS
from networks.check import Judge


@cache
def judge(name: str) -> Judge:
    return Judge(*NETWORKS[name].build())


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """What one test compiled must not count as a recompilation in the next."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_are_worth_comparing(name):
    """A constant or vanishing output would hide any error."""
    for out in judge(name).eager:
        assert out.std() > 0.03
        assert out.abs().max() < 100


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", NETWORKS)
def test_compile(name):
    judge(name).check_compiled()


@pytest.mark.sweep
@pytest.mark.parametrize("name", NETWORKS)
def test_from_fx_of_export(name):
    judge(name).check_exported()


@pytest.mark.sweep
@pytest.mark.parametrize("name", [n for n, network in NETWORKS.items() if network.traceable])
def test_from_fx_of_symbolic_trace(name):
    it = judge(name)
    it.check_imported(torch.fx.symbolic_trace(it.model))
