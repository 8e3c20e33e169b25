"""What operations are tried on: small models of one kind of layer, held in one of the ways that vbrt holds weights.

The weights are such that their format holds them without rounding, so that one plain model is the counterpart of
shells, of encoded layers and of layers in training, bit for bit.
"""

import copy
import itertools
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.esm.modeling_esmfold import EsmFoldLinear
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

import vbrt
from vbrt.config import load_config
from vbrt.formats import get_format

__all__ = [
    "BACKENDS",
    "FORMATS",
    "KINDS",
    "PLACES",
    "STATES",
    "Chain",
    "Holding",
    "Subject",
    "all_holdings",
    "held",
    "meets",
    "sampled_holdings",
]

KINDS = {
    "Linear": nn.Linear,
    "Conv1D": lambda k, n: Conv1D(n, k),
    "FalconLinear": FalconLinear,
    "EsmFoldLinear": EsmFoldLinear,
}
#: name -> weights.format, weights.fine, dtype
FORMATS = {
    "nvfp4": ("nvfp4", "none", torch.bfloat16),
    "mxfp4": ("mxfp4", "none", torch.float32),
    "nf4": ("nf4", "none", torch.float32),
    "quantile": ("quantile", "none", torch.float32),
    "mxint8": ("mxint8", "none", torch.bfloat16),
    "dense": ("dense", "none", torch.bfloat16),
    "dense fp32": ("dense", "none", torch.float32),
    "exact bf16": ("nvfp4", "exact", torch.bfloat16),
    "exact fp16": ("nvfp4", "exact", torch.float16),
}
LOSSLESS = ("dense", "dense fp32", "exact bf16", "exact fp16")
STATES = ("shell", "materialized", "trained")
PLACES = ("resident", "streamed")
BACKENDS = ("auto", "reference")
WIDTHS = (64, 96, 64, 96)  # blocks of 64 do not divide 96; first and last layer can be tied


@dataclass(frozen=True, slots=True)
class Holding:
    """A kind of layer, and how its weights are held. `trained` is mode = "train", which moves no weights."""

    kind: str
    format: str
    state: str
    place: str = "resident"
    backend: str = "auto"
    device: str = "cpu"

    @property
    def lossless(self) -> bool:
        """Whether results must be the plain layer's bits."""
        return self.format in LOSSLESS

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and inputs."""
        return FORMATS[self.format][2]

    def __str__(self) -> str:
        return " ".join(str(getattr(self, field.name)) for field in fields(self))

    def config(self) -> dict[str, Any]:
        """What `vbrt.wrap` takes, but for the budgets of streamed weights."""
        format, fine, _ = FORMATS[self.format]
        gpu = {"enabled": self.device == "cuda"}
        return {
            "mode": "train" if self.state == "trained" else "infer",
            "weights": {"format": format, "fine": fine, "min_parameters": 0},
            "separation": {"refresh_every": 1 if self.state == "trained" else 100},
            "compute": {"backend": self.backend},
            "tiers": {"gpu": gpu},
        }


def meets(holding: Holding, where: Mapping[str, Any]) -> bool:
    """Whether each named field has one of its values."""
    return all(
        getattr(holding, name) in (values if isinstance(values, tuple) else (values,)) for name, values in where.items()
    )


def all_holdings(device: str = "cpu") -> list[Holding]:
    """The whole matrix; layers in training are held in one place, and fine planes do not train."""
    frozen = itertools.product(KINDS, FORMATS, STATES[:2], PLACES, BACKENDS)
    trained = itertools.product(KINDS, [name for name in FORMATS if FORMATS[name][1] == "none"])
    return [
        *(Holding(*one, device=device) for one in frozen),
        *(Holding(kind, format, "trained", device=device) for kind, format in trained),
    ]


def sampled_holdings(name: str, count: int | None, device: str = "cpu") -> list[Holding]:
    """For an operation: each format in each state, with kinds, places and backends that change from one operation to
    the next; of those the first `count`, in an order that depends on the operation too."""
    start, made = zlib.crc32(name.encode()), []
    states = [(format, state) for state in STATES for format in FORMATS]
    for i, (format, state) in enumerate(states):
        turn = start + i
        kind = tuple(KINDS)[turn % 4]
        place, backend = PLACES[turn // 4 % 2], BACKENDS[turn // 8 % 2]
        made.append(Holding(kind, format, state, place, backend, device))
    made = [
        h if h.state != "trained" else Holding(h.kind, h.format, h.state, device=device)
        for h in made
        if h.state != "trained" or FORMATS[h.format][1] == "none"
    ]
    if count is None:
        return made
    first = start % len(made)
    return [made[(first + 7 * i) % len(made)] for i in range(count)]


class Chain(nn.Module):
    """[.., 64] -> [.., 96] by three layers of a kind, `a`, `b` and `c`."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.a, self.b, self.c = (make(k, n) for k, n in itertools.pairwise(WIDTHS))

    def forward(self, x: Tensor) -> Tensor:
        """x [.., 64] -> [.., 96]."""
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


