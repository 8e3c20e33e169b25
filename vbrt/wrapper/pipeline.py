"""Wrapper of an object that holds models, such as a diffusers pipeline: shared tiers, and all of the object's API."""

import contextlib
import functools
import types
from collections.abc import Iterator, Mapping
from dataclasses import replace
from os import PathLike
from types import MappingProxyType
from typing import Any

from torch import nn

from vbrt.errors import WrapError
from vbrt.model.attachment import Attachment
from vbrt.model.pass_hooks import EntryHook, move_rest_
from vbrt.model.runtime import Runtime
from vbrt.model.timeline_recording import recorded
from vbrt.report.openmetrics import Scraped
from vbrt.report.stats import Stats
from vbrt.tiers import Recorder, TierStack
from vbrt.wrapper.live_view_block import Watched
from vbrt.wrapper.pipeline_kinds import CallPhases, HolderKind
from vbrt.wrapper.wrapper import VBModelWrapper
from vbrt.wrapper.wrapper_choice import facade_of

__all__ = ["VBPipelineWrapper"]

_OWN = ("pipeline", "runtime", "_kind", "_attachments")
_ENTRIES = ("encode", "decode")


class VBPipelineWrapper(Scraped, Watched):
    """Wrapped pipeline: call it, or use anything of the pipeline, as before; attributes set on it are the pipeline's.

    Its models are swapped in place and share one runtime, with one budget per tier. Each model's page keys, phases and
    statistics begin with its name in the pipeline, such as "transformer/".

    Attributes:
        pipeline: the object itself, with all its attributes, for `isinstance`.
        runtime: stack, budgets and balance of all its models.
    """

    def __init__(
        self, pipeline: Any, kind: HolderKind, runtime: Runtime, attachments: Mapping[str, Attachment]
    ) -> None:
        self.__dict__.update(pipeline=pipeline, runtime=runtime, _kind=kind, _attachments=dict(attachments))
        phases = CallPhases(kind)
        for name, attachment in attachments.items():
            attachment.name_phase = functools.partial(phases.name, name)
            attachment.work.part = kind.phase_of(name) or ""
            _add_entry_hook(attachment.model, kind)
        if kind.device:
            setattr(pipeline, kind.device, runtime.stack.device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the pipeline."""
        for attachment in self._attachments.values():
            attachment.check_open("call")
            move_rest_(attachment.model, self.runtime.stack.device)  # the pipeline infers its device from them
        return self.pipeline(*args, **kwargs)

    # -- the pipeline's attributes ------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        pipeline = self.__dict__.get("pipeline")
        if pipeline is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(pipeline, name)
        if name in self._kind.refused and not all(a.closed for a in self._attachments.values()):
            raise WrapError(f"{type(pipeline).__name__}.{name}: {self._kind.refused[name]}")
        is_own = isinstance(value, types.MethodType) and value.__self__ is pipeline
        return self._returning_self(value) if is_own else value

    def _returning_self(self, method: types.MethodType) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            return self if result is self.pipeline else result

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        attachment = self._attachments.get(name)
        if name in _OWN or name in type(self).__dict__:
            raise WrapError(f"vb.{name} belongs to the wrapper; an attribute of the pipeline is vb.pipeline.{name}")
        if attachment is not None and attachment.alive and value is not attachment.model:
            raise WrapError(f"vb.{name} is a wrapped model, whose pages this pipeline's tiers hold: unwrap() first")
        setattr(self.pipeline, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.pipeline)})

    def __reduce_ex__(self, protocol: int) -> tuple:
        raise WrapError(
            f"copies and pickles of a wrapped {type(self.pipeline).__name__} are not made: copy its models, or write "
            "them with save_pretrained()"
        )

    @property
    def vbrt(self) -> "VBPipelineWrapper":
        """The wrapper itself, under the name that model wrappers have: its own names take precedence over the
        pipeline's."""
        return self

    # -- its models ---------------------------------------------------------------------------------------------------

    @property
    def models(self) -> Mapping[str, VBModelWrapper]:
        """Name -> wrapper of each model, with its own plan, statistics and registry."""
        wrapped = {name: facade_of(a.model, a) for name, a in self._attachments.items() if a.alive}
        return MappingProxyType(wrapped)

    @property
    def stack(self) -> TierStack:
        """The runtime's stack."""
        return self.runtime.stack

    @property
    def lossless(self) -> bool:
        """True if every swapped weight of every model is held bit for bit."""
        return all(attachment.original for attachment in self._attachments.values())

    def materialize(self, *, progress: bool | None = None) -> "VBPipelineWrapper":
        """Encode every layer of every model now. See `VBModelWrapper.materialize`."""
        for attachment in self._attachments.values():
            attachment.materialize(progress=progress)
        return self

    def set_budget(self, tier: str, budget: int | str) -> int:
        """Change the budget of a tier, which all models share; return bytes. See `VBModelWrapper.set_budget`."""
        return self.runtime.set_budget(tier, budget)

    def stats(self, *, experts: bool = False, verbose: bool = False) -> Stats:
        """Return a frozen snapshot of the counters of all models on the runtime. See `VBModelWrapper.stats`."""
        return replace(self.runtime.stats(experts=experts), verbose=verbose)

    @contextlib.contextmanager
    def phase(self, name: str, *, precision: str | None = None) -> Iterator[None]:
        """Name the passes of all its models that begin in a `with` block. See `VBModelWrapper.phase`."""
        with contextlib.ExitStack() as blocks:
            for attachment in self._attachments.values():
                blocks.enter_context(attachment.phase(name, precision))
            yield

    def timeline(self, path: str | PathLike) -> contextlib.AbstractContextManager[Recorder]:
        """Record the passes of all its models in a `with` block, and write them to a file. See
        `VBModelWrapper.timeline`."""
        return recorded(tuple(self._attachments.values()), path)

    # -- unwrap and close ---------------------------------------------------------------------------------------------

    def unwrap(self) -> Any:
        """Turn the models back into dense ones, in place; return the pipeline. See `VBModelWrapper.unwrap`.

        If a page cannot be read, the remaining models stay wrapped, and it can be called again.

        Raises:
            TierError: a page cannot be read.
        """
        for attachment in self._attachments.values():
            if attachment.alive:
                _remove_entry_hook(attachment.detach(), self._kind)
        return self.pipeline

    def close(self) -> None:
        """Free its models' pages; weights that live in the tiers are lost. Idempotent."""
        for attachment in self._attachments.values():
            attachment.close()

    def __enter__(self) -> "VBPipelineWrapper":
        for attachment in self._attachments.values():
            attachment.check_open("with")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _add_entry_hook(model: nn.Module, kind: HolderKind) -> None:
    if kind.entry_hook and any(hasattr(model, method) for method in _ENTRIES):
        setattr(model, kind.entry_hook, EntryHook())


def _remove_entry_hook(model: nn.Module, kind: HolderKind) -> None:
    if isinstance(model.__dict__.get(kind.entry_hook), EntryHook):
        delattr(model, kind.entry_hook)
