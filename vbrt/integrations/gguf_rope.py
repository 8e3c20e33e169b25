"""RoPE scaling of GGUF files, which transformers omits from the config that it makes of metadata.

Without it every position beyond the first is silently wrong. Metadata name "linear" and "yarn" scaling with their
factors. Llama 3's scaling is a tensor of factors, one per frequency, from which its four parameters are recovered by
trying candidates; a scaling that no config can describe is refused.
"""

import copy
from math import pi
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from vbrt.errors import CheckpointError
from vbrt.saves.published.gguf_checkpoint import GGUFTensors

__all__ = ["check_rope", "scale_rope_"]

_FACTORS = "rope_freqs.weight"
_LONG = ("rope_factors_long.weight", "rope_factors_short.weight")
_LENGTHS = (8192, 4096, 16384, 32768)  # candidate training lengths; Llama 3's is the first
_LOW, _HIGH = 1.0, 4.0  # Llama 3's, from llama.cpp's converter and Meta's code
#: metadata keys after "<architecture>.rope.scaling." -> config keys
_YARN = {
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_attn_factor": "attention_factor",
    "original_context_length": "original_max_position_embeddings",
}


def scale_rope_(config: PreTrainedConfig, tensors: GGUFTensors) -> None:
    """Set a config's RoPE scaling from its file.

    Raises CheckpointError: factors or a scaling that no transformers config describes.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return
    parameters = parameters.get("full_attention", parameters)  # sliding-window layers are not scaled
    if parameters.get("rope_type", "default") != "default":
        return
    metadata = tensors.files[0].metadata
    begin = f"{tensors.architecture}.rope.scaling."
    said = {key.removeprefix(begin): value for key, value in metadata.items() if key.startswith(begin)}
    kind, factor = said.get("type", "none"), said.get("factor", 1.0)
    if _FACTORS in tensors.infos:
        parameters.update(_of_factors(config, parameters, tensors))
    elif kind == "linear":
        parameters.update(rope_type="linear", factor=factor)
    elif kind == "yarn":
        more = {name: said[key] for key, name in _YARN.items() if key in said}
        parameters.update(rope_type="yarn", factor=factor, **more)
    elif kind != "none" or any(name in tensors.infos for name in _LONG):
        raise _unknown(tensors, f"rope.scaling.type = {kind!r}, with factors in {' and '.join(_LONG)}")


def check_rope(config: PreTrainedConfig, tensors: GGUFTensors) -> None:
    """Raise CheckpointError if a config lacks its file's scaling."""
    scaled = copy.deepcopy(config)
    scale_rope_(scaled, tensors)
    if getattr(scaled, "rope_parameters", None) != getattr(config, "rope_parameters", None):
        raise CheckpointError(
            f"{tensors.path}: its rotary frequencies are scaled, and the config that transformers made of its metadata "
            f"does not say so; pass config= with rope_parameters = {scaled.rope_parameters}, or use "
            "vbrt.from_pretrained, which takes them from the file"
        )


def _of_factors(config: PreTrainedConfig, parameters: dict[str, Any], tensors: GGUFTensors) -> dict[str, Any]:
    """Return Llama 3's scaling parameters that give a file's factors; empty if all factors are 1."""
    factors = tensors.decoded_rows(_FACTORS, 0, 1).flatten()
    largest = float(factors.max())
    if bool((factors == 1).all()):
        return {}
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if len(factors) == head // 2:
        for length in _LENGTHS:
            if torch.allclose(_llama3(parameters["rope_theta"], head, largest, length), factors, rtol=1e-4):
                return {
                    "rope_type": "llama3",
                    "factor": largest,
                    "low_freq_factor": _LOW,
                    "high_freq_factor": _HIGH,
                    "original_max_position_embeddings": length,
                }
    raise _unknown(tensors, f"{_FACTORS}, with factors up to {largest:g} that are not those of Llama 3")


def _llama3(theta: float, head: int, factor: float, length: int) -> Tensor:
    """Return Llama 3's divisor per frequency: 1 for short waves, `factor` for long ones, interpolated in between."""
    even = torch.arange(0, head, 2, dtype=torch.float32, device="cpu")
    waves = 2 * pi * theta ** (even / head)
    part = (length / waves - _LOW) / (_HIGH - _LOW)
    mixed = 1 / ((1 - part) / factor + part)
    return torch.where(waves < length / _HIGH, 1.0, torch.where(waves > length / _LOW, factor, mixed))


def _unknown(tensors: GGUFTensors, what: str) -> CheckpointError:
    return CheckpointError(
        f"{tensors.path}: {what}: transformers has no config for that; put the model's config.json next to the file"
    )
