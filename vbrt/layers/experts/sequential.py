"""Lease-on-read experts, for implementations that loop over experts.

A module's own forward takes its experts one after the other, ascending, and reads `gate_up_proj[e]`, `down_proj[e]`.
Given matrices that lease their pages as they are read, it runs as it is, in the order and precision of its own sums,
with room for a few experts.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from vbrt.layers.experts.protocols import ExpertsWeights, LeasedExperts

__all__ = ["InTurn"]


class InTurn:
    """Context of lease-on-read matrices, one chunk leased at a time; its exit ends the last lease.

    A matrix may be a view of its page: it is good until one of another chunk is read.
    """

    def __init__(self, handle: ExpertsWeights, chunks: Sequence[Sequence[int]], precision: str) -> None:
        self.handle, self._precision = handle, precision
        self._chunk_of = {expert: chunk for chunk in chunks for expert in chunk}
        self._leased: LeasedExperts | None = None
        self._lease = ExitStack()

    def __enter__(self) -> "InTurn":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._leased = None
        self._lease.close()

    def matrix(self, part: str, expert: int) -> Tensor:
        """Return one matrix as the module keeps it, decoded."""
        if self._leased is None or expert not in self._leased.experts:
            self._leased = None
            self._lease.close()
            chunk = self._chunk_of.get(expert, (expert,))
            self._leased = self._lease.enter_context(self.handle.lease(chunk, self._precision))
        return self._leased.matrix(part, self._leased.experts.index(expert))

    def stack(self, part: str) -> "_Stack":
        """Return an indexable proxy of the parameter."""
        return _Stack(self, part)


class _Stack:
    """Proxy of a part's stacked parameter."""

    def __init__(self, turns: InTurn, part: str) -> None:
        self._turns, self._part = turns, part

    def __getitem__(self, expert: Any) -> Tensor:
        return self._turns.matrix(self._part, int(expert))
