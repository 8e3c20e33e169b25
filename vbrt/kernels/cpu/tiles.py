"""Experts' pages in the order of a GPU's tiles, put back into the order of their format, for the CPU's kernels.

Pages lie in host memory as they go to the GPU. An expert that is computed where it lies is unpacked first: one pass
over its bytes, by all threads, bit for bit as `unpack_tiles`.
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

_THREAD_BYTES = 1 << 16  # of pages that are worth a thread
_KEPT_BYTES = 1 << 20  # of memory for pages from which on it is used again: it takes as long to map as to fill


def in_rows(pages: ExpertPages, layout: PageLayout) -> ExpertPages:
    """Return pages in host memory in the order of their format: `pages` as they are, or copies.

    Args:
        layout: of a page in the format's order.

    Raises KernelError: they are in an order that nobody knows here, or the kernels cannot be built.
    """
    if pages.layout == layout:
        return pages
    strange = [part for part in pages.shapes if TILES not in pages.offsets(part)]
    if strange:
        raise KernelError(f"pages of {', '.join(strange)} are neither in the format's order nor in that of tiles")
    held = {expert: page for expert, page in enumerate(pages.pages) if page is not None}
    room = 1 << (len(held) - 1).bit_length()  # few sizes, so that memory fits again
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
