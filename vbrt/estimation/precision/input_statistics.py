"""`weights.calibrate`: input statistics of each weight, from a run of the model on calibration text.

A weight's error costs its square times the mean square of its input, if inputs are uncorrelated: encoders weigh errors
so in their block-scale search. Correlations of neighbouring inputs let codes compensate each other's errors
(`vbrt.formats.error_feedback`). Inputs are observed at the matmul operators, whatever module calls them, so that each
routed expert has its own mean squares; experts get no correlations, since a layer has many of them.

Legend: E matrices of a parameter (1 where nothing is routed), K inputs, T tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vbrt.config import FORMATS, VBConfig
from vbrt.errors import ArgumentError, ConfigError
from vbrt.estimation.precision.calibration_data import Text, text_of
from vbrt.estimation.precision.sensitivity import evaluating, own_samples
from vbrt.estimation.precision.streamed_forward import Reader, streamed
from vbrt.formats.error_feedback import Inputs, moments_of
from vbrt.host import accelerator
from vbrt.libraries.torch_api import TorchDispatchMode
from vbrt.model.weight_choice import named_modules
from vbrt.report.progress import Progress
from vbrt.residency.plan import Plan, Swap
from vbrt.residency.weight_site import WeightSite

__all__ = ["input_statistics", "with_inputs"]

#: share of a weight's mean square added to each input's, so that inputs that the text does not excite still count
_FLOOR = 0.05
#: weight of the layer's mean, in tokens, in each expert's squares (a prior)
_PRIOR = 32.0
_BATCH = 4
_ATEN = torch.ops.aten
#: matmul operators -> argument positions of (input, weight)
_PRODUCTS = {
    _ATEN.mm.default: (0, 1),
    _ATEN.addmm.default: (1, 2),
    _ATEN.bmm.default: (0, 1),
    _ATEN.baddbmm.default: (1, 2),
    _ATEN.linear.default: (0, 1),
    _ATEN._grouped_mm.default: (0, 1),
}


def with_inputs(
    model: nn.Module,
    plan: Plan,
    config: VBConfig,
    readers: Mapping[tuple[str, str], Reader] | None = None,
    *,
    directory: str | None = None,
    device: torch.device | None = None,
) -> Plan:
    """Return the plan with input statistics on its swaps, as `weights.calibrate` asks; else the plan.

    Args:
        model: not wrapped; unchanged afterwards.
        readers: by module and parameter, for weights that the model does not hold.
        directory: of the tokenizer; by default the origin in the model's config.
        device: to run on; by default the plan's compute device.

    Raises:
        ConfigError: the text cannot be read, or the model cannot run on it.
    """
    if config.weights.calibrate is None or not any(map(_is_weighed, plan.swaps)):
        return plan
    cut = next((swap.name for swap in plan.swaps if swap.site.shard is not None), None)
    if cut is not None:
        raise ConfigError(
            f'{config.source}: weights.calibrate = "{config.weights.calibrate}": {cut} is sharded, '
            "and its blocks need the scales of the whole weight: calibrate in one process, as vbrt convert does, "
            "and load what it saves"
        )
    device = _device_of(plan) if device is None else device
    text = text_of(model, config, directory)
    found = input_statistics(model, [swap for swap in plan.swaps if _is_weighed(swap)], text, readers, device)
    swaps = tuple(replace(swap, inputs=found.get(swap.name, ())) for swap in plan.swaps)
    return replace(plan, swaps=swaps, notes=(*plan.notes, _note(text, plan.swaps, found)))


def _is_weighed(swap: Swap) -> bool:
    """True for weights with a scale search; lookup tables are not multiplied with anything."""
    return not FORMATS[swap.format].lossless and not swap.by_rows


def _device_of(plan: Plan) -> torch.device:
    """Return a plan's compute device."""
    return (
        torch.device(accelerator.TYPE, accelerator.current_device()) if "gpu" in plan.budgets else torch.device("cpu")
    )


def _note(text: Text, swaps: Sequence[Swap], found: Mapping[str, tuple[Inputs, ...]]) -> str:
    weighed = [swap.name for swap in swaps if _is_weighed(swap)]
    unseen = [name for name in weighed if name not in found]
    note = f"weights.calibrate: {len(found)} weights are encoded by the inputs that {text.name} gives"
    return f"{note}; no input reached {', '.join(unseen[:3])}{' ...' if unseen[3:] else ''}" if unseen else note


