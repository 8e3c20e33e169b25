"""Joint planes: one page with the same plane of all matrices of a routed expert.

An expert's matrices are always used together, so one copy transfers them all. They are called `parts`: "up" and "down"
(preceded by "gate" if a module stores the gate's matrix separately), and prefix the fields of a joint page: "up.codes",
"up.scales", "down.codes", ...
"""

from collections.abc import Mapping

from torch import Tensor

from vbrt.formats.page import PageLayout, build_layout

__all__ = ["PARTS", "join_fields", "join_layouts", "join_planes", "part_fields", "part_layout"]

Planes = list[tuple[PageLayout, dict[str, Tensor]]]

#: names of parts, in page order
PARTS = ("gate", "up", "down")


def join_layouts(parts: Mapping[str, PageLayout]) -> PageLayout:
    """Return the joint layout of several matrices' planes, by part."""
    first = next(iter(parts.values()))
    fields = [(f"{part}.{f.name}", f.dtype, f.shape) for part, layout in parts.items() for f in layout.fields]
    return build_layout(first.format, first.plane, fields)


def join_fields(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the fields of a joint page from those of its parts."""
    return {f"{part}.{name}": tensor for part, fields in parts.items() for name, tensor in fields.items()}


def part_layout(layout: PageLayout, part: str) -> PageLayout:
    """Return a part's layout as a separate page."""
    head = f"{part}."
    own = [(f.name.removeprefix(head), f.dtype, f.shape) for f in layout.fields if f.name.startswith(head)]
    return build_layout(layout.format, layout.plane, own)


def part_fields(fields: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """Return one part's fields of a joint page, under the format's names."""
    head = f"{part}."
    return {name.removeprefix(head): tensor for name, tensor in fields.items() if name.startswith(head)}


def join_planes(parts: Mapping[str, Planes]) -> Planes:
    """Return the joint planes of an expert, from the planes of each part."""
    by_plane = zip(*parts.values(), strict=True)
    return [
        (
            join_layouts({part: layout for part, (layout, _) in zip(parts, planes, strict=True)}),
            join_fields({part: tensors for part, (_, tensors) in zip(parts, planes, strict=True)}),
        )
        for planes in by_plane
    ]
