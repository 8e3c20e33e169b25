"""Planner: swaps, pages, homes and memory cost of wrapping a model, without reading or moving a weight.

It also works on models built under `torch.device("meta")`, so that a plan needs no weights.
"""

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn

from vbrt.config import (
    FORMATS,
    Machine,
    VBConfig,
    compute_tier,
    load_config,
    parse_budget,
    resolve_budgets,
    with_tier_budget,
)
from vbrt.config.argument_checks import check_instance
from vbrt.config.tier_records import TIERS
from vbrt.config.value_checks import shown
from vbrt.errors import ConfigError, NoRoomError, WrapError
from vbrt.formats import get_format
from vbrt.formats.fine_plane import estimate_fine_bytes
from vbrt.formats.joint_planes import join_layouts
from vbrt.formats.page import PAGE_ALIGN, PageLayout
from vbrt.host import accelerator
from vbrt.kernels import PageOrder
from vbrt.kernels.cuda.host_rows import serves
from vbrt.layers import KINDS, HandleSpec, SwappedLayer, kind_of
from vbrt.layers.weights.kernel_selection import planned_packing
from vbrt.model.machine_memory import this_machine
from vbrt.model.weight_choice import choose, named_modules, nbytes_of, why_none
from vbrt.residency.plan import Beside, PageSpec, Plan, Skip, Swap, format_bytes, place, with_whole_pages
from vbrt.residency.training_memory import with_state
from vbrt.residency.weight_site import ROOT

__all__ = ["make_plan", "noting_tables", "shown_plan", "swaps_with_pages", "with_tables_if_needed"]

_LARGE_TABLES, _LARGE_SHARE = 256 << 20, 0.1  # bytes, and part of a model: smaller tables stay parameters

_Made = TypeVar("_Made")

_KEPT_SHARE = 10  # a note if kept parameters are at least 1/10 of the model


def make_plan(
    model: nn.Module,
    config: VBConfig | Mapping[str, Any] | str | os.PathLike[str],
    machine: Machine | None = None,
    *,
    charge_kept: bool = True,
    saved: Sequence[Swap] | None = None,
    beside: Beside | None = None,
) -> Plan:
    """Return the plan for a model under a config on a machine (default: this one).

    Args:
        config: as for `vbrt.wrap`.
        machine: its memory and room on disk.
        charge_kept: subtract unswapped parameters from the memory for "auto" budgets. False shows by how much a
            model is too large.
        saved: swaps of a saved model, without pages; they replace the config's choice.
        beside: state of the shared runtime that the model joins; its budgets are taken unchanged.

    Raises:
        WrapError: the model is wrapped already.
        NoRoomError: the budgets are impossible for this model or this machine, or unswapped parameters do not fit, with
            lookup tables in the tiers either (unless `weights.embeddings` says what becomes of them).
        ConfigError: incompatible tiers.
    """
    check_instance(model, nn.Module, "make_plan(): model", "a torch.nn.Module")
    check_instance(machine, Machine | None, "make_plan(): machine", "a Machine, or None for this one")
    config = load_config(config)
    if config.gpu_memory is not None:
        raise ConfigError(
            f"{config.source}: gpu_memory = {shown(config.gpu_memory)}; make_plan counts pages alone: "
            "vbrt.estimate(model, config=...).plan derives their budget"
        )
    wrapped = [name for name, module in model.named_modules() if isinstance(module, SwappedLayer)]
    if wrapped:
        raise WrapError(f"{wrapped[0] or ROOT} is a VB layer already: this model is wrapped; unwrap() it first")
    if config.tiers.gpu.devices != "current":
        raise ConfigError(
            f"{config.source}: tiers.gpu.devices = {list(config.tiers.gpu.devices)}; vbrt.wrap of one model splits it "
            'over devices, nothing else does: load it first, or set devices = "current"'
        )
    machine = machine or this_machine(config)
    plan = functools.partial(_plan, model, machine=machine, charge_kept=charge_kept, saved=saved, beside=beside)
    if saved is not None:
        return plan(config)
    large = _large_tables(model, config, machine)
    if large:
        others = (name for name in _tables(model, config) if name not in large)
        shared = tuple(n for n in others if not any(fnmatchcase(n, p) for p in config.weights.exclude))
        with contextlib.suppress(NoRoomError):  # else it is that of the given config
            found = _noting(plan(_holding(config, large, shared)), large, "that take a tenth of the model or more")
            return _keeping(found, shared)
    return noting_tables(*with_tables_if_needed(model, config, plan))


