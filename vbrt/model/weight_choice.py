"""Selection of the weights to swap into the tiers, with a reason for each parameter that stays.

A weight of a module of a known kind (`vbrt.layers.modules.layer_kinds`) is a candidate. Tied weights are swapped at all
their sites or at none: one site that must stay keeps the others.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from vbrt.config import FORMATS, VBConfig
from vbrt.errors import ConfigError
from vbrt.layers import KINDS, Kind, kind_of
from vbrt.layers.experts.touched_experts import top_k_of
from vbrt.layers.rebind_forward import is_wrapped_by_plan
from vbrt.layers.weights.weight_shards import is_sharded, local_of, shard_refusal, sum_refusal
from vbrt.model.output_heads import find_heads
from vbrt.residency.plan import Skip, Swap
from vbrt.residency.weight_site import ROOT, WeightSite

__all__ = ["choose", "named_modules", "nbytes_of", "why_none"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

Held = tuple[str, str]
"""(module name, name of the parameter or buffer in it)."""


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by name, the model itself under `ROOT`."""
    return {name or ROOT: module for name, module in model.named_modules()}


def choose(
    model: nn.Module, config: VBConfig, saved: Sequence[Swap] | None = None
) -> tuple[list[Swap], dict[str, Skip]]:
    """Return the swaps, without pages, in model order, and everything else by module, with reasons.

    `saved`: swaps of a saved model, which replace the config's choice.
    """
    if config.weights.format == "auto":
        raise ConfigError(
            f'{config.source}: weights.format = "auto" is settled by running the model with its weights, as '
            "vbrt.wrap(model, ...), vbrt.choose_precision and `vbrt precision --write my.toml` do; "
            "use the config that they return or write"
        )
    survey = _Survey(named_modules(model), config)
    refused: dict[str, Skip] = {}
    swaps = _with_one_left(list(_swaps(survey, refused)), survey, refused)
    if saved is not None:
        swaps = _as_saved(swaps, saved, refused, config)
    return swaps, _account_rest(survey, swaps, refused)


