"""`vbrt.wrap`: plan, swap in place, keep a registry.

Nothing moves when a model is wrapped: its layers become shells that share their parameters. The first forward of a
layer, or `materialize()` for all of them, encodes the weight, stores its pages and lets the dense weight go.
"""

import contextlib
import ctypes
import os
import sys
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from vbrt.config import VBConfig, load_config, resolve_budget
from vbrt.config.schema import AUTO_PERCENT
from vbrt.errors import ConfigError, TierError, WrapError
from vbrt.formats import SeparationCounters
from vbrt.kernels.cpu import recycle
from vbrt.kernels.watched import unwatched
from vbrt.layers import (
    HandleSpec,
    SwappedLayer,
    TrainedLayer,
    TrainedWeight,
    VBLayer,
    WeightHandle,
    handles_in,
    layer_class,
    shed,
)
from vbrt.model.planner import make_plan, this_machine, with_freed
from vbrt.report.stats import LayerStats, Stats, TierStats
from vbrt.report.timeline import TimelineTotals, check_timeline_path
from vbrt.residency.division import auto_prefetch, rebalanced
from vbrt.residency.plan import Plan, Swap, format_bytes
from vbrt.residency.simulate import make_policy
from vbrt.saves.save import save_model
from vbrt.tiers import Level, MemoryTier, Recorder, SsdTier, TierStack
from vbrt.wrapper.mirror import Facade

__all__ = ["Before", "VBModelWrapper", "VBTrainingWrapper", "carry_out", "try_tiers", "wrap"]

_LOOK_SECONDS = 0.1  # between looks at the GPU's free memory, at least
_LARGE_BYTES = 64 << 20  # layers that the progress bar names


def wrap(
    model: nn.Module, config: VBConfig | Mapping[str, Any] | str | PathLike | None = None, **overrides: Any
) -> "VBModelWrapper":
    """Wrap a model so that its linear layers live as planes in the tiers of a config.

    Args:
        model: any nn.Module; changed in place (`unwrap` gives it back).
        config: a preset name ("fp4", the default, "exact", "dense", ...), a path to a TOML file, a dict, or a VBConfig.
        **overrides: sections of the config, merged key by key: `weights={"format": "nf4"}`, `tiers={"ssd": {...}}`,
            `mode="train"`.

    Returns:
        The wrapper. Everything of the model is reachable through it; `vb.model` is the same model, swapped. With
        mode = "train" it is a VBTrainingWrapper: weights stay parameters, and the forward sees them in 4 bits.

    Raises:
        ConfigError: the config is wrong, or impossible for this model or machine.
        WrapError: the model is wrapped already.
        TierError: the ssd tier's directory cannot be used.

    Warns, once for a reason, where nothing at all is swapped, more than a tenth of the model is not, or what is not
    does not fit beside the budgets: with the largest part. `vb.plan.warnings` keeps that.
    """
    if not isinstance(model, nn.Module):
        raise WrapError(f"wrap() got {type(model).__name__}; expected a torch.nn.Module")
    if isinstance(model, VBModelWrapper):
        raise WrapError("the model is wrapped already; unwrap() it first")
    config = load_config(config, **overrides)
    try_tiers(config)
    plan = make_plan(model, config)
    for text in plan.warnings:
        warnings.warn(f"vbrt.wrap: {text} (all reasons: plan.skipped)", stacklevel=2)
    return carry_out(model, config, plan)


def carry_out(model: nn.Module, config: VBConfig, plan: Plan) -> "VBModelWrapper":
    """The wrapper of a model, as its plan has it. Raises TierError: the ssd tier's directory cannot be used."""
    before, stack = Before(model), _build_stack(plan, config)
    try:
        specs = [_spec(swap, config) for swap in plan.swaps]
        if config.mode == "train":
            weights = list(map(TrainedWeight, specs))
            return VBTrainingWrapper(model, config, plan, stack, _swap(model, plan, weights, config.mode))
        handles = [WeightHandle(spec, stack) for spec in specs]
        return VBModelWrapper(model, config, plan, stack, _swap(model, plan, handles, config.mode))
    except BaseException:
        before.restore_()
        stack.close()
        raise


