"""Memory with addresses, tensors in it, and what is waited for: barriers, and what a warp has begun."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

BASE = 1 << 20  # of global memory; shared memory is below


class Buffer(NamedTuple):
    """A tensor in the machine's memory."""

    address: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Described(NamedTuple):
    """A matrix [rows, columns] of 16-bit numbers for the copy engine: boxes, in shared memory swizzled by 128 bytes."""

    matrix: Buffer
    stride: int  # of its rows
    box: tuple[int, int]


class Space:
    """Bytes with addresses; only what was allocated may be read or written."""

    def __init__(self, first: int, size: int) -> None:
        self.first, self.bytes, self.valid = first, np.full(size, 0xFF, np.uint8), np.zeros(size, np.bool_)
        self.end = 0

    def allocate(self, size: int, align: int = 256, beyond: int = 0) -> int:
        """`beyond` a multiple of align; what lies between two allocations is outside."""
        at = -(-self.end // align) * align + beyond
        self.end = at + size + 1
        self.valid[at : at + size] = True
        return self.first + at

    def places(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """[lanes, size] indices of the bytes at addresses [lanes]."""
        at = addresses.astype(np.int64) - self.first
        if (at % size).any():
            raise IndexError(f"an address is no multiple of {size}")
        places = at[:, None] + np.arange(size)
        if (places < 0).any() or (places >= len(self.bytes)).any() or not self.valid[places].all():
            raise IndexError(f"{size} bytes at {at.tolist()}: outside of what was allocated")
        return places


@dataclass
class Barrier:
    """What is still to come until the phase ends: arrivals, and bytes that the copy engine has been told of."""

    count: int
    pending: int
    bytes: int = 0
    phase: int = 0


class Later:
    """What a warp has begun, in groups: each is done when it is waited for."""

    def __init__(self) -> None:
        self.groups: list[list[Callable[[], None]]] = [[]]

    def add(self, step: Callable[[], None]) -> None:
        self.groups[-1].append(step)

    def commit(self) -> None:
        self.groups.append([])

    def wait(self, rest: int) -> None:
        """For all groups but the last so many."""
        done = max(0, len(self.groups) - 1 - rest)
        for step in itertools.chain.from_iterable(self.groups[:done]):
            step()
        del self.groups[:done]


def swizzled(addresses: np.ndarray) -> np.ndarray:
    """Of lines of 128 bytes, eight of which are a pattern: units of 16 bytes change places."""
    return addresses ^ (addresses >> 7 & 7) << 4