@dataclass(frozen=True)
class _Survey:
    """Survey of a model's parameters and buffers under a config, with cached lookups."""

    modules: dict[str, nn.Module]
    config: VBConfig

    @cached_property
    def candidates(self) -> dict[Held, nn.Module]:
        """Modules of known kinds, by weight."""
        return {
            (name, parameter): module
            for name, module in self.modules.items()
            if (kind := kind_of(module)) and _is_asked_for(kind, self.config)
            for parameter in kind.leading
        }

    @cached_property
    def holders(self) -> dict[tuple, list[Held]]:
        """Parameters and buffers by storage."""
        holders: dict[tuple, list[Held]] = defaultdict(list)
        for held, tensor in _tensors(self.modules):
            holders[_storage_key(tensor)].append(held)
        return holders

    @cached_property
    def heads(self) -> dict[int, str]:
        """Output heads by id, with the reason for each."""
        return find_heads(self.modules)

    @cached_property
    def some_frozen(self) -> bool:
        """True if any candidate is frozen; matrix products only, since position tables are often constants."""
        layers = ((name, module) for (_, name), module in self.candidates.items() if not kind_of(module).by_rows)
        weights = (local_of(module._parameters.get(name)) for name, module in layers)
        return any(weight is not None and not weight.requires_grad for weight in weights)

    @cached_property
    def reasons(self) -> dict[Held, str | None]:
        """Reason why each candidate itself must stay; None where it may be swapped."""
        overlaps = _overlaps(self.modules)
        return {held: overlaps.get(held) or _refusal(held, module, self) for held, module in self.candidates.items()}

    def refusal_of_tied(self, site: Held, held_as: list[Held]) -> str | None:
        """Return why a weight stays because of other users of its storage, `held_as`; None if it may be swapped."""
        if kind_of(self.candidates[site]).routed:
            return self._refusal_of_tied_experts(site[0], held_as)
        for other in held_as:
            if other == site:
                continue
            name = ".".join(other)
            if other not in self.candidates or self.reasons[other]:
                return f"shares storage with {name}, which stays dense"
            if not _same_view(self.candidates[site], site[1], self.candidates[other], other[1]):
                return f"shares storage with {name} in another layout"
        return None

    def _refusal_of_tied_experts(self, name: str, held_as: list[Held]) -> str | None:
        """Return why experts with shared weights stay; tied modules must share all parameters, under the same names."""
        kind, module = kind_of(self.modules[name]), self.modules[name]
        others = {held_by for held_by, _ in held_as} - {name}
        own = {n: _storage_key(local_of(p)) for n, p in module.named_parameters()}
        for other in sorted(others):
            theirs = {n: _storage_key(local_of(p)) for n, p in self.modules[other].named_parameters()}
            if own != theirs or kind_of(self.modules[other]) is not kind or self.config.mode == "train":
                return f"shares storage with {other}, which is not the same layer of experts, or trains"
            if why := self.reasons.get((other, kind.parameters[0]), "stays dense"):
                return f"shares storage with {other}: {why}"
        return None

    def serves_rows(self, held: Held) -> bool:
        """True if a swapped lookup table shares this weight."""
        weight = self.candidates[held]._parameters.get(held[1])
        held_as = [] if weight is None else self.holders[_storage_key(local_of(weight))]
        return any(other in self.candidates and kind_of(self.candidates[other]).by_rows for other in held_as)

    def site(self, held: Held) -> WeightSite:
        """Return the site of a candidate."""
        return self.sites(held)[0]

    def sites(self, held: Held) -> tuple[WeightSite, ...]:
        """Return the sites of a candidate and of the parameters that are swapped with it."""
        name, parameter = held
        kind = kind_of(self.modules[name])
        sites = kind.sites(name, self.modules[name])
        return sites if kind.routed else tuple(site for site in sites if site.parameter == parameter)

    def all_held_as(self, held: Held) -> list[Held]:
        """Return the parameters and buffers on the storages of a candidate and of the parameters swapped with it,
        without those parameters."""
        weights = [local_of(self.modules[held[0]]._parameters.get(site.parameter)) for site in self.sites(held)]
        own = {(held[0], site.parameter) for site in self.sites(held)[1:]}
        return [h for w in weights if w is not None for h in self.holders[_storage_key(w)] if h not in own]


def _swaps(survey: _Survey, refused: dict[str, Skip]) -> Iterator[Swap]:
    """Yield the swaps in model order; candidates that stay are added to `refused`."""
    done: set[Held] = set()
    for held, module in survey.candidates.items():
        if held in done:
            continue
        weight = local_of(module._parameters.get(held[1]))
        held_as = [held] if weight is None else survey.all_held_as(held)
        tied = [other for other in held_as if other in survey.candidates]
        reasons = {other: survey.refusal_of_tied(other, held_as) or survey.reasons[other] for other in tied}
        done.update(tied)
        if not any(reasons.values()):
            yield _swap([site for other in tied for site in survey.sites(other)], weight, survey)
        else:
            refused.update((name, Skip(0, reason)) for (name, _), reason in reasons.items())  # bytes: _account_rest


def _with_one_left(swaps: list[Swap], survey: _Survey, refused: dict[str, Skip]) -> list[Swap]:
    """Return the swaps without the smallest table, if a model with a `device` property, such as transformers', would
    have no parameter left to derive it from."""
    sites = {(site.module, site.parameter) for swap in swaps for site in swap.sites}
    tables = [swap for swap in swaps if any(KINDS[site.kind].by_rows for site in swap.sites)]
    left = any(
        parameter is not None and (name, own) not in sites
        for name, module in survey.modules.items()
        for own, parameter in module._parameters.items()
    )
    if left or not tables or not hasattr(type(survey.modules[ROOT]), "device"):
        return swaps
    kept = min(tables, key=lambda swap: swap.dense_bytes)
    reason = "it is the smallest table of a model that would have no parameter left to tell its device by"
    refused.update((site.module, Skip(0, reason)) for site in kept.sites)
    return [swap for swap in swaps if swap is not kept]


