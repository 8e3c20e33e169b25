"""A choice of precision by layer: what each layer loses in 4 bits, what was chosen for it, and why."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from vbrt.config import Budget, VBConfig, parse_weights_budget
from vbrt.config.toml_text import toml_text
from vbrt.errors import ConfigError
from vbrt.residency.plan import Swap, format_bytes

__all__ = ["LayerPrecision", "Precision"]


@dataclass(frozen=True, slots=True)
class LayerPrecision:
    """One layer of a choice.

    Attributes:
        swap: its weight in 4 bits, with its pages.
        weights: their number.
        coarse_bytes: of its pages in 4 bits.
        lossless_bytes: of its pages in the smaller of the lossless formats, `lossless_format`: "exact" or "dense".
        loss: in 4 bits alone, all else as it is: KL in nats a position, or by the method's own measure.
        lossless: what was chosen.
    """

    swap: Swap = field(repr=False)
    weights: int
    coarse_bytes: int
    lossless_bytes: int
    lossless_format: str
    loss: float = 0.0
    lossless: bool = False

    @property
    def name(self) -> str:
        """The layer's name in the model."""
        return self.swap.name

    @property
    def held(self) -> str:
        """What was chosen, as `weights.formats` says it."""
        return self.lossless_format if self.lossless else self.swap.format

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that were chosen."""
        return self.lossless_bytes if self.lossless else self.coarse_bytes

    @property
    def extra_bytes(self) -> int:
        """Bytes that lossless takes more than 4 bits."""
        return max(0, self.lossless_bytes - self.coarse_bytes)

    @property
    def loss_per_byte(self) -> float:
        """What a byte more saves of the loss."""
        return self.loss / max(1, self.extra_bytes)


@dataclass(frozen=True, slots=True)
class Precision:
    """Which layers are lossless and which in 4 bits.

    Attributes:
        config: to wrap with: `vbrt.wrap(model, choice.config)`.
        layers: those that were chosen for, in the order of the model.
        method: how their losses were found.
        budget_bytes: of all pages.
        named: bytes of the pages of layers that the config named, and the number of their weights.
        own: True if the model was measured on text that it wrote itself.
    """

    config: VBConfig
    layers: tuple[LayerPrecision, ...]
    method: str
    budget_bytes: int
    named: tuple[int, int] = (0, 0)
    own: bool = False

    def within(self, budget: int | str | Budget) -> Self:
        """Return the choice for another budget, by the same measurements.

        budget: as for `choose_precision`. Raises ConfigError: it is wrong, or too small for 4 bits: by how much.
        """
        room = budget if isinstance(budget, Budget) else parse_weights_budget(budget, where="budget")
        weights = self.named[1] + sum(layer.weights for layer in self.layers)
        limit = int(room.amount * weights / 8) if room.kind == "bits" else int(room.amount)
        layers = _spent(self.layers, limit - self.named[0])
        mine = {layer.name for layer in layers}
        formats = tuple(pair for pair in self.config.weights.formats if pair[0] not in mine)
        formats += tuple((layer.name, layer.held) for layer in layers if layer.lossless)
        config = replace(self.config, weights=replace(self.config.weights, formats=formats), source="choose_precision")
        return replace(self, config=config, layers=tuple(layers), budget_bytes=limit)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.named[0] + sum(layer.nbytes for layer in self.layers)

    @property
    def loss_in_4_bits(self) -> float:
        """The sum of the losses of all layers."""
        return sum(layer.loss for layer in self.layers)

    @property
    def loss(self) -> float:
        """The sum of the losses of the layers that stay in 4 bits: an estimate of the whole model's."""
        return sum(layer.loss for layer in self.layers if not layer.lossless)

    def to_toml(self) -> str:
        """Return the config as a TOML file, with the explanation as comments."""
        lines = "".join(f"# {line}".rstrip() + "\n" for line in str(self).splitlines())
        return f"{lines}\n{toml_text(self.config)}"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        lossless = sum(layer.lossless for layer in self.layers)
        unit = "KL, nats a position" if self.method == "kl" else "input² × error²"
        text = "text that the model wrote itself" if self.own else "the given sequences"
        yield f"{lossless} of {len(self.layers)} layers lossless, the others {self.config.weights.format}"
        yield f"pages  {format_bytes(self.nbytes)} of {format_bytes(self.budget_bytes)}"
        what = f"{unit}; {text}; a sum over layers"
        yield f"loss   {self.loss:.3g} of {self.loss_in_4_bits:.3g} with all in 4 bits ({what})"
        yield ""
        width = max([len(layer.name) for layer in self.layers], default=0)
        yield f"{'layer':<{width}}  {'loss':>9}  {'a MiB':>9}  {'bytes':>10}  held as"
        for layer in sorted(self.layers, key=lambda layer: -layer.loss_per_byte):
            a_mib = layer.loss_per_byte * (1 << 20)
            size = format_bytes(layer.nbytes)
            yield f"{layer.name:<{width}}  {layer.loss:9.2e}  {a_mib:9.2e}  {size:>10}  {layer.held}"


def _spent(layers: Sequence[LayerPrecision], room: int) -> list[LayerPrecision]:
    """Return the layers, lossless where a byte saves the most loss and as far as there is room. Raises ConfigError."""
    least = sum(layer.coarse_bytes for layer in layers)
    if least > room:
        short, room = least - room, max(0, room)
        raise ConfigError(
            f"budget: in 4 bits the layers take {format_bytes(least)}, and {format_bytes(room)} are left for them: "
            f"{format_bytes(short)} too little; set a larger budget, or leave layers dense by weights.exclude"
        )
    left, lossless = room - least, set()
    for layer in sorted(layers, key=lambda layer: -layer.loss_per_byte):
        if layer.loss > 0 and layer.extra_bytes <= left:
            left -= layer.extra_bytes
            lossless.add(layer.name)
    return [replace(layer, lossless=layer.name in lossless) for layer in layers]
