"""ExpertsCoder: kernel selection, encoding and decoding for a layer's experts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from vbrt.config import FORMATS
from vbrt.formats.fitted_codebook import Separation
from vbrt.formats.format import WeightPlanes
from vbrt.formats.joint_planes import join_layouts, join_planes, part_fields, part_layout
from vbrt.formats.page import PageLayout
from vbrt.host.logger import warn
from vbrt.kernels import resolve, resolves_late
from vbrt.kernels.experts import ExpertPages
from vbrt.layers.experts.experts_spec import ExpertsSpec
from vbrt.layers.weights.kernel_selection import Kernels, choose_kernels, coarse_kernels, refusals, rounding
from vbrt.layers.weights.linear_product import pass_precision
from vbrt.layers.weights.weight_encoding import Encoder, Planes

__all__ = ["ExpertOps", "ExpertsCoder", "ops_of"]


class ExpertOps(NamedTuple):
    """The functions of the ops on pages."""

    up: Callable[..., torch.Tensor]
    down: Callable[..., torch.Tensor]
    sum: Callable[..., torch.Tensor]


def ops_of(spec: ExpertsSpec, backend: str, device: torch.device, rounding: str | None = None) -> ExpertOps:
    """Return the ops of a layer's experts on a device."""
    formats = {"experts_up": spec.format, "experts_down": spec.down_format or spec.format, "experts_sum": spec.format}
    return ExpertOps(*(resolve(op, backend, device, format, rounding=rounding).run for op, format in formats.items()))


