"""`weights.calibrate` for weights in files: run the model on calibration inputs before any weight is encoded."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from vbrt.config import VBConfig
from vbrt.estimation.precision.input_statistics import with_inputs
from vbrt.residency.plan import Plan, Swap
from vbrt.residency.weight_site import ROOT, WeightSite
from vbrt.saves.files.read_target import HOST
from vbrt.saves.load.sources import Source
from vbrt.saves.published.dense_checkpoint import DenseCheckpoint

__all__ = ["calibrated"]


def calibrated(
    source: Source, model: nn.Module, plan: Plan, config: VBConfig, device: torch.device | None = None
) -> Plan:
    """Return the plan with input statistics on its swaps, as `weights.calibrate` asks; else the plan itself.

    The forward is streamed: one module's weights are in memory at a time, read as its forward begins.

    Args:
        model: outlined, its parameters on the meta device; afterwards those that are not swapped hold their values.
        device: to run on; by default the plan's compute device.

    Raises:
        CheckpointError: a file is damaged.
        ConfigError: as `with_inputs`.
    """
    if config.weights.calibrate is None or not isinstance(source, DenseCheckpoint):
        return plan  # saved planes are taken as they are
    encoded = tuple(filter(source.encodes, plan.swaps))
    readers = {
        (site.module, site.parameter): partial(source.dense, swap, site)
        for swap in plan.swaps
        for site in _all_sites(swap)
    }
    directory = source.path if source.path.is_dir() else source.path.parent
    with _without_swapped(model, plan):
        source.fill_kept_(model, HOST)
        found = with_inputs(
            model, replace(plan, swaps=encoded), config, readers, directory=str(directory), device=device
        )
    by_name = {swap.name: swap for swap in found.swaps}
    return replace(found, swaps=tuple(by_name.get(swap.name, swap) for swap in plan.swaps))


def _all_sites(swap: Swap) -> Iterator[WeightSite]:
    yield from swap.sites
    for tied in swap.tied:
        yield from (replace(part, module=tied.module) for part in swap.parts)


@contextmanager
def _without_swapped(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Context in which the model lacks its swapped parameters."""
    modules = {name or ROOT: module for name, module in model.named_modules(remove_duplicate=False)}
    sites = [site for swap in plan.swaps for site in _all_sites(swap)]
    own = [(modules[site.module]._parameters, site.parameter) for site in sites]
    kept = [(parameters, name, parameters[name]) for parameters, name in own]
    try:
        for parameters, name in own:
            parameters[name] = None
        yield
    finally:
        for parameters, name, parameter in kept:
            parameters[name] = parameter
