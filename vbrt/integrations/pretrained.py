"""`vbrt.from_pretrained`: a model of transformers from its files, wrapped; the dense model never exists.

    vb = vbrt.from_pretrained("path/to/model")             # whatever the files hold, also weights quantized by others
    vb = vbrt.from_pretrained("path/to/model", "exact", tiers={"cpu": {"budget": "8GiB"}})

Nothing here reaches for the network, and no code that comes with a model is run. Importing this module imports
transformers.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from vbrt.config import VBConfig, load_config
from vbrt.errors import CheckpointError
from vbrt.integrations.hf_configs import (
    gguf_at,
    loading,
    looked_at,
    meta_model,
    method_of,
    model_config,
    no_dtype,
    quiet,
    take_generation_config_,
)
from vbrt.integrations.transformers_quantizer import QuantizationConfig
from vbrt.libraries.transformers_api import logging as transformers_logging
from vbrt.model.runtime import Runtime
from vbrt.report.progress import Progress
from vbrt.saves.common.compatibility import first_names
from vbrt.saves.files.checkpoint_paths import MANIFEST
from vbrt.saves.files.prefetch import reading_ahead
from vbrt.saves.load.sources import open_source
from vbrt.saves.published.dense_checkpoint import DenseCheckpoint
from vbrt.wrapper.load import load_from
from vbrt.wrapper.wrapper import VBModelWrapper
from vbrt.wrapper.wrapper_of import of

__all__ = ["WEIGHTS", "Reader", "from_pretrained"]

_OWN = "vbrt"  # the quant_method of what `save_pretrained` has written
_READ_HERE = (MANIFEST, "model.safetensors", "model.safetensors.index.json")
#: the files of which a directory must have one
WEIGHTS = (*_READ_HERE, "pytorch_model.bin", "pytorch_model.bin.index.json")


def from_pretrained(
    directory: str | PathLike,
    config: VBConfig | Mapping[str, Any] | str | PathLike | None = None,
    *,
    runtime: Runtime | None = None,
    dtype: torch.dtype | None = None,
    progress: bool | None = None,
    **overrides: Any,
) -> VBModelWrapper:
    """Build the model of a directory or a GGUF file, fill it weight by weight, and return it wrapped, in eval mode.

    Weights that others have quantized go into pages as they are where their layout is one of vbrt's formats; other
    layouts are decoded, one weight at a time, and `plan.notes` and a warning say so. What such a checkpoint has left
    dense stays dense.

    Args:
        directory: with config.json, and safetensors files or what `vb.save` or `save_pretrained` wrote, or pickled
            weights (pytorch_model.bin), which transformers reads; or a GGUF file, whose config is made of its metadata
            if no config.json lies beside it.
        config: as `vbrt.wrap` takes it; by default that of saved planes, "exact" for a checkpoint that others have
            quantized, and "fp4" for a dense one.
        runtime: `vb.runtime` of another model, which shares its tiers, budgets and policy.
        dtype: of the model of a GGUF file, which names none: what is decoded is rounded to it. By default that of the
            config beside the file; the file's own, if none of its weights are quantized; else float32.
        progress: as for `vbrt.load`.
        **overrides: sections of the config, merged key by key.

    Raises:
        CheckpointError: files missing, damaged, of another model, or of a layout that vbrt does not read.
        ConfigError: as from `vbrt.load`; or a dtype for files that have their own.
        FormatError, TierError: as from `vbrt.load`.
        VBError: a config.json that is missing, damaged, or of a model that transformers cannot build.
    """
    return Reader(looked_at(directory)[0], dtype, progress=progress).read(config, overrides, runtime=runtime)


class Reader:
    """A directory or a GGUF file that becomes a wrapped model.

    Args:
        dtype: of the model of a GGUF file; see `from_pretrained`.
        progress: as for `vbrt.load`.

    Raises ConfigError: a dtype for files that have their own.
    """

    def __init__(self, path: Path, dtype: torch.dtype | None = None, *, progress: bool | None = None) -> None:
        self._path, self._dtype, self._progress = path, dtype, progress
        self._is_gguf = gguf_at(path) is not None
        if dtype is not None and not self._is_gguf:
            raise no_dtype(path, dtype)

    def read(
        self,
        config: VBConfig | Mapping[str, Any] | str | PathLike | None,
        overrides: Mapping[str, Any] | None = None,
        *,
        runtime: Runtime | None = None,
    ) -> VBModelWrapper:
        """Return the model in eval mode. See `from_pretrained`."""
        path, overrides = self._path, overrides or {}
        is_own = not self._is_gguf and method_of(model_config(path)) == _OWN
        source = None if is_own or _is_pickled(path) else open_source(path)
        weights = {key: value for key, value in overrides.items() if key == "weights"}
        runs = load_config(config, **weights).weights.calibrate is not None  # before anything is encoded
        if source is None or (type(source) is DenseCheckpoint and not self._is_gguf and not runs):
            is_named = not is_own or any(given is not None for given in (config, runtime)) or overrides
            return self._by_transformers(
                QuantizationConfig(config, runtime=runtime, **overrides) if is_named else None  # then its own counts
            )
        with reading_ahead(source.files):
            model = meta_model(path, self._dtype).eval()
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config  # the layers are no longer those of the library that it names
            vb = load_from(source, model, config, runtime=runtime, progress=self._progress, **overrides)
        take_generation_config_(model, path)
        return vb

    def _by_transformers(self, asked: QuantizationConfig | None) -> VBModelWrapper:
        """Have transformers read dense weights, and what says for itself how it is wrapped: classes have dtypes and
        buffers of their own, of which only transformers knows."""
        kind, given = type(meta_model(self._path)), {} if asked is None else {"quantization_config": asked}
        with quiet(), _counted(self._progress), loading(f"{self._path}: transformers cannot load it"):
            model, info = kind.from_pretrained(
                self._path, dtype="auto", local_files_only=True, output_loading_info=True, **given
            )
        vb, missing = of(model.eval()), sorted(info["missing_keys"])
        if missing:
            vb.close()
            raise CheckpointError(
                f"{self._path}: not of this model: {len(missing)} weights that the model has are missing: "
                f"{first_names(missing)}"
            )
        return vb


def _is_pickled(path: Path) -> bool:
    """True for a directory whose weights only transformers reads."""
    return not any((path / name).is_file() for name in _READ_HERE) and any((path / name).is_file() for name in WEIGHTS)


@contextlib.contextmanager
def _counted(progress: bool | None) -> Iterator[None]:
    """Show how many tensors transformers has loaded in the block, in the place of its own bar."""

    def items(given: Collection[Any]) -> Iterator[Any]:
        with Progress("loading", len(given), unit="weights", show=progress) as work:
            for item in given:
                yield item
                work.done()

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        is_loading = options.get("desc") == "Loading weights" and args
        return items(args[0]) if is_loading else factory(*args, **options)

    before = transformers_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)
