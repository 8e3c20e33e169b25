"""`vbrt.from_pretrained`: a wrapped transformers model from its files, without the dense model in memory.

    vb = vbrt.from_pretrained("path/to/model")             # dense files, or quantized by other libraries
    vb = vbrt.from_pretrained("path/to/model", "exact", tiers={"cpu": {"budget": "8GiB"}})
    vb = vbrt.from_pretrained("Qwen/Qwen3-0.6B")           # through the Hub's cache

The network is accessed for names of the Hub only, and code that comes with a model is not run. Importing this module
imports transformers.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from vbrt.config import load_config
from vbrt.config.overrides import Config
from vbrt.errors import CheckpointError
from vbrt.integrations.hf_configs import (
    gguf_at,
    loading,
    meta_model,
    method_of,
    model_config,
    no_dtype,
    quiet,
    take_generation_config_,
)
from vbrt.integrations.hub_models import located
from vbrt.integrations.model_paths import looked_at
from vbrt.integrations.published_saves import keep_layout_
from vbrt.integrations.transformers_quantizer import QuantizationConfig
from vbrt.libraries.transformers_api import logging as transformers_logging
from vbrt.model.runtime import Runtime
from vbrt.report.progress import Progress
from vbrt.residency.user_policy import Overrides
from vbrt.saves.common.compatibility import first_names
from vbrt.saves.files.checkpoint_paths import MANIFEST
from vbrt.saves.files.prefetch import reading_ahead
from vbrt.saves.load.sources import open_source
from vbrt.saves.published.dense_checkpoint import DenseCheckpoint
from vbrt.saves.published.published_checkpoint import PublishedCheckpoint
from vbrt.wrapper.load import load_from
from vbrt.wrapper.wrapper import VBModelWrapper
from vbrt.wrapper.wrapper_choice import warn_of_plan
from vbrt.wrapper.wrapper_of import of

__all__ = ["WEIGHTS", "Reader", "from_pretrained", "load_by_transformers"]

_OWN = "vbrt"  # quant_method of files written by `save_pretrained`
_READ_HERE = (MANIFEST, "model.safetensors", "model.safetensors.index.json")
#: weight files of which a directory must have one
WEIGHTS = (*_READ_HERE, "pytorch_model.bin", "pytorch_model.bin.index.json")


def from_pretrained(
    model: str | PathLike,
    config: Config = None,
    *,
    revision: str | None = None,
    runtime: Runtime | None = None,
    dtype: torch.dtype | None = None,
    progress: bool | None = None,
    **overrides: Unpack[Overrides],
) -> VBModelWrapper:
    """Build a model from a directory, GGUF file or Hub name, fill it weight by weight, and return it wrapped, in eval
    mode.

    Weights quantized by other libraries go into pages unchanged if their layout matches one of vbrt's formats; other
    layouts are decoded, one weight at a time, as `plan.notes` and a warning say. Weights that such a checkpoint left
    dense stay dense.

    Args:
        model: a directory with config.json, and safetensors files, a save of `vb.save` or `save_pretrained`, or pickled
            weights (pytorch_model.bin), which transformers reads; or a GGUF file, whose config is made of its metadata
            unless a config.json is next to it; or, as a str, the name of a model on the Hugging Face Hub, fetched into
            its cache if nothing of that name is here: "Qwen/Qwen3-0.6B", or "org/name:Q4_K_M" for a GGUF file in it.
        config: as `vbrt.wrap` takes it; default: that of saved planes, "exact" for a checkpoint quantized by another
            library, and "fp4" for a dense one. A rounded format that it names rounds quantized weights again.
        revision: branch, tag or commit of a Hub model. Default: its main branch.
        runtime: `vb.runtime` of another model, to share its tiers, budgets and policy.
        dtype: compute dtype of a GGUF file's model, to which decoded weights are rounded. Default: that of the config
            next to the file; else the file's own, if none of its weights are quantized; else float32.
        progress: as for `vbrt.load`.
        **overrides: as for `vbrt.wrap`, merged key by key: `gpu_memory="12GB"`, `budget="6GiB"`, and sections.

    Raises:
        CheckpointError: files missing, damaged, of another model, or of a layout that vbrt does not read.
        ConfigError: as from `vbrt.load`; or a dtype for files that have their own.
        FormatError, TierError: as from `vbrt.load`.
        VBError: a config.json that is missing, damaged, or of a model that transformers cannot build; a Hub model that
            cannot be fetched.
    """
    path, _ = looked_at(located(model, revision=revision, progress=progress))
    return Reader(path, dtype, progress=progress).read(config, overrides, runtime=runtime)


class Reader:
    """Reader of a directory or GGUF file into a wrapped model.

    Args:
        dtype: compute dtype of a GGUF file's model; see `from_pretrained`.
        progress: as for `vbrt.load`.

    Raises ConfigError: a dtype for files that have their own.
    """

    def __init__(self, path: Path, dtype: torch.dtype | None = None, *, progress: bool | None = None) -> None:
        self._path, self._dtype, self._progress = path, dtype, progress
        self._is_gguf = gguf_at(path) is not None
        if dtype is not None and not self._is_gguf:
            raise no_dtype(path, dtype)

    def read(
        self, config: Config, overrides: Mapping[str, Any] | None = None, *, runtime: Runtime | None = None
    ) -> VBModelWrapper:
        """Return the model in eval mode. See `from_pretrained`."""
        path, overrides = self._path, overrides or {}
        is_own = not self._is_gguf and method_of(model_config(path)) == _OWN
        source = None if is_own or _is_pickled(path) else open_source(path)
        weights = {key: value for key, value in overrides.items() if key == "weights"}
        runs = load_config(config, **weights).weights.calibrate is not None  # needs a run on dense weights
        if source is None or (type(source) is DenseCheckpoint and not self._is_gguf and not runs):
            is_named = not is_own or any(given is not None for given in (config, runtime)) or overrides
            return self._by_transformers(
                QuantizationConfig(config, runtime=runtime, **overrides) if is_named else None  # then its own counts
            )
        with reading_ahead(source.files):
            model = meta_model(path, self._dtype).eval()
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config  # the layers are no longer that library's
            vb = load_from(source, model, config, runtime=runtime, progress=self._progress, **overrides)
        take_generation_config_(model, path)
        if isinstance(source, PublishedCheckpoint) and not self._is_gguf:
            keep_layout_(model, source)
        return vb

    def _by_transformers(self, asked: QuantizationConfig | None) -> VBModelWrapper:
        """Load through transformers: dense weights, and files with a vbrt config of their own. Only transformers knows
        a class's own dtypes and buffers."""
        kind, given = type(meta_model(self._path)), {} if asked is None else {"quantization_config": asked}
        with _counted(self._progress):
            model, refusal = load_by_transformers(kind, self._path, **given)
        vb = of(model.eval())
        if refusal is not None:
            vb.close()
            raise refusal
        warn_of_plan(vb.plan, "from_pretrained", stacklevel=4)  # the quantizer's own were hidden, with all others
        return vb


