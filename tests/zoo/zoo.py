"""Tiny random models of every transformers architecture that can be built offline.

A builder, not a test: `scripts/sweep` runs all of them, `tests/scripts/test_sweep.py` a sample. `build(kind, name)` takes the
default config of an architecture, shrinks every size it knows by the *name of the field* (`shrink.RULES`), recursively through
text, vision and audio sub-configs, and feeds inputs chosen from the signature of `forward`. All widths shrink to the same
number, so what had to be equal stays equal without a table of relations. What names cannot tell stands in `OVERRIDES`,
as data. The road not taken: the tiny configs of transformers' own test suite are not part of its wheel.

A batch is one example: 12 tokens, an image of 64 x 64, 4 frames, 4000 samples of audio.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from tests.zoo.inputs import Inputs, find, inputs_of, realise, tree
from tests.zoo.overrides import DIFFUSERS, OVERRIDES, POSITIONS, SAMPLE, TIMM, UNMAPPED
from tests.zoo.shrink import LEVELS, shrink

__all__ = ["KINDS", "SAMPLE", "Unbuildable", "base_names", "build", "causal_lm_names", "forward", "names", "tensors"]

KINDS = ("causal", "base", "timm", "diffusers")
_MAPPINGS = {"causal": MODEL_FOR_CAUSAL_LM_MAPPING, "base": MODEL_MAPPING}

MAX_PARAMETERS = 100_000_000


class Unbuildable(RuntimeError):
    """An architecture that does not run a forward pass on this machine; the message is the reason."""


# -- names


def causal_lm_names() -> list[str]:
    """Model types that transformers maps to a causal language model, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING._model_mapping)


def base_names() -> list[str]:
    """Model types that transformers maps to a base model, and those of UNMAPPED, sorted."""
    return sorted({*MODEL_MAPPING._model_mapping, *UNMAPPED})


def names(kind: str) -> list[str]:
    """The architectures of a kind; none for timm and diffusers where they do not import."""
    if kind in _MAPPINGS:
        return {"causal": causal_lm_names, "base": base_names}[kind]()
    try:
        importlib.import_module(kind)
    except (ImportError, RuntimeError):  # RuntimeError: a torchvision that was built for another torch
        return []
    return sorted({"timm": TIMM, "diffusers": DIFFUSERS}[kind])


# -- build


def tensors(value: Any, prefix: str = "out") -> dict[str, Tensor]:
    """Every tensor in a model's output by path: dicts, dataclasses, tuples and caches are walked."""
    if isinstance(value, Tensor):
        return {prefix: value}
    found: dict[str, Tensor] = {}
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, PreTrainedConfig)):
        items = vars(value).items()
    else:
        return found
    for key, item in items:
        found.update(tensors(item, f"{prefix}.{key}"))
    return found


def forward(model: nn.Module, inputs: Mapping[str, Any], *, seed: int = 0) -> dict[str, Tensor]:
    """One forward pass without gradients; models that draw random numbers draw the same ones every time."""
    torch.manual_seed(seed)
    with torch.no_grad():
        out = tensors(model(**copy.deepcopy(dict(inputs))))
    return {path: tensor.clone() for path, tensor in out.items()}  # some models return tensors that they write again


def _reseed_(model: nn.Module, generator: torch.Generator) -> None:
    """Uninitialised and constant matrices become small random ones, so that equal outputs mean something."""
    with torch.no_grad():
        for p in model.parameters():
            if not p.is_floating_point() or p.numel() == 0:
                continue
            broken = not bool(torch.isfinite(p).all()) or float(p.abs().max()) > 1e3
            if broken or (p.ndim >= 2 and bool((p == p.flatten()[0]).all())):
                p.copy_(torch.randn(p.shape, generator=generator) * 0.02)


def _model_class(kind: str, model_type: str, config: PreTrainedConfig) -> type[nn.Module]:
    if kind == "base" and model_type in UNMAPPED:
        module, _, name = UNMAPPED[model_type].rpartition(".")
        return getattr(importlib.import_module(module), name)
    cls = _MAPPINGS[kind][type(config)]
    return cls[0] if isinstance(cls, (tuple, list)) else cls


