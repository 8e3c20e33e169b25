"""Records of diffusers and transformers pipelines. See `wrapper/pipeline_kinds.py`."""

from collections.abc import Mapping
from typing import Any

from vbrt.libraries import accelerate_api, diffusers_api
from vbrt.wrapper.pipeline_kinds import HolderKind

__all__ = ["DIFFUSERS", "TRANSFORMERS"]

_TIERS = (
    "tiers do that: the models of a wrapped pipeline share one budget for each tier, give room to the one that runs, "
    "and are fetched ahead of their use; see set_budget()"
)


def _components(pipeline: Any) -> Mapping[str, Any]:
    """Return a diffusers pipeline's components: models, schedulers, tokenizers, None."""
    return pipeline.components


def _moved_by(model: Any) -> str:
    """Return what already moves a model between devices: an accelerate hook, or diffusers' group offloading."""
    for module in model.modules():
        by = accelerate_api.mover_of(module) or diffusers_api.mover_of(module)
        if by:
            return by
    return ""


def _attributes(pipeline: Any) -> Mapping[str, Any]:
    return vars(pipeline)


DIFFUSERS = HolderKind(
    _components,
    phases=(
        ("transformer*", "step"),
        ("unet*", "step"),
        ("controlnet*", "step"),
        ("prior*", "step"),
        ("decoder*", "step"),
        ("vae*", "image"),
        ("vqvae*", "image"),
    ),
    refused=dict.fromkeys(
        ("enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload"), _TIERS
    ),
    entry_hook=accelerate_api.HOOK,
    moved_by=_moved_by,
)

TRANSFORMERS = HolderKind(_attributes, moved_by=_moved_by, device="device")