def with_tables_if_needed(
    model: nn.Module, config: VBConfig, made: Callable[[VBConfig], _Made]
) -> tuple[_Made, tuple[str, ...]]:
    """Return what is made of a config, or, if that has no room, of the one with lookup tables in the tiers; and the
    names of these. Raises NoRoomError, that of the given config, if neither has room."""
    try:
        return made(config), ()
    except NoRoomError as error:
        tables = _tables(model, config)
        if not tables:
            raise
        try:
            return made(_holding(config, tables)), tables
        except NoRoomError:
            raise error from None


def noting_tables(plan: Plan, names: Collection[str]) -> Plan:
    """Return a plan with lookup tables in the tiers for lack of room, which nobody has asked for, and a note and a
    warning of it."""
    noted = _noting(plan, names, "do not fit beside the rest, and")
    return replace(noted, warnings=(*plan.warnings, *noted.notes[len(plan.notes) :]))


def _noting(plan: Plan, names: Collection[str], why: str) -> Plan:
    swapped = [swap for swap in plan.swaps if any(site.module in names for site in swap.sites)]
    if not swapped:
        return plan
    listed = ", ".join(f"{swap.site.name} ({format_bytes(swap.dense_bytes)})" for swap in swapped)
    note = f"lookup tables {why} are held in the tiers, in their own bits: {listed}"
    if any(page.home == "ssd" for swap in swapped for page in swap.pages if page.by_rows):
        note += ". Each pass waits for its ids, to read rows from files, and no step is recorded"
    return replace(plan, notes=(*plan.notes, note))


def _tables(model: nn.Module, config: VBConfig) -> tuple[str, ...]:
    """Return the lookup tables of a model; none if the config says what becomes of them."""
    if config.mode != "infer" or config.weights.embeddings != "auto":
        return ()
    kinds = {name: kind_of(module) for name, module in named_modules(model).items()}
    return tuple(name for name, kind in kinds.items() if kind is not None and kind.by_rows)


def _large_tables(model: nn.Module, config: VBConfig, machine: Machine) -> tuple[str, ...]:
    """Return the lookup tables that no other layer shares if they take a tenth of a model, and a GPU computes, which
    reads their rows in page-locked memory."""
    tables, modules, cpu = _tables(model, config), named_modules(model), config.tiers.cpu
    if not tables or compute_tier(config, machine) != "gpu" or not (cpu.enabled and cpu.pinned) or cpu.shared:
        return ()
    if accelerator.is_available() and not serves(torch.device(accelerator.TYPE, accelerator.current_device())):
        return ()  # this machine's GPU would wait for the ids of each pass
    users = Counter(id(parameter) for module in modules.values() for parameter in module._parameters.values())
    own = tuple(name for name in tables if users[id(modules[name].weight)] == 1)
    every = sum(parameter.nbytes for parameter in model.parameters())
    large = sum(modules[name].weight.nbytes for name in own) >= max(_LARGE_TABLES, every * _LARGE_SHARE)
    return own if large else ()


def _holding(config: VBConfig, tables: Sequence[str], kept: Sequence[str] = ()) -> VBConfig:
    """Return the config with these tables in the tiers, in their own bits, and without those of `kept`."""
    formats = (*((table, "dense") for table in tables), *config.weights.formats)
    exclude = (*config.weights.exclude, *kept)
    return replace(config, weights=replace(config.weights, embeddings=True, formats=formats, exclude=exclude))


