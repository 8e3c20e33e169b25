"""Inputs of an architecture, from the signature of its forward and what its config says."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from tests.zoo.overrides import IMAGE, PATCH, TOKENS, VOCAB, WIDTH

__all__ = ["Inputs", "find", "inputs_of", "realise", "tree"]


def tree(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """The config and its sub-configs, breadth first."""
    queue = [config]
    while queue:
        c = queue.pop(0)
        yield c
        queue += [v for v in vars(c).values() if isinstance(v, PreTrainedConfig)]


def find(config: PreTrainedConfig, *wanted: str, default: Any = None) -> Any:
    for c in tree(config):
        for name in wanted:
            v = vars(c).get(name)
            if v is not None and not isinstance(v, bool):
                return v
    return default


def _size(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


class Inputs:
    """Deterministic inputs for one model; every method returns one tensor."""

    def __init__(self, config: PreTrainedConfig, seed: int, dtype: torch.dtype):
        self.config, self.dtype = config, dtype
        self.generator = torch.Generator().manual_seed(seed + 1)

    def ints(self, *shape: int, high: int | None = None, low: int = 3) -> Tensor:
        vocab = find(self.config, "vocab_size", "decoder_vocab_size", default=VOCAB)
        top = min(VOCAB // 2, vocab) if high is None else high
        return torch.randint(min(low, top - 1), top, shape, generator=self.generator)

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def image(self, *lead: int) -> Tensor:
        channels = find(self.config, "num_channels", "in_channels", "in_chans", default=3)
        channels = channels if isinstance(channels, int) else 3
        h, w = _size(find(self.config, "image_size", "img_size", "crop_size", default=IMAGE))
        return self.floats(*(lead or (1,)), channels, h, w)

    def make(self, name: str, variant: int, wanted: Mapping[str, Any]) -> Any:
        """One argument of forward, by its name; None when the name says nothing. `variant` 1 is the other usual layout."""
        c = self.config
        mels = find(
            c, "num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "feature_size", default=80
        )
        match name:
            case "input_ids" | "decoder_input_ids":
                return self.ints(1, TOKENS)
            case "hidden_states" | "pixel_values" if "grid_thw" in wanted or "image_grid_thw" in wanted:
                patch = find(c, "patch_size", default=PATCH)
                h, w = _size(patch)
                frames = find(c, "temporal_patch_size", default=1)
                return self.floats(16, find(c, "num_channels", "in_channels", "in_chans", default=3) * frames * h * w)
            case "grid_thw" | "image_grid_thw":
                return torch.tensor([[1, 4, 4]])
            case "pixel_values" if variant:
                return self.image(1, find(c, "num_frames", "frames_per_clip", default=4))
            case "pixel_values":
                return self.image(1)
            case "pixel_values_videos" | "pixel_values_images":
                return self.image(1, find(c, "num_frames", "frames_per_clip", default=4))
            case "input_features" if variant:
                return self.floats(1, mels, 2 * find(c, "max_source_positions", default=32))
            case "input_features":
                return self.floats(1, 64, mels)
            case "input_values" if variant:
                return self.floats(1, 1, 4000)
            case "input_values":
                return self.floats(1, 4000)
            case "bbox":
                return self.ints(1, TOKENS, 4, high=16).sort(-1).values
            case "inputs_embeds" | "hidden_states" | "query_embeds":
                return self.floats(1, TOKENS, WIDTH)
            case "input_features_mask" | "feature_attention_mask":
                return torch.ones(1, 64, dtype=torch.long)
        return None


def inputs_of(model: nn.Module, spec: Mapping[str, Any], rung: str, variant: int, make: Inputs) -> dict[str, Any]:
    signature = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    main = main if isinstance(main, str) else main[0]
    wanted = [
        n for n, p in signature.items() if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    for name in (main, "input_ids", "decoder_input_ids", "pixel_values", "image_grid_thw", "bbox"):
        if name not in signature or name in wanted:
            continue
        text_only = rung == "text" and "input_ids" in signature and name in ("pixel_values", "image_grid_thw")
        decoder_free = name == "decoder_input_ids" and not getattr(model.config, "is_encoder_decoder", False)
        if not text_only and not decoder_free:
            wanted.append(name)
    given = {n: realise(v, make) for n, v in spec.items() if v is not None}
    out = {n: v for n in wanted if n not in spec and (v := make.make(n, variant, signature)) is not None}
    return {**out, **given}


def realise(value: Any, make: Inputs) -> Any:
    """Input data of OVERRIDES: ("f", shape) floats, ("i", shape, high) integers, ("ones", shape), ("=", nested list)."""
    match value:
        case ("f", tuple(shape)):
            return make.floats(*shape)
        case ("i", tuple(shape), int(high)):
            return make.ints(*shape, high=high, low=0)
        case ("ones", tuple(shape)):
            return torch.ones(shape, dtype=torch.long)
        case ("=", data):
            return torch.tensor(data)
        case ("ids", int(length), int(token), int(count)):
            ids = make.ints(1, length)
            ids[0, 1 : 1 + count] = token
            return ids
    return value
