"""Stand-ins on a CPU for the kernels that decide which experts are resident, fetch their pages, gather and merge them.

The rule is another than theirs: the slot after the last one that was filled gives way, if its page is not leased.
"""

import ctypes
import math
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from vbrt.formats import get_format, merge_fine
from vbrt.formats.fine_coding import coded_fields, opened, stream_bytes
from vbrt.formats.fine_plane import wide_codes_in
from vbrt.formats.page import DTYPES
from vbrt.kernels.cuda.fine import merge

__all__ = ["drive_launch", "launch", "merge_experts"]


def launch(name: str) -> Any:
    """In the place of `residency._launch`."""

    def launched(*args: Any, **constants: Any) -> None:
        with _disable_current_modes():  # as a kernel, unseen
            {"resolve": _resolve, "fetch": _fetch}[name](*args, **constants)

    return launched


def _resolve(
    programs: int,
    tensors: tuple[Tensor, ...],
    numbers: tuple[int, ...],
    *,
    SCAN: bool,
    HOSTS: bool,
    PLANES: int,
    **others: Any,
) -> None:
    ids, pages, slots, clock, sources, addresses, fetch, _, shares, _, kept = tensors
    _, experts, first_page, _, first_slot, _, _, _, second_at = numbers
    room = int(clock[5])
    named = sorted({e for e in ids.flatten().tolist() if 0 <= e < experts})
    missing, place = [], pages[0]
    if HOSTS:  # the first ones
        misses = [e for e in named if place[first_page + e] < 0]
        hosted = misses[: int(shares[len(misses)])]
        kept.copy_(ids)
        for e in hosted:
            kept[ids == e] = -1
            pages[5:7, first_page + e] += 1
        named = [e for e in named if e not in hosted]
    busy = {first_page + e for e in named}
    assert len(named) <= room
    for e in named:
        page, hit = first_page + e, place[first_page + e] >= 0
        pages[4 if hit else 5][page] += 1
        if not hit:
            at = next(i % room for i in count(int(clock[2])) if int(slots[0, first_slot + i % room]) not in busy)
            clock[2] = at + 1
            old = int(slots[0, first_slot + at])
            if old >= 0:
                place[old] = -1
            place[page], slots[0, first_slot + at] = at, page
            for plane in range(PLANES):
                source, units = sources[2 * plane : 2 * plane + 2, page].tolist()
                missing.append((source, int(slots[2, first_slot + at]) + plane * second_at, units))
        addresses[e] = slots[2, first_slot + int(place[page])]
    fetch[0], stride = len(missing), PLANES * others["EXPERTS"]
    for i, of_page in enumerate(missing):
        for part, number in enumerate(of_page):
            fetch[1 + part * stride + i] = number


def _fetch(programs: int, tensors: tuple[Tensor, ...], numbers: tuple[int, ...], *, PAGES: int, **_: Any) -> None:
    table = tensors[0].tolist()
    for i in range(table[0]):
        source, target, units = table[1 + i :: PAGES][:3]
        assert units <= numbers[0]
        ctypes.memmove(target, source, 4096 * units)


def drive_launch(name: str) -> Any:
    """In the place of `drive_mail._launch`: posts, and waits for the thread that reads the drive."""

    def launched(device: Any, grid: Any, tensors: Any, numbers: Any, **constants: Any) -> None:
        with _disable_current_modes():
            {"ask": _ask, "bring": _bring}[name](tensors, numbers, **constants)

    return launched


def _word(words: Tensor, at: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(words.data_ptr() + 8 * at)


def _ask(
    tensors: tuple[Tensor, ...], numbers: tuple[int, ...], *, POST: int, COUNT: int, LIST: int, PAGES: int, **_: Any
) -> None:
    fetch, ranks, words, state = tensors
    first, most = numbers
    far = [i for i in range(int(fetch[0])) if fetch[1 + i] < 0]
    ranks[:PAGES] = -1
    posted = far[first : first + most]
    for rank, i in enumerate(posted):
        ranks[i], words[LIST + rank] = rank, -1 - fetch[1 + i]
    state[2] = len(posted)
    if posted:
        state[0] += 1
        words[COUNT] = len(posted)
        _word(words, POST).value = int(state[0])


def _bring(
    tensors: tuple[Tensor, ...],
    numbers: tuple[int, ...],
    *,
    ANSWER: int,
    GAVE_UP: int,
    ADDRESSES: int,
    FIRST: bool,
    PAGES: int,
    **_: Any,
) -> None:
    fetch, ranks, _, words, state = tensors
    units, wait_us = numbers
    table = fetch.tolist()
    entries = [table[1 + i :: PAGES][:3] for i in range(table[0])]
    for source, target, own in entries if FIRST else ():
        assert own <= units
        if source >= 0:
            ctypes.memmove(target, source, 4096 * own)
    number, broken, posted = state.tolist()
    if not posted:
        return
    begun = time.monotonic_ns()
    while not broken and abs(_word(words, ANSWER).value) != number and time.monotonic_ns() - begun < 1000 * wait_us:
        time.sleep(1e-5)
    came = _word(words, ANSWER).value == number
    for (_, target, own), rank in zip(entries, ranks.tolist(), strict=False):
        if rank >= 0 and came:
            ctypes.memmove(target, _word(words, ADDRESSES + rank).value, 4096 * own)
        elif rank >= 0:
            ctypes.memset(target, 255, 4096 * own)
    if not came:
        state[1] = 1
        if not broken:
            _word(words, GAVE_UP).value = number


def merge_experts(
    places_EF: Tensor,
    experts_P: Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
    format: str,
    *,
    first: int,
    coded: bool = False,
) -> Tensor:
    """In the place of `fine.merge.merge_experts`, of bf16: each weight by the reference, from where its fields lie."""
    names = merge.CODED_FIELDS if coded else merge.FIELDS
    fmt, columns = get_format(format), slice(first, first + len(names))
    with _disable_current_modes():
        out = torch.zeros(len(experts_P), *shape, dtype=dtype)
        for place, expert in enumerate(experts_P.tolist()):
            if expert >= 0:
                at = dict(zip(names, places_EF[expert, columns].tolist(), strict=True))
                fields = fmt.layout(shape, dtype).fields
                coarse = {
                    field.name: _read(at[field.name], DTYPES[field.dtype], field.shape)
                    for field in fields
                    if field.name in at
                }
                if coded:
                    out[place] = merge_fine(coarse, _coded(at, coarse, fmt, shape), fmt, shape, dtype)
                    continue
                low, wide = _read(at["low"], torch.uint8, shape), wide_codes_in(coarse["codes"], shape[1], fmt)
                side = _read(at["side"], torch.int8, (int(wide.sum()),))
                escapes = _read(at["escapes"], torch.int16, (int(((low == 128) & ~wide).sum()),))
                out[place] = merge_fine(coarse, {"low": low, "side": side, "escapes": escapes}, fmt, shape, dtype)
    return out


def _coded(at: dict[str, int], coarse: dict[str, Tensor], fmt: Any, shape: tuple[int, int]) -> dict[str, Tensor]:
    fields = coded_fields(shape, fmt)
    fine = {name: _read(at[name], DTYPES[dtype], size) for name, (dtype, size) in fields.items() if None not in size}
    symbols = opened(coarse, fine, fmt, shape[1])
    fine["extra"] = _read(at["extra"], torch.uint8, (stream_bytes(int(symbols.length.sum())),))
    fine["escapes"] = _read(at["escapes"], torch.int16, (int((symbols.symbol == 0).sum()),))
    return fine


def _read(address: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    data = ctypes.string_at(address, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
