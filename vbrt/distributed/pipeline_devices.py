"""Pipeline split: one model over several devices of one process, each device with its own tiers.

    split = vbrt.wrap(model, "exact", tiers={"gpu": {"devices": [0, 1]}})
    split.generate(**tokens)

Every device has its own stack: budgets, a ring, and its link to host memory. Activations move to the device of the next
unit by `.to()`, and that device becomes the current one. The model is the given one, with its layers swapped in place;
the devices' tiers share nothing.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vbrt.config import VBConfig, load_config, resolve_budgets, with_tier_budget
from vbrt.distributed.block_split import part_units
from vbrt.errors import ConfigError, WrapError
from vbrt.host import accelerator
from vbrt.model.attach import Attempt, attach
from vbrt.model.attachment import Attachment
from vbrt.model.machine_memory import this_machine
from vbrt.model.planner import swaps_with_pages
from vbrt.report.stats import Stats
from vbrt.residency.plan import Plan, Swap

__all__ = ["SplitModel", "devices_of", "split_over"]


def devices_of(config: VBConfig) -> tuple[torch.device, ...]:
    """Return the GPUs that a config splits models over; none if it does not.

    Raises ConfigError: a GPU does not exist.
    """
    asked = config.tiers.gpu.devices
    count = accelerator.device_count() if accelerator.is_available() else 0
    if asked != "current" and max(asked) >= count:
        raise ConfigError(f"{config.source}: tiers.gpu.devices = {list(asked)}; this process sees {count} GPUs")
    return () if asked == "current" else tuple(torch.device(accelerator.TYPE, index) for index in asked)


def split_over(model: nn.Module, config: VBConfig, devices: Sequence[torch.device]) -> "SplitModel":
    """Wrap a model over devices, and encode it.

    Args:
        config: gpu budgets apply to each device; budgets of lower tiers are divided.

    Raises:
        ConfigError, TierError: as `vbrt.wrap`.
        WrapError: the model cannot be partitioned, see `part_units`, or it trains.
    """
    if config.mode != "infer":
        raise WrapError(f'tiers.gpu.devices with mode = "{config.mode}": layers over several devices do not train')
    config = with_tier_budget(config, "gpu")
    swaps = swaps_with_pages(model, config)
    page_bytes: dict[str, int] = {}
    for swap in swaps:
        page_bytes[swap.site.module] = page_bytes.get(swap.site.module, 0) + swap.page_bytes
    units = part_units(model, page_bytes, len(devices))
    attempt, parts = Attempt(model, None), []
    budgets = resolve_budgets(config, this_machine(config))
    below = {name: budgets[name] for name in list(budgets)[1:] if name != "peer"}
    try:
        for device, part in zip(devices, units, strict=True):
            parts.append(_attached(part, device, config, (swaps, below)))
        return SplitModel(model, parts)
    except BaseException:
        for part in parts:
            part.attachment.close()
        attempt.undo()
        raise


class _Part:
    """One device's units, the module that holds them, and its attachment."""

    def __init__(self, device: torch.device, holder: nn.Module, attachment: Attachment) -> None:
        self.device, self.holder, self.attachment = device, holder, attachment

    @property
    def units(self) -> dict[str, nn.Module]:
        """Units by name in the whole model."""
        return dict(self.holder._modules)


def _attached(
    units: dict[str, nn.Module], device: torch.device, config: VBConfig, whole: tuple[Sequence[Swap], dict[str, int]]
) -> _Part:
    """Attach one device's units to a runtime there. whole: all swaps of the model, and the budgets of the lower
    tiers."""
    swaps, below = whole
    holder = nn.Module()
    holder.training = False
    for name, unit in units.items():
        holder._modules[name] = unit  # under the full name, dots included: patterns and stats use it
    own = [swap for swap in swaps if any(_within(swap.site.module, name) for name in units)]
    share = sum(swap.page_bytes for swap in own) / max(1, sum(swap.page_bytes for swap in swaps))
    tiers: dict[str, Any] = {name: {"budget": max(1, int(nbytes * share))} for name, nbytes in below.items()}
    modules = sorted({site.module for swap in own for site in swap.sites})
    weights = {"include": modules or ["-"], "exclude": [], "keep_head": False, "min_parameters": 0}
    with _current(device):
        attachment = attach(
            holder, load_config(config, weights=weights, tiers={**tiers, "gpu": {"devices": "current"}})
        )
        attachment.materialize()
    return _Part(device, holder, attachment)


def _within(module: str, unit: str) -> bool:
    return module == unit or module.startswith(f"{unit}.")


