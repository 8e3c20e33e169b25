"""Refusal of PEFT adapters that would silently train nothing, because weights in the tiers are no parameters.

PEFT matches `target_parameters` by name. Where it cannot be served (`libraries/peft_api.py`), experts in the tiers have
none: it warns at most. For a block named by `modules_to_save` it trains the block's parameters, which misses weights in
the tiers; a layer named directly turns into a plain one and trains. The next pass of the model raises, with the
module's name and a remedy.
"""

from collections.abc import Mapping

from torch import nn

from vbrt.errors import WrapError
from vbrt.layers import SwappedLayer
from vbrt.layers.experts import VBExperts
from vbrt.libraries.peft_api import adapted_parameters, saved_blocks, targeted_parameters

__all__ = ["check_adapters"]


def check_adapters(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raise WrapError for adapters that would not train: `target_parameters` on experts in the tiers that PEFT has not
    found, or `modules_to_save` on a block with layers there.

    Args:
        layers: the VB layers of the model by name.
    """
    targets = targeted_parameters(model)
    found = {(id(module), name) for module, name in adapted_parameters(model)} if targets else set()
    for name, layer in layers.items() if targets else ():
        if isinstance(layer, VBExperts):
            _check_layer(name.replace(".base_layer", ""), layer, targets, found)
    for name, block in saved_blocks(model):
        inside = next((inner for inner, layer in block.named_modules() if isinstance(layer, SwappedLayer)), None)
        if inside is not None:
            raise WrapError(
                f"{name}: modules_to_save of PEFT names it, and its layer {inside or 'weight'} lives in the tiers, "
                f'where its weight would not train; keep the block out of them (weights.exclude = ["{name}.*"]), or '
                "name its layers in modules_to_save"
            )


def _check_layer(name: str, layer: VBExperts, targets: set[str], found: set[tuple[int, str]]) -> None:
    for parameter in layer.handle.spec.parameters:
        key = f"{name}.{parameter}"
        if (id(layer), parameter) not in found and any(
            key == target or key.endswith(f".{target}") for target in targets
        ):
            raise WrapError(
                f"{key}: target_parameters of PEFT name it, and it lives in the tiers, where it is no parameter that "
                'an adapter could be added to; keep it out of them (weights.exclude = ["*.experts"]) to train adapters '
                "on dense experts, or adapt the Linear layers beside it (target_modules)"
            )
