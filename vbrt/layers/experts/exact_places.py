"""Places of the fields of `exact` experts, for the kernel that merges the planes of many experts at once.

The lists of a fine plane have other lengths for each expert, and so fields other places in its page. A table says where
each one lies: from the start of the coarse page, of the fine page, or, for tables of the format, anywhere.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vbrt.formats import get_format
from vbrt.formats.fine_coding import CODED
from vbrt.formats.joint_planes import part_fields
from vbrt.formats.page import PageLayout, unpack
from vbrt.host import accelerator
from vbrt.kernels.cuda.fine import merge
from vbrt.layers.experts.experts_spec import ExpertsSpec

__all__ = ["ExactPlaces", "why_not_merged"]

_COARSE, _FINE, _KEPT = range(3)  # where a field lies: in the coarse page, in the fine one, in a tensor of its own


def why_not_merged(spec: ExpertsSpec) -> str:
    """Return why the kernel does not merge the planes of a layer's experts; "" if it does."""
    return next(filter(None, (merge.why_not_experts(one.format, one.shape) for one in spec.parts.values())), "")


class ExactPlaces:
    """Places of the fields of a layer's experts, `merge.FIELDS` or `merge.CODED_FIELDS` for each part.

    Args:
        layouts: of each expert's pages, coarse and fine; coarse ones are alike, in the format's order.
        device: that has the pages when kernels read them.

    Attributes:
        slot_bytes: of memory for any expert's pages, the fine one behind the coarse one.
        coded: whether fine planes are, of all experts.
        fine_at: bytes from the beginning of such memory to the fine page.
    """

    def __init__(self, spec: ExpertsSpec, layouts: Sequence[Sequence[PageLayout]], device: torch.device) -> None:
        self._spec, coarse = spec, layouts[0][0]
        self.fine_at = coarse.nbytes
        self.slot_bytes = coarse.nbytes + max(fine.nbytes for _, fine in layouts)
        self._kept: list[Tensor] = []
        self.coded = any(field.name.endswith(f".{CODED}") for field in layouts[0][1].fields)
        self._fields = merge.CODED_FIELDS if self.coded else merge.FIELDS
        of_coarse = self._fields.index("fours" if self.coded else "low")
        page, fine_names = torch.empty(coarse.nbytes, dtype=torch.uint8, device=device), self._fields[of_coarse:]
        sample, own_F, fixed_F = unpack(page, coarse), [], []
        for part, one in spec.parts.items():
            fields = part_fields(sample, part)
            levels, values, scale = get_format(one.format).tables(fields)
            for tensor in (fields["codes"], fields["scales"], scale, levels, values)[:of_coarse]:
                start = tensor.data_ptr() - page.data_ptr()
                own_F.append(_COARSE if 0 <= start < page.numel() else _KEPT)
                fixed_F.append(start if own_F[-1] == _COARSE else tensor.data_ptr())
                self._kept += [tensor] if own_F[-1] == _KEPT else []
            own_F += [_FINE] * len(fine_names)
            fixed_F += [0] * len(fine_names)
        rows = []
        for _, fine in layouts:
            at = {field.name: field.offset for field in fine.fields}
            of_fine = ([at.get(f"{part}.{name}", at[f"{part}.starts"]) for name in fine_names] for part in spec.parts)
            rows.append([place for of_part in of_fine for place in (*[0] * of_coarse, *of_part)])
        own_F = torch.tensor(own_F, dtype=torch.int64, device="cpu")
        self._coarse_F, self._fine_F = (own_F == _COARSE).long(), (own_F == _FINE).long()
        self._offsets_EF = torch.tensor(rows, dtype=torch.int64, device="cpu") + torch.tensor(
            fixed_F, dtype=torch.int64, device="cpu"
        )
        self._in_slots = (self._offsets_EF + self.fine_at * self._fine_F).to(device), (own_F != _KEPT).long().to(device)

    def in_slots(self, addresses_E: Tensor) -> Tensor:
        """Return where the fields of experts lie in memory of `slot_bytes`, int64 [E, F], without synchronization."""
        offsets_EF, moving_F = self._in_slots
        return torch.addcmul(offsets_EF, addresses_E.unsqueeze(1), moving_F)

    def in_pages(self, experts: Sequence[int], coarse: Sequence[int], fine: Sequence[int]) -> Tensor:
        """Return where the fields of some experts lie, int64 [n, F] on the device, from their pages' addresses."""
        bases = torch.tensor([coarse, fine], dtype=torch.int64, device="cpu").unsqueeze(2)
        rows = self._offsets_EF[list(experts)] + bases[0] * self._coarse_F + bases[1] * self._fine_F
        return accelerator.sent(rows, self._in_slots[0].device)

    def parameters(self, places_EF: Tensor, experts_P: Tensor) -> dict[str, Tensor]:
        """Return the weights of every part of some experts, [P, ...], by the names of the module's parameters.

        Args:
            places_EF: of fields, as the other methods return them.
            experts_P: int64, rows of `places_EF`; -1 gives zeros.
        """
        names = zip(self._spec.parameters, self._spec.parts, strict=True)
        return {name: self._merged(places_EF, experts_P, part) for name, part in names}

    def _merged(self, places_EF: Tensor, experts_P: Tensor, part: str) -> Tensor:
        one, first = self._spec.parts[part], list(self._spec.parts).index(part) * len(self._fields)
        out = merge.merge_experts(places_EF, experts_P, one.shape, one.dtype, one.format, first=first, coded=self.coded)
        return out.transpose(1, 2).contiguous() if one.transposed else out