class Before:
    """A model as it came, to be given back: classes, parameters and buffers of its modules."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modules = [
            (module, type(module), dict(module._parameters), dict(module._buffers)) for module in model.modules()
        ]

    def restore_(self) -> None:
        """Undo what wrapping has done so far; does not close the tiers."""
        _unmark(self.model)
        for module, cls, parameters, buffers in self._modules:
            if isinstance(module, SwappedLayer):
                shed(module)
            module.__class__ = cls
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def try_tiers(config: VBConfig) -> None:
    """Raise TierError where the ssd tier's directory cannot be made or written; it is tried, and left as it was."""
    if config.mode == "train" or not config.tiers.ssd.enabled:
        return
    path = Path(config.tiers.ssd.path).expanduser().absolute()
    made = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    tier = None
    try:
        tier = SsdTier(path, 0)
        tier.close()
    finally:
        if tier is not None:
            tier.close()  # again, if Ctrl-C came the first time
        for folder in made:
            with contextlib.suppress(OSError):  # was not made, or somebody else has put something there
                folder.rmdir()


def _build_stack(plan: Plan, config: VBConfig) -> TierStack:
    levels = []
    for name, budget in plan.budgets.items():
        if name == "ssd":
            continue
        device = torch.device("cuda", torch.cuda.current_device()) if name == "gpu" else torch.device("cpu")
        pinned = name == "cpu" and plan.compute_tier == "gpu" and config.tiers.cpu.pinned
        room = budget - plan.home_bytes(name)
        ahead = _prefetch(plan, config, from_drive=name != plan.compute_tier)
        policy = make_policy(config.policy.kind, room, prefetch=ahead, group=plan.group)
        levels.append(Level(MemoryTier(name, device, budget, pinned=pinned), policy))
    workers = min(4, max(level.policy.prefetch for level in levels)) or 1
    stack = TierStack(levels, workers=workers, share_cores=plan.compute_tier == "cpu")
    try:
        if plan.home_bytes("ssd"):
            _attach_ssd(stack, plan, config)
    except BaseException:
        stack.close()
        raise
    return stack


def _attach_ssd(stack: TierStack, plan: Plan, config: VBConfig) -> None:
    ssd = _ssd_tier(plan, config)
    try:
        stack.attach(ssd)
    finally:
        if stack.ssd is not ssd:  # Ctrl-C
            ssd.close()


def _ssd_tier(plan: Plan, config: VBConfig) -> SsdTier:
    # a CPU that waits for a page has no other work; beside a GPU, several pages are read at a time
    helpers = min(4, os.cpu_count() or 1) - 1 if plan.compute_tier == "cpu" else 0
    path = Path(config.tiers.ssd.path).expanduser()
    return SsdTier(path, plan.budgets["ssd"], io=config.tiers.ssd.io, helpers=helpers)


def _prefetch(plan: Plan, config: VBConfig, *, from_drive: bool) -> int:
    if config.policy.prefetch != "auto":
        return config.policy.prefetch
    largest = max((page.nbytes for swap in plan.swaps for page in swap.pages), default=0)
    return auto_prefetch(largest, group=plan.group, from_drive=from_drive)


def _swap(
    model: nn.Module, plan: Plan, handles: list[WeightHandle] | list[TrainedWeight], mode: str
) -> dict[str, SwappedLayer]:
    modules = dict(model.named_modules())
    registry: dict[str, SwappedLayer] = {}
    for swap, handle in zip(plan.swaps, handles, strict=True):
        for name in (swap.name, *swap.aliases):
            module = modules["" if name == "(root)" else name]
            registry[name] = layer_class(swap.kind, mode).adopt_(module, handle)
    return registry


