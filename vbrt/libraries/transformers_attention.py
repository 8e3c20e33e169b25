"""Routing of a transformers model's attention: its attention calls and masks go to functions of ours in a block.

    route = Route("vbrt_mine", attention, masks)
    with route.of(model):
        model(...)     # calls attention(module, query, key, value, mask, **kwargs) and masks(**kwargs)

Uses transformers' AttentionInterface and AttentionMaskInterface (`transformers_api.ROWS`).
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from vbrt.errors import VBError
from vbrt.libraries import transformers_api
from vbrt.libraries.transformers_api import ROWS, attention_of, set_attention

__all__ = ["NotRouted", "Route", "register_routes"]

_KNOWN = {"sdpa", "eager"}
_ROUTES: list["Route"] = []


def register_routes() -> None:
    """Enter all routes in transformers' tables, where it is in use: captured steps depend on what these hold."""
    if "transformers.modeling_utils" in sys.modules and not ROWS.refusal():
        for route in _ROUTES:
            route.register()


class NotRouted(VBError):
    """A model's attention cannot be routed; the message gives the reason."""


class Route:
    """Functions in the place of a model's attention and masks.

    Args:
        name: of the attention implementation in transformers' tables.
        attention: called like any function of the attention interface.
        masks: called like any function of the mask interface.
    """

    def __init__(self, name: str, attention: Callable[..., Any], masks: Callable[..., Any]) -> None:
        self.name, self._attention, self._masks = name, attention, masks
        self._own: dict[int, str] = {}  # config id -> the model's implementation
        _ROUTES.append(self)

    @contextlib.contextmanager
    def of(self, model: Any) -> Iterator[None]:
        """Route the model's attention in the block. Raises NotRouted: it is none of torch's, or has no interface."""
        if missing := ROWS.refusal():
            raise NotRouted(missing)
        self.register()
        configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
        own = {key: name for key, config in configs.items() if (name := attention_of(config)) is not None}
        unknown = set(own.values()) - _KNOWN
        if unknown:
            raise NotRouted(f"attention by {', '.join(sorted(unknown))}")
        try:
            for key, name in own.items():
                self._own[key] = name
                set_attention(configs[key], self.name)
            yield
        finally:
            for key, name in own.items():
                set_attention(configs[key], name)

    def own_attention(self, module: Any) -> Callable[..., Any]:
        """The attention function that the model would call itself. Raises NotRouted: it has none."""
        found = transformers_api.ALL_ATTENTION_FUNCTIONS.get(self._own[id(module.config)])
        if found is None:  # defined in the model's module
            found = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if found is None:
            raise NotRouted(f"{type(module).__name__} has no attention function")
        return found

    def own_masks(self, config: Any) -> Callable[..., Any]:
        """The mask function that the model would call itself."""
        return transformers_api.ALL_MASK_ATTENTION_FUNCTIONS[self._own[id(config)]]

    def register(self) -> None:
        """Enter the functions in transformers' tables."""
        if self.name not in transformers_api.AttentionInterface._global_mapping:
            transformers_api.AttentionInterface.register(self.name, self._attention)
            transformers_api.AttentionMaskInterface.register(self.name, self._masks)
