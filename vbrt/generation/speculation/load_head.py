"""Loading of a model's multi-token prediction head from its checkpoint, onto the model's runtime."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from vbrt.config import VBConfig, load_config
from vbrt.errors import CheckpointError, WrapError
from vbrt.generation.speculation.mtp_head import mtp_head
from vbrt.libraries import transformers_api
from vbrt.model.attachment import Attachment
from vbrt.model.shared_config import shared_config
from vbrt.saves.files.prefetch import reading_ahead
from vbrt.saves.load.load_model import load_attached
from vbrt.saves.load.mtp_checkpoint import mtp_checkpoint

__all__ = ["load_head"]


def load_head(
    attachment: Attachment,
    directory: str | PathLike | None = None,
    config: VBConfig | Mapping[str, Any] | str | PathLike | None = None,
    *,
    progress: bool | None = None,
    **overrides: Any,
) -> Attachment:
    """Load the head of an attached model, and set `attachment.head`; return the head's attachment. See
    `vbrt.load_heads`."""
    attachment.check_open("load_heads")
    if attachment.head is not None:
        raise WrapError("load_heads: the model has its head already; close() what load_heads returned before")
    head = mtp_head(attachment.model)
    layers = len(attachment.model.get_decoder().layers)
    source = mtp_checkpoint(_directory_of(attachment.model.config) if directory is None else Path(directory), layers)
    config = _drafting(attachment.settings) if config is None else config
    asked = shared_config(source.config(config, overrides), attachment.runtime, config, overrides)
    with reading_ahead(source.files):
        own = load_attached(source, head, asked, runtime=attachment.runtime, progress=progress)
    attachment.head = head
    return own


def _drafting(config: VBConfig) -> VBConfig:
    """Return the config of a model for its head: without fine planes, since drafts are verified."""
    weights: dict[str, Any] = {"fine": "none", "calibrate": None}
    if config.weights.format == "auto":
        weights |= {"format": load_config().weights.format, "budget": None}
    return load_config(config, weights=weights)


def _directory_of(config: Any) -> Path:
    """Return the directory that transformers has loaded a model from. Raises CheckpointError: there is none."""
    name = getattr(config, "_name_or_path", "")
    path = Path(name)
    if not name:
        raise CheckpointError("load_heads: the model was not loaded from files; give the checkpoint's directory")
    if path.exists():
        return path.parent if path.name == "config.json" else path
    cached = transformers_api.cached_directory(name, getattr(config, "_commit_hash", None))
    if cached is None:
        raise CheckpointError(
            f"load_heads: {name}, which the model was loaded from, is neither a directory here nor in transformers' "
            "cache; give the checkpoint's directory"
        )
    return cached
