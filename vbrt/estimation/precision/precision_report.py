"""Precision choice by layer: losses in each format, what was chosen, and why."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from vbrt.config import Budget, VBConfig, known_formats, parse_weights_budget
from vbrt.config.toml_text import toml_text
from vbrt.errors import ConfigError
from vbrt.estimation.precision.knapsack import least_loss
from vbrt.residency.plan import Swap, format_bytes

__all__ = ["LayerPrecision", "Precision", "Way"]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to hold a layer.

    Attributes:
        held: a format, or "exact", as in `weights.formats`.
        nbytes: of its pages.
        loss: with only this layer changed: KL in nats a position, or the method's own measure; 0 if lossless.
        lossless: True if the weight is restored bit for bit.
    """

    held: str
    nbytes: int
    loss: float = 0.0
    lossless: bool = False


@dataclass(frozen=True, slots=True)
class LayerPrecision:
    """Choice for one layer.

    Attributes:
        swap: its weight in the smallest format (of 4 bits, or 3), with its pages.
        weights: number of weights.
        ways: alternatives, the smallest format first, and last "exact" or "dense", whichever is smaller.
        chosen: index of the chosen way.
    """

    swap: Swap = field(repr=False)
    weights: int
    ways: tuple[Way, ...]
    chosen: int = 0

    def with_losses(self, losses: Mapping[str, float]) -> Self:
        """Return the layer with other losses, by format; lossless ways have 0."""
        return replace(self, ways=tuple(replace(way, loss=losses.get(way.held, 0.0)) for way in self.ways))

    @property
    def name(self) -> str:
        """The layer's name in the model."""
        return self.swap.name

    @property
    def held(self) -> str:
        """The chosen format, as in `weights.formats`."""
        return self.ways[self.chosen].held

    @property
    def lossless(self) -> bool:
        """True if the chosen way is lossless."""
        return self.ways[self.chosen].lossless

    @property
    def nbytes(self) -> int:
        """Bytes of the chosen way's pages."""
        return self.ways[self.chosen].nbytes

    @property
    def coarse_bytes(self) -> int:
        """Bytes of its pages in the smallest format."""
        return self.ways[0].nbytes

    @property
    def loss(self) -> float:
        """Loss in the smallest format."""
        return self.ways[0].loss

    @property
    def left(self) -> float:
        """Loss as chosen."""
        return self.ways[self.chosen].loss

    @property
    def loss_per_byte(self) -> float:
        """Loss saved per byte beyond the smallest format, at the best step."""
        return max((gain for gain, _ in self.steps()), default=0.0)

    def steps(self) -> Iterator[tuple[float, int]]:
        """Yield the efficient ways above the smallest (convex hull): loss saved per byte over the previous one, and its
        index. The gain falls from step to step."""
        at = 0
        while True:
            found = [(self._gain(at, to), to) for to in range(at + 1, len(self.ways))]
            gain, to = max(found, default=(0.0, 0), key=lambda step: (step[0], -step[1]))
            if gain <= 0:
                return
            yield gain, to
            at = to

    def _gain(self, at: int, to: int) -> float:
        one, other = self.ways[at], self.ways[to]
        return (one.loss - other.loss) / max(1, other.nbytes - one.nbytes)