def _as_saved(swaps: list[Swap], saved: Sequence[Swap], refused: dict[str, Skip], config: VBConfig) -> list[Swap]:
    """Return `saved` in place of `swaps`, and update `refused`."""
    names = {site.module for swap in saved for site in swap.sites}
    for name in names & refused.keys():
        del refused[name]
    others = {site.module for swap in swaps for site in swap.sites} - names
    refused.update((name, Skip(0, "it was not swapped when the model was saved")) for name in others)
    return [replace(swap, note=swap.note or _note_on(swap, config)) for swap in saved]


def _same_view(one: nn.Module, parameter: str, other: nn.Module, other_parameter: str) -> bool:
    a, b = local_of(one._parameters[parameter]), local_of(other._parameters[other_parameter])
    same_order = kind_of(one).transposed == kind_of(other).transposed
    return same_order and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


# -- refusals of candidates -------------------------------------------------------------------------------------------


def _refusal(held: Held, module: nn.Module, survey: _Survey) -> str | None:
    """Return why a candidate itself must stay; None if it may be swapped."""
    kind = kind_of(module)
    if kind.routed and held[1] == kind.parameters[0]:
        others = (_refusal((held[0], other), module, survey) for other in kind.parameters[1:])
        why = next(filter(None, others), None) or _why_kept_experts(module, kind)
        if why:
            return why
    weight = module._parameters.get(held[1])
    if weight is None:
        return _why_no_parameter(module, held[1])
    if type(weight) is not nn.Parameter and not (is_sharded(weight) and kind.splits):
        return f"its {held[1]} is a {type(weight).__name__}, not a plain Parameter"
    why_whole = _why_not_by_rows(held, weight, survey)
    weight, why_whole = local_of(weight), why_whole or _why_not_in_parts(weight, survey.config)
    return (
        why_whole
        or _unwanted(held[0], survey.config)
        or _why_kept_head(held, module, survey)
        or _why_kept_module(module)
        or _why_kept_weight(held, weight, survey)
    )


def _why_not_by_rows(held: Held, weight: nn.Parameter, survey: _Survey) -> str | None:
    """Return why a weight whose rows are used one by one, or that is split, stays dense in a format of joint rows."""
    format, _ = survey.config.weights.held_as(*_names(survey.sites(held)))
    rows, by_rows = FORMATS[format].rows, kind_of(survey.modules[held[0]]).by_rows
    if rows == 1 or not (by_rows or is_sharded(weight)):
        return None
    how = "its rows are looked up one by one" if by_rows else "it is split over ranks"
    return f"{how}, and {format} codes {rows} rows together: weights.formats can hold it in another format"


def _why_not_in_parts(weight: nn.Parameter, config: VBConfig) -> str | None:
    if is_sharded(weight) and config.mode != "infer":
        return f'it is a DTensor, and mode = "{config.mode}" takes whole weights, which no plan has cut over ranks'
    return shard_refusal(weight)


def _why_kept_experts(module: nn.Module, kind: Kind) -> str | None:
    weights = [local_of(module._parameters[name]) for name in kind.parameters]
    sites = kind.sites("", module)
    counts = [sites[0].matrices if kind.ragged else site.matrices for site in sites]
    facts = zip(counts, weights, strict=True)
    if len({(matrices, weight.dtype, weight.requires_grad) for matrices, weight in facts}) > 1:
        return f"{', '.join(kind.parameters)} differ in the number of experts, in dtype or in requires_grad"
    return sum_refusal(module._parameters[name] for name in kind.parameters)


