"""Runtime shared by attached models: tier stack, budgets, and dynamic GPU budget; without a façade.

    attachment = attach(model, config)       # vbrt.model.attach; `vbrt.wrap` puts a façade in front of it
    model(x)                                 # layers lease their pages, a hook marks the passes
    attachment.runtime.set_budget("cpu", "4GiB")

A runtime has one stack and one budget per tier, for any number of models. Per-model state (plan, layers, passes) is an
`Attachment`. The runtime refers to attachments weakly: each lives as long as its model.
"""

import contextlib
import time
import weakref
from collections.abc import Collection, Mapping
from dataclasses import replace

from vbrt.config import VBConfig, load_config, resolve_budget
from vbrt.config.argument_checks import check_instance
from vbrt.config.tier_records import TIERS
from vbrt.config.tier_sections import memory_budget
from vbrt.config.value_checks import shown
from vbrt.errors import ConfigError, TierError, WrapError
from vbrt.kernels import libraries
from vbrt.kernels.cpu import buffer_reuse
from vbrt.kernels.operator_trace import recorder
from vbrt.layers import Weight, weights_in
from vbrt.libraries.torch_api import is_capturing
from vbrt.libraries.versions import newer_than_tested
from vbrt.model.attached import Attached
from vbrt.model.auto_budget import GpuBalance
from vbrt.model.expert_cache import give_way
from vbrt.model.kv_caches import TieredCache, cache_stats
from vbrt.model.live_sampling import know
from vbrt.model.machine_memory import this_machine, with_freed
from vbrt.model.make_stack import attach_stores, build_stack
from vbrt.model.pass_recording import PassRecording
from vbrt.model.snapshot import tier_stats
from vbrt.report.stats import LayerStats, Stats
from vbrt.residency.plan import Plan
from vbrt.residency.user_policy import PolicyFactory
from vbrt.tiers import Recording, TierStack
from vbrt.tiers.schedule.graph_capture import refusal

__all__ = ["Runtime"]