def input_statistics(
    model: nn.Module,
    swaps: Sequence[Swap],
    text: Text,
    readers: Mapping[tuple[str, str], Reader] | None = None,
    device: torch.device | None = None,
) -> dict[str, tuple[Inputs, ...]]:
    """Return input statistics by swap name, for the swaps that an input reached: see `Swap.inputs`.

    An expert with few tokens has mostly its layer's mean, one without tokens only that.

    Args:
        text, readers, device: as for `with_inputs`; without a device the model runs on its own.

    Raises:
        ConfigError: the model cannot run on the text.
    """
    device = next(model.parameters()).device if device is None else device
    meter = _InputMeter(swaps, device)
    try:
        with evaluating(model), _one_by_one(model, swaps), streamed(model, device, readers or {}, meter.notice):
            batches = [ids.to(device) for ids in _batches(model, text, device)]
            with Progress(f"calibrating on {text.name}", len(batches), unit="batches") as work, torch.no_grad():
                for ids in batches:
                    with meter:
                        _run(model, ids)
                    work.done()
    except (ArgumentError, IndexError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ConfigError(
            f"{text.where}: {type(model).__name__} did not run on token ids ({type(error).__name__}: {error}); "
            "it is for models that take them: leave it out"
        ) from error
    return meter.inputs()


def _batches(model: nn.Module, text: Text, device: torch.device) -> list[Tensor]:
    if text.ids is None:
        return list(own_samples(model, device).split(_BATCH))
    return [batch for ids in text.ids for batch in ids.split(_BATCH)]


def _run(model: nn.Module, ids: Tensor) -> None:
    known = getattr(getattr(model, "config", None), "use_cache", None) is not None
    model(ids, use_cache=False) if known else model(ids)


@contextmanager
def _one_by_one(model: nn.Module, swaps: Sequence[Swap]) -> Iterator[None]:
    """Context in which routed experts use their eager loop, which multiplies with each matrix in place."""
    modules = named_modules(model)
    configs = {
        id(config): config
        for swap in swaps
        if swap.experts and (config := getattr(modules[swap.site.module], "config", None)) is not None
    }
    names = {at: getattr(config, "_experts_implementation", None) for at, config in configs.items()}
    try:
        for at, config in configs.items():
            if names[at] is not None:
                config._experts_implementation = "eager"
        yield
    finally:
        for at, config in configs.items():
            if names[at] is not None:
                config._experts_implementation = names[at]


@dataclass(slots=True)
class _Sums:
    """Sums of one parameter: squares [E, K] and tokens [E] per matrix, on the device; input products [G, C, C] on the
    CPU, if wanted."""

    site: WeightSite
    total: Tensor
    tokens: Tensor
    moments: Tensor | None


class _InputMeter(TorchDispatchMode):
    """Accumulates the squared inputs of each weight while it is entered."""

    def __init__(self, swaps: Sequence[Swap], device: torch.device) -> None:
        super().__init__()
        self._sums: dict[str, list[_Sums]] = {}
        self._of: dict[tuple[str, str], _Sums] = {}
        self._here: dict[tuple[str, str], tuple[int, int, _Sums]] = {}  # address, bytes of a matrix
        for swap in swaps:
            parts = (swap.site, *swap.parts)
            is_fed_back = not swap.experts and swap.fine == "none"
            self._sums[swap.name] = [_empty(site, device, fed_back=is_fed_back) for site in parts]
            tied = [replace(part, module=site.module) for site in swap.tied for part in parts]
            for site, sums in zip((*parts, *tied), self._sums[swap.name] * (1 + len(swap.tied)), strict=True):
                self._of[site.module, site.parameter] = sums

    def notice(self, module: str, parameter: str, tensor: Tensor | None) -> None:
        """Note a parameter's address; None: it is released."""
        key = module, parameter
        if tensor is None:
            self._here.pop(key, None)
        elif key in self._of:
            sums = self._of[key]
            self._here[key] = tensor.data_ptr(), tensor.nbytes // sums.site.matrices, sums

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchDispatchMode`."""
        places = _PRODUCTS.get(func)
        if places is not None:
            x, w = (args[at] for at in places)
            self._add(x, w, args[2] if func is _ATEN._grouped_mm.default else None)
        return func(*args, **kwargs or {})

    def _add(self, x: Tensor, w: Tensor, ends: Tensor | None) -> None:
        at = w.data_ptr()
        found = next((h for h in self._here.values() if h[0] <= at < h[0] + h[1] * h[2].site.matrices), None)
        if found is None or x.shape[-1] != found[2].total.shape[1]:
            return
        start, nbytes, sums = found
        first = (at - start) // nbytes
        if ends is not None:
            x_ETK = list(x.tensor_split(ends[:-1].tolist()))
        else:
            x_ETK = list(x) if w.dim() == 3 and x.dim() == 3 else [x.reshape(-1, x.shape[-1])]
        for matrix, x_TK in enumerate(x_ETK, first):
            squares = x_TK.detach().float().square()
            sums.total[matrix] += squares.sum(0)
            sums.tokens[matrix] += squares.any(-1).sum()
            if sums.moments is not None:
                sums.moments += moments_of(x_TK.detach()).cpu()

    def inputs(self) -> dict[str, tuple[Inputs, ...]]:
        """Return the statistics on the CPU, by name of each swap that an input reached."""
        found = {}
        for name, parts in self._sums.items():
            made = [_weights(part.total.cpu(), part.tokens.cpu()) for part in parts]
            if all(weights is not None for weights in made):
                found[name] = tuple(Inputs(w, part.moments) for w, part in zip(made, parts, strict=True))
        return found


def _empty(site: WeightSite, device: torch.device, *, fed_back: bool) -> _Sums:
    k = site.shape[1]
    total = torch.zeros(site.matrices, k, dtype=torch.float32, device=device)
    moments = moments_of(torch.zeros(0, k, dtype=torch.float32, device="cpu")) if fed_back else None
    return _Sums(site, total, torch.zeros(site.matrices, dtype=torch.float32, device=device), moments)


def _weights(total_EK: Tensor, tokens_E: Tensor) -> Tensor | None:
    """Return fp32 [E, K], of mean 1 per matrix; None if all inputs were zero, or some not finite."""
    mean_K = total_EK.sum(0) / tokens_E.sum().clamp(min=1)
    if not mean_K.sum() > 0 or not mean_K.isfinite().all():
        return None
    mixed_EK = (total_EK + _PRIOR * mean_K) / (tokens_E + _PRIOR).unsqueeze(1)
    weights_EK = mixed_EK / mixed_EK.mean(1, keepdim=True) + _FLOOR
    return weights_EK / (1 + _FLOOR)
