"""Loss over a vocabulary that transformers' language models call, and the attribute by which a model has another.

| feature | without it |
| --- | --- |
| `LOSSES` | a model computes the loss of all its logits at once, in fp32 |
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from vbrt.libraries.probe import Feature
from vbrt.libraries.transformers_api import is_pretrained

__all__ = ["FEATURES", "LOSSES", "drop_losses", "replace_losses"]

_PLAIN = "loss.loss_utils:ForCausalLMLoss"
_KNOWN = ("logits", "labels", "vocab_size", "num_items_in_batch", "ignore_index", "shift_labels")
LOSSES = Feature(
    "transformers",
    (f"{_PLAIN}({', '.join(_KNOWN)})", "modeling_utils:PreTrainedModel.loss_function"),
    without="a language model's loss takes several fp32 tensors of its logits' size",
)
FEATURES = (LOSSES,)

_ATTRIBUTE = "_loss_function"  # of an instance: what its property `loss_function` returns and sets


def replace_losses(model: nn.Module, made: Callable[..., Any]) -> None:
    """Give the transformers models in `model` that call `ForCausalLMLoss` another loss: `made` of that one. Losses with
    arguments that are not known here stay."""
    found = [module for module in model.modules() if is_pretrained(module)]
    if not found or not LOSSES.is_there():
        return
    plain = LOSSES.part(_PLAIN)
    if set(inspect.signature(plain).parameters) != {*_KNOWN, "kwargs"}:
        return
    for module in found:
        if _calls(module, plain):
            module.loss_function = made(plain)


def _calls(module: nn.Module, plain: Callable[..., Any]) -> bool:
    """True if that is a model's loss. Of no type: the default, if it has a head, and the property would warn."""
    if _ATTRIBUTE not in vars(module) and getattr(module, "loss_type", None) is None:
        return module.get_output_embeddings() is not None
    return module.loss_function is plain


def drop_losses(model: nn.Module, made: type) -> None:
    """Give the models in `model` whose loss is a `made` their own again."""
    for module in model.modules():
        if isinstance(vars(module).get(_ATTRIBUTE), made):
            delattr(module, _ATTRIBUTE)
