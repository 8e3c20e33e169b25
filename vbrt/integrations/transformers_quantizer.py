"""Quantizer for transformers' `from_pretrained`: encodes tensors into planes as they are read.

    config = vbrt.QuantizationConfig("exact", tiers={"cpu": {"budget": "8GiB"}})
    model = AutoModelForCausalLM.from_pretrained("path", quantization_config=config)
    vb = vbrt.of(model)  # stats, set_budget, timeline, save, unwrap

The model stays a plain one on the meta device while transformers loads it: `vbrt.saves.load.fill_while_reading` puts
its weights into pages one by one, and swaps the layers at the end. Importing this module imports transformers.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from vbrt.config import VBConfig, load_config
from vbrt.config.overrides import Config
from vbrt.distributed.rank_watch import watch
from vbrt.errors import CheckpointError, ConfigError, VBError, WrapError
from vbrt.generation.generate import follow
from vbrt.host import accelerator
from vbrt.integrations.gguf_quantizer import TakesGGUF
from vbrt.integrations.tensor_parallel import is_split, share_of_files
from vbrt.integrations.transformers_experts import by_expert
from vbrt.libraries.transformers_api import (
    ConversionOps,
    QuantizationConfigMixin,
    adapters_only,
    keep_loading_attributes_of,
    own_dtypes_of,
)
from vbrt.model.attach import attach
from vbrt.model.runtime import Runtime
from vbrt.model.shared_config import shared_config
from vbrt.residency.user_policy import Overrides
from vbrt.saves.files.prefetch import read_ahead
from vbrt.saves.files.safetensors_file import TensorFile
from vbrt.saves.load.fill_while_reading import Filling
from vbrt.saves.published.dense_checkpoint import DenseCheckpoint
from vbrt.saves.saved.embedded_planes import dense_tensors, embedded_tensors, open_embedded
from vbrt.saves.saved.saved_planes import SavedModel, for_this_machine
from vbrt.wrapper.wrap import user_policy, warn_of_plan
from vbrt.wrapper.wrapper_of import attachment_of, of

__all__ = ["QuantizationConfig", "VBQuantizer"]

_METHOD, _GGUF = "vbrt", "gguf"


class _Method(str, Enum):  # noqa: UP042 - str(...) of diffusers' and transformers' own
    """Name of the method, as a str enum, because diffusers reads its `value`."""

    VBRT = _METHOD

    def __ne__(self, other: object) -> bool:
        """False for "gguf" too: transformers gives GGUF files only to quantizers whose method does not differ."""
        return str.__ne__(self, other) and other != _GGUF

    __hash__ = str.__hash__


_STORED = ("planes", "dense")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


_KEYS = ("quant_method", "stored", "dtypes", "config")


def _is_entry(key: str, value: Any) -> bool:
    """True for a valid entry of config.json."""
    if key == "dtypes":
        known = {str(dtype).removeprefix("torch.") for dtype in _DTYPES}
        return (
            isinstance(value, list) and len(value) in (0, 2) and all(isinstance(v, str) and v in known for v in value)
        )
    if key == "config":
        return isinstance(value, Mapping)
    return key in _KEYS and isinstance(value, str)


class Sharing:
    """Runtime shared by models loaded with one config; copies of the config share it, too."""

    def __init__(self, runtime: Runtime | str) -> None:
        if not isinstance(runtime, Runtime) and runtime != "shared":
            raise ConfigError(f'QuantizationConfig: runtime = {runtime!r}; expected vb.runtime of a model, or "shared"')
        self._given = runtime if isinstance(runtime, Runtime) else None
        self._last: weakref.ref[Runtime] | None = None

    def __deepcopy__(self, memo: dict) -> "Sharing":
        return self

    @property
    def runtime(self) -> Runtime | None:
        """The given runtime, or the last model's, if it is still alive."""
        last = self._given or (self._last and self._last())
        return last if self._given is not None or (last is not None and not last.stack.closed) else None

    @runtime.setter
    def runtime(self, runtime: Runtime) -> None:
        self._last = weakref.ref(runtime)