def _why_no_parameter(module: nn.Module, parameter: str) -> str:
    made_by = next((n for n in (f"{parameter}_orig", f"{parameter}_g") if n in module._parameters), None)
    if made_by is None:
        return f"its {parameter} is not a parameter"
    return f"its {parameter} is recomputed from {made_by} by a hook (spectral_norm, weight_norm or pruning)"


def _unwanted(name: str, config: VBConfig) -> str | None:
    """Return which pattern of the config excludes a module; None if none does."""
    wanted = config.weights
    if not any(fnmatchcase(name, pattern) for pattern in wanted.include):
        return f"not in weights.include = {list(wanted.include)}"
    excluded = next((pattern for pattern in wanted.exclude if fnmatchcase(name, pattern)), None)
    return None if excluded is None else f"weights.exclude has {excluded!r}"


def _why_kept_head(held: Held, module: nn.Module, survey: _Survey) -> str | None:
    if survey.config.weights.keep_head and id(module) in survey.heads and not survey.serves_rows(held):
        return f"output head ({survey.heads[id(module)]}); weights.keep_head = false swaps it"
    return None


def _why_kept_module(module: nn.Module) -> str | None:
    if "forward" in module.__dict__ and not is_wrapped_by_plan(module):
        return "its forward was replaced on the instance (accelerate's hooks do: remove_hook_from_submodules first)"
    kind = kind_of(module)
    of = next(of for of in type(module).__mro__ if "forward" in vars(of))
    if not kind.routed and getattr(of.forward, "__globals__", {}).get("__name__") != of.__module__:
        by = getattr(of.forward, "__qualname__", of.forward)
        return f"{of.__name__}.forward was replaced by {by}, which a layer of vbrt would not call"
    return kind.refuse(module)


def _why_kept_weight(held: Held, weight: nn.Parameter, survey: _Survey) -> str | None:
    wanted, size = survey.config.weights, weight.numel()
    if size < wanted.min_parameters:
        return f"{size} parameters; weights.min_parameters = {wanted.min_parameters}"
    if not size or weight.dim() != (3 if kind_of(survey.modules[held[0]]).stacked else 2):
        return f"its {held[1]} has shape {tuple(weight.shape)}"
    if survey.config.mode == "infer" and survey.some_frozen and weight.requires_grad:
        return "it trains (requires_grad) while other layers are frozen; requires_grad_(False) lets it be swapped"
    if survey.config.mode == "full" and kind_of(survey.modules[held[0]]).by_rows and weight.dtype != torch.bfloat16:
        dtype = str(weight.dtype).removeprefix("torch.")
        return f'its rows are looked up in {dtype}, and mode = "full" has tables in bf16: model.to(torch.bfloat16)'
    format, fine = wanted.held_as(held[0], ".".join(held))
    exact = FORMATS[format].lossless or fine == "exact"
    if weight.dtype not in _FLOATS and not (exact and weight.dtype is torch.float64):
        dtype = str(weight.dtype).removeprefix("torch.")
        return f"its {held[1]} is {dtype}; {format} holds float32, bfloat16, float16"
    return None


# -- storages ---------------------------------------------------------------------------------------------------------


def _tensors(modules: dict[str, nn.Module]) -> Iterator[tuple[Held, torch.Tensor]]:
    """Yield every parameter and buffer that has a shape."""
    for name, module in modules.items():
        for held, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and not _uninitialized(tensor):
                yield (name, held), local_of(tensor)


def _overlaps(modules: dict[str, nn.Module]) -> dict[Held, str]:
    """Return parameters and buffers that partly overlap others in memory, with the reason why they stay."""
    spans = sorted(
        (*_span(tensor), _storage_key(tensor), held)
        for held, tensor in _tensors(modules)
        if len(_storage_key(tensor)) > 1
    )
    found: dict[Held, str] = {}
    furthest = None
    for span in spans:
        device, begin, end, key, held = span
        if furthest and furthest[0] == device and begin < furthest[2] and key != furthest[3]:
            for one, other in ((held, furthest[4]), (furthest[4], held)):
                found[one] = f"its memory overlaps that of {'.'.join(other)}, and a write to one changes both"
        if not furthest or furthest[0] != device or end > furthest[2]:
            furthest = span
    return found