@cache
def _prototype(kind: str, format: str) -> Chain:
    """A model whose weights its format holds as they are."""
    name, fine, dtype = FORMATS[format]
    torch.manual_seed(zlib.crc32(f"{kind} {format}".encode()))
    model = Chain(KINDS[kind]).to(dtype).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.15)
    if name != "dense" and fine == "none":
        for layer in (model.a, model.b, model.c):
            layer.weight.data = _rounded(layer.weight.data, name, transposed=kind == "Conv1D")
    return model


def _rounded(weight: Tensor, format: str, *, transposed: bool) -> Tensor:
    w_NK = weight.t() if transposed else weight
    if format == "quantile":
        w_NK = _on_few_levels(w_NK)
    else:
        w_NK = get_format(format).decode(get_format(format).encode(w_NK), tuple(w_NK.shape), weight.dtype)
    return w_NK.t().contiguous() if transposed else w_NK


def _on_few_levels(w_NK: Tensor) -> Tensor:
    """Fewer magnitudes than a fitted codebook has, and the largest of them in each block."""
    level = torch.randint(1, 5, w_NK.shape) * 2
    level[:, ::8] = 8
    return level * w_NK.sign() / 32


class Subject:
    """What an operation is done to: a model as its user has it, and inputs.

    Attributes:
        whole: what the user calls: the wrapper, or the plain model.
        model: the model itself, in both cases.
        x, h: inputs of `whole` [3, 64] and of `layer` [3, 96].
        path: an empty directory.
    """

    def __init__(self, whole: nn.Module, holding: Holding, path: Path) -> None:
        self.whole, self.holding, self.path = whole, holding, path
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(3, WIDTHS[0], generator=generator).to(holding.device, holding.dtype)
        self.h = torch.randn(3, WIDTHS[1], generator=generator).to(holding.device, holding.dtype)

    @property
    def wrapped(self) -> bool:
        """Whether this is vbrt's side."""
        return isinstance(self.whole, vbrt.VBModelWrapper)

    @property
    def model(self) -> Chain:
        """The model without its wrapper."""
        return model_of(self.whole)

    @property
    def layer(self) -> nn.Module:
        """The layer in the middle, 96 -> 64."""
        return self.model.b

    def random(self, *shape: int) -> Tensor:
        """The same numbers on both sides."""
        generator = torch.Generator().manual_seed(len(shape) + sum(shape))
        return torch.randn(*shape, generator=generator).to(self.holding.device, self.holding.dtype)

    def rows(self, weight: Tensor) -> Tensor:
        """Another weight that the format holds as it is: the outputs of this one in the opposite order."""
        return weight.detach().flip(1 if self.holding.kind == "Conv1D" else 0)

    def unwrap(self) -> nn.Module:
        """The plain model, here a copy of it."""
        return self.whole.unwrap() if self.wrapped else self.whole

    def close(self) -> None:
        """The wrapper's; nothing on the plain side."""
        if self.wrapped:
            self.whole.close()


def model_of(whole: nn.Module) -> Any:
    """The model in a wrapper, or a plain one itself."""
    return whole.module if isinstance(whole, vbrt.VBModelWrapper) else whole


def held(holding: Holding, path: Path) -> Iterator[Subject]:
    """The plain subject and the wrapped one, each with a model of its own."""
    for wrapped in (False, True):
        model = copy.deepcopy(_prototype(holding.kind, holding.format)).to(holding.device)
        model.train(holding.state == "trained")
        folder = path / ("wrapped" if wrapped else "plain")
        folder.mkdir()
        yield Subject(_wrap(model, holding, path / "pages") if wrapped else model, holding, folder)


def _wrap(model: nn.Module, holding: Holding, path: Path) -> vbrt.VBModelWrapper:
    settings = holding.config()
    if holding.place == "streamed":
        plan = vbrt.make_plan(model, load_config(settings))
        largest = max(swap.page_bytes for swap in plan.swaps)
        room = {"budget": 2 * largest if 2 * largest < plan.page_bytes else largest}
        if holding.device == "cuda":
            settings["tiers"]["gpu"] |= room
        else:
            settings["tiers"] |= {"cpu": room, "ssd": {"enabled": True, "path": str(path)}}
    vb = vbrt.wrap(model, settings)
    return vb.materialize() if holding.state == "materialized" else vb