class QuantizationConfig(QuantizationConfigMixin):
    """Config of `from_pretrained(quantization_config=...)`: how transformers wraps the model that it loads.

    Args:
        config: as `vbrt.wrap` takes it: a preset ("fp4", the default, "exact", ...), a TOML file, a dict, a VBConfig.
        stored: content for `save_pretrained`: "planes", which only vbrt reads, or "dense" weights, which any reader
            loads. With mode = "train", always the dense weights.
        runtime: `vb.runtime` of another model, to share its tiers, budgets and policy; or "shared": all models loaded
            with this object share one, as components of a pipeline do.
        **overrides: as for `vbrt.wrap`: `gpu_memory="12GB"`, `budget="6GiB"`, and sections of
            the config; `policy=` also takes a custom policy.

    Attributes:
        settings: the resulting config; for a loaded model, the one that it was wrapped with.
        named: the arguments: config, overrides, and a policy factory or None.
        dtypes: of a save, the dtype in config.json (that of the first parameter that is not swapped) and the model's,
            where these differ.

    A directory written by `save_pretrained` keeps its config: after `import vbrt`, `from_pretrained` without one uses
    it, and a given one is merged into it, as by `vbrt.load`. Without vbrt, transformers loads dense weights with a
    warning, and rejects planes for their sizes.

    Raises ConfigError: as `vbrt.wrap`; or another value of `stored`.
    """

    def __init__(
        self,
        config: Config = None,
        *,
        stored: str = "planes",
        runtime: Runtime | str | None = None,
        **overrides: Unpack[Overrides],
    ) -> None:
        if stored not in _STORED:
            raise ConfigError(f"QuantizationConfig: stored = {stored!r}; expected one of {', '.join(_STORED)}")
        self.quant_method, self.stored = _Method.VBRT, stored
        self.sharing = None if runtime is None else Sharing(runtime)
        policy = user_policy(overrides, runtime if isinstance(runtime, Runtime) else None)
        self.named = config, overrides, policy
        self.dtypes: tuple[str, ...] = ()
        self.settings = load_config(config, **overrides)

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> "QuantizationConfig | tuple[QuantizationConfig, dict[str, Any]]":
        """Make a config from `to_dict`'s result. Raises ConfigError: an unknown key, named."""
        wrong = next((key for key in (*config_dict, *_KEYS) if not _is_entry(key, config_dict.get(key))), None)
        if wrong is not None:
            raise ConfigError(
                f"quantization_config of config.json: {wrong} = {config_dict.get(wrong)!r} is not as save_pretrained() "
                f"writes it; expected {', '.join(_KEYS)}; a newer vbrt may read it. A dict that is passed to "
                'from_pretrained must be such a one, too: pass quantization_config=vbrt.QuantizationConfig("exact")'
            )
        made = cls(VBConfig.from_save(config_dict["config"], source="config.json"), stored=config_dict["stored"])
        made.dtypes = tuple(config_dict["dtypes"])
        return (made, kwargs) if return_unused_kwargs else made

    def to_dict(self) -> dict[str, Any]:
        """Return the entry for config.json."""
        values = _METHOD, self.stored, list(self.dtypes), self.settings.to_dict()
        return dict(zip(_KEYS, values, strict=True))

    def __iter__(self):
        yield from self.to_dict().items()

    def get_loading_attributes(self) -> dict[str, Any]:
        """Return the attributes that override a directory's own config: all that was asked for."""
        return {"named": self.named, "sharing": self.sharing}

    def over(self, saved: VBConfig) -> VBConfig:
        """Return a save's config, adapted to this machine, with this object's settings merged in."""
        config, overrides, _ = self.named
        return load_config(for_this_machine(saved) if config is None else config, **overrides)

    def settle(self, saved: Any = None) -> None:
        """Set the settings for the model being read.

        Args:
            saved: files with a config of their own; by default weights are encoded.

        Raises:
            ConfigError: the settings contradict each other, or the runtime that the model joins.
        """
        config, overrides, _ = self.named
        self.settings = self.over(self.settings) if saved is None else saved.config(config, overrides)
        if saved is None and self.settings.weights.calibrate is not None:
            raise ConfigError(
                f'{self.settings.source}: weights.calibrate = "{self.settings.weights.calibrate}": the model has to '
                "run before its weights are encoded, and from_pretrained of transformers encodes them as it reads: use "
                "vbrt.from_pretrained or vbrt.wrap"
            )
        runtime = None if self.sharing is None else self.sharing.runtime
        if runtime is not None:
            self.settings = shared_config(self.settings, runtime, config, overrides)

    def filling(self, model: nn.Module, saved: Any = None) -> Filling:
        """Return the filling of a meta model, on the runtime that it gets."""
        runtime = None if self.sharing is None else self.sharing.runtime
        policy = self.named[2] if runtime is None else None
        made = Filling(model, self.settings, policy, saved, runtime=runtime)
        self.settings = made.settings
        if self.sharing is not None:
            self.sharing.runtime = made.runtime
        return made


