"""Milliseconds of a token of an 8B-shaped Llama in 4 bits: `vbrt report`.

A GPU with room for all layers measures them. Elsewhere two models that differ in their number of layers are measured:
the difference is a layer's time, and the rest, with the head, is what the smaller one takes beyond its layers. (On a
fast GPU the host's time of a token would hide that of few layers.) Weights are random.
"""

import statistics
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from vbrt.config import Machine, VBConfig, load_config
from vbrt.estimation.advice.cost_model import CostModel, default_cost_model
from vbrt.estimation.advice.machine_rates import Rates
from vbrt.estimation.advice.machine_report import Figure, MachineReport, guarded
from vbrt.estimation.advice.option_measurements import device as measured_device
from vbrt.estimation.advice.step_time import predict
from vbrt.estimation.memory.estimate import estimate
from vbrt.estimation.memory.estimate_report import Estimate
from vbrt.host import accelerator
from vbrt.integrations.hf_configs import unadvised
from vbrt.wrapper.wrap import wrap
from vbrt.wrapper.wrapper import VBModelWrapper

__all__ = ["LAYERS", "Clock", "llama_8b", "measure_tokens"]

LAYERS = 32
_PROMPT, _NEW = 32, 24
_VOCABULARY = 128256
_SMALL_VOCABULARY = 8192  # on a CPU, where a head of the whole one takes longer to make than layers to measure
#: free GPU memory -> layers to measure, whose dense weights fit beside their pages
_LAYERS = {26 << 30: (LAYERS,), 14 << 30: (4, 12), 7 << 30: (2, 8), 0: (1, 3)}
_AMPLE = 1 << 40  # bytes of the machine for which a prediction is made: its time depends on rates alone


class Clock:
    """A stopping criterion that never stops, and notes when it is asked: once a token, while the device computes."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        self.moments.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    @property
    def spans_ms(self) -> list[float]:
        """Milliseconds from each token to the next: transformers waits for each. The first two are left out: when it
        asks after the first one, the device may compute the prompt still."""
        return [1e3 * (later - earlier) for earlier, later in pairwise(self.moments[1:])]

    @property
    def ms(self) -> float:
        """Milliseconds from one token to the next, on average."""
        return statistics.mean(self.spans_ms)


def llama_8b(layers: int, device: torch.device | str, *, vocabulary: int = _VOCABULARY) -> nn.Module:
    """Return a random bf16 Llama of the 8B shape."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)


def measure_tokens(report: MachineReport) -> Iterator[str]:
    """Measure a token with all pages resident and, on a GPU, with half of them streamed; yields what is measured."""
    if report.rates is None:
        return
    yield "a token of an 8B-shaped model"
    with unadvised():
        report.figures += guarded("token", f"{LAYERS} layers of 8B, nvfp4", partial(_tokens, report))


def _tokens(report: MachineReport) -> list[Figure]:
    device = measured_device()
    on_gpu = device.type != "cpu"
    counts = _layers(on_gpu)
    few, more = counts[0], counts[-1]
    vocabulary = _VOCABULARY if on_gpu else _SMALL_VOCABULARY
    times = {layers: _measured(report, layers, vocabulary, device) for layers in counts}
    costs, found = default_cost_model(report.machine["computes_on"]), []
    predictions = _predictions(vocabulary, report.rates, costs)
    for how, at_more in times[more].items():
        layer_ms = 0.0 if few == more else (at_more - times[few][how]) / (more - few)
        name, by = f"{how}, {LAYERS} layers of 8B, nvfp4", f"cost model of {costs}"
        if layer_ms <= 0 and more < LAYERS:
            why = f"not extrapolated, {more} layers took no longer than {few}; other programs disturb it"
            found.append(Figure("token", name, "ms", note=why))
            continue
        note = f"extrapolated from {few} and {more} layers, {layer_ms:.3g} ms each" if more < LAYERS else ""
        if not on_gpu:
            note += f"; a head of {vocabulary} tokens"
        ms = at_more + layer_ms * (LAYERS - more)
        found.append(Figure("token", name, "ms", ms, None, predictions[how], by, note))
    if not on_gpu:
        found.append(
            Figure("token", "streamed", "ms", note="on a CPU pages come from the drive: vbrt demo measures that")
        )
    return found


def _layers(on_gpu: bool) -> tuple[int, ...]:
    """Return the numbers of layers to measure: all, or two to extrapolate from."""
    if not on_gpu:
        return 1, 2
    free = accelerator.mem_get_info()[0]
    return next(layers for least, layers in _LAYERS.items() if free >= least)


def _measured(report: MachineReport, layers: int, vocabulary: int, device: torch.device) -> dict[str, float]:
    """Return the milliseconds of a token, by where the pages are."""
    vb = wrap(llama_8b(layers, device, vocabulary=vocabulary), _config(None, device.type != "cpu"))
    try:
        vb.materialize(progress=False)
        found = {"resident": _token_ms(vb, device)}
        if device.type != "cpu":
            vb.set_budget("gpu", vb.plan.page_bytes // 2)
            found["half streamed"] = _token_ms(vb, device)
        report.notes += [note for note in vb.stats().fallbacks if note not in report.notes]
        return found
    finally:
        vb.close()


def _token_ms(vb: VBModelWrapper, device: torch.device) -> float:
    ids = torch.arange(10, 10 + _PROMPT, dtype=torch.int64, device=device)[None]
    lengths = {"max_new_tokens": _NEW, "min_new_tokens": _NEW, "do_sample": False, "pad_token_id": 0}
    spans: list[float] = []
    for warm in (False, True, True):  # the first captures steps
        clock = Clock()
        vb.generate(ids, **lengths, use_cache=True, stopping_criteria=[clock])
        spans += clock.spans_ms if warm else []
    return statistics.median(spans) if device.type != "cpu" else min(spans)


def _config(gpu_bytes: int | None, on_gpu: bool) -> VBConfig:
    if not on_gpu:
        return load_config("fp4", tiers={"gpu": {"enabled": False}})
    return load_config("fp4") if gpu_bytes is None else load_config("fp4", tiers={"gpu": {"budget": gpu_bytes}})


def _predictions(vocabulary: int, rates: Rates, costs: CostModel) -> dict[str, float]:
    """Return the milliseconds of a token of the whole model, by where the pages are."""
    on_gpu = costs.computes_on == "gpu"
    memory = _AMPLE if on_gpu else None
    machine, model = Machine(memory, memory, _AMPLE, _AMPLE), llama_8b(LAYERS, "meta", vocabulary=vocabulary)

    def estimated(gpu_bytes: int | None) -> Estimate:
        return estimate(model, "decode", _config(gpu_bytes, on_gpu), machine=machine, context=_PROMPT, new=_NEW)

    found = {"resident": estimated(None)}
    if on_gpu:
        found["half streamed"] = estimated(found["resident"].plan.page_bytes // 2)
    return {how: predict(model, each, rates, cost_model=costs).ms for how, each in found.items()}
