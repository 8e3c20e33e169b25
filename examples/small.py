"""The models that the examples run with: trained, small, over bytes, and part of this checkout. Nothing is downloaded.

Where an example says `small.language_model()`, take your own: `AutoModelForCausalLM.from_pretrained("./Llama-3.1-8B")`.
"""

import sys
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts import committed
from scripts.speculate import as_gpt2

#: a directory of transformers: a Qwen3-MoE with 48 routed experts a layer
EXPERTS = committed.EXPERTS
PROMPT = "def read_lines(path, encoding='utf-8'):\n    "


def language_model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return a GPT-2 of 5.7 million parameters, trained on Python sources."""
    return as_gpt2(committed.dense(), dtype)


def encode(text: str) -> torch.Tensor:
    """Return the bytes of a text, int64 [1, T]."""
    return torch.tensor([list(text.encode())])


def decode(ids: torch.Tensor) -> str:
    """Return the text of the first row."""
    return bytes(ids[0].tolist()).decode(errors="replace")


def rows(count: int, length: int, start: int = 0) -> list[dict[str, torch.Tensor]]:
    """Return pieces of sources that the model was not trained on, as Trainer takes them."""
    text = committed.held_out().long()
    pieces = [text[start + at * length : start + (at + 1) * length] for at in range(count)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]
