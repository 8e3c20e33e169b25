"""Attention of transformers' continuous batches by torch's own flash kernel, where no flash-attn package is installed.

transformers attends by the flash-attn package, or by torch's sdpa through a mask of all new by all cached tokens, whose
cost grows with the square of the number of sequences. torch has a flash kernel for sequences one behind the other, too.

| feature | without it |
| --- | --- |
| `FLASH_BATCHES` | sequences of a batch attend through a mask, as transformers has it |
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vbrt.errors import VBError
from vbrt.host import accelerator
from vbrt.libraries import torch_api
from vbrt.libraries.probe import Feature, announce
from vbrt.libraries.transformers_api import attention_of
from vbrt.libraries.transformers_attention import NotRouted, Route

__all__ = ["FEATURES", "FLASH_BATCHES", "flash_batches", "flash_refusal", "is_routed"]

_BATCHES = "generation.continuous_batching"
FLASH_BATCHES = Feature(
    "transformers",
    (
        f"{_BATCHES}.cache:PagedAttentionCache.update(key_states, value_states, layer_idx, kwargs)",
        f"{_BATCHES}.utils:attn_mask_is_needed(config)",
        "utils.generic:is_flash_attention_requested(config, requested_attention_implementation, version)",
        "utils.import_utils:is_flash_attn_2_available(kernels_fallback_ok)",
        "utils.import_utils:is_flash_attn_3_available(kernels_fallback_ok)",
        "generation.configuration_utils:ContinuousBatchingConfig(use_async_batching)",
    ),
    without="many sequences on a GPU attend through a mask, which is slower the more they are",
)
FEATURES = (FLASH_BATCHES,)

#: transformers makes no mask for an implementation with "flash" in its name, and asks none of a 2 or 3 behind it for
#: block tables
_NAME = "vbrt_flash"
_WIDEST = 256  # channels of a head
_DTYPES = (torch.float16, torch.bfloat16)


def flash_refusal(model: nn.Module) -> str:
    """Return why a batch of this model does not attend by torch's flash kernel, as for people; "" if it can."""
    if accelerator.vendor(model.device) != "nvidia":
        return "torch's flash kernel for many sequences needs an NVIDIA GPU"
    if not torch_api.has_flash_varlen:
        return f"torch {torch.__version__} has no flash kernel for many sequences"
    if missing := FLASH_BATCHES.refusal():
        return missing
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if model.dtype not in _DTYPES or width > _WIDEST or width % 8:
        return f"torch's flash kernel takes 16-bit heads of up to {_WIDEST} channels; here {width} of {model.dtype}"
    if accelerator.get_device_capability(model.device) < (8, 0):
        return "torch's flash kernel needs a GPU of compute capability 8.0"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return f"{type(model).__name__} caps its attention's logits"
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        return f"{type(model).__name__} has attention sinks"
    if attention_of(model.config) not in ("sdpa", "eager"):
        return f"{type(model).__name__} attends by {attention_of(model.config)}"
    return ""


@contextlib.contextmanager
def flash_batches(model: nn.Module) -> Iterator[bool]:
    """Have batches of a model attend by torch's flash kernel in the block, where that is faster; yield whether they do.
    A GPU that it does not serve is told once why."""
    if _has_package(model):
        yield False
        return
    with contextlib.ExitStack() as routed:
        try:
            if not (refusal := flash_refusal(model)):
                routed.enter_context(_ROUTE.of(model))
        except NotRouted as error:
            refusal = str(error)
        if refusal and model.device.type != "cpu":
            announce(f"{refusal}: {FLASH_BATCHES.without}")
        yield not refusal


def is_routed(model: nn.Module) -> bool:
    """True in a block of `flash_batches` that serves this model."""
    return attention_of(model.config) == _NAME


def _has_package(model: nn.Module) -> bool:
    """True if transformers attends by a flash-attn package of its own accord."""
    if FLASH_BATCHES.refusal() or not getattr(model, "_supports_flash_attn", False):
        return False
    found = (FLASH_BATCHES.part(f"utils.import_utils:is_flash_attn_{number}_available") for number in (2, 3))
    return any(is_available(kernels_fallback_ok=True) for is_available in found)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend within each sequence; query [1, H, M, K], key and value [1, G, N, K] of sequences behind each other."""
    ends = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if ends[0] is None or ends[1] is None:  # a call beside the batch
        return _ROUTE.own_attention(module)(module, query, key, value, attention_mask, **kwargs)
    if other := [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]:
        raise VBError(f"{type(module).__name__} attends with {', '.join(other)}, which a batch on a GPU cannot here")
    window = kwargs.get("sliding_window")
    out_MHK = torch_api.flash_varlen(
        *(x.squeeze(0).transpose(0, 1) for x in (query, key, value)),
        *ends,
        kwargs["max_length_q"],
        kwargs["max_length_k"],
        scale=kwargs.get("scaling"),
        left=-1 if window is None else window - 1,
    )
    return out_MHK.unsqueeze(0), None


def _masks(*args: Any, **kwargs: Any) -> Any:
    return _ROUTE.own_masks(kwargs["config"])(*args, **kwargs)


_ROUTE = Route(_NAME, _attention, _masks)
