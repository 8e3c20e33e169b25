"""Tile unpacking: experts' pages in a GPU's tile order, converted back to the format's order for CPU kernels.

Pages are stored in host memory as they are copied to the GPU. An expert computed on the host is unpacked first: one
pass over its bytes, by all threads, bit-exact with `unpack_tiles`.
"""

import ctypes

import torch
from torch import Tensor

from vbrt.config.format_records import FORMATS as RECORDS
from vbrt.errors import KernelError
from vbrt.formats.page import PageLayout
from vbrt.kernels.cpu import buffer_reuse
from vbrt.kernels.cpu.build import Order, library
from vbrt.kernels.cpu.thread_counts import team
from vbrt.kernels.cuda.e2m1.tiles import TILES
from vbrt.kernels.experts import ExpertPages

__all__ = ["in_rows"]

_THREAD_BYTES = 1 << 16  # bytes per thread that make threading worth it
_KEPT_BYTES = 1 << 20  # reuse larger buffers: mapping takes as long as filling


def in_rows(pages: ExpertPages, layout: PageLayout) -> ExpertPages:
    """Return host pages in the format's order: `pages` themselves, or converted copies.

    Args:
        layout: of a page in the format's order.

    Raises KernelError: unknown page order, or the kernels cannot be built.
    """
    if pages.layout == layout:
        return pages
    strange = [part for part in pages.shapes if TILES not in pages.offsets(part)]
    if strange:
        raise KernelError(f"pages of {', '.join(strange)} are neither in the format's order nor in that of tiles")
    held = {expert: page for expert, page in enumerate(pages.pages) if page is not None}
    room = 1 << (len(held) - 1).bit_length()  # few sizes, for buffer reuse
    memory = buffer_reuse.empty((room, layout.nbytes), torch.uint8, smallest_bytes=_KEPT_BYTES)[: len(held)]
    copies: list[Tensor | None] = [None] * pages.experts
    for expert, page in zip(held, memory, strict=True):
        copies[expert] = page
    out = ExpertPages(pages.format, pages.dtype, pages.shapes, layout, copies)
    addresses = [(ctypes.c_void_p * len(held))(*(page.data_ptr() for page in some)) for some in (held.values(), memory)]
    threads = team(memory.numel() // _THREAD_BYTES)
    for part, (n, k) in pages.shapes.items():
        own, to = pages.offsets(part), out.offsets(part)
        order = Order(
            *(ctypes.addressof(table) for table in addresses), len(held), own[TILES], own["tensor_scale"],
            to["codes"], to["scales"], to.get("tensor_scale", -1), n, k, RECORDS[pages.format].block,
        )  # fmt: skip
        library("tiles").vbrt_rows_of_tiles(order, threads)
    return out
