"""`vbrt.load`: a wrapped model from files, without the dense model in memory."""

from os import PathLike
from typing import Unpack

import torch
from torch import nn

from vbrt.config.overrides import Config
from vbrt.errors import WrapError
from vbrt.layers import SwappedLayer
from vbrt.layers.modules.training_warnings import warn_of_training
from vbrt.model.attach import Attempt
from vbrt.model.runtime import Runtime
from vbrt.model.shared_config import shared_config
from vbrt.residency.user_policy import Overrides
from vbrt.saves.files.prefetch import reading_ahead
from vbrt.saves.load.load_model import load_attached
from vbrt.saves.load.sources import Source, open_source
from vbrt.saves.saved.rank_saves import for_ranks
from vbrt.wrapper.wrap import facade_of, user_policy, warn_of_plan
from vbrt.wrapper.wrapper import VBModelWrapper

__all__ = ["load", "load_from"]


def load(
    directory: str | PathLike,
    model: nn.Module,
    config: Config = None,
    *,
    runtime: Runtime | None = None,
    progress: bool | None = None,
    **overrides: Unpack[Overrides],
) -> VBModelWrapper:
    """Wrap a model with weights from files: a save of `vb.save`, or a safetensors checkpoint.

    Every parameter and buffer comes from the files, in their dtypes, except parameters that a transformers class keeps
    in float32. A save is not re-encoded; a checkpoint is read and encoded one weight at a time. The model's mode
    (train, eval) stays.

    If the CPU computes, large unswapped weights of a checkpoint are memory-mapped, as by `from_pretrained`: the system
    may evict and re-read them, writes stay in this process, and files may be replaced or removed, but not truncated or
    written. Those of a save are read into memory, so that their verified digests hold for the model's lifetime.

    Args:
        directory: a save; a directory with model.safetensors, or its shards and index; or one .safetensors file.
        model: the architecture; changed in place. Built under `torch.device("meta")`, it never has dense weights in
            memory. Weights that it does hold are released once everything is loaded.
        config: as `vbrt.wrap` takes it; default: the save's, or "fp4" for a checkpoint. A save keeps its formats and
            its choice of layers.
        runtime: `vb.runtime` of another model, to share its tiers, budgets and policy, as for `vbrt.wrap`.
        progress: False: show nothing. By default loading that takes more than a second shows progress on stderr, unless
            VBRT_PROGRESS=0 is set.
        **overrides: sections of the config, merged key by key: `tiers={"gpu": {"budget": "6GiB"}}`; `policy=` also
            takes a custom policy, as for `vbrt.wrap`.

    Raises:
        CheckpointError: files missing, damaged, of a newer version or of another model: the model is unchanged.
        ConfigError: as from `wrap`; also for another weights.format or weights.fine than a save's.
        FormatError: a weight of a checkpoint holds NaN or Inf.
        TierError: a page cannot be stored.
        WrapError: the model is wrapped already.
    """
    if isinstance(model, VBModelWrapper) or not isinstance(model, nn.Module):
        raise WrapError(f"load() got {type(model).__name__}; expected a torch.nn.Module that is not wrapped")
    if any(isinstance(module, SwappedLayer) for module in model.modules()):
        raise WrapError('load(): the model is wrapped already; build a new one, under torch.device("meta") for one')
    source = for_ranks(open_source(directory), model)
    with reading_ahead(source.files):
        return load_from(source, model, config, runtime=runtime, progress=progress, **overrides)


def load_from(
    source: Source,
    model: nn.Module,
    config: Config,
    *,
    runtime: Runtime | None,
    progress: bool | None = None,
    **overrides: Unpack[Overrides],
) -> VBModelWrapper:
    """Wrap a model with a source's weights. See `load`."""
    policy = user_policy(overrides, runtime)
    asked = source.config(config, overrides)
    if runtime is not None:
        asked = shared_config(asked, runtime, config, overrides)
    attempt = Attempt(model, runtime)
    try:
        attachment = load_attached(source, model, asked, runtime=runtime, policy=policy, progress=progress)
        warn_of_plan(attachment.plan, "vbrt.load", stacklevel=4)
        layers = attachment.layers.values()
        if torch.is_grad_enabled() and any(layer.training and layer.handle.trainable for layer in layers):
            warn_of_training(stacklevel=3)
        return facade_of(model, attachment)
    except BaseException:
        attempt.undo()
        raise
