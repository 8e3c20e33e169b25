"""Runs that `vbrt demo` compares: one model, whole, offloaded by accelerate, or wrapped.

    python -m vbrt.integrations.showcase '{"run": "whole", "device": "cpu", "directory": ..., "tokens": 12}'

runs one and prints its `Outcome` as a line of JSON: the memory of that process beyond its imports is the model's.

The model is a Llama with random weights by a seed, written as safetensors files without ever being held: fp32 where
the CPU computes, which every CPU multiplies fast, and bf16 on a GPU. Importing this module imports transformers.
"""

import hashlib
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from vbrt.config import load_config
from vbrt.host import accelerator
from vbrt.integrations.transformers_quantizer import QuantizationConfig
from vbrt.libraries.transformers_api import logging as transformers_logging
from vbrt.saves.files.safetensors_file import TensorInfo, TensorWriter
from vbrt.wrapper.wrapper_of import of

__all__ = ["RUNS", "SIZES", "Outcome", "make", "run"]

_GPU = accelerator.TYPE
SIZES = {
    "cpu": {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8},
    _GPU: {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 8},
}
_VOCABULARY, _PROMPT, _STD = 256, 16, 0.02
_DRAWN = 1 << 22  # numbers that are drawn; weights are pieces of them, which begin anywhere
_SAMPLE_S = 0.01


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has shown.

    Attributes:
        load_s, token_s: seconds of loading, and of a token after the first (median).
        peak: the most memory, in bytes, beyond what the process had before the model: "resident" in all, of it "mapped"
            from files; on a GPU "gpu", by torch's allocator.
        digest: of all logits, bit for bit.
        tokens: that were generated.
        stats: `Stats.to_dict()` of a wrapped model.
    """

    load_s: float
    token_s: float
    peak: dict[str, int]
    digest: str
    tokens: list[int]
    stats: dict[str, Any] | None = None


# -- the model --------------------------------------------------------------------------------------------------------


def _config(device: str, gigabytes: float) -> LlamaConfig:
    """Return the config of a model of about that many GB: as many layers as that takes."""
    dtype = torch.bfloat16 if device == _GPU else torch.float32
    sizes = SIZES[device]
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    layer = (3 * hidden**2 + 3 * hidden * inner) * dtype.itemsize
    config = LlamaConfig(
        **sizes,
        vocab_size=_VOCABULARY,
        num_hidden_layers=max(1, round(gigabytes * 1e9 / layer)),
        max_position_embeddings=512,
        tie_word_embeddings=False,
        dtype=str(dtype).removeprefix("torch."),
    )
    config.architectures = ["LlamaForCausalLM"]
    return config


def make(directory: Path, device: str, gigabytes: float) -> dict[str, int]:
    """Write the model's files, a weight at a time; return its bytes and the number of its parameters."""
    config = _config(device, gigabytes)
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in LlamaForCausalLM(config).named_parameters()}
    infos = [TensorInfo(name, config.dtype, shape) for name, shape in shapes.items()]
    directory.mkdir(parents=True, exist_ok=True)
    with TensorWriter(directory / "model.safetensors", infos) as writer:
        for info, weight in zip(infos, _weights(infos), strict=True):
            writer.write(info.name, weight)
    config.save_pretrained(directory)
    nbytes = sum(info.nbytes for info in infos)
    return {"bytes": nbytes, "parameters": nbytes // config.dtype.itemsize}


def _weights(infos: list[TensorInfo]) -> Iterator[Tensor]:
    """Yield norms of ones, and matrices by a seed: numbers are drawn once, which is most of the time that it takes."""
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = torch.empty(_DRAWN, dtype=torch.float32, device="cpu").normal_(0, _STD, generator=generator)
    for info in infos:
        count = info.nbytes // info.dtype.itemsize
        if len(info.shape) == 1:
            yield torch.ones(info.shape, dtype=info.dtype, device="cpu")
            continue
        start = int(torch.randint(_DRAWN, (1,), generator=generator, dtype=torch.int64, device="cpu"))
        turned = drawn.roll(-start).to(info.dtype)
        yield turned.repeat(-(-count // _DRAWN))[:count].view(info.shape)


# -- memory -----------------------------------------------------------------------------------------------------------


class Sampler(threading.Thread):
    """The most resident memory of this process beyond that at its start, until `stop`: all, and mapped from files."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._before = _resident()
        self._peak = dict.fromkeys(self._before, 0)
        self._done = threading.Event()
        self.start()

    def run(self) -> None:
        """Sample, and once more at the end."""
        while not self._done.wait(_SAMPLE_S):
            self._sample()
        self._sample()

    def _sample(self) -> None:
        more = {name: nbytes - self._before[name] for name, nbytes in _resident().items()}
        if more["resident"] > self._peak["resident"]:
            self._peak = more

    def stop(self) -> dict[str, int]:
        """Return the peak, and what of it was mapped."""
        self._done.set()
        self.join()
        return self._peak


def _resident() -> dict[str, int]:
    info = psutil.Process().memory_info()
    return {"resident": info.rss} | ({"mapped": info.shared} if hasattr(info, "shared") else {})  # Linux alone says


# -- runs -------------------------------------------------------------------------------------------------------------


class _Clock:
    """A stopping criterion that never stops, and notes when it is asked: once a token."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        self.moments.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _run(asked: dict[str, Any], load: Callable[[], nn.Module]) -> tuple[Outcome, nn.Module]:
    """Load a model and generate: twice, since the first pass of each of them learns or maps something."""
    sampler, start = Sampler(), time.perf_counter()
    model = load()
    loaded = time.perf_counter() - start
    device = torch.device(asked["device"])
    generator = torch.Generator("cpu").manual_seed(1)
    ids = torch.randint(1, _VOCABULARY, (1, _PROMPT), generator=generator, dtype=torch.int64, device="cpu").to(device)
    how = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
    for count in (2, asked["tokens"]):
        clock = _Clock()
        out = model.generate(ids, max_new_tokens=count, min_new_tokens=count, stopping_criteria=[clock], **how)
    spans = [after - before for before, after in zip(clock.moments, clock.moments[1:], strict=False)]
    peak = sampler.stop()
    if device.type == _GPU:
        peak["gpu"] = accelerator.max_memory_allocated()
    digest = hashlib.sha256(b"".join(step.float().cpu().numpy().tobytes() for step in out.logits)).hexdigest()
    tokens = out.sequences[0, _PROMPT:].tolist()
    return Outcome(loaded, statistics.median(spans), peak, digest, tokens), model


def _whole(asked: dict[str, Any]) -> Outcome:
    load = lambda: AutoModelForCausalLM.from_pretrained(asked["directory"], dtype="auto")  # noqa: E731
    return _run(asked, lambda: load().to(asked["device"]))[0]


def _accelerate(asked: dict[str, Any]) -> Outcome:
    """Offloaded by accelerate: to host memory below a GPU, to the model's own files below a CPU."""
    top = 0 if asked["device"] == _GPU else "cpu"
    memory = {top: asked["budget"]} | ({"cpu": 1 << 50} if top == 0 else {})
    given = {"dtype": "auto", "device_map": "auto", "max_memory": memory, "offload_folder": asked["scratch"]}
    return _run(asked, lambda: AutoModelForCausalLM.from_pretrained(asked["directory"], **given))[0]


def _vbrt(asked: dict[str, Any]) -> Outcome:
    config = load_config(asked["config"])
    load = lambda: AutoModelForCausalLM.from_pretrained(  # noqa: E731
        asked["directory"], dtype="auto", quantization_config=QuantizationConfig(config)
    )
    outcome, model = _run(asked, load)
    vb = of(model)
    found = replace(outcome, stats=vb.stats().to_dict())
    vb.close()
    return found


RUNS: dict[str, Callable[[dict[str, Any]], Outcome]] = {"whole": _whole, "accelerate": _accelerate, "vbrt": _vbrt}


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Run the model as "run" names it; return its `Outcome` as a dict."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    return asdict(RUNS[asked["run"]](asked))


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