class Runtime:
    """Runtime: a stack, its budgets, and the models that share them.

    Attributes:
        stack: the tiers with their pages.
        settings: config with the valid sections `tiers` and `policy`; budgets as last requested.
        budgets: bytes of each tier, the computing one first.
        balance: controller of `tiers.gpu.budget = "auto"` and of a budget within `gpu_memory`; None for any other.
        caches: KV caches in the tiers.
    """

    def __init__(self, stack: TierStack, settings: VBConfig, budgets: Mapping[str, int]) -> None:
        self.stack, self.settings, self.budgets = stack, settings, dict(budgets)
        self.balance: GpuBalance | None = None
        self._attachments: dict[str, weakref.ref[Attached]] = {}  # by name
        self._dropped: weakref.WeakSet[Weight] = weakref.WeakSet()  # handles of closed models
        self.caches: weakref.WeakSet[TieredCache] = weakref.WeakSet()
        know(self)

    @classmethod
    def of_plan(cls, plan: Plan, config: VBConfig, policy: PolicyFactory | None = None) -> "Runtime":
        """Build the runtime of a plan, with the config's policy or another; no model is attached yet.

        Raises:
            TierError: the ssd tier's directory cannot be used.
        """
        runtime = cls(build_stack(plan, config, policy), config, plan.budgets)
        follows = config.tiers.gpu.budget == "auto" or plan.gpu_room is not None
        follows = follows and not config.tiers.cpu.shared  # ranks' budgets must stay equal
        if "gpu" in plan.budgets and follows and plan.page_bytes:
            runtime.balance = GpuBalance(plan.budgets["gpu"], plan.gpu_room)
        return runtime

    def __deepcopy__(self, memo: dict) -> "Runtime":
        return self  # copies of a model share pages, tiers and budgets

    def __reduce__(self):
        return Runtime, (self.stack, self.settings, self.budgets)

    # -- models -------------------------------------------------------------------------------------------------------

    @property
    def attachments(self) -> tuple[Attached, ...]:
        """Live, unclosed models on this runtime."""
        found = (ref() for ref in self._attachments.copy().values())
        return tuple(attachment for attachment in found if attachment is not None and attachment.alive)

    def add(self, attachment: Attached) -> None:
        """Register a model."""
        self._attachments[attachment.name] = weakref.ref(attachment)

    def free_name(self, wanted: str) -> str:
        """Return `wanted`, with a number appended if the name is taken on this runtime."""
        taken = {attachment.name for attachment in self.attachments}
        names = (wanted if number == 1 else f"{wanted}-{number}" for number in range(1, len(taken) + 2))
        return next(name for name in names if name not in taken)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close_unused(self, dropped: set[Weight]) -> None:
        """Free the pages of a closed model, and close the stack unless another model or a copy needs it.

        Args:
            dropped: handles of the closed model, which no longer hold pages.
        """
        self.stack.retire_unowned()
        self._dropped.update(dropped)
        for cache in [] if self.attachments else list(self.caches):
            cache.close()
        others = self.attachments or self.stack.pages or not self._dropped.issuperset(weights_in(self.stack))
        if self.stack.closed or not others:
            self.stack.close()
        elif self.attachments:
            self._use_freed_room()
        buffer_reuse.trim()

    def _use_freed_room(self) -> None:
        """Rehome all pages in the top tier, if a closed model has left room for them and for pages of unencoded layers,
        which would find no room to be streamed through."""
        top, registries = self.stack.names[0], [attachment.registry for attachment in self.attachments]
        waiting = [layer for registry in registries for handle, layer in registry.pages() if not handle.keys]
        to_come = sum(page.nbytes for layer in waiting for page in layer)
        if to_come and to_come + sum(page.nbytes for page in self.stack.pages.values()) > self.budgets[top]:
            return
        for attachment in self.attachments:
            attachment.hosting.release()
        with contextlib.suppress(TierError):  # an unreadable page stays; its lease raises
            self.stack.set_budget(top, self.budgets[top], self.largest_layer_bytes)
        for registry in registries:
            registry.forget_ready()

    def close(self) -> None:
        """Close every model and the tiers; weights in the tiers are lost. Idempotent."""
        for attachment in self.attachments:
            attachment.close()
        self.stack.close()

    def check_open(self, what: str) -> None:
        """Raise WrapError if the tiers are closed."""
        if self.stack.closed:
            raise WrapError(f"{what}: the runtime was closed with its last model; build a new one")

    def stats(self, *, experts: bool = False) -> Stats:
        """Return the counters of all models; layers of later models are prefixed with the model's name. `experts`: also
        per routed expert."""
        attachments, tiers = self.attachments, tier_stats(self.stack)
        parts = [attachment.stats(experts=experts) for attachment in attachments]
        layers: dict[str, LayerStats] = {}
        for attachment, part in zip(attachments, parts, strict=True):
            prefix = f"{attachment.name}/" if layers else attachment.prefix
            layers |= {prefix + name: layer for name, layer in part.layers.items()}
        top = self.stack.names[0]
        return Stats(
            self.stack.levels[0].policy.kind,
            top,
            sum(part.passes for part in parts),
            layers,
            tiers,
            sum(part.dense_bytes for part in parts),
            sum(part.kept_bytes for part in parts),
            tiers[top].held_bytes + sum(attachment.unpaged_bytes for attachment in attachments),
            tuple(dict.fromkeys(reason for part in parts for reason in part.fallbacks)),
            phases=self.stack.phases(),
            leases=self.stack.ledger.programmes.told(),
            caches=cache_stats(self.caches),
            libraries=libraries(),
            untested=newer_than_tested(loaded=True),
        )

    # -- CUDA graphs --------------------------------------------------------------------------------------------------

    def recordable(self, phase: str, keys: Collection[str] | None = None) -> str | None:
        """Return why a pass of a phase cannot be captured as a CUDA graph now; None if it can.

        Args:
            phase: with the prefix of the model's attachment, if any.
            keys: of the pages that the pass leases, where known.
        """
        return "the runtime was closed with its last model" if self.stack.closed else refusal(self.stack, phase, keys)

    def recording(self, phase: str, keys: Collection[str] | None = None) -> Recording:
        """Prepare the capture of a pass as a CUDA graph, right before the capture; see
        `vbrt.tiers.schedule.graph_capture`.

        Raises:
            TierError: it cannot be captured; the message says why.
        """
        self.check_open("recording")
        hostings = [attachment.hosting for attachment in self.attachments]
        caches = [attachment.expert_cache for attachment in self.attachments]
        return PassRecording(self.stack, phase, keys, hostings, caches)

    # -- budgets ------------------------------------------------------------------------------------------------------

    @property
    def page_bytes(self) -> int:
        """Bytes of all pages of all models and caches; pages shared by copies of a model count once."""
        pages = {page.key: page.nbytes for a in self.attachments for _, layer in a.registry.pages() for page in layer}
        return sum(pages.values()) + sum(cache.nbytes for cache in list(self.caches))

    @property
    def largest_layer_bytes(self) -> int:
        """Bytes of the largest lease."""
        return max((attachment.plan.largest_layer_bytes for attachment in self.attachments), default=0)

    def set_budget(self, tier: str, budget: int | str) -> int:
        """Change the budget of a tier for all models, while they run. See `VBModelWrapper.set_budget`."""
        self.check_open("set_budget")
        check_instance(tier, str, "set_budget(): tier", "the name of a tier, such as 'cpu'")
        if tier not in TIERS:
            has = ", ".join(self.budgets)
            raise ConfigError(f"set_budget(): tier = {shown(tier)}; expected one that this model has: {has}")
        memory_budget(budget, f"set_budget({tier!r}): budget")
        config = load_config(self.settings, tiers={tier: {"budget": budget}})
        nbytes = self._resize(tier, config, keep_settings=False)
        if tier == "gpu":
            self.balance = GpuBalance(nbytes) if budget == "auto" and not config.tiers.cpu.shared else None
        return nbytes

    def _resize(self, tier: str, config: VBConfig, *, keep_settings: bool) -> int:
        """Resize a tier to `config`'s budget, and store it in `settings` unless `keep_settings`."""
        if tier not in self.budgets:
            has = ", ".join(self.budgets)
            raise TierError(
                f"tiers.{tier}: this model has the tiers {has}; name one of them, or wrap it again with {tier}"
            )
        attachments = self.attachments
        for attachment in attachments:
            attachment.materialize()
        machine = with_freed(this_machine(config), tier, tier_stats(self.stack)[tier].held_bytes)
        nbytes = resolve_budget(config, machine, tier)
        largest = self.largest_layer_bytes
        if TIERS[tier].passes and nbytes < largest:
            raise ConfigError(
                f"tiers.{tier}: a budget of {nbytes} bytes is smaller than the largest layer's pages ({largest} "
                "bytes); give it at least that"
            )
        self.open_stores()
        living = [a.expert_cache for a in attachments if a.expert_cache.lives] if tier == self.stack.names[0] else []
        if not give_way(living, nbytes, self.page_bytes):
            living = []
        for attachment in attachments if TIERS[tier].memory else ():
            if attachment.expert_cache not in living:
                attachment.expert_cache.reset()  # raises if a graph has captured it
            if not living:
                attachment.hosting.release()
        try:
            with contextlib.ExitStack() as moving:
                for cache in list(self.caches):
                    moving.enter_context(cache.movable())
                self.stack.set_budget(tier, nbytes, largest)
            for cache in living:
                cache.take_room()
        finally:  # also after an interrupt: pages may have moved, and the budget may be in force
            with self.stack.encoding:
                if tier_stats(self.stack)[tier].budget_bytes == nbytes:
                    settings = self.settings if keep_settings else _with_tier(self.settings, config, tier)
                    self.budgets, self.settings = {**self.budgets, tier: nbytes}, settings
            for attachment in attachments:
                attachment.registry.forget_ready()  # views would keep moved pages' memory alive
        return nbytes

    def open_stores(self) -> None:
        """Open the ssd tier if the config has one and it is not open yet."""
        with self.stack.encoding:
            attach_stores(self.stack, self.settings, self.budgets)

    def follow_free_memory(self, ahead_bytes: int = 0) -> None:
        """Lower or raise the GPU budget by the free memory, for `budget = "auto"` and `gpu_memory`; `ahead_bytes` are
        about to be allocated. Not while a pass is traced or captured, which the work for it would become a part of."""
        balance = self.balance
        if balance is None or not balance.active or recorder() is not None or is_capturing():
            return
        if ahead_bytes or balance.due():
            _follow(self, balance, ahead_bytes)

    @property
    def gives_way(self) -> bool:
        """True while pages have less room than they were given, as other memory has needed it."""
        balance = self.balance
        return balance is not None and _used_bytes(self) < min(balance.wanted_bytes, self.page_bytes)

    def make_room(self) -> bool:
        """Lower the GPU budget after an out-of-memory error; True if that worked, so that the pass can be retried."""
        balance = self.balance
        if balance is None:
            return False
        before = _used_bytes(self)
        balance.look_soon()
        _follow(self, balance)
        return self.budgets["gpu"] < before


def _follow(runtime: Runtime, balance: GpuBalance, ahead_bytes: int = 0) -> None:
    begun, used = time.monotonic(), _used_bytes(runtime)
    nbytes = max(runtime.largest_layer_bytes, balance.wanted_now(used, runtime.page_bytes, ahead_bytes))
    balance.looked(time.monotonic() - begun)
    if nbytes == used:
        return
    config = load_config(runtime.settings, tiers={"gpu": {"budget": nbytes}})
    try:
        runtime._resize("gpu", config, keep_settings=True)
    except (ConfigError, TierError) as error:
        balance.stop(error)


def _used_bytes(runtime: Runtime) -> int:
    """Return the part of the GPU budget that pages can use; lowering it above that would free nothing."""
    return min(runtime.budgets["gpu"], runtime.page_bytes)


def _with_tier(settings: VBConfig, config: VBConfig, tier: str) -> VBConfig:
    """Return `settings` with one tier's section of `config`."""
    tiers = replace(settings.tiers, **{tier: getattr(config.tiers, tier)})
    return replace(settings, tiers=tiers, source=config.source)