def _keeping(plan: Plan, tables: Sequence[str]) -> Plan:
    """Return a plan that leaves these tables out, with the reason."""
    reason = "a lookup table whose weight another layer reads whole; weights.embeddings = true swaps both"
    kept = {name: replace(plan.skipped[name], reason=reason) for name in tables if name in plan.skipped}
    return replace(plan, skipped={**plan.skipped, **kept})


def _plan(
    model: nn.Module,
    config: VBConfig,
    *,
    machine: Machine,
    charge_kept: bool,
    saved: Sequence[Swap] | None,
    beside: Beside | None,
) -> Plan:
    modules = named_modules(model)
    swaps, skipped = choose(model, config, saved)
    if config.mode == "full":
        swaps = [whole for swap in swaps for whole in _by_parameter(swap)]
    config = with_tier_budget(config, compute_tier(config, machine))
    if config.mode == "train":
        return _training_plan(tuple(swaps), config, machine, modules, skipped)
    left = _after_wrapping(model, config, machine, skipped, charge_kept=charge_kept)
    beside_gpu = _beside_the_ring(modules, swaps) if config.mode == "full" and left.gpu_free_bytes is not None else 0
    if beside_gpu:
        left = replace(left, gpu_free_bytes=max(0, left.gpu_free_bytes - beside_gpu))
    budgets, others = (_budgets(config, left), ()) if beside is None else (dict(beside.budgets), beside.layers)
    if config.mode == "full":
        swaps = [
            replace(swap, dtype="bfloat16") for swap in swaps
        ]  # pages hold bf16 halves; see `vbrt/training/full/full_weight.py`
    layers = [_pages_on(swap, config, "gpu" in budgets) for swap in swaps]
    rooms = with_whole_pages(budgets, layers, machine.peers)
    if config.mode == "full":  # the host updates these pages in place
        rooms = {name: room for name, room in rooms.items() if name not in ("gpu", "peer")}
    homes = _homes([*others, *_leased_together(swaps, layers)], rooms, config, skipped)
    if config.mode == "full":
        layers, homes = with_state(swaps, layers, homes, rooms, config)
    placed = tuple(_placed(swap, pages, homes) for swap, pages in zip(swaps, layers, strict=True))
    divided = _divided(config, machine, budgets) if beside is None else ()
    notes = (*_idle_gpu(config, machine), *divided, *_notes(placed, config, modules, skipped))
    if beside_gpu and "gpu" in budgets:
        said = "two gradients on their way, gradients and fp32 moments of parameters that stay"
        notes += (f"beside its budget and activations the gpu holds {format_bytes(beside_gpu)}: {said}",)
    warnings = notes[-1:]
    if placed:
        short, said = _kept_beside(placed, skipped, budgets, left)
        notes, warnings = (notes, said) if short else ((*notes, *said), ())
    return Plan(placed, skipped, budgets, notes, config.mode, warnings=warnings)


def shown_plan(model: nn.Module, config: VBConfig, machine: Machine) -> Plan:
    """Return the plan of `wrap`; where `wrap` would refuse for lack of memory, a plan that shows the shortage.

    Raises ConfigError: budgets are impossible for this model.
    """
    try:
        return make_plan(model, config, machine)
    except ConfigError:
        return make_plan(model, config, machine, charge_kept=False)


def swaps_with_pages(model: nn.Module, config: VBConfig) -> list[Swap]:
    """Return the swaps of a model with their pages, without homes: budgets are ignored.

    Raises ConfigError as `choose` does.
    """
    on_gpu = accelerator.is_used(config.tiers.gpu.enabled)
    return [replace(swap, pages=_pages_on(swap, config, on_gpu)) for swap in choose(model, config)[0]]


