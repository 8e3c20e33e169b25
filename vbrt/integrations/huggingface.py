"""transformers: models from a directory or a config, offline.

    model = meta_model("path/to/config.json")                 # no weights: for a plan
    vb, tokenizer = load_wrapped("path/to/model", config)     # wrapped as it is read; the dense model never exists
    model, tokenizer = load_causal_lm("path/to/model")        # dense, for `vbrt.wrap`

`conversation.py` has the text that comes out of it.

Nothing here reaches for the network, and no code that comes with a model is run. Importing this module imports
transformers, which vbrt does not install. A model that cannot be loaded is a `VBError` with the first line of the
reason.
"""

import contextlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from vbrt.config import VBConfig
from vbrt.errors import VBError, describe_os_error
from vbrt.host.files import expanded, read_bounded
from vbrt.integrations.gguf_models import TOKENIZERS, config_beside, gguf_config, gguf_dtype, gguf_tokenizer
from vbrt.integrations.transformers_quantizer import QuantizationConfig
from vbrt.saves.gguf import GGUFTensors
from vbrt.saves.gguf_file import GGUF_SUFFIX
from vbrt.saves.manifest import MANIFEST
from vbrt.saves.sources import gguf_file
from vbrt.wrapper.load import load
from vbrt.wrapper.of import of
from vbrt.wrapper.wrapper import VBModelWrapper

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "gguf_at",
    "load_causal_lm",
    "load_wrapped",
    "loading",
    "meta_model",
    "method_of",
    "model_config",
    "quiet",
    "take_generation_config_",
]

_MAX_CONFIG_BYTES = 16 << 20
_MODELOPT = "hf_quant_config.json"  # of weights that ModelOpt has quantized
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide progress bars, load reports and warnings of transformers while the block runs."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


# -- models without weights -------------------------------------------------------------------------------------------


def meta_model(path: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """Build the model of a directory, a config.json or a GGUF file on the meta device: shapes and dtypes, no weights.

    The class is the config's first architecture that transformers knows, else what its auto classes make of it; the
    dtype is the one given, else the config's, else that of the weights beside it, else float32. The config of a GGUF
    file is the one beside it, else made of its metadata.

    Raises:
        VBError: no such file, not a config, or one that this version of transformers cannot build.
    """
    gguf = gguf_at(path)
    file = _config_file(path) if gguf is None else config_beside(gguf)
    if file is not None:
        config = _config(file)
        dtype = dtype or config.dtype or _dtype_of_weights(file.parent)
    else:
        tensors, file = GGUFTensors(gguf), gguf
        with quiet(), loading(f"{gguf}: transformers {transformers.__version__} makes no config of its metadata"):
            config = gguf_config(tensors)
        dtype = dtype or gguf_dtype(tensors)
    dtype = dtype or torch.float32
    with quiet(), torch.device("meta"), loading(f"{file}: transformers cannot build this model"):
        make = _model_class(config, file)
        return make(config, dtype=dtype)


def model_config(path: Path) -> PreTrainedConfig:
    """Return the config of a directory or a config.json. Raises VBError as `meta_model`."""
    return _config(_config_file(path))


def gguf_at(path: Path) -> Path | None:
    """Return the GGUF file that a path stands for; None for any other model. Raises VBError: it cannot be read."""
    path, is_directory = _looked_at(path)
    return gguf_file(path) if is_directory or (path.suffix == GGUF_SUFFIX and path.exists()) else None


def method_of(config: PreTrainedConfig) -> str:
    """Return the method by which a model's checkpoint is quantized, as its config says; "" for a dense one."""
    given = getattr(config, "quantization_config", None) or {}
    return str(given.get("quant_method", "") if isinstance(given, dict) else given.quant_method)


def _config_file(path: Path) -> Path:
    path, is_directory = _looked_at(path)
    if is_directory:
        if (path / "config.json").exists():
            return path / "config.json"
        raise VBError(f"{path}: no config.json in this directory; expected a model as save_pretrained() writes it")
    if not path.exists():
        is_hub_name = not path.is_absolute() and len(path.parts) == 2 and not path.parent.exists()
        hint = f"; to fetch a model of that name: hf download {path} --local-dir {path.name}" if is_hub_name else ""
        raise VBError(f"{path}: no such file or directory; expected a model directory or a config.json{hint}")
    return path


def _looked_at(path: Path) -> tuple[Path, bool]:
    """Return the path without "~", and True if it is a directory. Raises VBError: it cannot be read."""
    try:
        path = expanded(path)
        is_directory = path.is_dir()
        (path / "config.json" if is_directory else path).exists()  # raises where nobody may look
        return path, is_directory
    except OSError as error:
        raise VBError(
            f"{error.filename}: cannot be read: {describe_os_error(error)}; expected a model directory or a config.json"
        ) from error


def _config(file: Path) -> PreTrainedConfig:
    try:
        data = json.loads(read_bounded(file, _MAX_CONFIG_BYTES).decode())
    except OSError as error:
        raise VBError(f"{file}: cannot be read: {describe_os_error(error)}") from error
    except (ValueError, RecursionError) as error:
        raise VBError(f"{file}: not valid JSON ({error}); expected the config.json of a model") from error
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise VBError(f'{file}: no "model_type" in it; expected the config.json of a transformers model')
    with quiet(), loading(f"{file}: transformers {transformers.__version__} does not take this config"):
        return AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)


