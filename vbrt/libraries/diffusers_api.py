"""diffusers: its hook registry on modules, and the base class of its quantizers.

| feature | without it |
| --- | --- |
| `LOADING` | `from_pretrained` of diffusers with `vbrt.QuantizationConfig` is refused |
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
    without="from_pretrained(quantization_config=vbrt.QuantizationConfig(...)) needs another version; vbrt.wrap of a "
    "pipeline or model that was loaded works with this one",
)
FEATURES = (LOADING,)


def __getattr__(name: str) -> Any:
    """`DiffusersQuantizer`, imported when it is asked for. Raises LibraryError where there is none."""
    if name != "DiffusersQuantizer":
        raise AttributeError(name)
    return LOADING.part(LOADING.asks[0])


def mover_of(module: nn.Module) -> str:
    """What of diffusers moves a module's weights: "group offloading"; "" for nothing."""
    registry = vars(module).get("_diffusers_hook")
    ask = getattr(registry, "get_hook", None)
    return "group offloading" if ask is not None and ask("group_offloading") is not None else ""