# merges a given config into a directory's own, which would drop it otherwise
keep_loading_attributes_of(QuantizationConfig)


class _Encode(ConversionOps):
    """Hands tensors to the filling; the others go on to the model."""

    def __init__(self, quantizer: "VBQuantizer") -> None:
        self._quantizer = quantizer

    def __deepcopy__(self, memo: dict) -> "_Encode":
        return self

    def convert(
        self,
        input_dict: dict[str, Any],
        *,
        model: nn.Module,
        missing_keys: set[str],
        source_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the tensors that are not in pages."""
        left = {}
        self._quantizer.note_use(source_patterns[0], input_dict.values())
        for name in list(input_dict):
            given = input_dict.pop(name)
            weight = given[0] if isinstance(given, list) else given
            if not self._quantizer.put(model, name, weight, missing_keys):
                left[name] = given
        return left


class VBQuantizer(TakesGGUF):
    """Encodes a model's weights while transformers loads it, and attaches it to a runtime. See `HfQuantizer`.

    Attributes:
        filling: the model's planes during loading; None before, afterwards, and with mode = "train".
    """

    requires_calibration = False

    def __init__(self, quantization_config: QuantizationConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._holds_planes = self.pre_quantized and quantization_config.stored == "planes"
        self.pre_quantized = False  # so that tensors are read one at a time, by this thread
        self._files: list[Path] = []
        self._model: PreTrainedModel | None = None  # until its conversions are known
        self._read_in: dict[str, torch.dtype] = {}
        self._given: list = []  # conversions for the model's non-GGUF files; a GGUF file needs none
        self._conversions: list | None = None  # of names and tensors; saving dense weights reverts them
        self._dtypes: tuple[torch.dtype, torch.dtype] | None = None  # of a loaded model: visible, and its own
        self._error: Exception | None = None
        self._begin: Callable[[PreTrainedModel], None] | None = (
            None  # of a filling that waits for the model to be split
        )
        self._is_split = False

    # -- before loading -----------------------------------------------------------------------------------------------

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raise ConfigError for a device map that places weights: tiers do that."""
        places = set(map(str, device_map.values() if isinstance(device_map, Mapping) else [device_map or "auto"]))
        gpu = accelerator.is_used(self.quantization_config.settings.tiers.gpu.enabled)
        kind = accelerator.TYPE
        here = {kind, f"{kind}:0", "0", "auto", "balanced", "sequential", "balanced_low_0"} if gpu else {"cpu", "auto"}
        here |= {f"{kind}:{accelerator.current_device()}"} if gpu else set()
        if places - here or len(places) > 1:
            raise ConfigError(
                f"device_map={device_map!r}: weights of a wrapped model are not placed by a map, tiers do that: leave "
                'it out and give gpu_memory="12GB", or budgets, tiers={"gpu": {"budget": "6GiB"}, "cpu": {...}, "ssd": '
                '{"enabled": True, "path": ...}}, or tiers={"gpu": {"enabled": False}} to compute on the CPU'
            )

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """Return the model's dtype where a save has another in its config.json: see `QuantizationConfig`; for a GGUF
        file and dtype="auto", the file's."""
        dtype = super().update_dtype(dtype)
        seen, own = self.quantization_config.dtypes or (None, None)
        return getattr(torch, own) if str(dtype) == f"torch.{seen}" else dtype

    def update_device_map(self, device_map: Any) -> None:
        """Return None: unswapped tensors move to the device after reading."""

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Any = None, **kwargs: Any
    ) -> PreTrainedModel:
        self._files, self._model = [Path(file) for file in checkpoint_files or ()], model
        self._is_split = is_split(getattr(model.config, "distributed_config", None))
        share = share_of_files(split=self._is_split)
        if share and self._files and all(file.suffix == ".safetensors" for file in self._files):
            try:
                self.ahead = read_ahead(map(TensorFile, self._files), share=share)
            except CheckpointError:  # the files' reader reports what vbrt cannot read
                _check_open(self._files)
        return model

    def update_weight_conversions(self, weight_conversions: list, model: PreTrainedModel | None = None) -> list:
        """Plan the model, which is complete by now; read experts one by one. Older versions do not pass it."""
        model, self._model = model or self._model, None
        config = self.quantization_config
        saved, self._given = self._saved(model), weight_conversions
        config.settle(None if config.settings.mode == "train" else saved)
        if config.settings.mode == "train":
            self._refuse_planes()
            _ignore_(model, {r"(^|[._])separation$"})  # engine states belong to a run; training starts new ones
            return weight_conversions if self.gguf is None else []
        self._read_in = _dtypes_read_in(model)
        for name, parameter in model.named_parameters():
            if name in self._read_in:
                parameter.data = parameter.data.to(self._read_in[name])
        if self._holds_planes:
            _ignore_(model, saved.plane_patterns())
        self._begin = partial(_begin_filling, self, saved)
        if not self._is_split:
            self._begin(model)
        return [] if saved is not None else [by_expert(conversion) for conversion in weight_conversions]

    def _refuse_planes(self) -> None:
        if self._holds_planes:
            raise ConfigError(
                f'{self._files[0].parent}: holds planes, which do not train; mode = "train" needs dense weights: '
                'those of the checkpoint that it was made of, or saved with stored="dense"'
            )

    def _saved(self, model: PreTrainedModel) -> SavedModel | DenseCheckpoint | None:
        """Return the source of planes, if they are not encoded from tensors that transformers reads."""
        if not self._holds_planes:
            return self.gguf
        saved = open_embedded(self._files)
        saved.check_fit(model)
        return saved

    # -- during loading -----------------------------------------------------------------------------------------------

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """True if a weight goes into pages as it is read, in transformers' reading dtype."""
        if self._begin is not None:
            self._begin(model)
        if self.filling is None or not self.filling.takes(param_name):
            return False
        return self._holds_planes or self.gguf is not None or param_name in self._read_in

    def get_quantize_ops(self) -> ConversionOps:
        """Return the operation that takes the tensors read."""
        return _Encode(self)

    def note_use(self, name: str, weights: Iterable[Any]) -> None:
        """Report the use of tensors of this name or pattern to the prefetcher."""
        if self.ahead is not None:
            self.ahead.used(name, sum((w[0] if isinstance(w, list) else w).nbytes for w in weights))

    def put(self, model: nn.Module, name: str, weight: Any, missing: set[str]) -> bool:
        """Put a weight, or experts' matrices, into pages; False if it is the model's. Errors are raised after loading,
        because transformers would only report them as a failed conversion."""
        filling = self.filling
        if filling is None or not filling.takes(name):
            return False
        if self._error is None:
            try:
                filling.take(name, weight) if isinstance(weight, torch.Tensor) else filling.take_matrices(name, weight)
            except VBError as error:
                self._error = error
        missing.discard(name)
        model.get_parameter(name)._is_hf_initialized = True  # keeps transformers from initializing it
        return True

    # -- after loading ------------------------------------------------------------------------------------------------

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        filling, self.filling = self.filling, None
        model.__dict__.pop("_keys_to_ignore_on_load_unexpected", None)
        ahead, self.ahead = self.ahead, None
        try:
            if self._error is not None:
                raise self._error
            if filling is None:
                attachment = attach(model, self.quantization_config.settings, policy=self.quantization_config.named[2])
            else:
                attachment = filling.finish(model)
            watch(attachment, model)
            follow(attachment, model)
            self._dtypes = model.dtype, model.config.dtype
            self._conversions = model._weight_conversions if self.gguf is None else self._given
        except BaseException:
            if filling is not None:
                filling.close()
            raise
        finally:
            if ahead is not None:
                ahead.close()
        for module in model.modules():
            if isinstance(module, PreTrainedModel):  # some models compute differently then, for layers without `weight`
                vars(module.config).pop("_is_quantized", None)
        return model

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> nn.Module:
        return of(model).unwrap().to(dtype)

    def is_serializable(self) -> bool:
        """True: see `QuantizationConfig.stored`."""
        return True

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, torch.Tensor] | None, dict]:
        """Return the content for `save_pretrained`, planes or dense weights, and the files' metadata; None for the
        model's own state dict. With an ssd tier, host memory holds one shard of `max_shard_size` at a time.

        Raises CheckpointError: sharded planes.
        """
        if adapters_only(model):
            return None, {}  # only adapters are saved
        model._weight_conversions = self._conversions
        try:
            attachment = attachment_of(model)
            attachment.check_open("save_pretrained")
        except WrapError:
            self.remove_quantization_config(model)  # unwrapped: a plain model again
            return None, {}
        config = model.config.quantization_config
        config.dtypes = self._dtypes_to_save(model)
        if config.settings.mode == "train":
            config.stored = "dense"
            return None, {}
        cut = next((swap.name for swap in attachment.plan.swaps if swap.site.shard is not None), None)
        if cut is not None and config.stored == "planes":
            raise CheckpointError(
                f"save_pretrained: {cut}: each rank has a part of its planes, and only one would write; call "
                'vbrt.of(model).save(path) on every rank, or load with QuantizationConfig(..., stored="dense")'
            )
        if cut is not None:
            return None, {}  # transformers gathers sharded state dicts
        if config.stored == "dense":
            return dense_tensors(attachment), {}
        model._weight_conversions = []  # planes and all else have the model's names
        return embedded_tensors(attachment)

    def _dtypes_to_save(self, model: PreTrainedModel) -> tuple[str, ...]:
        seen, own = self._dtypes or (None, None)
        if seen is own or model.dtype is not seen:
            return ()
        return str(seen).removeprefix("torch."), str(own).removeprefix("torch.")

    @property
    def is_trainable(self) -> bool:
        """True: adapters train on frozen planes, and mode = "train" trains the weights."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """True if the weights themselves train."""
        return self.quantization_config.settings.mode == "train"

    @property
    def is_compileable(self) -> bool:
        """True."""
        return True


def _begin_filling(quantizer: VBQuantizer, saved: Any, model: PreTrainedModel) -> None:
    """Plan a model whose shard is present by now, if transformers splits it over ranks. Ties are made only here,
    because the splitting looks up parameters by all names of its plan, including tied ones."""
    quantizer._begin = None
    model.tie_weights()
    quantizer.filling = quantizer.quantization_config.filling(model, saved)
    warn_of_plan(quantizer.filling.plan, "from_pretrained", stacklevel=6)


def _check_open(files: Iterable[Path]) -> None:
    """Raise CheckpointError for a file that safetensors cannot open: its own error names no path."""
    for file in files:
        try:
            with safe_open(file, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file}: damaged, truncated, or not a safetensors file: {error}; copy it again"
            ) from error


def _ignore_(model: PreTrainedModel, patterns: set[str]) -> None:
    """Make transformers ignore unknown tensor names of these patterns while the model loads."""
    model._keys_to_ignore_on_load_unexpected = patterns.union(model._keys_to_ignore_on_load_unexpected or ())


def _dtypes_read_in(model: PreTrainedModel) -> dict[str, torch.dtype]:
    """Return transformers' reading dtypes of parameters that a quantizer takes, by name. Parameters that the model's
    class cast are not included: they are read in the model's dtype, and would lose bits."""
    dtype = model.config.dtype
    own, found = own_dtypes_of(model, dtype), {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        wanted = own(name)
        if wanted is not None or parameter.dtype is dtype:
            found[name] = wanted or dtype
    return found
