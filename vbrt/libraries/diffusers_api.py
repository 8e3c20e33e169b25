"""diffusers: the hook registry on modules, and the base class of quantizers.

| feature | without it |
| --- | --- |
| `LOADING` | diffusers' `from_pretrained` with `vbrt.QuantizationConfig` raises |
"""

from typing import Any

from torch import nn

from vbrt.libraries.probe import Feature

__all__ = ["FEATURES", "LOADING", "mover_of"]

LOADING = Feature(
    "diffusers",
    (
        "quantizers.base:DiffusersQuantizer",
        "quantizers.auto:AUTO_QUANTIZATION_CONFIG_MAPPING",
        "quantizers.auto:AUTO_QUANTIZER_MAPPING",
    ),
    without="from_pretrained(quantization_config=vbrt.QuantizationConfig(...)) needs another version; vbrt.wrap on a "
    "loaded pipeline or model works with this one",
)
FEATURES = (LOADING,)


def __getattr__(name: str) -> Any:
    """`DiffusersQuantizer`, imported on access. Raises LibraryError if it is missing."""
    if name != "DiffusersQuantizer":
        raise AttributeError(name)
    return LOADING.part(LOADING.asks[0])


def mover_of(module: nn.Module) -> str:
    """Name of the diffusers mechanism that moves a module's weights: "group offloading"; "" if there is none."""
    registry = vars(module).get("_diffusers_hook")
    ask = getattr(registry, "get_hook", None)
    return "group offloading" if ask is not None and ask("group_offloading") is not None else ""