def _model_class(config: PreTrainedConfig, file: Path) -> Callable[..., nn.Module]:
    for name in config.architectures or ():
        known = getattr(transformers, name, None)
        if known is not None:
            return known._from_config
    for auto in (AutoModelForCausalLM, AutoModel):
        if type(config) in auto._model_mapping:
            return auto.from_config
    raise VBError(
        f"{file}: architectures = {config.architectures}, model_type = {config.model_type!r}; transformers "
        f"{transformers.__version__} has no model for that (code that comes with a model is not run)"
    )


def _dtype_of_weights(directory: Path) -> torch.dtype | None:
    """Return the dtype of the first floating tensor in a directory's safetensors, as `from_pretrained` does."""
    for file in sorted(directory.glob("*.safetensors")):
        with loading(f"{file}: cannot be read"), safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                part = tensors.get_slice(name)
                if part.get_shape() and part[:0].dtype.is_floating_point:
                    return part[:0].dtype
    return None


# -- models with weights ----------------------------------------------------------------------------------------------


def load_causal_lm(
    path: Path, *, warn: Callable[[str], object] = warnings.warn
) -> tuple[nn.Module, "PreTrainedTokenizerBase"]:
    """Load the causal language model in a directory, on the CPU in its own dtype and in eval mode, and its tokenizer.

    Args:
        path: a directory as `save_pretrained` of model and tokenizer writes it.
        warn: called with one line when weights are missing from the checkpoint and were drawn at random.

    Raises:
        VBError: a part of the model is missing, named; or transformers cannot load it.
    """
    path, _ = _checked(path)
    tokenizer = _tokenizer(path)
    return _pretrained(path, warn), tokenizer


def load_wrapped(
    path: Path,
    config: VBConfig | None,
    *,
    warn: Callable[[str], object] = warnings.warn,
    count: Callable[[int, int], object] | None = None,
) -> tuple[VBModelWrapper, "PreTrainedTokenizerBase"]:
    """Load the causal language model in a directory into planes, in eval mode, and its tokenizer.

    Args:
        path: a directory as `load_causal_lm` takes it; with planes in it, such as `vbrt convert` writes, they are read
            as they are. Or a GGUF file.
        config: by default that of the planes in the directory, "exact" for weights that others have quantized, else
            "fp4".
        warn: as for `load_causal_lm`.
        count: called with the numbers of the tensor that is read next and of all tensors.

    Raises:
        VBError: as from `load_causal_lm`, `vbrt.load` and `vbrt.wrap`.
    """
    gguf = gguf_at(path)
    if gguf is not None:
        return _load_gguf(gguf, config)
    path, known = _checked(path)
    tokenizer = _tokenizer(path)
    method = method_of(known)
    others = method not in ("", "vbrt") or (path / _MODELOPT).exists()
    if others or (path / MANIFEST).exists():
        with quiet():
            vb = load(path, meta_model(path).eval(), config)
        take_generation_config_(vb.model, path)
        return vb, tokenizer
    given = {} if method == "vbrt" and config is None else {"quantization_config": QuantizationConfig(config)}
    with _counted(count):
        return of(_pretrained(path, warn, **given)), tokenizer