def _spec(swap: Swap, config: VBConfig) -> HandleSpec:
    return HandleSpec(
        name=swap.name,
        shape=swap.shape,
        dtype=getattr(torch, swap.dtype),
        format=swap.format,
        fine=swap.fine == "exact",
        transposed=swap.site.transposed,
        backend=config.compute.backend,
        fp8=config.compute.fp8,
        fp4=config.compute.fp4,
        homes={page.plane: page.home for page in swap.pages},
        levels=config.separation.levels,
        refresh_every=config.separation.refresh_every,
    )


class _PassMarker:
    """A forward pre-hook of the model: tells the stack that a pass begins, and settles what wrapping left undone.

    `before_pass`, where it is set, is called first, after the first pass.
    """

    before_pass: Callable[[], None] | None = None

    def __init__(self, stack: TierStack | None) -> None:
        self.stack, self.passes, self.brought = stack, 0, False

    def __call__(self, model: nn.Module, args: tuple) -> None:
        if torch.compiler.is_compiling() or self.stack is None or self.stack.capturing():
            return
        if not self.brought:
            with self.stack.encoding:  # threads whose first passes meet: the others find it there
                if not self.brought:
                    _bring(model, self.stack.device)
                    self.brought = True
        if self.passes == 1:
            release_host_memory()  # the dense weights left one by one during the first pass
        if self.passes and self.before_pass is not None:
            self.before_pass()
        self.passes += 1
        self.stack.begin_pass()

    def __deepcopy__(self, memo: dict) -> "_PassMarker":
        return self

    def __reduce__(self):
        return _PassMarker, (None,)


def _bring(model: nn.Module, device: torch.device) -> None:
    """Move what was not swapped to a GPU that computes; pages stay where they are. Not as a part of what is traced,
    transformed or run in inference mode around it."""
    if device.type != "cpu":
        with unwatched(), torch.inference_mode(False):
            model.to(device)


def _unmark(model: nn.Module) -> None:
    for hook_id, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, _PassMarker):
            del model._forward_pre_hooks[hook_id]


class _GpuBalance:
    """Follows the GPU's free memory. The margin is what `budget = "auto"` left free; it doubles each time that the
    model runs out in the middle of a pass."""

    def __init__(self, wanted_bytes: int) -> None:
        self.wanted_bytes, self.fallbacks = wanted_bytes, []
        self.margin_bytes = wanted_bytes * (100 - AUTO_PERCENT["gpu"]) // AUTO_PERCENT["gpu"]
        self._next_look = 0.0
        self._ran_out = _times_out_of_memory()

    def due(self) -> bool:
        """Whether it is time for another look, which takes some tenths of a millisecond."""
        return time.monotonic() >= self._next_look

    def wanted_now(self, budget_bytes: int, page_bytes: int) -> int:
        """What the budget should be now, in bytes, of at most all pages."""
        self._next_look = time.monotonic() + _LOOK_SECONDS
        wanted, free = min(self.wanted_bytes, page_bytes), torch.cuda.mem_get_info()[0]
        ran_out = _times_out_of_memory() > self._ran_out
        if budget_bytes >= wanted and free >= self.margin_bytes // 2 and not ran_out:
            return budget_bytes  # most passes: torch's own figures cost more
        free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if ran_out:
            return self._give_way(budget_bytes, free)
        return rebalanced(budget_bytes, wanted, free, self.margin_bytes)

    def look_soon(self) -> None:
        """Make the next look due."""
        self._next_look = 0.0

    def _give_way(self, budget_bytes: int, free_bytes: int) -> int:
        self._ran_out = _times_out_of_memory()
        shortage = max(self.margin_bytes, 2 * self.margin_bytes - free_bytes)
        self.margin_bytes *= 2
        left = format_bytes(self.margin_bytes)
        self.fallbacks = [f'GPU memory ran out in a pass: tiers.gpu.budget = "auto" leaves {left} free from now on']
        return max(0, budget_bytes - shortage)

    def give_up(self, error: Exception) -> None:
        """Announce once that the budget stays."""
        reason = f'tiers.gpu.budget = "auto" stays as it is although GPU memory is short: {error}'
        self.fallbacks.append(reason)
        warnings.warn(reason, stacklevel=2)


