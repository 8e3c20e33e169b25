"""Page I/O of experts: write planes into pages, and read them as encoded for pickles, saves and other machines."""

import functools
from collections.abc import Iterable, Mapping

import torch

from vbrt.formats.joint_planes import join_fields
from vbrt.formats.page import PageLayout, new_page, pack, unpack
from vbrt.layers.experts.protocols import ExpertsWeights
from vbrt.layers.weights.pickling import from_pickle, to_pickle
from vbrt.layers.weights.weight_encoding import Planes
from vbrt.tiers import Owner, Tally

__all__ = ["Uneven", "pickled", "unpickled", "write_pages"]


class Uneven(Exception):
    """Error: an expert's matrices are in another order than those of previous experts."""


def write_pages(handle: ExpertsWeights, planes: Iterable[Planes]) -> None:
    """Write the planes of each expert into pages, which the handle owns then.

    Raises:
        Uneven, FormatError, TierError: nothing is written then.
    """
    stack, keys, first = handle.stack, [], None
    owner = Owner(stack, Tally())
    try:
        for expert, planes_of_expert in enumerate(planes):
            first = first or planes_of_expert[0][0]
            if planes_of_expert[0][0] != first:
                raise Uneven
            for layout, tensors in planes_of_expert:
                keys.append(_add(handle, layout, tensors, expert, owner))
        handle.own_pages(tuple(keys), owner)
    except BaseException:
        if handle.owner is not owner:
            stack.retire(owner)
            stack.retire_unowned()
        raise


def _add(
    handle: ExpertsWeights, layout: PageLayout, tensors: Mapping[str, torch.Tensor], expert: int, owner: Owner
) -> str:
    stack, spec = handle.stack, handle.spec
    planned = spec.site.expert_key(layout.plane, expert)
    key = planned if planned not in stack.pages else f"{planned}@{handle.id}.{handle.generation}"
    home = spec.homes.get(planned, stack.names[0])
    stack.add(key, layout, home, functools.partial(pack, tensors, layout), owner, frozen=True)
    return key


# -- pickles ----------------------------------------------------------------------------------------------------------


def pickled(handle: ExpertsWeights) -> list:
    """Return the joint planes of all experts as the format encodes them, as bytes."""
    pages, coder = [], handle.coder
    for expert in range(handle.spec.experts if handle.keys else 0):
        planes = []
        with handle.lease([expert]) as leased:
            for layout, fields in zip(handle.layouts_of(expert), leased.fields(0), strict=True):
                parts = {part: coder.encoded_part(part, layout, fields) for part in handle.spec.parts}
                joint = coder.encoded_joint(layout)
                planes.append((joint.to_dict(), to_pickle(pack(join_fields(parts), joint, new_page(joint)))))
        pages.append(planes)
    return pages


def unpickled(pages: list) -> list[Planes]:
    """Inverse of `pickled`."""
    return [[_from_pickle(*plane) for plane in planes] for planes in pages]


def _from_pickle(layout: dict, page: torch.Tensor | bytes) -> tuple[PageLayout, Mapping[str, torch.Tensor]]:
    known = PageLayout.from_dict(layout)
    return known, unpack(from_pickle(page), known)