def _span(tensor: torch.Tensor) -> tuple[str, int, int]:
    """Return the device, and the address range of the elements."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return str(tensor.device), begin, begin + (last + 1) * tensor.element_size()


def _storage_key(tensor: torch.Tensor) -> tuple:
    """Return a key that is equal for tensors of equal size and address; by identity without an address."""
    plain = type(tensor.data) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
    if tensor.device.type == "meta" or not tensor.numel() or not plain:
        return (id(tensor),)
    return (str(tensor.device), tensor.data_ptr(), tensor.numel())


def _uninitialized(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.parameter.UninitializedTensorMixin)


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements held by this process; 0 for an uninitialized tensor."""
    tensor = local_of(tensor)
    return 0 if _uninitialized(tensor) else tensor.numel() * tensor.element_size()


# -- swaps ------------------------------------------------------------------------------------------------------------


def _swap(sites: list[WeightSite], weight: torch.Tensor, survey: _Survey) -> Swap:
    config = survey.config
    format, fine = wanted = config.weights.held_as(*_names(sites))
    if fine == "exact" and weight.dtype not in (torch.bfloat16, torch.float16):
        format, fine = "dense", "none"
    dtype = str(weight.dtype).removeprefix("torch.")
    routed, count = KINDS[sites[0].kind].routed, len(KINDS[sites[0].kind].parameters)
    return Swap(
        site=sites[0],
        tied=tuple(sites[count::count] if routed else sites[1:]),
        parts=tuple(sites[1:count]) if routed else (),
        experts=sites[0].matrices if routed else 0,
        top_k=top_k_of(sites[0], survey.modules) if routed else 0,
        dtype=dtype,
        dense_bytes=sum(site.parameters for site in sites[:count]) * weight.itemsize if routed else nbytes_of(weight),
        format=format,
        fine=fine,
        note=_note(sites[0], dtype, format, wanted[1]) or _note_on_head(sites, survey),
    )


def _note_on_head(sites: list[WeightSite], survey: _Survey) -> str:
    """Return the note on an output head that is swapped in spite of `keep_head`, because a swapped table shares it."""
    heads = [site.name for site in sites if id(survey.modules[site.module]) in survey.heads]
    if not heads or not survey.config.weights.keep_head or not any(KINDS[site.kind].by_rows for site in sites):
        return ""
    return f"{heads[0]} has the same weight and goes with it: weights.keep_head keeps no head of a swapped table"


def _is_asked_for(kind: Kind, config: VBConfig) -> bool:
    return config.mode in kind.modes and (config.weights.embeddings is True or not kind.by_rows)


def _names(sites: Iterable[WeightSite]) -> list[str]:
    """Return the names by which `weights.formats` may call a weight."""
    return [name for site in sites for name in dict.fromkeys((site.module, site.name))]


def _note_on(swap: Swap, config: VBConfig) -> str:
    return _note(swap.site, swap.dtype, swap.format, config.weights.held_as(*_names(swap.sites))[1])


def _note(site: WeightSite, dtype: str, format: str, fine: str) -> str:
    """Return the note for users on a swap; "" without one. `fine`: the requested fine plane."""
    if FORMATS[format].lossless and fine == "exact":
        return f"{dtype} has no fine plane: held dense, which is exact; bfloat16 halves it"
    if site.shape[1] % FORMATS[format].block:
        return f"in_features {site.shape[1]} padded to a multiple of {FORMATS[format].block}"
    return ""


# -- parameters that stay ---------------------------------------------------------------------------------------------