def _by_parameter(swap: Swap) -> list[Swap]:
    """Split a swap of routed experts into one per stacked parameter, each as one weight."""
    if not swap.experts:
        return [swap]
    itemsize = getattr(torch, swap.dtype).itemsize
    return [
        replace(
            swap, site=site, parts=(), experts=0, top_k=0, inputs=(), dense_bytes=site.parameters * itemsize,
            tied=tuple(replace(site, module=other.module) for other in swap.tied),
        )
        for site in (swap.site, *swap.parts)
    ]  # fmt: skip


def _leased_together(swaps: Sequence[Swap], layers: Sequence[tuple[PageSpec, ...]]) -> list[tuple[PageSpec, ...]]:
    """Group pages by lease: all stacked parameters of a module are leased together."""
    found: dict[str, tuple[PageSpec, ...]] = {}
    for swap, pages in zip(swaps, layers, strict=True):
        found[swap.lease] = (*found.get(swap.lease, ()), *pages)
    return list(found.values())


def _training_plan(
    swaps: tuple[Swap, ...], config: VBConfig, machine: Machine, modules: dict[str, nn.Module], skipped: dict[str, Skip]
) -> Plan:
    """Return a plan without pages: every weight stays a parameter."""
    tier = compute_tier(config, machine)
    what = f'mode = "train": the weights stay parameters in the {tier} memory, nothing moves and no budget applies'
    notes = (what, *_notes(swaps, config, modules, skipped))
    return Plan(swaps, skipped, {tier: 0}, notes, config.mode, warnings=() if swaps else notes[-1:])


# -- memory cost ------------------------------------------------------------------------------------------------------


def _pages_on(swap: Swap, config: VBConfig, on_gpu: bool) -> tuple[PageSpec, ...]:
    device = torch.device(accelerator.TYPE if on_gpu else "cpu")
    spec = HandleSpec.of(swap, config)
    return _pages(swap, planned_packing(spec, device), coded=spec.codes_fine(device))


def _pages(swap: Swap, packing: PageOrder | None, *, coded: bool) -> tuple[PageSpec, ...]:
    """Return the pages of a weight without homes; static sizes are exact, the fine plane's is an upper bound."""
    by_rows = all(KINDS[site.kind].by_rows for site in swap.sites)
    planes = _plane_bytes(swap, None if by_rows else packing, coded=coded)
    if not swap.experts:
        return tuple(PageSpec(swap.site.page_key(plane), plane, n, by_rows=by_rows) for plane, n in planes.items())
    return tuple(
        PageSpec(swap.site.expert_key(plane, expert), plane, nbytes, top_k=swap.top_k)
        for expert in range(swap.experts)
        for plane, nbytes in planes.items()
    )


