"""Verified random access into a page file: rows of a table without the rest of its page.

A page's digest covers all of it. For items, the tier keeps a digest of each block of 4 KiB in memory (two thousandths
of the page's bytes), computed by one verified pass over the file at the first access. From then on every read takes
whole blocks and verifies each.
"""

import torch
import xxhash

from vbrt.errors import TierError
from vbrt.host.host_memory import aligned, bytes_view
from vbrt.host.safe_files import read_into

__all__ = ["BLOCK_BYTES", "BlockDigests", "read_items"]

BLOCK_BYTES = 4096
_DIGEST_BYTES = 8


class BlockDigests:
    """XXH3-64 digests of a page's blocks."""

    def __init__(self) -> None:
        self._digests = bytearray()

    def extend(self, chunk: memoryview) -> None:
        """Append the digests of the page's next bytes, a multiple of a block."""
        for at in range(0, len(chunk), BLOCK_BYTES):
            self._digests += xxhash.xxh3_64_digest(chunk[at : at + BLOCK_BYTES])

    def holds(self, block: int, data: memoryview) -> bool:
        """True if `data` matches the digest of a block."""
        return self._digests[block * _DIGEST_BYTES : (block + 1) * _DIGEST_BYTES] == xxhash.xxh3_64_digest(data)


def read_items(
    fd: int, first_byte: int, digests: BlockDigests, items: tuple[torch.Tensor, int], name: str
) -> torch.Tensor:
    """Read items of one size from a page: uint8 [n, nbytes].

    Args:
        fd: the page's file, opened with or without O_DIRECT; the page begins at `first_byte`.
        items: the offset of each item in the page, int64 [n], and the bytes of one.
        name: of the page and its file, for errors.

    Raises:
        TierError: a block does not hold the bytes that were written, or the file ends before it.
        OSError: it cannot be read.
    """
    offset_T, nbytes = items
    first_T, last_T = offset_T // BLOCK_BYTES, (offset_T + max(nbytes - 1, 0)) // BLOCK_BYTES
    span = int((last_T - first_T).max()) + 1
    blocks = torch.minimum(
        first_T.unsqueeze(1) + torch.arange(span, dtype=torch.int64, device="cpu"), last_T.unsqueeze(1)
    ).unique()
    data = aligned(len(blocks) * BLOCK_BYTES)
    _read_blocks(fd, first_byte, blocks.tolist(), bytes_view(data), name)
    _verify(blocks.tolist(), bytes_view(data), digests, name)
    place_T = torch.searchsorted(blocks, first_T) * BLOCK_BYTES + offset_T % BLOCK_BYTES
    return data.unfold(0, nbytes, 1).index_select(0, place_T)  # blocks of one item lie side by side


def _read_blocks(fd: int, first_byte: int, blocks: list[int], view: memoryview, name: str) -> None:
    """Read blocks, ascending; one request per run of consecutive blocks."""
    begin = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end] != blocks[end - 1] + 1:
            try:
                part = view[begin * BLOCK_BYTES : end * BLOCK_BYTES]
                read_into(fd, [part], first_byte + blocks[begin] * BLOCK_BYTES)
            except EOFError as error:
                raise TierError(f"{name} is truncated: {error}") from error
            begin = end


def _verify(blocks: list[int], view: memoryview, digests: BlockDigests, name: str) -> None:
    for at, block in enumerate(blocks):
        if not digests.holds(block, view[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES]):
            raise TierError(
                f"{name} does not hold the bytes that were written (4 KiB at {block * BLOCK_BYTES}); "
                "the disk or the file is damaged"
            )
