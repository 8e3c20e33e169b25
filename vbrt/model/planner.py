"""What a model contains and what wrapping it will cost: the plan, made without moving or reading a weight.

Works on real models and on models built under `torch.device("meta")`, so that a plan needs no weights.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from vbrt.config import Machine, VBConfig, compute_tier, resolve_budgets
from vbrt.errors import ConfigError, TierError, WrapError, describe_os_error
from vbrt.formats import get_format
from vbrt.formats.fine import estimate_fine_bytes
from vbrt.formats.page import PAGE_ALIGN
from vbrt.kernels import Packing, page_packing, resolve, resolves_late
from vbrt.layers import SwappedLayer, kind_of
from vbrt.model.heads import find_heads
from vbrt.residency.plan import PageSpec, Plan, Skip, Swap, format_bytes, place

__all__ = ["ROOT", "make_plan", "this_machine", "with_freed"]

ROOT = "(root)"  # what a model itself is called among its modules
_KEPT_SHARE = 10  # a part of so many, kept, is worth a warning
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def make_plan(
    model: nn.Module,
    config: VBConfig,
    machine: Machine | None = None,
    *,
    charge_kept: bool = True,
    chosen: Sequence[Swap] | None = None,
) -> Plan:
    """The plan for a model under a config on a machine (default: this one).

    Args:
        chosen: what is swapped, without pages, instead of what the config would choose: for a model that was saved.
        charge_kept: take what is not swapped off the memory that "auto" budgets share out. False is for showing by
            how much a model is too large.

    Raises:
        WrapError: the model is wrapped already.
        ConfigError: the budgets are impossible for this model or this machine, or what is not swapped does not fit.
    """
    wrapped = [name for name, module in model.named_modules() if isinstance(module, SwappedLayer)]
    if wrapped:
        raise WrapError(f"{wrapped[0] or ROOT} is a VB layer already: this model is wrapped; unwrap() it first")
    modules = _named_modules(model)
    refused: dict[str, Skip] = {}
    swaps = list(_choose(model, modules, config, refused))
    if chosen is not None:
        swaps = _as_chosen(swaps, chosen, refused, config)
    skipped = _account_rest(modules, swaps, refused)
    machine = machine or this_machine(config)
    if config.mode == "train":
        return _training_plan(tuple(swaps), config, machine, modules, skipped)
    left = _after_wrapping(model, config, machine, skipped, charge_kept=charge_kept)
    budgets = _budgets(config, left)
    device = torch.device("cuda" if "gpu" in budgets else "cpu")
    layers = [_pages(swap, _packing(swap.format, config, device)) for swap in swaps]
    homes = _homes(layers, budgets, config, skipped)
    placed = tuple(_placed(swap, pages, homes) for swap, pages in zip(swaps, layers, strict=True))
    notes = (*_idle_gpu(config, machine), *_notes(placed, config, modules, skipped))
    warnings = _kept_warning(placed, skipped, budgets, left) if placed else notes[-1:]
    return Plan(placed, skipped, budgets, notes, warnings=warnings)


def _training_plan(
    swaps: tuple[Swap, ...], config: VBConfig, machine: Machine, modules: dict[str, nn.Module], skipped: dict[str, Skip]
) -> Plan:
    """No pages: every weight stays the parameter that it is."""
    tier = compute_tier(config, machine)
    what = f'mode = "train": the weights stay parameters in the {tier} memory, nothing moves and no budget applies'
    notes = (what, *_notes(swaps, config, modules, skipped))
    return Plan(swaps, skipped, {tier: 0}, notes, config.mode, warnings=() if swaps else notes[-1:])


def this_machine(config: VBConfig) -> Machine:
    """What this machine has, in bytes: GPU and host memory, and room on the disk of `tiers.ssd.path`.

    Raises TierError: the system does not say, for want of descriptors for one.
    """
    try:
        memory, ssd_free = psutil.virtual_memory(), _disk_free(config)
    except OSError as error:
        raise TierError(
            f"this machine: the system does not say what memory and disks it has "
            f"({describe_os_error(error)}: {error.filename}); try again once that is mended"
        ) from error
    gpu_free, gpu_total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (None, None)
    if gpu_free is not None:
        gpu_free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return Machine(
        gpu_total_bytes=gpu_total,
        gpu_free_bytes=gpu_free,
        cpu_total_bytes=memory.total,
        cpu_available_bytes=memory.available,
        ssd_free_bytes=ssd_free,
    )


def with_freed(machine: Machine, tier: str, nbytes: int) -> Machine:
    """The machine as if `nbytes` that a tier holds were free."""
    if tier == "gpu":
        return replace(machine, gpu_free_bytes=machine.gpu_free_bytes + nbytes)
    if tier == "cpu":
        return replace(machine, cpu_available_bytes=machine.cpu_available_bytes + nbytes)
    return replace(machine, ssd_free_bytes=machine.ssd_free_bytes + nbytes)


def _disk_free(config: VBConfig) -> int | None:
    if not config.tiers.ssd.enabled:
        return None
    path = Path(config.tiers.ssd.path).expanduser().absolute()
    existing = next(p for p in (path, *path.parents) if os.path.exists(p))  # Path.exists() raises where it may not look
    return psutil.disk_usage(str(existing)).free


# -- what to swap -----------------------------------------------------------------------------------------------------


def _named_modules(model: nn.Module) -> dict[str, nn.Module]:
    return {name or ROOT: module for name, module in model.named_modules()}


def _choose(
    model: nn.Module, modules: dict[str, nn.Module], config: VBConfig, skipped: dict[str, Skip]
) -> Iterator[Swap]:
    """Swaps in the order of the model; every candidate that is refused goes to `skipped`.

    A weight that several modules hold is swapped for all of them, or for none.
    """
    candidates = {name: module for name, module in modules.items() if kind_of(module)}
    holders, heads = _holders(modules), find_heads(modules)
    some_frozen = any(_frozen(module) for module in candidates.values())
    overlaps = _overlaps(modules)
    reasons = {
        name: overlaps.get(name) or _refusal(name, module, config, heads, some_frozen)
        for name, module in candidates.items()
    }
    done: set[str] = set()
    for name, module in candidates.items():
        if name in done:
            continue
        weight = module._parameters.get("weight")
        held_as = [(name, "weight")] if weight is None else holders[_storage_key(weight)]
        tied = [o for o, held in held_as if o in candidates and held == "weight"]
        refused = {o: _refused_for_others(o, held_as, candidates, reasons) or reasons[o] for o in tied}
        done.update(tied)
        if not any(refused.values()):
            yield _swap(tied, module, config)
        else:
            skipped.update((o, Skip(0, reason)) for o, reason in refused.items())  # bytes come with the accounting


def _as_chosen(swaps: list[Swap], chosen: Sequence[Swap], skipped: dict[str, Skip], config: VBConfig) -> list[Swap]:
    """`chosen` instead of `swaps`; `skipped` follows."""
    names = {name for swap in chosen for name in (swap.name, *swap.aliases)}
    for name in names & skipped.keys():
        del skipped[name]
    others = {name for swap in swaps for name in (swap.name, *swap.aliases)} - names
    skipped.update((name, Skip(0, "it was not swapped when the model was saved")) for name in others)
    return [replace(swap, note=_note(swap.shape, swap.dtype, swap.format, config)) for swap in chosen]


def _refused_for_others(
    name: str, held_as: list[tuple[str, str]], candidates: dict[str, nn.Module], reasons: dict[str, str | None]
) -> str | None:
    """Why a weight stays because of what else is on its storage, `held_as`: (module, parameter or buffer)."""
    for owner, held in held_as:
        if (owner, held) == (name, "weight"):
            continue
        if held != "weight" or owner not in candidates or reasons[owner]:
            return f"shares storage with {owner}.{held}, which stays dense"
        if not _same_view(candidates[name], candidates[owner]):
            return f"shares storage with {owner}.{held} in another layout"
    return None


def _same_view(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.weight, other.weight
    return type(one) is type(other) and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def _frozen(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and not weight.requires_grad


def _refusal(name: str, module: nn.Module, config: VBConfig, heads: dict[int, str], some_frozen: bool) -> str | None:
    """Why a Linear or Conv1D stays as it is for its own sake; None when it may be swapped."""
    wanted, weight = config.weights, module._parameters.get("weight")
    if weight is None:
        made_by = next((n for n in ("weight_orig", "weight_g") if n in module._parameters), None)
        return (
            f"its weight is recomputed from {made_by} by a hook (spectral_norm, weight_norm or pruning)"
            if made_by
            else "its weight is not a parameter"
        )
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}, not a plain Parameter"
    if not wanted.include or not any(fnmatchcase(name, pattern) for pattern in wanted.include):
        return f"not in weights.include = {list(wanted.include)}"
    excluded = next((pattern for pattern in wanted.exclude if fnmatchcase(name, pattern)), None)
    if excluded:
        return f"weights.exclude has {excluded!r}"
    if wanted.keep_head and id(module) in heads:
        return f"output head ({heads[id(module)]}); weights.keep_head = false swaps it"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance (accelerate's hooks do: remove_hook_from_submodules first)"
    if weight.numel() < wanted.min_parameters:
        return f"{weight.numel()} parameters; weights.min_parameters = {wanted.min_parameters}"
    if not weight.numel() or weight.dim() != 2:
        return f"its weight has shape {tuple(weight.shape)}"
    if config.mode == "infer" and some_frozen and weight.requires_grad:
        return "it trains (requires_grad) while other layers are frozen; requires_grad_(False) lets it be swapped"
    exact = wanted.format == "dense" or wanted.fine == "exact"
    if weight.dtype not in _FLOATS and not (exact and weight.dtype is torch.float64):
        dtype = str(weight.dtype).removeprefix("torch.")
        return f"its weight is {dtype}; {wanted.format} holds float32, bfloat16, float16"
    return None


def _holders(modules: dict[str, nn.Module]) -> dict[tuple, list[tuple[str, str]]]:
    """The (module, parameter or buffer) on each storage."""
    holders: dict[tuple, list[tuple[str, str]]] = defaultdict(list)
    for name, held, tensor in _tensors(modules):
        holders[_storage_key(tensor)].append((name, held))
    return holders


def _tensors(modules: dict[str, nn.Module]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(module, name, tensor) of every parameter and buffer that has a shape."""
    for name, module in modules.items():
        for held, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and not _uninitialized(tensor):
                yield name, held, tensor


