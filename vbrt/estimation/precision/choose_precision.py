"""`vbrt.choose_precision`: mixed precision by layer within a budget, from each layer's measured loss.

Each layer's loss in 4 and in 8 bits, and in 3 where the budget is too small for 4, is measured alone, the others
unchanged. These losses are additive to about a percent, so the least sum within the budget is a knapsack
(`knapsack.py`). Where two choices are closer than that, sums cannot rank them: the diagonal Hessian's choice is a
second proposal, and the whole model is measured under both, on the same sequences.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from vbrt.config import FORMATS, Budget, VBConfig, load_config, parse_weights_budget
from vbrt.config.argument_checks import check_instance
from vbrt.config.overrides import Config, SectionOverrides
from vbrt.errors import ArgumentError, ConfigError, WrapError
from vbrt.estimation.precision.calibration_data import Text, text_of
from vbrt.estimation.precision.input_statistics import input_statistics
from vbrt.estimation.precision.precision_report import LayerPrecision, Precision, Way
from vbrt.estimation.precision.sensitivity import (
    Sequences,
    batches_of,
    evaluating,
    kl_between,
    logits_of,
    own_samples,
    rounded,
    rounded_weight,
)
from vbrt.estimation.precision.streamed_forward import lent
from vbrt.host import accelerator
from vbrt.layers import KINDS, SwappedLayer
from vbrt.model.planner import make_plan, swaps_with_pages
from vbrt.model.weight_choice import named_modules
from vbrt.report.progress import Progress
from vbrt.residency.plan import Swap

__all__ = ["METHODS", "choose_precision", "confirmed", "settled"]

METHODS = ("kl", "hessian")
_LEAST, _COARSE, _BETWEEN = "t3", "nvfp4", "mxint8"


def choose_precision(
    model: nn.Module,
    sequences: Sequences | None = None,
    budget: int | str | None = None,
    config: Config = "fp4",
    *,
    method: str = "kl",
    **overrides: Unpack[SectionOverrides],
) -> Precision:
    """Choose each layer's precision (3 bits, 4 bits, 8 bits or lossless) within a budget.

    Args:
        model: with its weights, not wrapped; it runs twice for each layer, and is unchanged afterwards. A model in host
            memory runs on the GPU that the config computes on, with as many weights there as its budget holds.
        sequences: calibration data: token ids [N, S], or a list of sequences, or of mappings of forward arguments. A
            few of some hundred tokens suffice. None: samples from the model itself.
        budget: of all pages: bits a weight ("5 bits") or bytes (2147483648, "2GiB"). Default: `weights.budget`.
        config: as for `vbrt.wrap`: it decides which weights are swapped; `weights.format` is the 4-bit format, or
            "t3", which layers leave for nvfp4 first ("auto": nvfp4, and t3 within a budget too small for that); layers
            in `weights.formats` keep theirs. overrides: sections of it.
        method: "kl" measures the KL divergence of the model's outputs, and compares the whole model with the choice of
            "hessian" (except for models streamed to a GPU from host memory); "hessian" is Σ squared weight error × mean
            squared input, from one run of the model, for linear layers only.

    Returns:
        The choice: `.config` to wrap with, `.layers`, `.to_toml()`; `str()` explains it.

    Raises:
        ArgumentError: invalid sequences or method, or a layer that the method does not support.
        ConfigError: an invalid config or budget, or a budget too small: by how much.
        FormatError: a weight holds NaN or Inf.
        WrapError: the model is wrapped, or has no weights to choose for.
    """
    config = load_config(config, **overrides)
    where = "budget" if budget is not None else f"{config.source}: weights.budget"
    room = parse_weights_budget(config.weights.budget if budget is None else budget, where=where)
    if method not in METHODS:
        raise ArgumentError(f'method = {method!r}; expected "kl" or "hessian"')
    _check_model(model)
    base, options = _starting_point(model, config, room)
    text = None if base.weights.calibrate is None else text_of(model, base)
    lies = next(model.parameters()).device
    with evaluating(model), _placed(model, base, options) as device:
        if text is not None:
            options = _weighed(model, options, text, device)
            sequences = text.ids and [row[None] for ids in text.ids for row in ids] if sequences is None else sequences
        batches = batches_of(own_samples(model, device) if sequences is None else sequences, device)
        measure = _kl_losses if method == "kl" else _hessian_losses
        losses = measure(model, options, batches, device)
        layers = tuple(option.with_losses(found) for option, found in zip(options, losses, strict=True))
        choice = Precision(base, layers, method, 0, _named(model, base, layers), own=sequences is None).within(room)
        if method == "kl" and device == lies:
            choice = confirmed(choice, model, batches, _proxy(model, options, batches, device))
    return choice


def confirmed(
    choice: Precision, model: nn.Module, batches: list[Any], proxy: Sequence[Mapping[str, float]] | None
) -> Precision:
    """Return a choice or the choice by a proxy's losses, whichever has the lower KL for the whole model on the same
    batches.

    proxy: losses of each layer by format; None: no second proposal. Weights are held twice meanwhile.
    """
    rival = choice if proxy is None else choice.by_losses(proxy)
    if rival.config == choice.config:
        return choice
    references = [logits_of(model, batch) for batch in batches]
    found = {"kl": choice, "hessian": rival}
    kls = {method: _together(model, each, batches, references) for method, each in found.items()}
    ranked = sorted(kls.items(), key=lambda pair: pair[1])
    return replace(found[ranked[0][0]], together=tuple(ranked))


def _together(model: nn.Module, choice: Precision, batches: list[Any], references: list[Tensor]) -> float:
    with ExitStack() as stack:
        for layer in choice.layers:
            if not layer.lossless:
                stack.enter_context(rounded(model, layer.swap, layer.held))
        return kl_between(model, batches, references)


def _proxy(
    model: nn.Module, options: Sequence[LayerPrecision], batches: list[Any], device: torch.device
) -> list[dict[str, float]] | None:
    """Return the Hessian proxy's losses; None if it does not support a layer."""
    try:
        return _hessian_losses(model, options, batches, device)
    except ArgumentError:
        return None


