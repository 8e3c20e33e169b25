"""`vbrt.load_heads`: the multi-token prediction head that comes with a checkpoint, to draft for a wrapped model."""

from os import PathLike
from typing import Unpack

from torch import nn

from vbrt.config.overrides import Config, SectionOverrides
from vbrt.generation.speculation.load_head import load_head
from vbrt.wrapper.wrapper import VBModelWrapper
from vbrt.wrapper.wrapper_choice import facade_of, warn_of_plan
from vbrt.wrapper.wrapper_of import attachment_of

__all__ = ["load_heads"]


def load_heads(
    model: nn.Module,
    directory: str | PathLike | None = None,
    config: Config = None,
    *,
    progress: bool | None = None,
    **overrides: Unpack[SectionOverrides],
) -> VBModelWrapper:
    """Load the multi-token prediction head of a wrapped model's checkpoint, which transformers drops on load.

    `generate(speculate=..., drafter="heads")` then drafts with it. Checkpoints of DeepSeek-V3, GLM-4.5 (MoE) and
    Qwen3-Next have one. It joins the model's tiers, budgets and policy, and ends with the model; `save` leaves it out.
    Loading before the first `generate` spares its recordings, since pages of both models are placed anew.

    Args:
        model: wrapped, or a transformers model loaded with a `vbrt.QuantizationConfig`.
        directory: with the safetensors files; default: where transformers has loaded the model from.
        config: as `vbrt.load` takes it; default: the model's own, without fine planes: drafts are verified.
        progress: as for `vbrt.load`.
        **overrides: sections of the config, merged key by key.

    Returns:
        The wrapper of the head; `close()` frees it.

    Raises:
        CheckpointError: no head there, tensors of it missing, named, or files that cannot be read.
        ConfigError, FormatError, TierError: as from `vbrt.load`.
        WrapError: not a wrapped model, one of a kind without heads, or one that has its head already.
    """
    attachment = load_head(attachment_of(model), directory, config, progress=progress, **overrides)
    warn_of_plan(attachment.plan, "vbrt.load_heads", stacklevel=3)
    return facade_of(attachment.model, attachment)
