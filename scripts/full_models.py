"""Models and steps of `scripts/full_bench.py`: Llamas of random weights that return their loss."""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK = 2048  # tokens whose logits are in memory at once
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the latter to try a script


@dataclass(frozen=True, slots=True)
class Llama:
    """A Llama's shape."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """Their number."""
        attention = 2 * self.width**2 + 2 * self.width * self.width // self.heads * self.kv_heads
        block = attention + 3 * self.width * self.inner + 2 * self.width
        return self.layers * block + 2 * self.vocabulary * self.width + self.width


SHAPES = {
    "tiny": Llama(layers=4, width=128, inner=256, heads=4, kv_heads=2, vocabulary=256),
    "350m": Llama(layers=24, width=1024, inner=2816, heads=16, kv_heads=16, vocabulary=32000),
    "1.5b": Llama(layers=28, width=2048, inner=5632, heads=16, kv_heads=16, vocabulary=32000),
    "8b": Llama(layers=32, width=4096, inner=14336, heads=32, kv_heads=8, vocabulary=128256),
    "13b": Llama(layers=40, width=5120, inner=13824, heads=40, kv_heads=40, vocabulary=32000),
}


def llama_of(shape: Llama, **config: object) -> nn.Module:
    """Return transformers' class, without tied embeddings; `config`: further keys of its config."""
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds

    sizes = {
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocabulary,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False, **config))


class Trainee(nn.Module):
    """Ids [B, S] -> the mean loss of the next tokens, in nats; logits are made a chunk of tokens at a time."""

    def __init__(self, shape: Llama, *, recompute: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.llama = llama_of(shape, max_position_embeddings=8192, use_cache=False)
        if recompute:
            self.llama.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, ids: Tensor) -> Tensor:
        """The loss."""
        hidden = self.llama.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
        targets, total = ids[:, 1:].flatten(), hidden.new_zeros((), dtype=torch.float32)
        for these, those in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True):
            total = total + checkpoint(self._loss, these, those, use_reentrant=False)
        return total / len(targets)

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.llama.lm_head(hidden).float(), targets, reduction="sum")


@torch.no_grad()
def draw_(model: nn.Module) -> nn.Module:
    """Draw all matrices from a normal distribution of 0.02, and set vectors to one."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
    return model


def made(shape: Llama, *, recompute: bool, dtype: torch.dtype = torch.float32) -> Trainee:
    """Return a model of random weights, drawn on the device."""
    with torch.device(DEVICE), no_init_weights(), drawn_in(dtype):
        return draw_(Trainee(shape, recompute=recompute)).train()


@contextlib.contextmanager
def drawn_in(dtype: torch.dtype) -> Iterator[None]:
    """Context in which models are made in a dtype."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def batch(shape: Llama, tokens: int, context: int, seed: int = 0) -> Tensor:
    """Return ids [tokens / context, context]."""
    dice = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randint(shape.vocabulary, (tokens // context, context), device=DEVICE, generator=dice)


def no_init_weights() -> contextlib.AbstractContextManager[None]:
    """Return a context in which transformers leaves weights as they are: they are drawn afterwards."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        from transformers.modeling_utils import no_init_weights
    return no_init_weights()


def waited() -> None:
    """Wait for the GPU."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def measured(step: Callable[[], object], *, steps: int, warm: int = 2) -> dict:
    """Return seconds a step (the median), each of them, and two peaks in these steps: of tensors, and of all that torch
    reserves, which has the memory of CUDA graphs."""
    for _ in range(warm):
        step()
    waited()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    spans = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        waited()
        spans.append(time.perf_counter() - start)
    found = {"seconds": statistics.median(spans), "each": [round(span, 4) for span in spans]}
    if DEVICE == "cuda":
        found |= {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    return found


def passed(
    model: nn.Module,
    ids: Tensor,
    factor: float = 1.0,
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Tensor:
    """Do one forward under bf16 autocast, and its backward `around` which is something; the loss, times a factor."""
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = factor * model(ids)
    with around():
        loss.backward()
    return loss.detach()


def emptied() -> None:
    """Give memory back before the next measurement."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