class SplitModel:
    """Model over several devices: call it, or use anything of the model.

    Attributes:
        module: the model itself; also `model`, unless the model has its own.
        parts: per device, in block order.
    """

    def __init__(self, model: nn.Module, parts: Sequence[_Part]) -> None:
        self.module, self.parts = model, tuple(parts)
        self._hooks = [model.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True)]
        self._hooks.append(model.register_forward_hook(self._end, always_call=True))
        self._before: list[int] = []
        for part in self.parts:
            hop = _Hop(part.device)
            for unit in part.units.values():
                if any(True for _ in unit.parameters()) or any(True for _ in unit.buffers()) or _has_layers(unit):
                    self._hooks.append(unit.register_forward_pre_hook(hop, prepend=True, with_kwargs=True))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "module" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.module, name, self.module) if name == "model" else getattr(self.module, name)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Devices of the parts."""
        return tuple(part.device for part in self.parts)

    @property
    def plans(self) -> dict[str, Plan]:
        """Plan of each device, by device name."""
        return {str(part.device): part.attachment.plan for part in self.parts}

    def set_budget(self, tier: str, budget: int | str) -> list[int]:
        """Change a tier's budget on every device; return the bytes of each. See `VBModelWrapper.set_budget`."""
        found = []
        for part in self.parts:
            with _current(part.device):
                found.append(part.attachment.set_budget(tier, budget))
        return found

    def stats(self, *, verbose: bool = False) -> Stats:
        """Return all devices' counters; tiers are named with their device. `verbose`: see `VBModelWrapper.stats`."""
        several = [(f"{part.device}", part.attachment.stats()) for part in self.parts]
        each = [stats for _, stats in several]
        eager = "tiers.gpu.devices: decode steps over several devices run eagerly, without capture"
        return replace(
            each[0],
            layers={name: layer for stats in each for name, layer in stats.layers.items()},
            tiers={f"{tier} of {device}": held for device, stats in several for tier, held in stats.tiers.items()},
            dense_bytes=sum(stats.dense_bytes for stats in each),
            kept_bytes=sum(stats.kept_bytes for stats in each),
            device_bytes=sum(stats.device_bytes for stats in each),
            fallbacks=tuple(dict.fromkeys([eager, *(reason for stats in each for reason in stats.fallbacks)])),
            leases="; ".join(dict.fromkeys(stats.leases for stats in each if stats.leases)),
            verbose=verbose,
        )

    def unwrap(self) -> nn.Module:
        """Restore the dense model, in place; its parts stay on their devices, without hops. Returns the model."""
        for part in self.parts:
            with _current(part.device):
                part.attachment.detach()
        self._remove_hooks()
        return self.module

    def close(self) -> None:
        """Free all pages and tiers. Idempotent."""
        for part in self.parts:
            part.attachment.close()
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _begin(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Begin a pass on all devices."""
        self._before.append(accelerator.current_device() if accelerator.is_available() else 0)
        for part in self.parts:
            part.attachment.begin_part(args, kwargs)

    def _end(self, model: nn.Module, args: tuple, output: Any) -> None:
        """Restore the current device of before the pass."""
        before = self._before.pop() if self._before else 0
        if accelerator.is_available():
            accelerator.set_device(before)


class _Hop:
    """Forward pre-hook of a unit: moves its arguments to its device, which becomes the current one.

    Arguments shared by consecutive blocks, such as masks and rotary embeddings, are copied once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}

    def __call__(self, unit: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments on the unit's device."""
        if self._device.type == accelerator.TYPE:
            accelerator.set_device(self._device)
        return self._here(args), self._here(kwargs)

    def _here(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if value.device == self._device else self._copy(value)
        if type(value) in (list, tuple):
            return type(value)(map(self._here, value))
        if type(value) is dict:
            return {name: self._here(part) for name, part in value.items()}
        return value

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and tensor.requires_grad:
            return tensor.to(self._device)
        if tensor.is_inference() or tensor.nbytes > _LARGE_BYTES:  # these may be mutated untracked
            return tensor.to(self._device, non_blocking=True)
        known = self._moved.get(id(tensor))
        if known is not None and known[0] is tensor and known[1] == tensor._version:
            return known[2]
        if len(self._moved) >= _KEPT:
            del self._moved[next(iter(self._moved))]
        copy = tensor.to(self._device, non_blocking=True)
        self._moved[id(tensor)] = (tensor, tensor._version, copy)
        return copy


_KEPT, _LARGE_BYTES = 8, 8 << 20  # cached arguments, which the cache keeps alive


def _has_layers(unit: nn.Module) -> bool:
    return any(module._forward_pre_hooks or module._parameters for module in unit.modules())


def _current(device: torch.device) -> contextlib.AbstractContextManager:
    return accelerator.device(device) if device.type == accelerator.TYPE else contextlib.nullcontext()