def load_by_transformers(kind: Any, path: Path, **given: Any) -> tuple[nn.Module, CheckpointError | None]:
    """Load a directory by a model class or auto class; return the model, and the error if files do not fit it.

    transformers fills what is missing at random, and refers to a log for shapes that differ.

    Raises VBError: it cannot load them.
    """
    with quiet(), loading(f"{path}: transformers cannot load it"):
        how = {"dtype": "auto", "local_files_only": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
        model, info = kind.from_pretrained(path, trust_remote_code=False, **how, **given)
    missing = sorted(info["missing_keys"])
    wrong = [
        f"{key} is {tuple(held)} in the files, and {tuple(has)} in the model"
        for key, held, has in info["mismatched_keys"]
    ]
    if wrong:
        why = f"{len(wrong)} shapes do not fit: {first_names(sorted(wrong))}"
    elif missing:
        why = f"{len(missing)} weights are missing: {first_names(missing)}"
    else:
        return model, None
    return model, CheckpointError(f"{path}: not of this model: {why}")


def _is_pickled(path: Path) -> bool:
    """True for a directory with weights that only transformers reads."""
    return not any((path / name).is_file() for name in _READ_HERE) and any((path / name).is_file() for name in WEIGHTS)


@contextlib.contextmanager
def _counted(progress: bool | None) -> Iterator[None]:
    """Show the number of tensors loaded by transformers in the block, in place of its own bar."""

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