def _construct(
    kind: str, model_type: str, spec: Mapping[str, Any], level: str, seed: int, dtype: torch.dtype
) -> nn.Module:
    config = shrink(CONFIG_MAPPING[model_type](), spec.get("config", {}), level=level)
    if kind == "causal" and "is_decoder" in vars(config) and not getattr(config, "is_encoder_decoder", False):
        config.is_decoder = True
    cls = _model_class(kind, model_type, config)
    if not isinstance(config, cls.config_class):  # the language model of a composite config
        config = next((c for c in tree(config) if isinstance(c, cls.config_class)), config)
    with torch.device("meta"):
        count = sum(p.numel() for p in cls._from_config(config).parameters())
    if count > MAX_PARAMETERS:
        raise Unbuildable(f"{count / 1e6:.0f} M parameters after shrinking")
    torch.manual_seed(seed)
    model = cls._from_config(config, dtype=dtype).eval()
    _reseed_(model, torch.Generator().manual_seed(seed))
    return model


_MISMATCH = re.compile(r"tokens?\D{0,12}(\d+)\D{1,30}features?\D{0,12}(\d+)", re.I)


def _place_image_tokens(inputs: dict[str, Any], model: nn.Module, message: str) -> dict[str, Any] | None:
    """Models count their placeholder tokens and say how many they want: puts that many into input_ids."""
    token = find(model.config, "image_token_id", "image_token_index", "audio_token_id")
    found = _MISMATCH.search(message)
    if not found or not isinstance(token, int) or "input_ids" not in inputs or (count := int(found[2])) > POSITIONS - 4:
        return None
    ids = inputs["input_ids"]
    placed = torch.cat([ids[:, :2], torch.full((1, count), token), ids[:, 2:4]], 1)
    kinds = {"mm_token_type_ids": (placed == token).long()}
    return {
        **inputs,
        "input_ids": placed,
        **{k: v for k, v in kinds.items() if k in inspect.signature(model.forward).parameters},
    }


def build(
    kind: str, model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny random model in eval mode and inputs on which `model(**inputs)` runs.

    Args:
        kind: one of KINDS. model_type: one of `names(kind)`.
        seed: the same one gives the same bits. dtype: of the parameters and of floating inputs.

    Raises:
        Unbuildable: with what each attempt ran into.
    """
    if kind in ("timm", "diffusers"):
        return _build_other(kind, model_type, seed, dtype)
    spec = OVERRIDES.get(model_type, {})
    if "skip" in spec:
        raise Unbuildable(spec["skip"])
    reasons = []
    for level in spec.get("levels", LEVELS):
        try:
            model = _construct(kind, model_type, spec, level, seed, dtype)
        except Exception as e:  # noqa: BLE001 - whatever a config or model raises is the reason that is reported
            reasons.append(f"{level}: {_first_line(e)}")
            continue
        tried: list[dict[str, Any]] = []
        for rung, variant in (("towers", 0), ("towers", 1), ("text", 0)):
            inputs = inputs_of(model, spec.get("inputs", {}), rung, variant, Inputs(model.config, seed, dtype))
            shapes = {k: getattr(v, "shape", v) for k, v in inputs.items()}
            if shapes in tried:
                continue
            tried.append(shapes)
            try:
                return model, _run(model, inputs)
            except Exception as e:  # noqa: BLE001 - the same
                reasons.append(f"{level} {rung}: {_first_line(e)}")
    raise Unbuildable("; ".join(dict.fromkeys(reasons)))


def _build_other(kind: str, name: str, seed: int, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    make = Inputs(PreTrainedConfig(), seed, dtype)
    library = importlib.import_module(kind)
    torch.manual_seed(seed)
    if kind == "timm":
        model, spec = library.create_model(name, pretrained=False, **TIMM[name]), {"x": ("f", (1, 3, 224, 224))}
    else:
        cls, config, spec = DIFFUSERS[name]
        model = getattr(library, cls)(**config)
    model = model.eval().to(dtype)
    _reseed_(model, torch.Generator().manual_seed(seed))
    inputs = {n: realise(v, make) for n, v in spec.items()}
    forward(model, inputs)
    return model, inputs


def _run(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs, with placeholder tokens where the model asks for them, after a forward pass that succeeded."""
    try:
        forward(model, inputs)
    except ValueError as e:
        placed = _place_image_tokens(inputs, model, str(e))
        if placed is None:
            raise
        forward(model, placed)
        return placed
    return inputs


def _first_line(e: BaseException) -> str:
    return f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else ''}"[:300]