def _named(model: nn.Module, base: VBConfig, layers: Sequence[LayerPrecision]) -> tuple[int, int]:
    """Return the page bytes, and the number of weights, of layers not chosen for."""
    mine = {layer.name for layer in layers}
    others = [swap for swap in swaps_with_pages(model, base) if swap.name not in mine]
    return sum(swap.page_bytes for swap in others), sum(map(_weights_of, others))


def settled(model: nn.Module, config: VBConfig) -> VBConfig:
    """Return the config with the formats that `weights.format = "auto"` chooses on the model's own samples; other
    configs unchanged."""
    if config.weights.format != "auto":
        return config
    try:
        return choose_precision(model, config=config).config
    except ArgumentError as error:
        raise ConfigError(
            f'{config.source}: weights.format = "auto" measures samples of the model: {error}: '
            "vbrt.choose_precision(model, sequences).config"
        ) from error


def _check_model(model: nn.Module) -> None:
    check_instance(model, nn.Module, "choose_precision(): model", "a torch.nn.Module")
    wrapped = next((name for name, module in model.named_modules() if isinstance(module, SwappedLayer)), None)
    if wrapped is not None:
        raise WrapError(f"{wrapped or 'the model'} is a VB layer already; choose the precision before it is wrapped")
    meta = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if meta is not None:
        raise WrapError(f"{meta} is on the meta device, without data; load the model first: its loss is measured")


@contextmanager
def _placed(model: nn.Module, base: VBConfig, options: Sequence[LayerPrecision]) -> Iterator[torch.device]:
    """Context in which the model runs on the returned device: the compute GPU, within its budget, or the model's own
    device."""
    lies = next(model.parameters()).device
    if lies.type != "cpu" or not accelerator.is_used(base.tiers.gpu.enabled):
        yield lies
        return
    device = accelerator.default_device()
    budgeted = [model.get_parameter(site.tensor) for option in options for site in option.swap.sites]
    measured = replace(base, gpu_memory=None, context=None)  # that share is of the model with its chosen formats
    with lent(model, device, make_plan(model, measured).budgets["gpu"], budgeted):
        yield device


def _weighed(
    model: nn.Module, options: Sequence[LayerPrecision], text: Text, device: torch.device
) -> list[LayerPrecision]:
    """Return the layers with input statistics, by which rounding weighs errors."""
    found = input_statistics(model, [option.swap for option in options], text, device=device)
    return [replace(o, swap=replace(o.swap, inputs=found.get(o.name, ()))) for o in options]


def _starting_point(model: nn.Module, config: VBConfig, room: Budget) -> tuple[VBConfig, list[LayerPrecision]]:
    """Return the config with all layers in the smallest format, and their alternatives; refuse a budget that is too
    small before measuring."""
    for base in _coarse_configs(config):
        options = _options(model, base)
        if not options:
            raise WrapError(f"{type(model).__name__} has no layer to choose for: no weight is swapped into 4 bits")
        unmeasured = Precision(base, tuple(options), "kl", 0, _named(model, base, options))
        if unmeasured.fits(room):
            break
    unmeasured.within(room)
    return base, options


def _coarse_configs(config: VBConfig) -> list[VBConfig]:
    """Return the config with all layers in 4 bits, except those that it names, and then in 3. Raises ConfigError."""
    weights = config.weights
    record = FORMATS.get(weights.format)  # None: "auto"
    coarse = record is None or (record.bits <= 4 and not record.lossless)
    if not coarse or config.mode == "train":
        what = 'mode = "train"' if coarse else f'weights.format = "{weights.format}"'
        raise ConfigError(f"{config.source}: {what}; expected a format of 3 or 4 bits of a model that does not train")
    formats = (_COARSE, _LEAST) if record is None else (weights.format,)
    return [replace(config, weights=replace(weights, format=format, fine="none", budget=None)) for format in formats]


# -- alternatives -----------------------------------------------------------------------------------------------------


