"""Transformers built from the configurations of `transformers`; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.cases import Built
from benchmarks.networks.shared import Outputs, spread


def _transformer(model: nn.Module, *args: torch.Tensor) -> Built:
    return spread(model).eval(), args


def bert(batch: int) -> Built:
    """Four layers of BERT-base over 128 tokens."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        num_hidden_layers=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    model = Outputs(BertModel(config), "last_hidden_state", "pooler_output")
    return _transformer(model, torch.randint(3, config.vocab_size, (batch, 128)))


class LastToken(nn.Module):
    """A language model's logits after its last token, which is what prefill is run for."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.model(tokens, logits_to_keep=1).logits


def gpt2(batch: int) -> Built:
    """GPT-2 small over a prompt of 64 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = LastToken(GPT2LMHeadModel(config))
    return _transformer(model, torch.randint(3, config.vocab_size, (batch, 64)))


def vit_small(batch: int) -> Built:
    """ViT-Small with patches of 16 (Steiner et al., 2021)."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=384, num_attention_heads=6, intermediate_size=1536, num_labels=1000
    )
    model = Outputs(ViTForImageClassification(config), "logits")
    return _transformer(model, torch.randn(batch, 3, 224, 224))


def whisper_encoder(batch: int) -> Built:
    """The encoder of Whisper tiny over 30 seconds of sound."""
    from transformers import WhisperConfig, WhisperModel

    config = WhisperConfig(dropout=0.0)
    encoder = WhisperModel(config).encoder
    return _transformer(
        Outputs(encoder, "last_hidden_state"), torch.randn(batch, config.num_mel_bins, 3000)
    )
