"""Stand-ins on a CPU for the kernels that decide which experts are resident, fetch their pages and gather them.

The rule is another than theirs: the slot after the last one that was filled gives way, if its page is not leased.
"""

import ctypes
from itertools import count
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["launch"]


def launch(name: str) -> Any:
    """In the place of `residency._launch`."""

    def launched(*args: Any, **constants: Any) -> None:
        with _disable_current_modes():  # as a kernel, unseen
            {"resolve": _resolve, "fetch": _fetch}[name](*args, **constants)

    return launched


def _resolve(
    programs: int, tensors: tuple[Tensor, ...], numbers: tuple[int, ...], *, SCAN: bool, HOSTS: bool, **others: Any
) -> None:
    ids, pages, slots, clock, sources, addresses, fetch, arena, _, shares, _, kept = tensors
    _, experts, first_page, _, first_slot, _, _, page_bytes, _, _ = numbers
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
            missing.append((int(sources[page]), arena.data_ptr() + at * page_bytes))
        addresses[e] = arena.data_ptr() + int(place[page]) * page_bytes
    fetch[0], stride = len(missing), others["EXPERTS"]
    for i, (source, target) in enumerate(missing):
        fetch[1 + i], fetch[1 + stride + i] = source, target


def _fetch(programs: int, tensors: tuple[Tensor, ...], numbers: tuple[int, ...], *, EXPERTS: int, **_: Any) -> None:
    table, nbytes = tensors[0].tolist(), numbers[0] * 4096
    for i in range(table[0]):
        ctypes.memmove(table[1 + EXPERTS + i], table[1 + i], nbytes)