def _times_out_of_memory() -> int:
    return torch.cuda.memory_stats_as_nested_dict().get("num_ooms", 0)


class VBModelWrapper(Facade):
    """A wrapped model: call it, or use anything of the model, as before; attributes set on it are the model's.

    Attributes:
        model: the model itself, with VB layers in it.
        settings, plan: what was asked for, and what was decided. (`config` is the model's own, where it has one.)
        registry: name -> VB layer, aliases of tied weights included.
    """

    def __init__(
        self, model: nn.Module, config: VBConfig, plan: Plan, stack: TierStack, registry: dict[str, VBLayer]
    ) -> None:
        timed: TimelineTotals | None = None  # of the last recording
        super().__init__(
            model,
            settings=config,
            plan=plan,
            stack=stack,
            _layers=registry,
            _timed=timed,
            _closed=False,
            _gpu_balance=None,
            _marker=None,
            _hook=None,
            _dense={},
        )  # _dense: what unwrap() has decoded
        self._hook_up()

    def _hook_up(self) -> None:
        auto = "gpu" in self.plan.budgets and self.settings.tiers.gpu.budget == "auto" and self.plan.page_bytes > 0
        self._marker = _PassMarker(self.stack)
        self._follow_gpu(self.plan.budgets["gpu"] if auto else None)
        self._hook = self.model.register_forward_pre_hook(self._marker)

    def _follow_gpu(self, wanted_bytes: int | None) -> None:
        """Let the GPU budget follow what is free, up to `wanted_bytes`; None: let it be."""
        self._gpu_balance = None if wanted_bytes is None else _GpuBalance(wanted_bytes)
        self._marker.before_pass = None if wanted_bytes is None else partial(_balance, weakref.ref(self))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward.

        When it runs out of GPU memory and `tiers.gpu.budget = "auto"` can give way, it is run again, unless that could
        differ: in training mode, or with arguments that it may have changed (a cache). Those get the error, and room at
        their next call.
        """
        while True:
            try:
                return self.model(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                if self._gpu_balance is None or self.model.training or not _is_data((args, kwargs)):
                    raise
                why = str(error)  # the error itself holds the tensors of the pass
            self._gpu_balance.look_soon()
            before = min(self.plan.budgets["gpu"], self.plan.page_bytes)
            self._balance()
            if self.plan.budgets["gpu"] >= before:
                raise torch.OutOfMemoryError(why)

    @property
    def registry(self) -> Mapping[str, VBLayer]:
        """Name -> VB layer."""
        return MappingProxyType(self._held)

    @property
    def _held(self) -> dict[str, VBLayer]:
        """The layers, without those that have left the tiers to train."""
        for name in [name for name, layer in self._layers.items() if not isinstance(layer, SwappedLayer)]:
            del self._layers[name]
        return self._layers

    @property
    def device(self) -> torch.device:
        """Where kernels compute and inputs belong."""
        return self.stack.device

    # -- materialize --------------------------------------------------------------------------------------------------

    def materialize(self, *, progress: bool | None = None) -> "VBModelWrapper":
        """Encode every layer now instead of on its first forward; a second call does nothing.

        Args:
            progress: show a progress bar naming the large layers; by default on a terminal only.

        Raises:
            FormatError: a weight holds NaN or Inf, named. Layers before it are encoded, the model stays usable.
            TierError: a page cannot be stored, or the wrapper was closed.
        """
        for layer in self._held.values():
            layer.keep_given_()
        waiting = {name: layer for name, layer in self._held.items() if not layer.materialized}
        for layer in _with_progress(waiting, sys.stderr.isatty() if progress is None else progress):
            layer.materialize_()
        _bring(self.model, self.stack.device)
        if waiting:
            release_host_memory()
        return self

    # -- budgets ------------------------------------------------------------------------------------------------------

    def set_budget(self, tier: str, budget: int | str) -> int:
        """Another budget for a tier, while the model runs: to make room for a KV cache, or to use room again.

        Pages that no longer fit move to the tiers below; when the budget grows they are kept in the faster tier again
        as they pass through it. Encodes what is not encoded yet.

        Args:
            tier: "gpu", "cpu" or "ssd".
            budget: bytes, "8GiB", "40%" (of the whole), or "auto" (a share of what is free, what vbrt holds included).

        Returns:
            The budget in bytes.

        Raises:
            ConfigError: not a budget, more than the machine has, or less than the largest layer.
            TierError: the model does not use that tier, or no tier below has room for what would have to move.
            WrapError: the wrapper was closed or unwrapped.
        """
        self._check_open("set_budget")
        config = load_config(self.settings, tiers={tier: {"budget": budget}})
        nbytes = self._set_budget(tier, config)
        if tier == "gpu":
            self._follow_gpu(nbytes if budget == "auto" else None)
        return nbytes

    def _set_budget(self, tier: str, config: VBConfig) -> int:
        if tier not in self.plan.budgets:
            raise TierError(f"tiers.{tier}: this model has the tiers {', '.join(self.plan.budgets)}")
        self.materialize()
        machine = with_freed(this_machine(config), tier, self._tier_stats()[tier].held_bytes)
        nbytes = resolve_budget(config, machine, tier)
        largest = self.plan.largest_layer_bytes
        if tier != "ssd" and nbytes < largest:
            raise ConfigError(
                f"{config.source}: tiers.{tier}.budget = {nbytes} bytes is smaller than the largest "
                f"layer's pages ({largest} bytes); give it at least that"
            )
        if self.stack.ssd is None and "ssd" in self.plan.budgets:
            _attach_ssd(self.stack, self.plan, config)  # nothing lived there so far
        plan = replace(self.plan, budgets={**self.plan.budgets, tier: nbytes})
        try:
            self.stack.set_budget(tier, nbytes)
        finally:  # also when it was interrupted: pages may have moved, and the budget may hold already
            if self._tier_stats()[tier].budget_bytes == nbytes:
                self.__dict__.update(settings=config, plan=plan)
            for layer in self._held.values():
                layer.handle.forget_ready()  # views would keep the memory of pages that moved
        return nbytes

    def _balance(self) -> None:
        """Give GPU memory back that the model has come to need, or take it again: for `budget = "auto"`."""
        if not self._gpu_balance.due():
            return
        used = min(self.plan.budgets["gpu"], self.plan.page_bytes)  # giving up what no page needs would free nothing
        nbytes = max(self.plan.largest_layer_bytes, self._gpu_balance.wanted_now(used, self.plan.page_bytes))
        if nbytes == used:
            return
        settings = self.settings
        try:
            self._set_budget("gpu", load_config(settings, tiers={"gpu": {"budget": nbytes}}))
            self.__dict__.update(settings=settings)  # still "auto"
        except (ConfigError, TierError) as error:
            self._gpu_balance.give_up(error)
            self._marker.before_pass = None

    # -- stats --------------------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """A frozen snapshot of all counters."""
        stack = self.stack
        here = dict(self._held)  # other threads may encode, move and unwrap meanwhile
        swaps = [swap for swap in self.plan.swaps if swap.name in here]  # none after unwrap()
        layers = {swap.name: self._layer_stats(swap, here[swap.name]) for swap in swaps}
        fallbacks = [reason for level in stack.levels for reason in level.tier.fallbacks]
        fallbacks += stack.ssd.fallbacks if stack.ssd else []
        for swap in swaps:
            fallbacks += here[swap.name].handle.all_fallbacks()
        fallbacks += self._gpu_balance.fallbacks if self._gpu_balance else []
        shells = sum(swap.dense_bytes for swap in swaps if not here[swap.name].materialized)
        device_bytes = stack.levels[0].tier.held_bytes + shells + self.plan.kept_bytes
        return Stats(
            self.settings.policy.kind,
            stack.names[0],
            self._marker.passes,
            layers,
            self._tier_stats(),
            self.plan.dense_bytes,
            self.plan.kept_bytes,
            device_bytes,
            tuple(dict.fromkeys(fallbacks)),
            self._timed,
        )

    def _layer_stats(self, swap: Swap, layer: VBLayer) -> LayerStats:
        handle, stack = layer.handle, self.stack
        pages = [page for page in map(stack.pages.get, handle.keys) if page is not None]
        top, planes, homes, moved = stack.levels[0].slots, {}, {}, {}
        hits = misses = prefetched = wait_ns = 0
        for page in pages:  # one loop: this runs for every layer, in at most 10 µs
            planes[page.layout.plane] = page.nbytes
            home = page.home
            homes[stack.names[home]] = None
            hits, misses, prefetched = hits + page.hits, misses + page.misses, prefetched + page.prefetched
            wait_ns += page.wait_ns
            for link, nbytes in page.bytes_moved.items():
                moved[link] = moved.get(link, 0) + nbytes
        separation = handle.separation.counters if handle.separation else None
        return LayerStats(
            format=handle.spec.label,
            kernel=handle.kernel,
            materialized=layer.materialized,
            home="/".join(homes),
            resident=bool(pages) and all(page.key in top for page in pages),
            plane_bytes=planes or {"dense": swap.dense_bytes},
            forwards=handle.forwards,
            weight_reads=handle.weight_reads,
            hits=hits,
            misses=misses,
            prefetched=prefetched,
            bytes_moved=moved,
            wait_us=wait_ns // 1000,
            separation_hits=separation.hits if separation else 0,
            separation_refreshes=separation.refreshes if separation else 0,
            clipped_share=separation.clipped_share if separation else 0.0,
        )

    def _tier_stats(self) -> dict[str, TierStats]:
        stack = self.stack
        homes = Counter(page.home for page in list(stack.pages.values()))
        stats = {
            level.tier.name: TierStats(
                level.tier.capacity_bytes,
                level.tier.held_bytes,
                level.tier.peak_bytes,
                homes[level.index],
                len(level.slots),
            )
            for level in stack.levels
        }
        ssd = stack.ssd
        if ssd:
            files = homes[len(stack.levels)]
            stats["ssd"] = TierStats(ssd.capacity_bytes, ssd.held_bytes, ssd.peak_bytes, files, files)
        return stats

    def timeline(self, path: str | PathLike) -> contextlib.AbstractContextManager[Recorder]:
        """Record the passes that run in a `with` block, and write when what was computed, waited for and copied.

        Recording costs events on the device, and resident layers take the way of streamed ones: it is for a few
        passes, after the first. A block that raises leaves a file of what it did until then.

        Args:
            path: "*.html", to look at in a browser, or "*.json" in Chrome's trace format, for Perfetto.

        Returns:
            A context manager; it yields the recorder, whose `timeline` has spans and totals when the block has ended.

        Raises:
            ConfigError: another suffix, or a file that cannot be written.
            WrapError: the wrapper was closed or unwrapped; (on entering) the model is being recorded already.
        """
        self._check_open("timeline")
        return self._record(check_timeline_path(path))

    @contextlib.contextmanager
    def _record(self, path: Path) -> Iterator[Recorder]:
        recorder = Recorder(self.stack.device, self.stack.guard)
        recorder.start()
        hooks = []
        try:
            hooks.append(self.model.register_forward_pre_hook(recorder.begin_pass, prepend=True))
            hooks.append(self.model.register_forward_hook(recorder.end_pass, always_call=True))
            yield recorder
        finally:
            for hook in hooks:
                hook.remove()
            timeline = recorder.stop()
            self._timed = timeline.totals
            timeline.write(path)

    # -- keeping it ---------------------------------------------------------------------------------------------------

    def save(self, directory: str | PathLike) -> Path:
        """Write the planes, what was not swapped and the config into a directory, for `vbrt.load`.

        safetensors files and `vbrt.json`; one layer is in memory at a time. What is not encoded yet is encoded now.
        A save that is there already is replaced once the new one is complete, and stays as it is until then.

        Returns:
            The directory.

        Raises:
            CheckpointError: it cannot be written, or the disk is full: names the path.
            FormatError, TierError: a weight cannot be encoded, or a page cannot be read.
            WrapError: the wrapper was closed or unwrapped.
        """
        self._check_open("save")
        self.materialize()
        return save_model(self.model, self.settings, Path(directory))

    # -- the way back -------------------------------------------------------------------------------------------------

    @property
    def lossless(self) -> bool:
        """Whether every swapped weight is held bit for bit (formats "dense" and "exact"): what `unwrap()`,
        `state_dict()` and `.weight` give. False where any is rounded to 4 bits."""
        return all(swap.format == "dense" or swap.fine == "exact" for swap in self.plan.swaps)

    def unwrap(self) -> nn.Module:
        """The dense model back, in place: bit for bit where it is `lossless` ("dense", "exact"), and otherwise with the
        weights as 4 bits have rounded them, in their old dtype and size. A layer that was never encoded, because it has
        not run yet, gets its own parameter back.

        Layers that were tied get one parameter again. Closes the wrapper. If a page cannot be read, nothing is lost:
        the layers that are left stay wrapped.

        Raises:
            TierError: a page cannot be read.
        """
        for name, layer in list(self._layers.items()):
            handle = layer.__dict__.get("_vb_handle")  # None, or of a plain layer: Ctrl-C came in an earlier call
            if isinstance(layer, SwappedLayer):
                layer.look()
                handle = layer.handle
                self._dense[handle] = layer.release_(self._dense.get(handle))._parameters["weight"]
            shed(layer)
            del self._layers[name]
            if handle is not None and not handle.layers:
                handle.drop()
        for handle in self._dense:  # again, if Ctrl-C came in between
            handle.drop()
        self._dense.clear()
        self._hook.remove()
        self.close()
        return self.model

    def close(self) -> None:
        """Release files, threads and pinned memory; weights that live in the tiers are gone. Twice is fine.

        What a deep copy of the model shares, pages and tiers, stays until the copy goes too.
        """
        self._closed = True
        own = {layer.handle for layer in self._held.values()}
        for handle in own:
            handle.drop()
        self.stack.collect()
        alone = not self.stack.pages and own.issuperset(handles_in(self.stack))
        if self.stack.closed or alone:
            self.stack.close()
        recycle.forget()

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise WrapError(
                f"{what}: the model was closed or unwrapped, its planes are gone; do that before, or wrap "
                "the model again"
            )

    def __enter__(self) -> "VBModelWrapper":
        self._check_open("with")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- copies -------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_hook": None}  # a name that is missing would be set on the model

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        _unmark(self.model)
        self._hook_up()


class VBTrainingWrapper(VBModelWrapper):
    """A model whose weights train: `wrap` with mode = "train". The stack is empty, nothing moves.

    `parameters()` are the model's own, the state dict has their names and, for 4-bit formats, what the engine keeps
    beside each weight (`*.separation`), so that a run that is taken up again is the same run.
    """

    _layers: Mapping[str, TrainedLayer]

    @property
    def lossless(self) -> bool:
        """True: the weights are the parameters that an optimizer moves; what rounds them is each forward."""
        return True

    def materialize(self, *, progress: bool | None = None) -> "VBTrainingWrapper":
        """Bring the model to the computing device now instead of at its first forward; there is nothing to encode."""
        _bring(self.model, self.stack.device)
        return self

    def set_budget(self, tier: str, budget: int | str) -> int:
        """Raises WrapError: no tier holds weights that train."""
        raise WrapError(
            f'set_budget({tier!r}): mode = "train" keeps the weights out of the tiers, there is nothing to '
            "budget; for less memory use activation checkpointing or smaller batches"
        )

    def timeline(self, path: str | PathLike) -> contextlib.AbstractContextManager[Recorder]:
        """Raises WrapError: nothing is leased or copied."""
        raise WrapError(
            'timeline(): mode = "train" moves no weights, so there are no waits and copies to record; '
            "torch.profiler shows where a step's time goes"
        )

    def stats(self) -> Stats:
        """A frozen snapshot of all counters; waits for the device to have counted clipped weights."""
        swaps = [swap for swap in self.plan.swaps if swap.name in self._layers]  # none after unwrap()
        layers = {swap.name: self._layer_stats(swap, self._layers[swap.name]) for swap in swaps}
        kept_for_scales = sum(stats.plane_bytes.get("scales", 0) for stats in layers.values())
        return Stats(
            "none",
            self.stack.names[0],
            self._marker.passes,
            layers,
            {},
            self.plan.dense_bytes,
            self.plan.kept_bytes,
            self.plan.dense_bytes + kept_for_scales,
        )

    def _layer_stats(self, swap: Swap, layer: TrainedLayer) -> LayerStats:
        handle = layer.handle
        engine = handle.separation
        planes = {"dense": swap.dense_bytes} | ({"scales": engine.nbytes} if engine else {})
        separation = engine.counters if engine else SeparationCounters()
        return LayerStats(
            format=handle.spec.label,
            kernel="reference",
            materialized=True,
            home=self.stack.names[0],
            resident=True,
            plane_bytes=planes,
            forwards=handle.forwards,
            weight_reads=0,
            hits=0,
            misses=0,
            prefetched=0,
            bytes_moved={},
            wait_us=0,
            separation_hits=separation.hits,
            separation_refreshes=separation.refreshes,
            clipped_share=separation.clipped_share,
        )

    def save(self, directory: str | PathLike) -> Path:
        """Write what the forward computes with now, as planes, into a directory: `vbrt.load` makes an inference model
        of it. To take up training again, save `state_dict()` instead: the planes have lost the weights' last bits.

        Raises:
            CheckpointError: it cannot be written, or the disk is full: names the path.
            FormatError: a weight holds NaN or Inf.
            WrapError: the wrapper was unwrapped.
        """
        self._check_open("save")
        return save_model(self.model, replace(self.settings, mode="infer"), Path(directory))

    def unwrap(self) -> nn.Module:
        """The model back, in place, with the very parameters that trained: an optimizer keeps working.

        Closes the wrapper.
        """
        for layer in self._layers.values():
            layer.release_()
        self._layers.clear()
        self._hook.remove()
        self.close()
        return self.model

    def close(self) -> None:
        """Nothing to release: the weights are parameters, and the layers go on as they are. Twice is fine."""
        self._closed = True
        self.stack.close()


def _is_data(value: Any) -> bool:
    """Whether a model's argument is made of tensors and constants, which no forward is expected to change."""
    if type(value) in (list, tuple):
        return all(map(_is_data, value))
    if type(value) is dict:
        return all(map(_is_data, value.values()))
    return value is None or isinstance(value, torch.Tensor | bool | int | float | str | torch.dtype | torch.device)


def _balance(wrapper: "weakref.ref[VBModelWrapper]") -> None:
    owner = wrapper()
    if owner is not None:
        owner._balance()


def _with_progress(layers: Mapping[str, VBLayer], show: bool) -> Iterable[VBLayer]:
    """The layers, with a progress bar in their number that names the large ones."""
    columns = (
        TextColumn("encoding"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[layer]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not show) as bar:
        task = bar.add_task("encoding", total=len(layers), layer="")
        for name, layer in layers.items():
            nbytes = layer.handle.spec.shape[0] * layer.handle.spec.shape[1] * layer.handle.spec.dtype.itemsize
            bar.update(task, layer=f"{name} ({format_bytes(nbytes)})" if nbytes >= _LARGE_BYTES else "")
            yield layer
            bar.advance(task)


def release_host_memory() -> None:
    """Give freed host memory back to the operating system: glibc keeps freed chunks of its heap otherwise."""
    recycle.forget()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
        if trim is not None:
            trim(0)
