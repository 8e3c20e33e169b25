"""The language model that scripts/train trains, and the text it reads: bytes in, bytes out, nothing to download.

GPT-2's architecture (Radford et al. 2019) of vbrt's own blocks, with learned positions, over a vocabulary of 256 bytes.
With routed experts it is transformers' Qwen3-MoE instead (lm_experts.py).

Legend: B batch, S positions, V vocabulary.
"""

import contextlib
import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn

import vbrt
from vbrt import ArgumentError, FlashAttention, OptimizedTransformerBlock

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}  # not prose, or not its own
_HELD_OUT, _SLOTS = 5, 16  # the slot of stdlib's modules that is never trained on


@dataclass(frozen=True, slots=True)
class Shape:
    """What makes two models the same architecture.

    Attributes:
        experts: routed experts in each block instead of one MLP; 0: none, and then the next two are 0.
        active: of them for each token.
        inner: width of an expert.
    """

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int = 256
    tied: bool = True
    experts: int = 0
    active: int = 0
    inner: int = 0

    @property
    def parameters(self) -> int:
        """Their number."""
        tables = self.vocabulary * (1 if self.tied else 2) * self.width
        if self.experts:  # no biases; norms of the stream, and of the heads of queries and keys
            block = 4 * self.width**2 + 2 * self.width + 2 * (self.width // self.heads)
            block += self.experts * (3 * self.inner + 1) * self.width
            return self.layers * block + tables + self.width
        block = 12 * self.width**2 + (4 + 1 + 4) * self.width  # projections and MLP; norms, biases of down and up
        return self.layers * block + tables + self.context * self.width + 2 * self.width


class PlainAttention(FlashAttention):
    """softmax(q kᵀ) v as the definition has it, with all S² scores: what flash attention saves is measured against."""

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """x [B, S, width]; always causal."""
        q, k, v = (self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.mT * self.head_dim**-0.5).masked_fill(later, -torch.inf)
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


class SdpaAttention(FlashAttention):
    """torch's own fused attention, called as torch's users call it."""

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """x [B, S, width]; always causal."""
        q, k, v = (self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


ATTENTIONS = {"vbrt": FlashAttention, "plain": PlainAttention, "sdpa": SdpaAttention}


class LanguageModel(nn.Module):
    """Ids [B, S] -> logits [B, S, V] in the blocks' dtype, or with targets [B, S] the mean loss in nats a byte."""

    def __init__(
        self, shape: Shape, *, dropout: float = 0.0, attention: str = "vbrt", checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.shape = shape
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(
            OptimizedTransformerBlock(
                shape.width, shape.heads, 4 * shape.width, dropout, use_checkpoint=checkpointing, causal=True
            )
            for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.token.weight
        for name, parameter in self.named_parameters():  # GPT-2's: what is added to the stream starts small
            if parameter.ndim == 2:
                added = name.endswith(("o_proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers) if added else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        for block in self.blocks:
            block.attention.__class__ = ATTENTIONS[attention]  # the same projections, another forward

    def forward(self, ids: Tensor, targets: Tensor | None = None, *, last: bool = False) -> Tensor:
        """`last`: logits of the last position only, [B, 1, V], as generation needs them."""
        x = self.token(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x[:, -1:] if last else x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# -- how it trains ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Options:
    """What costs or saves memory while training; `attention` is a key of ATTENTIONS. `full`: all state in the tiers."""

    attention: str = "plain"
    mixed_precision: bool = False
    checkpointing: bool = False
    fp4: bool = False
    full: bool = False

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager:
        """The context of a forward: bf16 where torch's autocast has it, weights stay fp32."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.mixed_precision)


def build(
    shape: Shape, options: Options, device: torch.device, *, dropout: float = 0.0, balance: float = 0.0
) -> nn.Module:
    """A new model on its device, from torch's seed; with fp4 the wrapper that trains it through 4-bit weights.

    `balance` is the weight of the loss that spreads tokens evenly over experts.
    """
    how = {"dropout": dropout, "attention": options.attention, "checkpointing": options.checkpointing}
    with device:
        if shape.experts:
            from scripts.lm_experts import ExpertsLanguageModel  # transformers takes seconds to import

            model = ExpertsLanguageModel(shape, balance=balance, **how)
        else:
            model = LanguageModel(shape, **how)
    if not options.fp4:
        return model
    tiers = {"gpu": {"enabled": False}} if device.type == "cpu" else {}
    return vbrt.wrap(model, mode="train", weights={"format": "nvfp4"}, tiers=tiers)


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW; matrices decay, and vectors do not."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), fused=matrices[0].is_cuda or None)


# -- text -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes to train on and bytes that are kept from it, uint8; `digest` tells texts apart."""

    train: Tensor
    held_out: Tensor
    digest: str
    source: str


def read_text(path: Path | None, context: int) -> Text:
    """The text of a file or of all files in a folder, or (None) the sources of Python's standard library.

    Held out are the last sixteenth, and of the library whole modules and packages, chosen by their names, so that no
    half of a file gives the other half away.

    Raises:
        ArgumentError: the path is missing or cannot be read, or the text is too short for one window.
    """
    if path is None:
        train, held_out = _library()
        source = f"the standard library of Python {sysconfig.get_python_version()}"
    else:
        text, source = _files(path), str(path)
        cut = len(text) - len(text) // _SLOTS
        train, held_out = text[:cut], text[cut:]
    if len(train) < context + 2 or len(held_out) < 2:
        raise ArgumentError(
            f"{source}: {len(train) + len(held_out):,} bytes of text; a context of {context} needs at "
            f"least {(context + 2) * _SLOTS // (_SLOTS - 1) + 2:,}"
        )
    digest = xxhash.xxh3_64_hexdigest(train + b"\0" + held_out)
    return Text(_tensor(train), _tensor(held_out), digest, source)


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _library() -> tuple[bytes, bytes]:
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in library_files(root):
        parts[is_held_out(path.relative_to(root))].append(path.read_bytes())
    return b"\0".join(parts[False]), b"\0".join(parts[True])


def library_files(root: Path) -> list[Path]:
    """Sources of the standard library, in an order that does not depend on the file system."""
    found = (path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts))
    return sorted((path for path in found if not path.name.startswith("_sysconfigdata")), key=Path.as_posix)


def is_held_out(path: Path) -> bool:
    """Whether a source, by its path in the library, is never trained on: tomllib, subprocess, tempfile and others."""
    return xxhash.xxh3_64_intdigest(path.parts[0].encode()) % _SLOTS == _HELD_OUT


def _files(path: Path) -> bytes:
    try:
        if not path.is_dir():
            return path.read_bytes()
        files = sorted((p for p in path.rglob("*") if p.is_file() and not p.name.startswith(".")), key=Path.as_posix)
        return b"\0".join(text for text in map(Path.read_bytes, files) if b"\0" not in text)  # what has NULs is no text
    except OSError as error:
        raise ArgumentError(
            f"{error.filename or path}: cannot be read: {error.strerror}; expected a text file or a folder of them"
        ) from error


class Windows:
    """Batches of windows of a text: each epoch is a new cut and a new order of all of it, known from the seed alone.

    So the position in the data is one number, the windows read so far, and any batch can be had again.
    """

    def __init__(self, text: Tensor, context: int, batch: int, seed: int) -> None:
        self.text, self.context, self.size, self.seed = text, context, batch, seed
        self.windows = (len(text) - 1) // context - (len(text) > 2 * context)  # room for the cut to move
        self._epochs: dict[int, Tensor] = {}

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """ids and targets, int64 [B, S], of a step."""
        wanted = range(step * self.size, (step + 1) * self.size)
        starts = torch.stack([self._epoch(i // self.windows)[i % self.windows] for i in wanted])
        rows = self.text[starts[:, None] + torch.arange(self.context + 1)].long()
        return rows[:, :-1], rows[:, 1:]

    def _epoch(self, number: int) -> Tensor:
        if number not in self._epochs:
            dice = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            room = len(self.text) - self.windows * self.context
            cut = int(torch.randint(0, room, (), generator=dice))
            starts = torch.randperm(self.windows, generator=dice) * self.context + cut
            self._epochs = {k: v for k, v in self._epochs.items() if k == number - 1} | {number: starts}
        return self._epochs[number]


@torch.no_grad()
def loss_of(model: nn.Module, text: Tensor, context: int, *, batch: int = 16, at_most: int | None = None) -> float:
    """Mean loss over a text, in nats a byte, in windows that do not overlap, `at_most` so many of them, evenly spread.

    Perplexity a byte is exp of it, bits a byte are it over log 2.
    """
    training, device = model.training, next(model.parameters()).device
    model.eval()
    windows = max(1, (len(text) - 1) // context)
    context = min(context, len(text) - 1)
    chosen = windows if at_most is None else min(windows, at_most)
    total = 0.0
    for starts in (torch.arange(chosen) * windows // chosen * context).split(batch):
        rows = text[starts[:, None] + torch.arange(context + 1)].long().to(device)
        total += len(rows) * model(rows[:, :-1], rows[:, 1:]).item()
    model.train(training)
    return total / chosen
