"""What `vbrt demo` compares: one model, run whole, offloaded by accelerate, and wrapped, each in a process of its own.

A process that has imported torch and transformers, which takes seconds, and done nothing else reads questions, one JSON
line on stdin each, forks a process for each of them, and that one writes a line to stdout:

    {"act": "make", "directory": ..., "gigabytes": 1.0}               -> {"answer": {"bytes": ..., "parameters": ...}}
    {"act": "whole" | "accelerate" | "vbrt", "directory": ..., ...}   -> {"answer": see `Outcome`}
    {"act": "trained", "checkout": ...}                               -> {"answer": see `trained`}
    what fails                                                        -> {"error": what happened}

The model is a Llama with random weights by a seed, written as safetensors files without ever being held: fp32 where
the CPU computes, which every CPU multiplies fast, and bf16 on a GPU. Importing this module imports transformers.
"""

import gc
import hashlib
import importlib
import json
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from vbrt.config import load_config
from vbrt.integrations.transformers_quantizer import QuantizationConfig
from vbrt.libraries.transformers_api import logging as transformers_logging
from vbrt.saves.files.safetensors_file import TensorInfo, TensorWriter
from vbrt.wrapper.wrap import wrap
from vbrt.wrapper.wrapper_of import of

__all__ = ["ACTS", "Outcome", "answer", "main", "make", "trained"]

SIZES = {
    "cpu": {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8},
    "cuda": {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 8},
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


def _device(asked: dict[str, Any]) -> torch.device:
    return torch.device(asked.get("device") or ("cuda" if torch.cuda.is_available() else "cpu"))


def _config(device: torch.device, gigabytes: float) -> LlamaConfig:
    """Return the config of a model of about that many GB: as many layers as that takes."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = SIZES[device.type]
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


def make(directory: Path, config: LlamaConfig) -> dict[str, int]:
    """Write the model's files, a weight at a time; return its bytes and the number of its parameters."""
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
        self._before, self._peak = _resident(), {"resident": 0, "mapped": 0}
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
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resident, mapped = (int(lines[name].split()[0]) << 10 for name in ("VmRSS", "RssFile"))
    return {"resident": resident, "mapped": mapped}


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
    device = _device(asked)
    generator = torch.Generator("cpu").manual_seed(1)
    ids = torch.randint(1, _VOCABULARY, (1, _PROMPT), generator=generator, dtype=torch.int64, device="cpu").to(device)
    how = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
    for count in (2, asked["tokens"]):
        clock = _Clock()
        out = model.generate(ids, max_new_tokens=count, min_new_tokens=count, stopping_criteria=[clock], **how)
    spans = [after - before for before, after in zip(clock.moments, clock.moments[1:], strict=False)]
    peak = sampler.stop()
    if device.type == "cuda":
        peak["gpu"] = torch.cuda.max_memory_allocated()
    digest = hashlib.sha256(b"".join(step.float().cpu().numpy().tobytes() for step in out.logits)).hexdigest()
    tokens = out.sequences[0, _PROMPT:].tolist()
    return Outcome(loaded, statistics.median(spans), peak, digest, tokens), model


def _whole(asked: dict[str, Any]) -> Outcome:
    device = _device(asked)
    load = lambda: AutoModelForCausalLM.from_pretrained(asked["directory"], dtype="auto").to(device)  # noqa: E731
    return _run(asked, load)[0]


def _accelerate(asked: dict[str, Any]) -> Outcome:
    """Offloaded by accelerate: to host memory below a GPU, to the model's own files below a CPU."""
    top = 0 if _device(asked).type == "cuda" else "cpu"
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
    found = Outcome(**asdict(outcome) | {"stats": vb.stats().to_dict()})
    vb.close()
    return found


# -- real weights -----------------------------------------------------------------------------------------------------

_PRESETS = ("exact", "fp4")
_BEGINS = b"    def __init__(self, "


def trained(checkout: Path, count: int) -> dict[str, Any]:
    """Continue a line of Python with the trained model of a checkout: plain, and wrapped in two presets.

    Returns "parameters", and "texts": preset -> {"text", "digest" of all logits, "hits"}; "plain" is the model itself.
    """
    sys.path.insert(0, str(checkout))
    committed = importlib.import_module("scripts.committed")
    model = committed.dense(torch.bfloat16)
    texts = {"plain": _continued(model, count)}
    half = {"gpu": {"enabled": False}}
    for preset in _PRESETS:
        with wrap(committed.dense(torch.bfloat16), preset, tiers=half, weights={"keep_head": True}) as vb:
            texts[preset] = _continued(vb, count)
    return {"parameters": sum(p.numel() for p in model.parameters()), "texts": texts}


@torch.inference_mode()
def _continued(model: Callable[..., Tensor], count: int) -> dict[str, str]:
    ids, digest = torch.tensor([list(_BEGINS)], dtype=torch.int64, device="cpu"), hashlib.sha256()
    for _ in range(count):
        logits = model(ids, last=True)[0, -1].float()
        digest.update(logits.numpy().tobytes())
        ids = torch.cat([ids, logits.argmax().view(1, 1)], 1)
    return {"text": bytes(ids[0].tolist()).decode("utf-8", "replace"), "digest": digest.hexdigest()}


# -- the process ------------------------------------------------------------------------------------------------------


def _made(asked: dict[str, Any]) -> dict[str, int]:
    return make(Path(asked["directory"]), _config(_device(asked), asked["gigabytes"]))


ACTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "make": _made,
    "whole": lambda asked: asdict(_whole(asked)),
    "accelerate": lambda asked: asdict(_accelerate(asked)),
    "vbrt": lambda asked: asdict(_vbrt(asked)),
    "trained": lambda asked: trained(Path(asked["checkout"]), asked["count"]),
}


def answer(asked: dict[str, Any]) -> Any:
    """Do what is asked and return what came of it."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        return ACTS[asked["act"]](asked)
    finally:
        gc.collect()


def main() -> None:
    """Say that everything is imported and which device computes; answer questions until there are no more."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # which wakes no GPU: a fork could not use it then
    print(json.dumps({"device": _device({}).type, "threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _answer_and_end(json.loads(line))
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            print(json.dumps({"error": _killed(os.WTERMSIG(status))}), flush=True)


def _answer_and_end(asked: dict[str, Any]) -> NoReturn:
    try:
        said = {"answer": answer(asked)}
    except BaseException as error:  # noqa: BLE001 - the parent says it
        traceback.print_exc()
        said = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(said), flush=True)
    sys.stderr.flush()
    os._exit(0)


def _killed(number: int) -> str:
    return f"signal {number}" + ("; the system was out of memory, it seems" if number == signal.SIGKILL else "")


if __name__ == "__main__":
    main()
