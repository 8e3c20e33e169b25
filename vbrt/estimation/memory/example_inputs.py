"""Example inputs for a forward, from the model's class and config; only shapes matter."""

import inspect
from typing import Any

import torch
from torch import nn

from vbrt.errors import ArgumentError
from vbrt.estimation.memory.task import Task

__all__ = ["inputs_of"]

_TEXT = 448  # maximum output tokens of a speech model: Whisper's max_target_positions


def inputs_of(
    model: nn.Module, task: Task, tokens: int | None = None, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Return keyword arguments for `model.forward` on a device, with `tokens` per sequence or the task's context.

    Raises ArgumentError: the model's inputs are unknown.
    """
    name, tokens = getattr(model, "main_input_name", None), tokens or task.context
    config = getattr(model, "config", None)
    if name == "input_ids":
        shapes = {"input_ids": (task.batch, tokens)}
    elif name == "pixel_values":
        shapes = {"pixel_values": _image(config, task.batch)}
    elif name == "input_features":
        shapes = {"input_features": (task.batch, config.num_mel_bins, 2 * config.max_source_positions)}
    elif hasattr(config, "sample_size") and "sample" in _arguments(model):
        shapes = _sample(model, config, task.batch)
    else:
        raise ArgumentError(
            f"{type(model).__name__}: nothing says what its forward takes; give estimate(..., step=...), a function of "
            "the model that runs it once"
        )
    if getattr(config, "is_encoder_decoder", False):
        shapes["decoder_input_ids"] = (task.batch, tokens if name == "input_ids" else min(tokens, _TEXT))
    floating = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    # ones, because zeros are padding to some models
    return {
        key: torch.ones(shape, dtype=torch.long if key.endswith("_ids") else floating, device=device)
        for key, shape in shapes.items()
    }


def _image(config: Any, batch: int) -> tuple[int, ...]:
    vision = getattr(config, "vision_config", config)
    return (batch, getattr(vision, "num_channels", 3), *_pair(getattr(vision, "image_size", 224)))


def _sample(model: nn.Module, config: Any, batch: int) -> dict[str, tuple[int, ...]]:
    """Return the input shapes of a diffusers denoiser."""
    shapes = {"sample": (batch, config.in_channels, *_pair(config.sample_size)), "timestep": (batch,)}
    if "encoder_hidden_states" in _arguments(model):
        width = config.cross_attention_dim
        shapes["encoder_hidden_states"] = (batch, 77, width[0] if isinstance(width, list | tuple) else width)
    return shapes


def _pair(size: Any) -> tuple[int, int]:
    return tuple(size) if isinstance(size, list | tuple) else (size, size)


def _arguments(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)
