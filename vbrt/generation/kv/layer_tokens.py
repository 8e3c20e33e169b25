"""Tokens of one attention layer: sealed pages in extents, and the last tokens in open pages of the tail.

The tail is three pages on the computing device, in the model's dtype. Tokens are written to it once; a page is sealed
(encoded and sent to its home) once two later pages have tokens. So the last one to two pages of tokens, more than any
rejected draft, stay resident and exact; after a prompt longer than the tail it may be fewer.

A layer's state is one immutable record, `Held`; every change ends by swapping it. So an interrupt (Ctrl-C) has no
effect: new tokens are in parts of the tail that no record refers to, and new extents are freed with their last
reference.

Beam search reorders sequences at every step. Sealed pages are not rewritten; the record maps rows to their sequences.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.generation.kv.extent import Extent, Memory
from vbrt.generation.kv.extent_store import KVStore
from vbrt.generation.kv.fetch_ring import Place
from vbrt.generation.kv.quantized import KVShape, PageCode, page_code
from vbrt.host import accelerator

__all__ = ["TAIL_PAGES", "LayerTokens", "Part"]

TAIL_PAGES = 3
_OPEN_PAGES = 2  # of the tail, that stay open
_ROUNDED_TOKENS = 8  # GPU results are padded by up to an eighth, so that later steps reuse their memory

Pair = tuple[Tensor, Tensor]


class Part(NamedTuple):
    """Used pages of an extent, and the sequence in them for each row; rows None: identity."""

    extent: Extent
    used: int
    rows: Tensor | None = None


class Tail:
    """Open pages: uint8 [pages, B, row_bytes], each row its keys, then its values."""

    def __init__(self, store: KVStore, shape: KVShape, page_bytes: int) -> None:
        self.shape = shape
        sizes = [shape.heads * shape.page * dim * shape.dtype.itemsize for dim in shape.dims]
        starts = [0, -(-sizes[0] // 256) * 256]
        row = -(-(starts[1] + sizes[1]) // 256) * 256
        self.memory: Memory = store.tail(TAIL_PAGES * shape.batch * row, page_bytes)
        self.rows = self.memory.bytes[: TAIL_PAGES * shape.batch * row].view(TAIL_PAGES, shape.batch, row)
        self.pair: Pair = tuple(
            self.rows[:, :, start : start + size].view(shape.dtype).unflatten(2, (shape.heads, shape.page, dim))
            for start, size, dim in zip(starts, sizes, shape.dims, strict=True)
        )  # each [pages, B, H, P, D]


@dataclass(frozen=True, slots=True)
class Held:
    """Immutable state of a layer.

    Attributes:
        length: tokens appended minus tokens cropped.
        dropped: leading tokens that a sliding window has dropped.
        parts: sealed pages, oldest first.
        slots: tail pages with the tokens after them, in order.
    """

    tail: Tail
    code: PageCode
    length: int = 0
    dropped: int = 0
    parts: tuple[Part, ...] = ()
    slots: tuple[int, ...] = ()

    @property
    def sealed(self) -> int:
        """Index of the first token in the tail."""
        return self.dropped + self.code.shape.page * sum(part.used for part in self.parts)

    @property
    def open(self) -> int:
        """Number of tokens in the tail."""
        return self.length - self.sealed


class LayerTokens:
    """Keys and values of one layer.

    Args:
        store: holds the pages.
        layer: index in the store.
        bits: per value in sealed pages.
        page: tokens per page.
        window: tokens that a query attends to, itself included; None: all.

    Attributes:
        held: None before the first tokens.
        keep_past: True while tokens behind the window are kept, for a later crop.
    """

    def __init__(self, store: KVStore, layer: int, *, bits: int, page: int, window: int | None = None) -> None:
        self.store, self.layer, self.bits, self.page, self.window = store, layer, bits, page, window
        self.held: Held | None = None
        self.keep_past = False

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Number of tokens so far."""
        return self.held.length if self.held else 0

    @property
    def past(self) -> int:
        """Number of cached tokens that the next ones attend to."""
        return self.length if self.window is None else min(self.length, self.window - 1)

    def streamed(self, first: int = 0) -> Iterator[tuple[Place, Extent, int]]:
        """Yield the extents that the next pass streams from lower tiers, starting at index `first`."""
        if self.held is None:
            return
        parts, end = self.held.parts, self.held.dropped
        for number in range(first if self.window is None else 0, len(parts)):
            extent, used, _ = parts[number]
            end += used * self.page
            seen = self.window is None or end > self.length - self.past
            if seen and number >= first and extent.page.home:
                yield (self.layer, number), extent, used

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self, new: Pair | None = None) -> Pair:
        """Return keys [B, H, T, K] and values [B, H, T, V]: the cached tokens that new ones attend to, then these."""
        held, past = self.held, self.past
        shape, total = held.code.shape, past + (new[0].shape[2] if new else 0)
        if not held.parts and total:
            return tuple(torch.cat(pieces, dim=2) for pieces in zip(*self._pieces(new, past), strict=True))
        device = held.tail.rows.device
        out = _results(shape, total, device)
        try:
            at = self._read_parts(out, past)
        except BaseException:
            self.store.forget_ring()
            raise
        for piece in self._pieces(new, min(past, held.open)):
            end = at + piece[0].shape[2]
            for target, source in zip(out, piece, strict=True):
                target[:, :, at:end].copy_(source)
            at = end
        return out

    def _read_parts(self, out: Pair, past: int) -> int:
        """Decode sealed tokens into the result; return their number."""
        held, at, begin = self.held, 0, self.held.dropped
        first = self.held.length - past
        for number, part in enumerate(held.parts):
            end = begin + part.used * self.page
            if end > first:
                with _pages(self, number, part) as pages:
                    skip = max(0, first - begin)
                    at = _decode(part, pages, skip, out, at)
            begin = end
        return at

    def _pieces(self, new: Pair | None, last: int) -> Iterator[Pair]:
        """Yield the last `last` tokens of the tail page by page, then the new ones."""
        held, page = self.held, self.page
        skip = held.open - min(last, held.open)
        for number, slot in enumerate(held.slots):
            begin, end = max(0, skip - number * page), min(page, held.open - number * page)
            if begin < end:
                yield tuple(x[slot, :, :, begin:end] for x in held.tail.pair)
        if new is not None:
            yield new

    # -- writing ------------------------------------------------------------------------------------------------------

    def append(self, keys: Tensor, values: Tensor) -> Pair:
        """Append keys [B, H, T, K] and values [B, H, T, V]; return what `read` gives with them.

        Raises:
            TierError: no tier has room for them, or pages cannot be read; the layer is unchanged.
        """
        self.begin(keys, values)
        result = self.read((keys, values))
        held = self._dropped(self._stored(keys, values))
        self.held = held
        return result

    def begin(self, keys: Tensor, values: Tensor) -> None:
        """Allocate the tail for these shapes on first use. Raises TierError: no room."""
        if self.held is not None:
            return
        batch, heads, _, key_dim = keys.shape
        self.held = self._empty(KVShape(batch, heads, self.page, key_dim, values.shape[3], keys.dtype))

    def _empty(self, shape: KVShape) -> Held:
        code = page_code(shape, self.bits)
        return Held(Tail(self.store, shape, code.page_bytes), code)

    def _stored(self, keys: Tensor, values: Tensor) -> Held:
        """Write tokens; return the new state."""
        held, page, new = self.held, self.page, (keys, values)
        tail, live, count = held.tail.pair, len(held.slots), keys.shape[2]
        pages = -(-(held.open + count) // page)
        sealed = max(0, pages - _OPEN_PAGES)
        if pages - max(sealed, live) > TAIL_PAGES - live:
            sealed = pages - (TAIL_PAGES - live)
        if live and held.open < live * page:  # fill the last open page
            begin = held.open - (live - 1) * page
            end = min(page, begin + count)
            for target, source in zip(tail, new, strict=True):
                target[held.slots[-1], :, :, begin:end].copy_(source[:, :, : end - begin])
        free = [slot for slot in range(TAIL_PAGES) if slot not in held.slots]
        slots = [*held.slots[sealed:]]
        for number in range(max(sealed, live), pages):
            begin = number * page - held.open
            piece = tuple(x[:, :, begin : begin + page] for x in new)
            slots.append(free.pop(0))
            for target, source in zip(tail, piece, strict=True):
                target[slots[-1], :, :, : source.shape[2]].copy_(source)
        parts = self._sealed(held, new, sealed) if sealed else held.parts
        return replace(held, length=held.length + count, parts=parts, slots=tuple(slots))

    def _sealed(self, held: Held, new: Pair, count: int) -> tuple[Part, ...]:
        """Seal `count` pages, from the tail and then from new tokens; return all parts."""
        parts = list(held.parts)
        for slot in held.slots[:count]:
            self._seal(parts, held.code.encode(*(x[slot] for x in held.tail.pair)))
        begin = self.page * len(held.slots) - held.open
        left = count - len(held.slots)
        while left > 0:
            pages = min(left, max(1, self.store.sizes.extent // held.code.page_bytes))
            end = begin + pages * self.page
            self._seal(parts, held.code.encode(*(x[:, :, begin:end] for x in new)))
            begin, left = end, left - pages
        return tuple(parts)

    def _seal(self, parts: list[Part], pages: Tensor) -> None:
        """Append encoded pages to the last extent while it has room, then to new ones."""
        while len(pages):
            last = parts[-1] if parts else None
            count = _room_behind(last, pages.shape[1])
            if count:
                self.store.write(last.extent, pages[:count])
                parts[-1] = last._replace(used=last.extent.filled)
            else:
                extent = self.store.extend(self.layer, self.held.code, pages, sum(part.used for part in parts))
                count = extent.filled
                parts.append(Part(extent, count))
            pages = pages[count:]

    def _dropped(self, held: Held) -> Held:
        """Drop extents entirely behind the window."""
        if self.window is None or self.keep_past:
            return held
        parts, dropped = held.parts, held.dropped
        while parts and dropped + parts[0].used * self.page <= held.length - (self.window - 1):
            dropped += parts[0].used * self.page
            parts = parts[1:]
        return replace(held, parts=parts, dropped=dropped)

    # -- operations ---------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Drop all tokens."""
        self.held = None

    def forget_past(self) -> None:
        """Drop tokens behind the window."""
        if self.held is not None:
            self.held = self._dropped(self.held)

    def crop(self, count: int) -> None:
        """Remove the last `count` tokens, at most all. A sealed page at the new end is decoded back into the tail,
        which in 8 and 4 bits keeps its rounding."""
        held = self.held
        length = max(0, held.length - count)
        if length >= held.sealed:
            pages = -(-(length - held.sealed) // self.page)
            self.held = replace(held, length=length, slots=held.slots[:pages])
            return
        keep, rest = divmod(max(0, length - held.dropped), self.page)
        parts, number = list(_first_pages(held.parts, keep)), keep
        slots: tuple[int, ...] = ()
        if rest:
            slots = (next(slot for slot in range(TAIL_PAGES) if slot not in held.slots),)
            self._open(held, number, slots[0])
        self.held = replace(held, length=length, parts=tuple(parts), slots=slots)

    def _open(self, held: Held, number: int, slot: int) -> None:
        """Decode a sealed page into a tail slot."""
        for place, part in enumerate(held.parts):
            if number < part.used:
                with _pages(self, place, part) as pages:
                    out = tuple(x[slot] for x in held.tail.pair)
                    part.extent.code.decode(pages[number : number + 1], out, part.rows)
                return
            number -= part.used

    def select(self, rows: Tensor) -> None:
        """Select sequences by index, int64 [R], in this order."""
        held = self.held
        rows = rows.to(held.tail.rows.device)
        parts, known = [], {}
        for part in held.parts:
            if id(part.rows) not in known:
                known[id(part.rows)] = rows if part.rows is None else part.rows.index_select(0, rows)
            parts.append(part._replace(rows=known[id(part.rows)]))
        shape = replace(held.code.shape, batch=len(rows))
        if len(rows) == held.code.shape.batch:
            held.tail.rows.copy_(held.tail.rows.index_select(1, rows))
            self.held = replace(held, parts=tuple(parts))
            return
        new = self._empty(shape)
        new.tail.rows.copy_(held.tail.rows.index_select(1, rows))
        self.held = replace(new, length=held.length, dropped=held.dropped, parts=tuple(parts), slots=held.slots)

    def copy_to(self, other: "LayerTokens") -> None:
        """Copy the tokens to another layer: sealed pages are shared, the tail is copied."""
        other.keep_past, held = self.keep_past, self.held
        if held is None:
            return
        for part in held.parts:
            part.extent.shared = True
            other.store.extents[other.layer].add(part.extent)
        tail = Tail(other.store, held.code.shape, held.code.page_bytes)
        tail.rows.copy_(held.tail.rows)
        other.held = replace(held, tail=tail)


def _pages(layer: LayerTokens, number: int, part: Part) -> "_Resident | _Streamed":
    """Return a context manager for the pages of a part."""
    if part.extent.level.index == 0:
        return _Resident(layer.store, part)
    return _Streamed(layer.store, (layer.layer, number), part)


class _Resident:
    """Pages read in place, in the computing tier."""

    def __init__(self, store: KVStore, part: Part) -> None:
        self._store, self._part = store, part

    def __enter__(self) -> Tensor:
        self._store.tally.hits += 1
        return self._part.extent.pages(self._part.used)

    def __exit__(self, *exc_info: object) -> None:
        """No-op."""


class _Streamed:
    """Pages read through the ring."""

    def __init__(self, store: KVStore, place: Place, part: Part) -> None:
        self._ring, self._place, self._part = store.ring, place, part

    def __enter__(self) -> Tensor:
        self._load = self._ring.take(self._place, self._part.extent, self._part.used)
        return self._ring.pages(self._load)[: self._part.used]

    def __exit__(self, *exc_info: object) -> None:
        self._ring.done(self._load)


def _decode(part: Part, pages: Tensor, skip: int, out: Pair, at: int) -> int:
    """Decode pages without the first `skip` tokens into the result at token `at`; return the end."""
    code, page = part.extent.code, part.extent.code.shape.page
    first, inside = divmod(skip, page)
    if inside:
        whole = tuple(x.new_empty(*x.shape[:2], page, x.shape[3]) for x in out)
        code.decode(pages[first : first + 1], whole, part.rows)
        end = at + page - inside
        for target, source in zip(out, whole, strict=True):
            target[:, :, at:end].copy_(source[:, :, inside:])
        at, first = end, first + 1
    end = at + (part.used - first) * page
    if end > at:
        code.decode(pages[first:], tuple(x[:, :, at:end] for x in out), part.rows)
    return end


def _room_behind(part: Part | None, page_bytes: int) -> int:
    """Return how many pages may be appended to the extent of a layer's last part: none if it is shared, full, in a
    file, or if rows are reordered."""
    if part is None or part.rows is not None or part.extent.shared or not part.extent.level.tier.memory:
        return 0
    extent = part.extent
    fits = extent.code.page_bytes == page_bytes and part.used == extent.filled
    return extent.capacity - extent.filled if fits else 0


def _first_pages(parts: Sequence[Part], count: int) -> Iterator[Part]:
    for part in parts:
        if count <= 0:
            return
        yield part._replace(used=min(part.used, count))
        count -= part.used


def _results(shape: KVShape, tokens: int, device: torch.device) -> Pair:
    """Return uninitialized keys and values, in one buffer if their shapes match, so that one kernel can write both."""
    head = (shape.batch, shape.heads, tokens)
    if shape.key_dim == shape.value_dim:
        return _result((2, *head, shape.key_dim), shape.dtype, device).unbind(0)
    return tuple(_result((*head, dim), shape.dtype, device) for dim in shape.dims)


def _result(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialized memory. On a GPU it is padded by some tokens: the results of the next steps then have the
    same size, and torch's allocator reuses the block."""
    *head, tokens, dim = shape
    if device.type != accelerator.TYPE:
        return torch.empty(shape, dtype=dtype, device=device)
    step = max(1, (1 << tokens.bit_length()) // (2 * _ROUNDED_TOKENS))
    room = -(-tokens // step) * step
    flat = torch.empty(prod(head) * room * dim, dtype=dtype, device=device)
    return flat[: prod(head) * tokens * dim].view(shape)