def _overlaps(modules: dict[str, nn.Module]) -> dict[str, str]:
    """Modules whose weight lies in memory that another parameter or buffer covers in part, with the reason."""
    spans = sorted(
        (*_span(tensor), _storage_key(tensor), name, held)
        for name, held, tensor in _tensors(modules)
        if len(_storage_key(tensor)) > 1
    )
    found: dict[str, str] = {}
    furthest = None
    for span in spans:
        device, begin, end, key, name, held = span
        if furthest and furthest[0] == device and begin < furthest[2] and key != furthest[3]:
            for (one, as_what), (other, other_held) in (((name, held), furthest[4:]), (furthest[4:], (name, held))):
                if as_what == "weight":
                    found[one] = f"its memory overlaps that of {other}.{other_held}, and a write to one changes both"
        if not furthest or furthest[0] != device or end > furthest[2]:
            furthest = span
    return found


def _span(tensor: torch.Tensor) -> tuple[str, int, int]:
    """The device, and the addresses between which the elements lie."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return str(tensor.device), begin, begin + (last + 1) * tensor.element_size()


def _storage_key(parameter: torch.Tensor) -> tuple:
    plain = type(parameter.data) is torch.Tensor and parameter.layout is torch.strided and not parameter.is_nested
    if parameter.device.type == "meta" or not parameter.numel() or not plain:
        return (id(parameter),)
    return (str(parameter.device), parameter.data_ptr(), parameter.numel())


def _uninitialized(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, nn.parameter.UninitializedTensorMixin)


def _nbytes(tensor: torch.Tensor) -> int:
    return 0 if _uninitialized(tensor) else tensor.numel() * tensor.element_size()


def _swap(names: list[str], module: nn.Module, config: VBConfig) -> Swap:
    weight, kind = module.weight, kind_of(module)
    shape = tuple(weight.shape)[::-1] if kind == "Conv1D" else tuple(weight.shape)
    wanted, dtype = config.weights, weight.dtype
    format, fine = wanted.format, wanted.fine
    if fine == "exact" and dtype not in (torch.bfloat16, torch.float16):
        format, fine = "dense", "none"
    dtype = str(dtype).removeprefix("torch.")
    return Swap(
        names[0],
        kind,
        shape,
        dtype,
        _nbytes(weight),
        format,
        fine,
        (),
        tuple(names[1:]),
        _note(shape, dtype, format, config),
    )


def _note(shape: tuple[int, int], dtype: str, format: str, config: VBConfig) -> str:
    """What is to be said of a swap, if anything."""
    if format == "dense" and config.weights.fine == "exact":
        return f"{dtype} has no fine plane: held dense, which is exact; bfloat16 halves it"
    if format != "dense" and shape[1] % get_format(format).block:
        return f"in_features {shape[1]} padded to a multiple of {get_format(format).block}"
    return ""


def _account_rest(modules: dict[str, nn.Module], swaps: list[Swap], skipped: dict[str, Skip]) -> dict[str, Skip]:
    """`skipped` with the bytes of everything that is not swapped, once per storage, in the order of the model.

    A storage that a refused layer shares is counted where it stays dense, such as at the embedding of a tied head.
    """
    swapped = {name for swap in swaps for name in (swap.name, *swap.aliases)}
    seen = {_storage_key(modules[name].weight) for name in swapped}
    rest = dict(skipped)
    for name in sorted(modules, key=lambda name: name in skipped):
        module = modules[name]
        own = {n: p for n, p in module._parameters.items() if p is not None}
        if any(map(_uninitialized, own.values())):
            rest[name] = Skip(0, f"{type(module).__name__} before its first call: run the model once, then wrap it")
            continue
        fresh = {n: p for n, p in own.items() if _storage_key(p) not in seen}
        seen |= {_storage_key(p) for p in fresh.values()}
        if fresh:
            reason = skipped[name].reason if name in skipped else _why_kept(module, fresh, is_swapped=name in swapped)
            rest[name] = Skip(sum(map(_nbytes, fresh.values())), reason)
    return {name: rest[name] for name in modules if name in rest}


def _why_kept(module: nn.Module, own: dict[str, nn.Parameter], *, is_swapped: bool) -> str:
    kind = type(module).__name__
    if is_swapped:
        return "bias of a swapped layer"
    experts = [n for n, p in own.items() if p.dim() == 3 and p.shape[0] > 1]  # [1, ...]: position embeddings
    if experts and not type(module).__module__.startswith("torch.nn."):
        names = ", ".join(experts)
        return f"{kind}: 3-D parameters ({names}), such as routed experts, are not nn.Linear and stay dense"
    if isinstance(module, nn.Embedding):
        return f"{kind}: a lookup table, read by rows"
    if isinstance(module, nn.MultiheadAttention):
        return f"{kind}: reads its projections ({', '.join(own)}) without calling them"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return f"{kind}: nn.MultiheadAttention reads its weight without calling it"
    if isinstance(module, nn.Linear) and is_parametrized(module):
        return "its weight is computed by a parametrization: remove_parametrizations first"
    if isinstance(module, nn.Linear):
        return f"{kind}: a subclass of nn.Linear with semantics of its own"
    return f"{kind}: not an nn.Linear"


# -- what it costs ----------------------------------------------------------------------------------------------------


def _pages(swap: Swap, packing: Packing | None) -> tuple[PageSpec, ...]:
    """The pages of a layer without homes; static sizes are exact, the fine plane is an estimate from above."""
    dtype, shape = getattr(torch, swap.dtype), swap.shape
    if swap.format == "dense":
        stored = shape[::-1] if swap.kind == "Conv1D" else shape
        return (PageSpec(f"{swap.name}#dense", "dense", get_format("dense").layout(stored, dtype).nbytes),)
    nbytes = get_format(swap.format).layout(shape, dtype).nbytes
    if swap.fine == "none":
        packed = packing.layout(shape).nbytes if packing else 0  # whether a weight fits that order, its values decide
        return (PageSpec(f"{swap.name}#coarse", "coarse", max(nbytes, packed)),)
    coarse = PageSpec(f"{swap.name}#coarse", "coarse", nbytes)
    fine = -(-int(estimate_fine_bytes(shape, dtype) * 1.1) // PAGE_ALIGN) * PAGE_ALIGN + PAGE_ALIGN
    return (coarse, PageSpec(f"{swap.name}#fine", "fine", fine))


def _packing(format: str, config: VBConfig, device: torch.device) -> Packing | None:
    if resolves_late(config.compute.backend, device):
        return None
    return page_packing(resolve("linear", config.compute.backend, device, format), format)


def _placed(swap: Swap, pages: tuple[PageSpec, ...], homes: dict[str, str]) -> Swap:
    return replace(swap, pages=tuple(replace(page, home=homes[page.key]) for page in pages))


def _budgets(config: VBConfig, machine: Machine) -> dict[str, int]:
    """Bytes of each tier, computing tier first."""
    budgets = resolve_budgets(config, machine)
    ordered = {tier: budgets[tier] for tier in ("gpu", "cpu", "ssd") if tier in budgets}
    if "gpu" in ordered and "ssd" in ordered and "cpu" not in ordered:
        raise ConfigError(
            f"{config.source}: tiers.ssd.enabled = true with tiers.cpu.enabled = false; pages travel "
            "from the ssd to the gpu through the cpu tier, enable it"
        )
    return ordered


def _after_wrapping(
    model: nn.Module, config: VBConfig, machine: Machine, skipped: dict[str, Skip], *, charge_kept: bool
) -> Machine:
    """Free memory as budgets share it out: all weights leave, and what stays as it is comes to the computing tier."""
    held = {"cpu": 0, "cuda": 0}
    for parameter in model.parameters():
        if parameter.device.type in held:
            held[parameter.device.type] += _nbytes(parameter)
    free = {"cpu": min(machine.cpu_total_bytes, machine.cpu_available_bytes + held["cpu"]), "gpu": None}
    if machine.gpu_total_bytes is not None:
        free["gpu"] = held["cuda"] + (
            machine.gpu_total_bytes if machine.gpu_free_bytes is None else machine.gpu_free_bytes
        )
    if charge_kept:
        tier = compute_tier(config, machine)
        kept = sum(skip.nbytes for skip in skipped.values())
        if kept > free[tier]:
            raise ConfigError(_kept_does_not_fit(tier, kept, free[tier], config, skipped))
        free[tier] -= kept
    return replace(machine, gpu_free_bytes=free["gpu"], cpu_available_bytes=free["cpu"])


def _kept_does_not_fit(tier: str, kept: int, free: int, config: VBConfig, skipped: dict[str, Skip]) -> str:
    remedy = "weights.include, weights.exclude and weights.keep_head say what is swapped"
    if tier == "gpu":
        remedy += "; tiers.gpu.enabled = false computes on the cpu"
    return (
        f"{config.source}: kept parameters of {kept} bytes ({format_bytes(kept)}), which are not swapped, do not "
        f"fit into the {tier} memory: {format_bytes(free)} are free. The largest are {_largest(skipped)}. {remedy}"
    )


def _largest(skipped: dict[str, Skip], count: int = 3) -> str:
    """The largest kept parts, small ones left out, with their bytes and reasons."""
    largest = sorted(skipped.items(), key=lambda item: -item[1].nbytes)[:count]
    return ", ".join(
        f"{name} ({format_bytes(skip.nbytes)}; {skip.reason})"
        for name, skip in largest
        if 10 * skip.nbytes >= largest[0][1].nbytes
    )


def _homes(
    layers: list[tuple[PageSpec, ...]], budgets: dict[str, int], config: VBConfig, skipped: dict[str, Skip]
) -> dict[str, str]:
    """The home of each page; where there is none, the error also says what else takes the memory."""
    try:
        return place(layers, budgets, source=config.source)
    except ConfigError as error:
        tier, kept = next(iter(budgets)), sum(skip.nbytes for skip in skipped.values())
        if not kept or getattr(config.tiers, tier).budget != "auto":
            raise
        raise ConfigError(
            f"{error}. The {tier} also holds kept parameters of {format_bytes(kept)}, which are not "
            f"swapped; the largest are {_largest(skipped)}"
        ) from error


def _notes(
    swaps: tuple[Swap, ...], config: VBConfig, modules: dict[str, nn.Module], skipped: dict[str, Skip]
) -> tuple[str, ...]:
    notes = []
    dense = [swap for swap in swaps if swap.format != config.weights.format]
    if dense:
        notes.append(f"{len(dense)} layers: {dense[0].note}")
    if not swaps:
        saves = " and saves no memory" if config.mode == "infer" else ""
        notes.append(f"nothing is swapped, the model stays as it is{saves}: {_why_none(modules, skipped)}")
    return tuple(notes)


def _idle_gpu(config: VBConfig, machine: Machine) -> tuple[str, ...]:
    gpu = config.tiers.gpu
    if not gpu.enabled or gpu.budget == "auto" or machine.gpu_total_bytes is not None:
        return ()
    return (f"tiers.gpu.budget = {gpu.budget!r} is for a GPU, and this machine has none: the cpu computes",)


def _kept_warning(
    swaps: tuple[Swap, ...], skipped: dict[str, Skip], budgets: dict[str, int], left: Machine
) -> tuple[str, ...]:
    """What to say where much of a model is not swapped, or does not fit beside the budget of the computing tier."""
    kept, tier = sum(skip.nbytes for skip in skipped.values()), next(iter(budgets))
    total = kept + sum(swap.dense_bytes for swap in swaps)
    pages = min(budgets[tier], sum(swap.page_bytes for swap in swaps))
    free = left.gpu_free_bytes if tier == "gpu" else left.cpu_available_bytes
    if kept * _KEPT_SHARE <= total and pages <= free:
        return ()
    short = (
        ""
        if pages <= free
        else (f", and do not fit beside its budget: {format_bytes(pages)} of pages find {format_bytes(free)} free")
    )
    text = (
        f"{format_bytes(kept)} of the model's {format_bytes(total)} are not swapped and stay in the {tier} memory, "
        f"outside the budgets{short}; the largest part is {_largest(skipped, count=1)}"
    )
    return (text,)


def _why_none(modules: dict[str, nn.Module], skipped: dict[str, Skip]) -> str:
    """The most frequent reason why a linear layer stays; for a model without any, what holds the most bytes."""
    linear = [name for name in skipped if kind_of(modules[name]) or isinstance(modules[name], nn.Linear)]
    if linear:
        (reason, count), *_ = Counter(skipped[name].reason for name in linear).most_common()
        return f"{count} of {len(linear)} linear layers stay because: {reason}"
    if not skipped:
        return "it has no parameters"
    name, skip = max(skipped.items(), key=lambda item: item[1].nbytes)
    return f"it has no linear layers; its largest part is {name} ({skip.reason})"
