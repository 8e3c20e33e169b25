"""Adapters that PEFT should put on experts in the tiers, which it cannot: its parametrizations need a parameter there.

PEFT looks for parameters by name, finds none where experts are encoded, and at most warns that it matched nothing. So
the next pass of the model says which layer it is, and what would do.
"""

from collections.abc import Mapping

from torch import nn

from vbrt.errors import WrapError
from vbrt.layers.experts import VBExperts
from vbrt.libraries.peft_api import targeted_parameters

__all__ = ["check_adapters"]


def check_adapters(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raise WrapError if an adapter's `target_parameters` name experts that live in the tiers.

    Args:
        layers: the VB layers of the model by name.
    """
    targets = targeted_parameters(model)
    for name, layer in layers.items() if targets else ():
        if isinstance(layer, VBExperts) and layer.materialized:
            _check_layer(name.replace(".base_layer", ""), layer, targets)


def _check_layer(name: str, layer: VBExperts, targets: set[str]) -> None:
    for parameter in layer.handle.spec.parameters:
        key = f"{name}.{parameter}"
        if any(key == target or key.endswith(f".{target}") for target in targets):
            raise WrapError(
                f"{key}: target_parameters of PEFT name it, and it lives in the tiers, where it is no parameter that "
                'an adapter could be added to; keep it out of them (weights.exclude = ["*.experts"]) to train adapters '
                "on dense experts, or adapt the Linear layers beside it (target_modules)"
            )