@dataclass(frozen=True, slots=True)
class Precision:
    """Precision of each layer: 3 bits, 4 bits, 8 bits or lossless.

    Attributes:
        config: to wrap with: `vbrt.wrap(model, choice.config)`.
        layers: the layers chosen for, in model order.
        method: how losses were measured.
        budget_bytes: of all pages.
        named: page bytes, and number of weights, of layers that the config named.
        own: True if measured on the model's own samples.
        together: whole-model KL of each proposal by method, the taken one first; empty without a second proposal, and
            after `within`.
    """

    config: VBConfig
    layers: tuple[LayerPrecision, ...]
    method: str
    budget_bytes: int
    named: tuple[int, int] = (0, 0)
    own: bool = False
    together: tuple[tuple[str, float], ...] = field(default=(), compare=False)

    def within(self, budget: int | str | Budget) -> Self:
        """Return the choice for another budget, from the same measurements.

        budget: as for `choose_precision`. Raises ConfigError: it is invalid, or too small: by how much.
        """
        limit = self._limit(budget if isinstance(budget, Budget) else parse_weights_budget(budget, where="budget"))
        return self._holding(_spent(self.layers, limit - self.named[0], self._bits), limit)

    def fits(self, room: Budget) -> bool:
        """True if a budget holds all layers in the smallest format."""
        return self.named[0] + sum(layer.coarse_bytes for layer in self.layers) <= self._limit(room)

    def _limit(self, room: Budget) -> int:
        weights = self.named[1] + sum(layer.weights for layer in self.layers)
        return int(room.amount * weights / 8) if room.kind == "bits" else int(room.amount)

    @property
    def _bits(self) -> int:
        return known_formats()[self.config.weights.format].bits

    def by_losses(self, losses: Sequence[Mapping[str, float]]) -> Self:
        """Return the choice by other losses, for the same budget; the layers keep their own losses."""
        others = [layer.with_losses(found) for layer, found in zip(self.layers, losses, strict=True)]
        chosen = [layer.chosen for layer in _spent(others, self.budget_bytes - self.named[0], self._bits)]
        layers = [replace(layer, chosen=at) for layer, at in zip(self.layers, chosen, strict=True)]
        return self._holding(layers, self.budget_bytes)

    def _holding(self, layers: Sequence[LayerPrecision], limit: int) -> Self:
        mine = {layer.name for layer in layers}
        formats = tuple(pair for pair in self.config.weights.formats if pair[0] not in mine)
        formats += tuple((layer.name, layer.held) for layer in layers if layer.chosen)
        config = replace(self.config, weights=replace(self.config.weights, formats=formats), source="choose_precision")
        return replace(self, config=config, layers=tuple(layers), budget_bytes=limit, together=())

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.named[0] + sum(layer.nbytes for layer in self.layers)

    @property
    def loss_in_4_bits(self) -> float:
        """Sum of all layers' losses in the smallest format, of 4 bits or 3."""
        return sum(layer.loss for layer in self.layers)

    @property
    def loss(self) -> float:
        """Sum of the losses as chosen: an estimate of the whole model's."""
        return sum(layer.left for layer in self.layers)

    def to_toml(self) -> str:
        """Return the config as a TOML file, with the explanation in comments."""
        lines = "".join(f"# {line}".rstrip() + "\n" for line in str(self).splitlines())
        return f"{lines}\n{toml_text(self.config)}"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        lossless = sum(layer.lossless for layer in self.layers)
        between = {layer.held for layer in self.layers if layer.chosen and not layer.lossless}
        counts = "".join(f", {sum(layer.held == held for layer in self.layers)} {held}" for held in sorted(between))
        unit = "KL, nats a position" if self.method == "kl" else "input² × error²"
        text = "samples of the model" if self.own else "the given sequences"
        yield f"{lossless} of {len(self.layers)} layers lossless{counts}, the others {self.config.weights.format}"
        yield f"pages  {format_bytes(self.nbytes)} of {format_bytes(self.budget_bytes)}"
        what = f"{unit}; {text}; a sum over layers"
        yield f"loss   {self.loss:.3g} of {self.loss_in_4_bits:.3g} with all in {self._bits} bits ({what})"
        if self.together:
            (best, least), *others = self.together
            beside = ", ".join(f"{kl:.3g} as {method} chooses" for method, kl in others)
            yield f"whole  {least:.3g} as {best} chooses, measured together; {beside}"
        yield ""
        width = max([len(layer.name) for layer in self.layers], default=0)
        yield f"{'layer':<{width}}  {'loss':>9}  {'left':>9}  {'a MiB':>9}  {'bytes':>10}  held as"
        for layer in sorted(self.layers, key=lambda layer: -layer.loss_per_byte):
            a_mib = layer.loss_per_byte * (1 << 20)
            size = format_bytes(layer.nbytes)
            losses = f"{layer.loss:9.2e}  {layer.left:9.2e}  {a_mib:9.2e}"
            yield f"{layer.name:<{width}}  {losses}  {size:>10}  {layer.held}"


def _spent(layers: Sequence[LayerPrecision], room: int, bits: int) -> list[LayerPrecision]:
    """Return the layers with the least sum of losses within a room. Raises ConfigError."""
    least = sum(layer.coarse_bytes for layer in layers)
    if least > room:
        short, room = least - room, max(0, room)
        raise ConfigError(
            f"budget: in {bits} bits the layers take {format_bytes(least)}, and {format_bytes(room)} are left for "
            f"them: {format_bytes(short)} too little; set a larger budget, or leave layers dense by weights.exclude"
        )
    items = [[(way.nbytes, way.loss) for way in layer.ways] for layer in layers]
    return [replace(layer, chosen=at) for layer, at in zip(layers, least_loss(items, room), strict=True)]