def _account_rest(survey: _Survey, swaps: list[Swap], refused: dict[str, Skip]) -> dict[str, Skip]:
    """Return `refused` with the bytes of all unswapped parameters and buffers, once per storage, in model order.

    A storage that several modules share is counted at one of them, such as at the embedding of a tied head.
    """
    modules, sites = survey.modules, [site for swap in swaps for site in swap.sites]
    swapped = {site.module for site in sites}
    seen = {_storage_key(local_of(modules[site.module]._parameters[site.parameter])): site.name for site in sites}
    rest = dict(refused)
    for name in sorted(modules, key=lambda name: name in refused):
        module = modules[name]
        own = {n: local_of(p) for n, p in module._parameters.items() if p is not None}
        if any(map(_uninitialized, own.values())):
            rest[name] = Skip(0, f"{type(module).__name__} before its first call: run the model once, then wrap it")
            continue
        fresh = {n: p for n, p in own.items() if _storage_key(p) not in seen}
        seen |= {_storage_key(p): f"{name}.{n}" for n, p in fresh.items()}
        if fresh:
            reason = refused[name].reason if name in refused else _why_kept(module, fresh, survey.config)
            reason = "bias of a swapped layer" if name in swapped else reason
            rest[name] = Skip(sum(map(nbytes_of, fresh.values())), reason)
        elif own and name not in rest and name not in swapped:
            rest[name] = Skip(
                0, f"shares storage with {seen[_storage_key(next(iter(own.values())))]}, which stays dense"
            )
    return {name: rest[name] for name in modules if name in rest}


def _why_kept(module: nn.Module, own: dict[str, nn.Parameter], config: VBConfig) -> str:
    kind = type(module).__name__
    known = kind_of(module)
    if known is not None and known.routed and config.mode not in known.modes:
        return f'{kind}: its experts ({", ".join(own)}) stay dense in mode = "{config.mode}"'
    experts = [n for n, p in own.items() if p.dim() == 3 and p.shape[0] > 1]  # [1, ...]: position embeddings
    if experts and not type(module).__module__.startswith("torch.nn."):
        names = ", ".join(experts)
        return f"{kind}: 3-D parameters ({names}) of a class that is not known to hold routed experts stay dense"
    if isinstance(module, nn.Embedding):
        return _why_kept_table(module, config)
    if isinstance(module, nn.MultiheadAttention):
        return f"{kind}: reads its projections ({', '.join(own)}) without calling them"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return f"{kind}: nn.MultiheadAttention reads its weight without calling it"
    if isinstance(module, nn.Linear) and is_parametrized(module):
        return "its weight is computed by a parametrization: remove_parametrizations first"
    if isinstance(module, nn.Linear):
        return f"{kind}: a subclass of nn.Linear with semantics of its own"
    return f"{kind}: not an nn.Linear"


def _why_kept_table(table: nn.Embedding, config: VBConfig) -> str:
    name, kind = type(table).__name__, kind_of(table)
    if kind is None:
        return f"{name}: a lookup table, of a subclass of nn.Embedding with semantics of its own"
    if config.mode not in kind.modes:
        return f'{name}: a lookup table, which mode = "{config.mode}" leaves dense'
    return f"{name}: a lookup table, read by rows; weights.embeddings = true swaps it"


def why_none(modules: dict[str, nn.Module], skipped: dict[str, Skip]) -> str:
    """Return the most frequent reason why linear layers stay; without linear layers, the largest holder of bytes."""
    linear = [name for name in skipped if _is_linear(modules[name])]
    if linear:
        (reason, count), *_ = Counter(skipped[name].reason for name in linear).most_common()
        return f"{count} of {len(linear)} linear layers stay because: {reason}"
    if not skipped:
        return "it has no parameters"
    name, skip = max(skipped.items(), key=lambda item: item[1].nbytes)
    return f"it has no linear layers; its largest part is {name} ({skip.reason})"


def _is_linear(module: nn.Module) -> bool:
    kind = kind_of(module)
    return isinstance(module, nn.Linear) if kind is None else not kind.by_rows