def _options(model: nn.Module, base: VBConfig) -> list[LayerPrecision]:
    """Return the layers that the config does not name, with their alternatives."""
    weights = base.weights
    refined = FORMATS[weights.format].bits == FORMATS[_COARSE].bits  # which a fine plane makes exact
    others = (
        replace(weights, fine="exact") if refined else replace(weights, format=_COARSE),
        replace(weights, format=_BETWEEN),
        replace(weights, format="dense", calibrate=None),
    )
    ways: dict[str, list[Way]] = {}
    for chosen in others:
        plain = tuple(pair for pair in chosen.formats if pair[1] != "exact")  # which some formats refuse
        for swap in swaps_with_pages(model, replace(base, weights=replace(chosen, formats=plain))):
            held = "exact" if swap.fine == "exact" else swap.format
            ways.setdefault(swap.name, []).append(Way(held, swap.page_bytes, lossless=swap.lossless))
    return [
        LayerPrecision(swap, _weights_of(swap), (Way(swap.format, swap.page_bytes), *_worth(ways[swap.name])))
        for swap in swaps_with_pages(model, base)
        if not swap.lossless and not _is_named(swap, weights.formats)
    ]


def _worth(ways: Sequence[Way]) -> list[Way]:
    """Return the smallest lossless way, after the smaller lossy ones."""
    last = min((way for way in ways if way.lossless), key=lambda way: (way.nbytes, way.held != "dense"))
    return [*(way for way in ways if not way.lossless and way.nbytes < last.nbytes), last]


def _is_named(swap: Swap, formats: Sequence[tuple[str, str]]) -> bool:
    names = [name for site in swap.sites for name in (site.module, site.name)]
    return any(fnmatchcase(name, pattern) for pattern, _ in formats for name in names)


def _weights_of(swap: Swap) -> int:
    return sum(site.parameters for site in (swap.site, *swap.parts))


# -- losses -----------------------------------------------------------------------------------------------------------


def _lossy(option: LayerPrecision) -> list[str]:
    return [way.held for way in option.ways if not way.lossless]


def _kl_losses(
    model: nn.Module, options: Sequence[LayerPrecision], batches: list[Any], device: torch.device
) -> list[dict[str, float]]:
    """Return the KL of each layer alone, by format."""
    references = [logits_of(model, batch) for batch in batches]
    losses: list[dict[str, float]] = []
    with Progress("measuring layers in each format", len(options), unit="layers") as work:
        for option in options:
            work.at(option.name)
            losses.append({})
            for format in _lossy(option):
                with rounded(model, option.swap, format, device):
                    losses[-1][format] = kl_between(model, batches, references)
            work.done()
    return losses


def _hessian_losses(
    model: nn.Module, options: Sequence[LayerPrecision], batches: list[Any], device: torch.device
) -> list[dict[str, float]]:
    """Return Σ (mean input² · error²) of each layer, by format: its output's squared error for uncorrelated inputs."""
    odd = next((o.name for o in options if KINDS[o.swap.kind].by_rows or KINDS[o.swap.kind].routed), None)
    if odd is not None:
        raise ArgumentError(f'{odd}: method = "hessian" knows linear layers only; method = "kl" measures any')
    squares = _input_squares(model, options, batches)
    losses = []
    work = Progress("measuring errors of layers", len(options), unit="layers")
    for option, square in _shown(work, options, squares):
        site, weight = option.swap.site, model.get_parameter(option.swap.site.tensor).detach().to(device)
        found = {}
        for format in _lossy(option):
            error = rounded_weight(weight, site, format, *option.swap.inputs).float() - weight.float()
            found[format] = float((error.t() if site.transposed else error).square().sum(0) @ square.to(error))
        losses.append(found)
    return losses


def _shown(
    work: Progress, options: Sequence[LayerPrecision], squares: Sequence[Tensor]
) -> Iterator[tuple[LayerPrecision, Tensor]]:
    """Yield layers with their squares, and show them as progress."""
    with work:
        for option, square in zip(options, squares, strict=True):
            work.at(option.name)
            yield option, square
            work.done()


def _input_squares(model: nn.Module, options: Sequence[LayerPrecision], batches: list[Any]) -> list[Tensor]:
    """Return the mean square of each input [K] of each layer; zeros for a layer that no forward calls."""
    found = [[torch.zeros(option.swap.shape[1], dtype=torch.float64, device="cpu"), 0] for option in options]

    def hook(at: int) -> Any:
        def add(module: nn.Module, args: tuple[Any, ...]) -> None:
            if not args or not isinstance(args[0], Tensor) or args[0].shape[-1] != len(found[at][0]):
                raise ArgumentError(f'{options[at].name}: not called with its inputs first; use method = "kl"')
            x = args[0].detach().float().flatten(0, -2)
            found[at][0] += x.square().sum(0).double().cpu()
            found[at][1] += len(x)

        return add

    modules = named_modules(model)
    hooks = [modules[o.swap.site.module].register_forward_pre_hook(hook(at)) for at, o in enumerate(options)]
    try:
        for batch in batches:
            logits_of(model, batch)
    finally:
        for handle in hooks:
            handle.remove()
    return [total / max(1, count) for total, count in found]