def _plane_bytes(swap: Swap, packing: PageOrder | None, *, coded: bool) -> dict[str, int]:
    """Return the bytes per page by plane: of the weight, or of one expert."""
    dtype, sites = getattr(torch, swap.dtype), (swap.site, *swap.parts)
    lossless = FORMATS[swap.format].lossless
    if lossless and not swap.experts:  # stacked experts that train from the tiers: all of them in a page
        return {"dense": get_format(swap.format).layout(swap.site.kept_shape, dtype).nbytes}
    nbytes = _joint_bytes(
        get_format(format).layout(site.matrix_shape if lossless else site.shape, dtype)
        for site, format in zip(sites, swap.part_formats, strict=True)
    )
    if lossless:
        return {"dense": nbytes}
    if packing:  # values decide whether a weight can have the kernel's order
        nbytes = max(nbytes, _joint_bytes(packing.layout(site.shape) for site in sites))
    if swap.fine == "none":
        return {"coarse": nbytes}
    fine = sum(int(estimate_fine_bytes(site.shape, dtype, coded=coded) * 1.1) for site in sites)
    return {"coarse": nbytes, "fine": -(-fine // PAGE_ALIGN) * PAGE_ALIGN + PAGE_ALIGN}


def _joint_bytes(layouts: Iterable[PageLayout]) -> int:
    """Return the bytes of a page with these layouts concatenated."""
    layouts = dict(zip("abc", layouts, strict=False))
    return (join_layouts(layouts) if len(layouts) > 1 else layouts["a"]).nbytes


def _placed(swap: Swap, pages: tuple[PageSpec, ...], homes: dict[str, str]) -> Swap:
    return replace(swap, pages=tuple(replace(page, home=homes[page.key]) for page in pages))


def _budgets(config: VBConfig, machine: Machine) -> dict[str, int]:
    """Return the bytes of each tier, the computing tier first."""
    budgets = resolve_budgets(config, machine)
    ordered = {tier: budgets[tier] for tier in TIERS if tier in budgets}
    if "gpu" in ordered and "ssd" in ordered and "cpu" not in ordered:
        raise ConfigError(
            f"{config.source}: tiers.ssd.enabled = true with tiers.cpu.enabled = false; pages travel "
            "from the ssd to the gpu through the cpu tier, enable it"
        )
    return ordered


def _after_wrapping(
    model: nn.Module, config: VBConfig, machine: Machine, skipped: dict[str, Skip], *, charge_kept: bool
) -> Machine:
    """Return the machine's free memory after wrapping: weights in pages, kept parameters on the computing device."""
    held = {"cpu": 0, accelerator.TYPE: 0}
    for parameter in model.parameters():
        if parameter.device.type in held:
            held[parameter.device.type] += nbytes_of(parameter)
    free = {"cpu": min(machine.cpu_total_bytes, machine.cpu_available_bytes + held["cpu"]), "gpu": None}
    if machine.gpu_total_bytes is not None:
        free["gpu"] = held[accelerator.TYPE] + (
            machine.gpu_total_bytes if machine.gpu_free_bytes is None else machine.gpu_free_bytes
        )
    if charge_kept:
        tier = compute_tier(config, machine)
        kept = sum(skip.nbytes for skip in skipped.values())
        if kept > free[tier]:
            raise NoRoomError(_kept_does_not_fit(tier, kept, free[tier], config, skipped))
        free[tier] -= kept
    return replace(machine, gpu_free_bytes=free["gpu"], cpu_available_bytes=free["cpu"])


def _beside_the_ring(modules: dict[str, nn.Module], swaps: Sequence[Swap]) -> int:
    """Return the extra GPU bytes of training from the tiers, besides budget, parameters and activations."""
    swapped = {id(modules[site.module]._parameters[site.parameter]) for swap in swaps for site in swap.sites}
    kept = [p for p in modules[ROOT].parameters() if p.requires_grad and id(p) not in swapped]
    state = sum(p.numel() * (p.itemsize + 8 + 2 * (p.dtype is torch.bfloat16)) for p in kept)
    return 2 * 2 * max((swap.site.parameters for swap in swaps), default=0) + state


def _kept_does_not_fit(tier: str, kept: int, free: int, config: VBConfig, skipped: dict[str, Skip]) -> str:
    remedy = "weights.include, weights.exclude and weights.keep_head say what is swapped"
    if tier == "gpu":
        remedy += "; tiers.gpu.enabled = false computes on the cpu"
    return (
        f"{config.source}: kept parameters of {kept} bytes ({format_bytes(kept)}), which are not swapped, do not "
        f"fit into the {tier} memory: {format_bytes(free)} are free. The largest are {_largest(skipped)}. {remedy}"
    )


def _largest(skipped: dict[str, Skip], count: int = 3) -> str:
    """Return text that lists the largest kept parameters with bytes and reasons."""
    largest = sorted(skipped.items(), key=lambda item: -item[1].nbytes)[:count]
    return ", ".join(
        f"{name} ({format_bytes(skip.nbytes)}; {skip.reason})"
        for name, skip in largest
        if 10 * skip.nbytes >= largest[0][1].nbytes
    )


def _homes(
    layers: list[tuple[PageSpec, ...]], budgets: dict[str, int], config: VBConfig, skipped: dict[str, Skip]
) -> dict[str, str]:
    """Return the home of each page; the error for lack of room also names other users of the memory."""
    try:
        return place(layers, budgets, source=config.source)
    except NoRoomError as error:
        tier, kept = next(iter(budgets)), sum(skip.nbytes for skip in skipped.values())
        if not kept or getattr(config.tiers, tier).budget != "auto":
            raise
        raise NoRoomError(
            f"{error}. The {tier} also holds kept parameters of {format_bytes(kept)}, which are not "
            f"swapped; the largest are {_largest(skipped)}"
        ) from error


def _notes(
    swaps: tuple[Swap, ...], config: VBConfig, modules: dict[str, nn.Module], skipped: dict[str, Skip]
) -> tuple[str, ...]:
    others = Counter(swap.note for swap in swaps if swap.format != config.weights.format and swap.note)
    names = [name for swap in swaps for site in swap.sites for name in (site.module, site.name)]
    idle = [pattern for pattern, _ in config.weights.formats if not any(fnmatchcase(n, pattern) for n in names)]
    notes = [f"{count} layers: {note}" for note, count in others.items()]
    notes += [f"weights.formats has {pattern!r}, which no swapped layer matches" for pattern in idle]
    for key in ("include", "exclude"):
        patterns = getattr(config.weights, key)
        idle = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in modules)]
        notes += [f"weights.{key} has {pattern!r}, which no module matches" for pattern in idle]
    if not swaps:
        saves = " and saves no memory" if config.mode == "infer" else ""
        notes.append(f"nothing is swapped, the model stays as it is{saves}: {why_none(modules, skipped)}")
    return tuple(notes)