class ExpertsCoder:
    """Encoder, decoder and kernels of a layer's experts.

    Attributes:
        encoders: by part.
        kernels: by part, for spec and device; None until first needed if building them takes time.
        fallbacks: receives reasons for deviations from the config.
    """

    def __init__(self, spec: ExpertsSpec, device: torch.device, fallbacks: list[str]) -> None:
        self.spec, self.device, self.fallbacks = spec, device, fallbacks
        self.encoders = {
            part: Encoder(
                one, device, Separation(one.levels, one.refresh_every) if FORMATS[one.format].fitted else None, []
            )
            for part, one in spec.parts.items()
        }
        for encoder in self.encoders.values():
            encoder.alike = True
        self.kernels: dict[str, Kernels] | None = None
        self._coarse_kernels: dict[str, Kernels] | None = None
        self._ops: ExpertOps | None = None
        self._decoders: dict[PageLayout, dict[str, Callable[[ExpertPages, str], torch.Tensor] | None]] = {}
        if not resolves_late(spec.first.backend, device):
            self.take_kernels()

    def take_kernels(self) -> dict[str, Kernels]:
        """Choose the kernels; warn once for all layers about requested ones that are unavailable."""
        kernels = {part: choose_kernels(one, self.device) for part, one in self.spec.parts.items()}
        for part, chosen in kernels.items():
            chosen.kernel.prepare(self.device)
            self.encoders[part].packing = None if self.spec.fine else chosen.packing  # no kernel takes them alone
        for reason in refusals(self.spec.first, self.device):
            if reason not in self.fallbacks:
                self.fallbacks.append(reason)
                warn(reason, stacklevel=4)
        self.kernels = kernels
        return kernels

    def kernels_of_pass(self) -> dict[str, Kernels]:
        """The kernels for the planes that this pass takes."""
        kernels = self.kernels or self.take_kernels()
        if not (self.spec.fine and pass_precision() == "coarse"):
            return kernels
        if self._coarse_kernels is None:
            self._coarse_kernels = {part: coarse_kernels(one, self.device) for part, one in self.spec.parts.items()}
        return self._coarse_kernels

    def ops_of_pass(self) -> ExpertOps:
        """The ops on the planes that this pass takes; only for those that lose bits."""
        if self._ops is None:
            to = rounding(self.spec.first, self.device)
            self._ops = ops_of(self.spec, self.spec.first.backend, self.device, to)
        return self._ops

    @property
    def backend(self) -> str:
        """Name of the backend in use."""
        spec = self.spec.first
        if spec.lossless:
            return next(iter((self.kernels or self.take_kernels()).values())).kernel.backend
        return resolve("experts_up", spec.backend, self.device, spec.format).backend

    def refuse_order(self) -> None:
        """Keep pages in the format's order: the kernels' order cannot represent all experts."""
        for encoder in self.encoders.values():
            encoder.packing = None
        self.fallbacks.append(
            f"{self.spec.name}: the block scales of some experts lie too far apart for the kernels' order; all are "
            "decoded and multiplied in plain torch"
        )

    def decoder_of_pages(
        self, part: str, layout: PageLayout, dtype: torch.dtype
    ) -> Callable[[ExpertPages, str], torch.Tensor] | None:
        """The function that decodes one part of many pages of a layout by their addresses, as [n, N, K] of a dtype;
        None: they are decoded one by one."""
        if self.spec.lossless or self.spec.fine or dtype is not torch.bfloat16:
            return None
        if layout not in self._decoders:
            self._decoders[layout] = {name: self._decoder(name, layout) for name in self.spec.parts}
        return self._decoders[layout][part]

    def _decoder(self, part: str, layout: PageLayout) -> Callable[[ExpertPages, str], torch.Tensor] | None:
        kernel = resolve("experts_up", self.spec.first.backend, self.device, self.spec.parts[part].format)
        own = replace(layout, fields=tuple(field for field in layout.fields if field.name.startswith(f"{part}.")))
        return kernel.decode_pages if kernel.by_address(own, self.device) else None

    # -- planes -------------------------------------------------------------------------------------------------------

    def from_encoded(self, planes: Mapping[str, Mapping[str, dict[str, torch.Tensor]]]) -> Planes:
        """The joint planes of one expert, from encoded tensors by part and name of the plane; zeros where it has none
        of a part."""
        return join_planes(
            {
                part: self.encoders[part].from_encoded(planes[part]) if part in planes else self._zeros(part)
                for part in self.spec.parts
            }
        )

    def _zeros(self, part: str) -> Planes:
        one = self.spec.parts[part]
        return self.encoders[part].split(torch.zeros(one.site.matrix_shape, dtype=one.dtype, device=self.device))

    def encoded_part(
        self, part: str, layout: PageLayout, fields: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The fields of one part of a stored plane as the format encodes them."""
        encoder, own = self.encoders[part], part_fields(fields, part)
        return encoder.unpacked_fields(own) if layout.plane == "coarse" else own

    def matrix(self, part: str, planes: Sequence[Mapping[str, torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
        """One matrix of one expert as the module keeps it, decoded to a dtype; perhaps a view of a page."""
        one = self.spec.parts[part]
        kernels = (self.kernels_of_pass() if len(planes) == 1 else self.kernels or self.take_kernels())[part]
        fields = [part_fields(plane, part) for plane in planes]
        if one.dense:
            return fields[0]["weight"].to(dtype)
        held = WeightPlanes(
            one.format,
            one.shape,
            one.dtype if kernels.lossless else dtype,
            fields[0],
            fields[1] if len(fields) > 1 else None,
        )
        return (kernels.decode_turned(held) if one.transposed else kernels.decode(held)).to(dtype)

    def encoded_layout(self, part: str, layout: PageLayout) -> PageLayout:
        """The layout that one part of a stored plane has in a page of its own, as the format encodes it."""
        if layout.plane == "fine":
            return part_layout(layout, part)
        one = self.encoders[part].spec
        shape = one.site.matrix_shape if one.dense else one.shape
        return self.encoders[part].format.layout(shape, one.dtype)

    def encoded_joint(self, layout: PageLayout) -> PageLayout:
        """The layout of a stored joint plane as the format encodes it."""
        return join_layouts({part: self.encoded_layout(part, layout) for part in self.spec.parts})
