"""`save_pretrained` of a model whose checkpoint another library quantized: its own layout, which that library reads.

Frozen planes do not change, so their tensors are copied from the files, byte for byte; all other tensors are the
model's. The config gets the library's entry back.
"""

import contextlib
import functools
import inspect
import shutil
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vbrt.errors import ArgumentError, WrapError
from vbrt.libraries.transformers_api import HfQuantizer, adapters_only
from vbrt.residency.plan import Plan
from vbrt.saves.published.packed_files import MODELOPT_FILE, scheme_entries
from vbrt.saves.published.published_checkpoint import PublishedCheckpoint
from vbrt.wrapper.wrapper_of import attachment_of

__all__ = ["keep_layout_"]


def keep_layout_(model: nn.Module, source: PublishedCheckpoint) -> None:
    """Let `model.save_pretrained` write the layout of the checkpoint that the model was loaded from, unless its weights
    train, or are rounded to another format."""
    if hasattr(type(model), "save_pretrained") and not source.rounds_again:
        model.__dict__["save_pretrained"] = PublishedSave(model, source)


class PublishedSave:
    """The `save_pretrained` of one model: a callable set on the instance, with a weak reference to it."""

    def __init__(self, model: nn.Module, source: PublishedCheckpoint | None) -> None:
        self._model, self._source = weakref.ref(model), source
        functools.update_wrapper(self, type(model).save_pretrained)
        self.__signature__ = inspect.signature(type(model).save_pretrained.__get__(model))

    def __call__(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """See transformers. Raises CheckpointError: the files that the model was loaded from are gone or others."""
        model = self._model()
        if model is None:
            raise WrapError("save_pretrained: the model is gone; keep it in a variable for as long as this is called")
        save, source, plan = type(model).save_pretrained.__get__(model), self._source, _frozen_plan(model)
        if source is None or plan is None or adapters_only(model) or kwargs.get("state_dict") is not None:
            return save(save_directory, *args, **kwargs)
        if Path(save_directory).resolve() == source.path.resolve():
            raise ArgumentError(
                f"save_pretrained: {save_directory}: quantized weights are copied from the files in this directory; "
                "expected another one"
            )
        if "save_original_format" in inspect.signature(save).parameters:
            kwargs["save_original_format"] = False  # the tensors have the files' names already
        with _as_published(model, source, plan):
            out = save(save_directory, *args, **kwargs)
        if (source.path / MODELOPT_FILE).is_file():
            shutil.copyfile(source.path / MODELOPT_FILE, Path(save_directory, MODELOPT_FILE))
        return out

    def __deepcopy__(self, memo: dict) -> "PublishedSave":
        model = memo.get(id(self._model()))
        return PublishedSave(self._model() if model is None else model, self._source)

    def __reduce__(self) -> tuple:
        return PublishedSave, (self._model(), None)


def _frozen_plan(model: nn.Module) -> Plan | None:
    """Return the plan of a model with frozen weights; None: unwrapped, a copy, or its weights train."""
    try:
        attachment = attachment_of(model)
        attachment.check_open("save_pretrained")
    except WrapError:
        return None
    return attachment.plan if attachment.settings.mode == "infer" else None


@contextlib.contextmanager
def _as_published(model: nn.Module, source: PublishedCheckpoint, plan: Plan) -> Iterator[None]:
    """Show transformers a model quantized by the library that wrote the source, during the block."""
    entries = scheme_entries(source.path)
    model.hf_quantizer = _Written(*source.published_tensors(model, plan))
    vars(model.config).update(entries)
    try:
        yield
    finally:
        for key in entries:
            vars(model.config).pop(key, None)
        del model.hf_quantizer


class _Written(HfQuantizer):
    """Tensors for `save_pretrained`, and their files' metadata. See `HfQuantizer`."""

    requires_calibration = False

    def __init__(self, tensors: dict[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        self._tensors, self._metadata = tensors, dict(metadata)

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """True."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: adapters train on frozen planes."""
        return True

    def get_state_dict_and_metadata(self, *args: Any, **kwargs: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return them."""
        return self._tensors, self._metadata