def _idle_gpu(config: VBConfig, machine: Machine) -> tuple[str, ...]:
    gpu = config.tiers.gpu
    if not gpu.enabled or gpu.budget == "auto" or machine.gpu_total_bytes is not None:
        return ()
    return (f"tiers.gpu.budget = {gpu.budget!r} is for a GPU, and this machine has none: the cpu computes",)


def _divided(config: VBConfig, machine: Machine, budgets: Mapping[str, int]) -> tuple[str, ...]:
    """Return a note for each budget that is a rank's share of memory."""
    ranks = {"gpu": machine.ranks_on_gpu, "cpu": machine.ranks_here, "ssd": machine.ranks_here}
    asked = {tier: getattr(config.tiers, tier).budget for tier in budgets if ranks.get(tier, 1) > 1}
    return tuple(
        f'tiers.{tier}.budget = "{budget}" is one of {ranks[tier]} equal shares, for the ranks '
        f"{'on this GPU' if tier == 'gpu' else 'of this machine'} ({machine.ranks_said_by})"
        for tier, budget in asked.items()
        if parse_budget(budget, where=tier).kind != "bytes"
    )


def _kept_beside(
    swaps: tuple[Swap, ...], skipped: dict[str, Skip], budgets: dict[str, int], left: Machine
) -> tuple[bool, tuple[str, ...]]:
    """Return whether unswapped parameters leave the computing tier's pages too little memory, and a text that says so,
    or that they are much of the model."""
    kept, tier = sum(skip.nbytes for skip in skipped.values()), next(iter(budgets))
    total = kept + sum(swap.dense_bytes for swap in swaps)
    pages = min(budgets[tier], sum(swap.page_bytes for swap in swaps))
    free = left.gpu_free_bytes if tier == "gpu" else left.cpu_available_bytes
    if kept * _KEPT_SHARE <= total and pages <= free:
        return False, ()
    short = (
        ""
        if pages <= free
        else (f", and do not fit beside its budget: {format_bytes(pages)} of pages find {format_bytes(free)} free")
    )
    text = (
        f"{format_bytes(kept)} of the model's {format_bytes(total)} are not swapped and stay in the {tier} memory, "
        f"outside the budgets{short}; the largest part is {_largest(skipped, count=1)}"
    )
    return pages > free, (text,)
