"""Encoding of a dense weight into its format's planes, in the kernels' order, and decoding."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from math import isfinite

import torch

from vbrt.config import FORMATS
from vbrt.errors import FormatError
from vbrt.formats import WeightPlanes, get_format
from vbrt.formats.error_feedback import compensated
from vbrt.formats.fine_coding import CODED, MOST_STREAM_BYTES
from vbrt.formats.fine_plane import fine_layout
from vbrt.formats.fitted_codebook import Separation
from vbrt.formats.format import EncodedGroup
from vbrt.formats.page import Incoming, PageLayout
from vbrt.host.logger import say
from vbrt.host.mapped_weights import populate
from vbrt.kernels import EXACT, PageOrder, resolve
from vbrt.layers.weights.weight_shards import agreed_amax, gathered
from vbrt.layers.weights.weight_spec import HandleSpec
from vbrt.libraries.torch_api import has_overlap
from vbrt.residency.weight_site import EXPERTS
from vbrt.tiers import Level

__all__ = ["Encoder", "Planes", "strides_of", "uploaded"]

_UPLOADED_BYTES = 1 << 20
_PLAIN = (torch.Tensor, torch.nn.Parameter)

Planes = Sequence[tuple[PageLayout, Mapping[str, torch.Tensor | Incoming]]]
"""Planes of a weight on their way into pages, or out of them."""


_announced: list[str] = []


def _announce_rounding(spec: HandleSpec) -> None:
    """Say once per process, in its first rank, that weights are rounded, and how to keep them exact."""
    if spec.lossless or _announced or os.environ.get("RANK", "0") != "0":
        return
    record = FORMATS[spec.format]
    error = f", relative error about {100 * record.noise:.2g} %" if record.noise else ""
    _announced.append(spec.format)
    say(f'weights are rounded to {record.bits} bits ({spec.format}{error}); the preset "exact" keeps every bit')


class Encoder:
    """Encoder of weights with one spec on one device.

    Attributes:
        separation: the fitted codebook, where the format has one.
        packing: the order in which the kernels read a coarse page, or None: as the format encodes it.
        fallbacks: receives reasons why a weight is not in that order.
        alike: True if all its pages have the same fields, as a layer's experts must: fine planes are coded though that
            makes one larger.
    """

    def __init__(
        self, spec: HandleSpec, device: torch.device, separation: Separation | None, fallbacks: list[str]
    ) -> None:
        self.spec, self.device, self.separation, self.fallbacks = spec, device, separation, fallbacks
        self.format = resolve("codec", spec.backend, device, spec.format).run(get_format(spec.format))
        if separation is not None:
            separation.format = self.format
        self.packing: PageOrder | None = None
        self.alike = False
        self._encode_many = resolve("encode_many", spec.backend, device, spec.format).run
        self._split_fine = resolve("split_fine", spec.backend, device, spec.format).run
        codes = spec.codes_fine(device)
        self._code_fine = resolve("code_fine", spec.backend, device, spec.format).run if codes else None

    def split(self, weight: torch.Tensor, expert: int | None = None) -> Planes:
        """The planes of a weight in the module's orientation; nothing is stored. `expert`: whose it is.

        Raises:
            FormatError: NaN, Inf, or a weight without data, with the layer's name.
        """
        name = self.spec.name if expert is None else f"{self.spec.name}[{expert}]"
        if weight.is_meta:
            raise FormatError(
                f"{name}: its weight is on the meta device, without data; load it first "
                "(load_state_dict(..., assign=True))"
            )
        _announce_rounding(self.spec)
        try:
            squares = self._squares(slice(expert or 0, (expert or 0) + 1))
            return self._split(weight.detach().to(self.device, self.spec.dtype), squares)
        except FormatError as error:
            raise FormatError(f"{name}: {error}; exclude the layer (weights.exclude) or repair it") from error

    def split_many(self, weights: torch.Tensor, first: int = 0) -> list[Planes]:
        """The planes of several weights [E, ...] of one shape, of experts `first` and following: what `split` gives for
        each, in fewer steps.

        Raises:
            FormatError: as `split` does, with the expert's number behind the layer's name.
        """
        if not (weights.is_meta or self.spec.dense or self.separation):
            _announce_rounding(self.spec)
            with contextlib.suppress(FormatError):  # which is raised below, by the expert's name
                squares = self._squares(slice(first, first + len(weights)))
                return self._split_many(weights.detach().to(self.device, self.spec.dtype), squares)
        return [self.split(weight, expert) for expert, weight in enumerate(weights, first)]

    def _squares(self, matrices: slice) -> torch.Tensor | None:
        """The mean squares of the inputs of some matrices [E, K], on the device."""
        return None if self.spec.inputs is None else self.spec.inputs.squares[matrices].to(self.device)

    def _split_many(self, weights: torch.Tensor, squares: torch.Tensor | None) -> list[Planes]:
        spec = self.spec
        w_ENK = weights.transpose(1, 2).contiguous() if spec.transposed else weights
        found: dict[int, Planes] = {}
        for group in self._encode_many(self.format, w_ENK, self._amax(w_ENK), squares):
            coarse = list(group.planes(self.format.layout(spec.shape, spec.dtype)))
            for place, member in enumerate(group.members):
                found[member] = self._fine_pages(w_ENK[member], coarse[place])
            for member, page in zip(group.members, self._coarse_pages(group, coarse), strict=True):
                found[member] = [page, *found[member]]
        return [found[member] for member in range(len(weights))]

    def _coarse_pages(
        self, group: EncodedGroup, coarse: Sequence[dict[str, torch.Tensor]]
    ) -> Sequence[tuple[PageLayout, Mapping[str, torch.Tensor]]]:
        """The pages of a group, put in the kernels' order together where all have one scale and whole tiles of rows."""
        order, (n, k), count = self.packing, self.spec.shape, len(coarse)
        if order is not None and count > 1 and "tensor_scale" in group.coarse and n % order.rows == 0:
            tensors = order.pack(group.coarse, (n * count, k))
            if tensors is not None:
                layout = order.layout((n, k))
                return [(layout, plane) for plane in EncodedGroup(group.members, tensors).planes(layout)]
        return [self._coarse_page(plane) for plane in coarse]

    def _split(self, weight: torch.Tensor, squares: torch.Tensor | None) -> Planes:
        spec = self.spec
        if spec.dense:
            return [(self.format.layout(tuple(weight.shape), spec.dtype), self.format.encode(weight))]
        w_NK = weight.t().contiguous() if spec.transposed else weight
        coarse = self._fitted(w_NK, squares) if self.separation else self._encoded(w_NK, squares)
        if (
            spec.inputs is not None and spec.inputs.moments is not None and not spec.fine
        ):  # which codes tell from weights
            coarse = compensated(self.format, w_NK, coarse, spec.inputs.moments)
        planes = [self._coarse_page(coarse)]
        return [*planes, *self._fine_pages(w_NK, coarse)]

    def _fine_pages(
        self, w_NK: torch.Tensor, coarse: dict[str, torch.Tensor]
    ) -> list[tuple[PageLayout, Mapping[str, torch.Tensor]]]:
        """Return the fine plane's page, if the weight has one: coded, unless a plain one is smaller."""
        if not self.spec.fine:
            return []
        coded = self._code_fine(w_NK, coarse, self.format) if self._code_fine else None
        if coded is not None and len(coded["extra"]) > MOST_STREAM_BYTES:
            coded = None
        # a plain one has 8 bits and more
        if coded is not None and (self.alike or fine_layout(coded).nbytes <= w_NK.numel()):
            return [(fine_layout(coded), coded)]
        plain = self._split_fine(w_NK, coarse, self.format)
        pages = [(fine_layout(fine), fine) for fine in (coded, plain) if fine is not None]
        return [min(pages, key=lambda page: page[0].nbytes)]

    def _encoded(self, w_NK: torch.Tensor, squares: torch.Tensor | None) -> Mapping[str, torch.Tensor]:
        w_ENK = w_NK.unsqueeze(0)
        (group,) = self._encode_many(self.format, w_ENK, self._amax(w_ENK), squares)
        return group.coarse

    def _amax(self, w_ENK: torch.Tensor) -> list[float] | None:
        """Largest magnitudes of the whole matrices, if these are shards; else None."""
        shard = self.spec.site.shard
        if shard is None or shard.dim == EXPERTS:
            return None
        amax_E = agreed_amax(w_ENK, shard)
        if not all(map(isfinite, amax_E)) and bool(w_ENK.isfinite().all()):
            raise FormatError(f"{self.format.name}: another rank's part of the weight holds NaN or Inf")
        return amax_E

    def _fitted(self, w_NK: torch.Tensor, squares: torch.Tensor | None) -> Mapping[str, torch.Tensor]:
        """The plane under a codebook that is fitted to the whole weight, whatever part of it this process holds."""
        shard = self.spec.site.shard
        if shard is None or shard.dim == EXPERTS:
            return self.separation.encode(w_NK, None if squares is None else squares[0])
        (amax,) = self._amax(w_NK.unsqueeze(0))
        return self.separation.encode_part(w_NK, gathered(w_NK, shard), amax)

    def _coarse_page(self, coarse: dict[str, torch.Tensor]) -> tuple[PageLayout, dict[str, torch.Tensor]]:
        """Return the page in the kernel's preferred order, if it has one that is exact."""
        spec = self.spec
        tensors = self.packing.pack(coarse, spec.shape) if self.packing else None
        if tensors is not None:
            return self.packing.layout(spec.shape), tensors
        if self.packing:
            self.fallbacks.append(
                f"{spec.name}: its block scales lie too far apart for the kernels' order; "
                "decoded and multiplied in plain torch"
            )
        return self.format.layout(spec.shape, spec.dtype), coarse

    @property
    def stores_as_encoded(self) -> bool:
        """True if a page has the fields of a plane as the format encodes them, so that files may be read into it."""
        return self.packing is None and not self.spec.fine

    def from_encoded(self, planes: Mapping[str, dict[str, torch.Tensor | Incoming]]) -> Planes:
        """Planes to store, from encoded tensors by name of the plane; all in memory unless `stores_as_encoded`."""
        spec = self.spec
        if spec.dense:
            return [(self.format.layout(spec.weight_shape, spec.dtype), planes["dense"])]
        coarse = {name: t.to(self.device) if self.packing else t for name, t in planes["coarse"].items()}
        return [self._coarse_page(coarse), *(self._fine_as_asked(planes) if spec.fine else [])]

    def _fine_as_asked(
        self, planes: Mapping[str, dict[str, torch.Tensor]]
    ) -> list[tuple[PageLayout, Mapping[str, torch.Tensor]]]:
        """Return the page of an encoded fine plane, in the form that the spec asks for."""
        spec, fine = self.spec, planes["fine"]
        if (CODED in fine) == spec.codes_fine(self.device):
            return [(fine_layout(fine), fine)]
        coarse, fine = ({name: t.to(self.device) for name, t in planes[plane].items()} for plane in ("coarse", "fine"))
        decode = resolve("decode_weight", spec.backend, self.device, EXACT).run
        return self._fine_pages(decode(WeightPlanes(spec.format, spec.shape, spec.dtype, coarse, fine)), coarse)

    def encoded_layout(self, layout: PageLayout) -> PageLayout:
        """The layout of a stored plane as the format encodes it."""
        return self.format.layout(self.spec.shape, self.spec.dtype) if self._is_packed(layout) else layout

    def unpacked_fields(self, fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The fields of a coarse plane as the format encodes them, whichever order they are in."""
        order = self.packing
        if order is None or set(fields) != {field.name for field in order.layout(self.spec.shape).fields}:
            return fields
        return order.unpack(fields, self.spec.shape)

    def unpacked(self, layout: PageLayout, plane: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A stored plane as the format encodes it."""
        return self.packing.unpack(plane, self.spec.shape) if self._is_packed(layout) else plane

    def _is_packed(self, layout: PageLayout) -> bool:
        return self.packing is not None and layout == self.packing.layout(self.spec.shape)


def uploaded(weight: torch.Tensor, level: Level) -> torch.Tensor:
    """Return a large weight in pageable host memory on the GPU of a level, through its relay; any other as it is."""
    if level.stream is None or weight.device.type != "cpu" or weight.nbytes < _UPLOADED_BYTES:
        return weight
    if type(weight) not in _PLAIN or weight.is_pinned() or not weight.is_contiguous():
        return weight
    populate(weight)
    origin = weight.detach().view(-1).view(torch.uint8)
    there = level.relay.filled(
        weight.nbytes, lambda part, at: part.copy_(origin[at : at + part.numel()]), level.tier.device
    )
    return there.view(weight.dtype).view(weight.shape)


def strides_of(weight: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a weight that is not contiguous and whose elements do not overlap; else None."""
    plain = weight.is_contiguous() or has_overlap(weight) == 1
    return None if plain else weight.stride()
