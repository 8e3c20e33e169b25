"""Paged KV cache in 8 or 4 bits: `vbrt.KVCache`'s codes for caches that write and read single tokens by number.

Pages are those of `AffineCode`, of one sequence each. A token's values are quantized as they come. Keys are quantized
in groups of 64 tokens of a channel, once the group is full; until then they wait, in the cache's dtype, in the tail of
their sequence. So a sequence costs 64 tokens of plain keys beside its pages, and prompts are written without a detour.

Which tokens are in a tail, and which one fills a group, the host knows as it hands out rows; a mark in the upper bits
of a row brings that to the device with the rows themselves, so that batches may be prepared ahead:

    bits 0 to 39    row: block * rows_per_block + place in the page
    bits 40 to 55   tail of the sequence; 0: none
    bits 56 to 62   of the token that fills a group: how many tokens of it come in this call; else 0

A window is a ring of rows in which new tokens take the places of old ones. The codes of a group stay valid until it is
full again, so tokens that are still in the window are read from them meanwhile.

Legend: M new tokens, N tokens read, S groups filled, G tokens per group, H heads, P tokens per page, K and V channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.generation.kv.quantized import AffineCode, decode_groups, encode_groups
from vbrt.kernels.cuda import kv_pages

__all__ = ["PagedCodes", "PagedTokens"]

_ROW, _TAIL_BITS = (1 << 40) - 1, 16
_TAIL = (1 << _TAIL_BITS) - 1
_TEMPORARY_BYTES = 64 << 20  # of fp32 values decoded at a time where there is no kernel


class PagedCodes:
    """Storage of a paged cache's layers, all of one shape.

    Args:
        code: of a page; its shape has one sequence.
        sequences: in the cache at once, usually; room for their tails is taken at the start, for more when they come.

    Attributes:
        page_bytes: of the keys and values of a page's tokens in one layer.
        tail_bytes: of a sequence's tail in one layer.
    """

    def __init__(self, code: AffineCode, sequences: int) -> None:
        self.code, self.sequences = code, sequences
        self.page_bytes, shape = code.page_bytes, code.shape
        self.tail_bytes = code.token_group * shape.heads * shape.key_dim * shape.dtype.itemsize

    def over(self, pages: Tensor, rows_per_block: int, window: int | None = None) -> "PagedTokens":
        """Return the tokens of some layers in zeroed pages uint8 [blocks, layers, page_bytes]."""
        return PagedTokens(self, pages, rows_per_block, window)


class _Writes(NamedTuple):
    """Places of new tokens: int64 [M], of filled groups [S], and of the tokens of these [S, G]; see `_writes_of`."""

    blocks: Tensor
    places: Tensor
    tail_rows: Tensor
    group_blocks: Tensor
    groups: Tensor
    is_new: Tensor
    new: Tensor
    waited: Tensor


class _Reads(NamedTuple):
    """Places of tokens to read: int64 [N]; and of those whose keys are in tails, their numbers and rows there."""

    blocks: Tensor
    places: Tensor
    waiting: Tensor
    tail_rows: Tensor


class PagedTokens:
    """Keys and values of some layers of a paged cache; see `PagedCodes.over`.

    Rows are marked on the host, in the order of their use on the device.
    """

    def __init__(self, storage: PagedCodes, pages: Tensor, rows_per_block: int, window: int | None) -> None:
        self._code, self._rows_per_block, self._window = storage.code, rows_per_block, window
        self._group, shape = storage.code.token_group, storage.code.shape
        self._layers = [storage.code.fields(pages[:, layer]) for layer in range(pages.shape[1])]
        tails = min(storage.sequences, len(pages)) + 1  # tail 0 takes tokens of no tail
        self._tails = torch.zeros(
            pages.shape[1], tails * self._group, shape.heads, shape.key_dim, dtype=shape.dtype, device=pages.device
        )
        self._tail_of: dict[str, int] = {}
        self._copies: list[tuple[int, int]] = []
        self._writes: _Writes | None = None
        self._reads: _Reads | None = None

    @property
    def nbytes(self) -> int:
        """Bytes beside the pages."""
        return self._tails.nbytes

    # -- host: marks -----------------------------------------------------------------------------------------------

    def marked_writes(self, sequence: str, rows: list[int], past: int, alive: "dict[str, object]") -> list[int]:
        """Mark the rows of a sequence's new tokens.

        Args:
            rows: one for each token, in order.
            past: tokens of the sequence before them.
            alive: all sequences in the cache.
        """
        tail, group, end = self._tail(sequence, alive) << 40, self._group, len(rows)
        first = skipped = max(0, end - self._window) if self._window else 0  # the first tokens of more than a window
        while first < end:
            at = (past + first) % self._window if self._window else past + first
            left = group - at % group
            left = min(left, self._window - at) if self._window else left
            if first + left <= end:
                waited = at % group and not (skipped and first == skipped)
                rows[first + left - 1] |= left << 56 | (tail if waited else 0)
            else:
                rows[first:] = [row | tail for row in rows[first:]]
            first += left
        return rows

    def marked_reads(self, sequence: str, rows: list[int], length: int, end: int | None = None) -> list[int]:
        """Mark the rows of a sequence's tokens to read.

        Args:
            rows: of its last tokens, in order; behind `end`, others.
            length: tokens of the sequence, these included.
        """
        end = len(rows) if end is None else end
        waiting = (length % self._window if self._window else length) % self._group
        if waiting:
            tail = self._tail_of[sequence] << 40
            rows[end - waiting : end] = [row | tail for row in rows[end - waiting : end]]
        return rows

    def fork(self, sequence: str, other: str, alive: "dict[str, object]") -> None:
        """Have the next `copy_tails` copy the tail of a sequence for another one."""
        if sequence in self._tail_of:
            self._copies.append((self._tail_of[sequence], self._tail(other, alive)))

    def _tail(self, sequence: str, alive: "dict[str, object]") -> int:
        """Return the tail of a sequence: its own, that of one that has left, or the next."""
        if sequence not in self._tail_of:
            self._tail_of = {name: tail for name, tail in self._tail_of.items() if name in alive}
            taken = set(self._tail_of.values())
            self._tail_of[sequence] = next(tail for tail in range(1, _TAIL + 1) if tail not in taken)
        return self._tail_of[sequence]

    # -- device: tokens --------------------------------------------------------------------------------------------

    def begin(self, writes: Tensor, reads: Tensor) -> None:
        """Take marked rows int64 [M] and [N] of a call, for all layers. It waits for the device."""
        highest = int(((writes >> 40) & _TAIL).max()) if len(writes) else 0
        self._grow(highest)
        self._writes, self._reads = self._writes_of(writes), self._reads_of(reads)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write new tokens: keys [M, H, K], values [M, H, V]."""
        at, tails, bits = self._writes, self._tails[layer], self._code.bits
        codes_K, bounds_K, codes_V, bounds_V = self._layers[layer]
        if len(at.groups):
            full_SGHK = torch.where(at.is_new[..., None, None], keys[at.new], tails[at.waited])
            x = full_SGHK.transpose(1, 2).float().unsqueeze(2)
            codes, low, step = encode_groups(x, 3, bits)
            groups = codes_K.unflatten(3, (-1, self._group))
            groups[at.group_blocks, 0, :, at.groups] = codes
            bounds_K[at.group_blocks, :, 0, :, at.groups] = torch.cat((low, step), 2).transpose(1, 2).bfloat16()
        tails.index_copy_(0, at.tail_rows, keys)
        codes, low, step = encode_groups(values.float().unflatten(2, (-1, self._code.channel_group)), 3, bits)
        codes_V[at.blocks, 0, :, at.places] = codes
        bounds_V[at.blocks, :, 0, :, at.places] = torch.stack((low, step), 1).bfloat16()

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys [N, H, K] and values [N, H, V], contiguous, in the cache's dtype."""
        at, shape = self._reads, self._code.shape
        found = [
            torch.empty(len(at.blocks), shape.heads, dim, dtype=shape.dtype, device=self._tails.device)
            for dim in shape.dims
        ]
        codes_K, bounds_K, codes_V, bounds_V = self._layers[layer]
        self._decode(codes_K, bounds_K, kv_pages.Groups(self._group, 1, self._code.bits), found[0])
        self._decode(codes_V, bounds_V, kv_pages.Groups(1, self._code.channel_group, self._code.bits), found[1])
        found[0].index_copy_(0, at.waiting, self._tails[layer].index_select(0, at.tail_rows))
        return found[0], found[1]

    def _decode(self, codes: Tensor, bounds: Tensor, groups: kv_pages.Groups, out: Tensor) -> None:
        blocks, places = self._reads[:2]
        if kv_pages.gathers(codes):
            kv_pages.gather(codes, bounds, groups, out, blocks, places)
            return
        count = max(1, _TEMPORARY_BYTES // (4 * out[:1].numel()))
        for block, place, part in zip(blocks.split(count), places.split(count), out.split(count), strict=True):
            code, bound = codes[block, 0, :, place], bounds[block, :, 0, :, place // groups.tokens]
            part.copy_(decode_groups(code, bound[:, 0], bound[:, 1], 3, groups.bits))

    def copy_tails(self) -> None:
        """Copy the tails of sequences that have been forked since."""
        if self._copies:
            self._grow(max(tail for _, tail in self._copies))
            tails = self._tails.unflatten(1, (-1, self._group))
            source, target = torch.tensor(self._copies, dtype=torch.int64, device=tails.device).unbind(1)
            tails.index_copy_(1, target, tails.index_select(1, source))
            self._copies.clear()

    def _grow(self, highest: int) -> None:
        """Have room for a tail, and for twice as many as before if there was none."""
        tails = self._tails.shape[1] // self._group
        if highest >= tails:
            more = (max(highest + 1, 2 * tails) - tails) * self._group
            layers, _, heads, channels = self._tails.shape
            self._tails = torch.cat((self._tails, self._tails.new_zeros(layers, more, heads, channels)), 1)

    def _writes_of(self, marked: Tensor) -> _Writes:
        blocks, places, tail, row = self._places_of(marked)
        coming = marked >> 56
        fills = coming.nonzero().flatten()
        in_group, group = row % self._group, self._group
        last, came = in_group[fills, None], coming[fills, None]
        token = torch.arange(group, dtype=torch.int64, device=marked.device).minimum(
            last
        )  # behind a window's end: its last token
        token = torch.where(tail[fills, None] == 0, token.maximum(last - came + 1), token)
        return _Writes(
            blocks,
            places,
            torch.where(coming == 0, tail, 0) * group + in_group,
            blocks[fills],
            places[fills] // group,
            token > last - came,
            (fills[:, None] - (last - token)).clamp_(min=0),
            tail[fills, None] * group + token,
        )

    def _reads_of(self, marked: Tensor) -> _Reads:
        blocks, places, tail, row = self._places_of(marked)
        waiting = tail.nonzero().flatten()
        return _Reads(blocks, places, waiting, (tail * self._group + row % self._group)[waiting])

    def _places_of(self, marked: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return blocks, places in their pages, tails and rows, int64."""
        row = marked & _ROW
        blocks = row // self._rows_per_block
        return blocks, row - blocks * self._rows_per_block, (marked >> 40) & _TAIL, row
