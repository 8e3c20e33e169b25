"""Wrapper of a model: call it, or use anything of the model; the work is the runtime's."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from vbrt.config import VBConfig
from vbrt.config.overrides import TierName
from vbrt.distributed.rank_stats import merged
from vbrt.distributed.rank_watch import watch, watched
from vbrt.errors import WrapError
from vbrt.generation.generate import follow, refuse_text
from vbrt.host.logger import warn
from vbrt.layers import VBLayer
from vbrt.model.attachment import Attachment
from vbrt.model.pass_hooks import is_plain_data, mark_own_calls
from vbrt.model.runtime import Runtime
from vbrt.model.timeline_recording import recorded
from vbrt.report.openmetrics import Scraped
from vbrt.report.routing_recorder import RoutingRecorder
from vbrt.report.stats import Stats
from vbrt.residency.plan import Plan
from vbrt.saves.saved.rank_saves import save_on_ranks
from vbrt.tiers import Recorder, TierStack
from vbrt.wrapper.live_view_block import Watched
from vbrt.wrapper.model_proxy import Facade

__all__ = ["VBModelWrapper"]

_TRACED = "the wrapper's forward passes on any arguments, as its model's takes them; trace the model, vb.module"


def _rounded(formats: Sequence[str]) -> str:
    return (
        f"unwrap(): weights come back as rounded to {', '.join(formats)}; their original bits are gone. The preset "
        '"exact" keeps them: vb.lossless is True then'
    )


class VBModelWrapper(Facade, Scraped, Watched):
    """Wrapped model: call it, or use anything of the model, as before; attributes set on it are the model's.

    Where the model has an attribute of a name below, `vb.name` is the model's, and `vb.vbrt.name` is this one. Always
    the wrapper's: `device`, `forward`, `state_dict`, `load_state_dict` and `zero_grad`. `config` is the model's own.
    """

    def __init__(self, model: nn.Module, attachment: Attachment) -> None:
        super().__init__(model, _attachment=attachment, _vb_watch=watch(attachment, model))
        follow(attachment, model)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "forward":
            mark_own_calls(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward.

        On out-of-memory with a reducible `tiers.gpu.budget = "auto"`, it lowers the budget and runs again, unless the
        result could differ: in training mode, or with arguments that may have been mutated (a cache). Those calls raise
        the error, and find room at the next call.
        """
        while True:
            try:
                if self._vb_watch is None:
                    return self._vb_model(*args, **kwargs)
                with watched(self._vb_watch):
                    return self._vb_model(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                runtime = self._attachment.runtime
                if runtime.balance is None or self._vb_model.training or not is_plain_data((args, kwargs)):
                    raise
                why = str(error)  # the error holds the pass's tensors alive
            except (AttributeError, TypeError):
                if args and callable(getattr(self._vb_model, "generate", None)):
                    refuse_text(args[0], "vb")
                raise
            except torch.fx.proxy.TraceError as error:
                if isinstance(args, torch.fx.Proxy):  # the analysed forward takes any arguments
                    raise WrapError(f"torch.fx.symbolic_trace: {_TRACED}") from error
                raise
            if not runtime.make_room():
                raise torch.OutOfMemoryError(why)

    if TYPE_CHECKING:  # the model's own, with vbrt's arguments; absent where the model's class has no `generate`

        @overload
        def generate(
            self,
            inputs: Tensor | None = None,
            *,
            return_dict_in_generate: Literal[True],
            speculate: int | bool | Literal["auto"] = False,
            drafter: str | tuple[str, ...] = "auto",
            exactness: Literal["tokens", "distribution"] = "tokens",
            seed: int | None = None,
            **kwargs: Any,
        ) -> Any: ...

        @overload
        def generate(
            self,
            inputs: Tensor | None = None,
            *,
            return_dict_in_generate: Literal[False] | None = None,
            speculate: int | bool | Literal["auto"] = False,
            drafter: str | tuple[str, ...] = "auto",
            exactness: Literal["tokens", "distribution"] = "tokens",
            seed: int | None = None,
            **kwargs: Any,
        ) -> Tensor: ...

        def generate(self, inputs: Tensor | None = None, **kwargs: Any) -> Any: ...

    @property
    def runtime(self) -> Runtime:
        """Stack, budgets and balance, which several models may share."""
        return self._attachment.runtime

    @property
    def stack(self) -> TierStack:
        """The runtime's stack of tiers."""
        return self._attachment.stack

    @property
    def settings(self) -> VBConfig:
        """The config, with current budgets."""
        return self._attachment.settings

    @property
    def plan(self) -> Plan:
        """Decisions for each weight, with current budgets."""
        return self._attachment.plan

    @property
    def registry(self) -> Mapping[str, VBLayer]:
        """Name -> VB layer, with aliases of tied weights."""
        return MappingProxyType(self._attachment.layers)

    @property
    def device(self) -> torch.device:
        """Device of kernels and inputs."""
        return self._attachment.stack.device

    def materialize(self, *, progress: bool | None = None) -> "VBModelWrapper":
        """Encode every layer now instead of on its first forward; idempotent.

        Args:
            progress: False: show nothing. By default, work of more than a second shows progress on stderr, unless
                VBRT_PROGRESS=0 is set.

        Raises:
            FormatError: a weight holds NaN or Inf, named. Layers before it are encoded, the model stays usable.
            TierError: a page cannot be stored, or the wrapper was closed.
        """
        with watched(self._vb_watch):
            self._attachment.materialize(progress=progress)
        return self

    def set_budget(self, tier: TierName, budget: int | str) -> int:
        """Change the budget of a tier while the model runs: to make room for a KV cache, or to use room again.

        Pages that no longer fit move to the tiers below; with a larger budget they are kept in the faster tier again as
        they pass through it. Layers that are not encoded yet are encoded. Models on one runtime share the budget.

        Args:
            tier: "gpu", "peer", "cpu" or "ssd".
            budget: bytes, "8GiB", "40%" (of the whole), or "auto" (a share of free memory, counting vbrt's own as
                free).

        Returns:
            The budget in bytes.

        Raises:
            ConfigError: not a budget, more than the machine has, or less than the largest layer.
            TierError: the model does not use that tier, or no tier below has room for the pages to move.
            WrapError: the wrapper was closed or unwrapped.
        """
        return self._attachment.set_budget(tier, budget)

    def stats(self, *, experts: bool = False, group: Any = None, verbose: bool = False) -> Stats:
        """Return a frozen snapshot of all counters.

        Args:
            experts: with the counters of every routed expert: `vb.stats(experts=True).experts("layers.0.mlp.experts")`.
            group: a process group, or True for the default one, whose ranks all call this: its first rank gets the sums
                over all, the others get their own.
            verbose: printed with counters of mechanisms that have no setting: captures, fusion, pages, loaded kernels.
        """
        own = self._attachment.stats(experts=experts)
        return replace(own if group is None else merged(own, group), verbose=verbose)

    def phase(
        self, name: str, *, precision: Literal["coarse", "full"] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Name the passes that begin in a `with` block, in this thread: `with vb.phase("draft"): vb(x)`.

        Each phase has its own learned order, and its counters in `stats().phases`. Without a name, a pass under
        `no_grad` is "decode" if its first input has one token per sequence, else "prompt"; with gradients it is
        "forward", and later leases by autograd are "backward".

        Args:
            name: any; the innermost block counts.
            precision: "coarse" leases only the coarse planes of `exact` weights, enough for a draft; "full".

        Raises:
            ArgumentError: (on entering) not a name, or not a precision.
            WrapError: the wrapper was closed or unwrapped.
        """
        return self._attachment.phase(name, precision)

    def timeline(self, path: str | PathLike) -> contextlib.AbstractContextManager[Recorder]:
        """Record the passes of a `with` block, and write a timeline of compute, waits and copies to a file.

        Recording adds device events, and leases resident layers like streamed ones: use it for a few passes, after the
        first. A block that raises leaves a file of the passes until then.

        Args:
            path: "*.html", for a browser, or "*.json" in Chrome's trace format, for Perfetto.

        Returns:
            A context manager; it yields the recorder, whose `timeline` has spans and totals after the block.

        Raises:
            ConfigError: another suffix, or a file that cannot be written.
            WrapError: the wrapper was closed or unwrapped; (on entering) the model is being recorded already.
        """
        return recorded((self._attachment,), path)

    def record_routing(self, path: str | PathLike) -> contextlib.AbstractContextManager[RoutingRecorder]:
        """Record the routing of tokens to experts in a `with` block, and write it into a small file.

        `vbrt.simulate` and `vbrt plan --routing` read the file; with `policy.routing` it decides the policy's scope.
        Recording synchronizes the device in each layer: use some hundred tokens of typical text. Replays of CUDA graphs
        are not recorded.

        Returns:
            A context manager; it yields the recorder, whose `routing` is the record so far.

        Raises:
            ArgumentError: (on entering or at the end) the file cannot be written.
            WrapError: the wrapper was closed or unwrapped, the model has no routed experts in the tiers, or (on
                entering) is being recorded already.
        """
        return self._attachment.record_routing(path)

    def save(self, directory: str | PathLike, *, progress: bool | None = None) -> Path:
        """Save planes, all other tensors and the config into a directory, for `vbrt.load`.

        The directory has safetensors files and `vbrt.json`; one layer is in memory at a time. Layers that are not
        encoded yet are encoded. An existing save is replaced once the new one is complete. For a transformers model it
        also gets the configs, and the tokenizer of the directory that the model was loaded from, so that
        `vbrt.from_pretrained` and `AutoConfig` accept it.

        If weights are sharded over ranks, every rank calls it and writes its shard. Any number of ranks can load that,
        or a save of a single process.

        Args:
            progress: as for `materialize`.

        Returns:
            The directory.

        Raises:
            CheckpointError: it cannot be written, or the disk is full: names the path.
            FormatError, TierError: a weight cannot be encoded, or a page cannot be read.
            WrapError: the wrapper was closed or unwrapped.
        """
        return save_on_ranks(self._attachment, directory, progress=progress)

    @property
    def lossless(self) -> bool:
        """True if every swapped weight is held bit for bit (formats "dense" and "exact", and the codes of a quantized
        checkpoint as they are), so that `unwrap()`, `state_dict()` and `.weight` give the original weights. False if
        any is rounded."""
        return self._attachment.original

    def unwrap(self) -> nn.Module:
        """Turn the model back into a dense one, in place, and close the wrapper.

        Weights are the original ones bit for bit if the model is `lossless`, else as rounded, in
        their original dtype and size. A layer that was never encoded gets its own parameter back; tied layers share one
        parameter again. If a page cannot be read, nothing is lost: the remaining layers stay wrapped.

        Warns if any were rounded, because nothing else has the original bits.

        Raises:
            TierError: a page cannot be read.
        """
        if formats := self._attachment.rounded_formats():
            warn(_rounded(formats), stacklevel=2)
        return self._attachment.detach()

    def close(self) -> None:
        """Retire the model's pages; close files, threads and pinned memory. Idempotent.

        Weights that live in the tiers are lost; `unwrap()` keeps them.

        Pages shared with a deep copy of the model, and tiers that other models use, stay until those are closed too.
        """
        self._attachment.close()

    def __enter__(self) -> "VBModelWrapper":
        self._attachment.check_open("with")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._attachment.close()

    # -- copies -------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_attachment": self._attachment.seed(), "_vb_watch": None}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        attachment = self.__dict__["_attachment"] = state["_attachment"].attach_to(self._vb_model)
        self.__dict__["_vb_watch"] = watch(attachment, self._vb_model)
        follow(attachment, self._vb_model)
