"""Small transformers models with random weights: built from configs, so nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Outputs(nn.Module):
    """Call a transformers model without its key-value cache and keep the named outputs as a tuple.

    A cache is a Python object of transformers, which `torch.export` returns only if it knows its
    class; the networks' arithmetic is the same without.
    """

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor, ...]:
        out = self.model(*args, **kwargs)
        return tuple(out[name] for name in self.names)


def spread(model: nn.Module) -> nn.Module:
    """Move LayerNorm scales and the biases off the 1 and 0 that they start from."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
            elif parameter.dim() == 1:
                parameter.uniform_(0.7, 1.3)
    return model


def ids(batch: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(3, vocabulary, (batch, length))


def bert(dropout: float = 0.1) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=300,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, 17:] = 0
    model = Outputs(BertModel(config), "last_hidden_state", "pooler_output")
    return model, (ids(2, 24, 300),), {"attention_mask": mask}


def gpt2(dropout: float = 0.1) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=300,
        n_positions=64,
        n_embd=64,
        n_layer=3,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return Outputs(GPT2LMHeadModel(config), "logits"), (ids(2, 20, 300),), {}


def llama() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
    )
    return Outputs(LlamaForCausalLM(config), "logits"), (ids(2, 20, 300),), {}


def vit() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=48,
        patch_size=8,
        num_labels=10,
    )
    return Outputs(ViTForImageClassification(config), "logits"), (torch.randn(2, 3, 48, 48),), {}


def t5() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=300,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    )
    mask = torch.ones(2, 18, dtype=torch.long)
    mask[0, 11:] = 0
    named = {
        "input_ids": ids(2, 18, 300),
        "attention_mask": mask,
        "decoder_input_ids": ids(2, 9, 300),
    }
    return Outputs(T5ForConditionalGeneration(config), "logits"), (), named


def whisper() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=300,
        num_mel_bins=20,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=50,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    )
    named = {"input_features": torch.randn(2, 20, 100), "decoder_input_ids": ids(2, 9, 300)}
    return Outputs(WhisperForConditionalGeneration(config), "logits"), (), named


BUILDERS: dict[str, Any] = {
    "bert": bert,
    "gpt2": gpt2,
    "llama": llama,
    "vit": vit,
    "t5": t5,
    "whisper": whisper,
}