def _load_gguf(file: Path, config: VBConfig | None) -> tuple[VBModelWrapper, "PreTrainedTokenizerBase"]:
    model = meta_model(file).eval()
    _check_causal(model.config, file)
    with quiet(), loading(f"{file}: transformers cannot make its tokenizer"):
        tokenizer = gguf_tokenizer(file)
    with quiet():
        vb = load(file, model, config)
    take_generation_config_(vb.model, file)
    return vb, tokenizer


def take_generation_config_(model: nn.Module, path: Path) -> None:
    """Give a model the generation_config.json of its directory, or the one beside its GGUF file, if there is one.

    Raises VBError: transformers does not take it.
    """
    directory = path if path.is_dir() else path.parent
    if (directory / "generation_config.json").exists() and hasattr(model, "generation_config"):
        with quiet(), loading(f"{directory}: transformers does not take its generation_config.json"):
            model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)


def _checked(path: Path) -> tuple[Path, PreTrainedConfig]:
    """Return the directory of a causal language model, and its config. Raises VBError: parts are missing."""
    path, is_directory = _looked_at(path)
    if not is_directory:
        _config_file(path)  # names a missing one
        raise VBError(f"{path}: not a directory; expected a model directory with weights and tokenizer")
    config = _config(_config_file(path))
    _check_causal(config, path)
    _check_regular(path)
    _check_has(path, (*_WEIGHTS, MANIFEST), "weights")
    _check_has(path, TOKENIZERS, "tokenizer")
    return path, config


def _tokenizer(path: Path) -> "PreTrainedTokenizerBase":
    with quiet(), loading(f"{path}: transformers cannot load it"):
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def _pretrained(path: Path, warn: Callable[[str], object], **given: Any) -> nn.Module:
    with quiet(), loading(f"{path}: transformers cannot load it"):
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype="auto", local_files_only=True, trust_remote_code=False, output_loading_info=True, **given
        )
    missing = sorted(info["missing_keys"])
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        warn(f"{path}: {len(missing)} weights are not in the checkpoint and were drawn at random: {shown}")
    return model.eval()


class _Counted:
    """What transformers iterates over while it loads, in the place of a progress bar."""

    def __init__(self, items: Iterable[Any], total: int, count: Callable[[int, int], object]) -> None:
        self._items, self._total, self._count = items, total, count

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self._items, 1):
            self._count(number, self._total)
            yield item


@contextlib.contextmanager
def _counted(count: Callable[[int, int], object] | None) -> Iterator[None]:
    """Have `count` called for each tensor that transformers loads in the block."""

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if count is None or options.get("desc") != "Loading weights" or not args:
            return factory(*args, **options)
        return _Counted(args[0], len(args[0]), count)

    before = transformers_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


def _check_causal(config: PreTrainedConfig, path: Path) -> None:
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    named = config.architectures or []
    if named and not causal.intersection(named):
        raise VBError(
            f"{path}: architectures = {named}; expected a causal language model, such as LlamaForCausalLM "
            "(in Python, vbrt.wrap takes any module)"
        )
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise VBError(
            f"{path}: model_type = {config.model_type!r} has no causal language model in transformers "
            f"{transformers.__version__}"
        )


def _check_has(path: Path, names: tuple[str, ...], what: str) -> None:
    if not any((path / name).is_file() for name in names):
        raise VBError(f"{path}: no {what} in this directory; expected one of {', '.join(names)}")


def _check_regular(path: Path) -> None:
    """Raise VBError for files that are not regular: opening a FIFO would never return."""
    for file in sorted(path.iterdir()):
        if file.is_fifo() or file.is_socket() or file.is_char_device() or file.is_block_device():
            raise VBError(f"{file}: neither a file nor a directory; remove it from the model's directory")


@contextlib.contextmanager
def loading(what: str) -> Iterator[None]:
    """Turn what transformers raises in the block into a VBError: `what`, and the first lines of the reason."""
    try:
        yield
    except VBError:
        raise
    except Exception as error:  # files are anybody's, and so is what the libraries behind it raise for them
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        until = next((n for n, line in enumerate(lines) if not line.endswith(":")), 0)
        raise VBError(f"{what}: {' '.join(lines[: until + 1]) or type(error).__name__}") from error
