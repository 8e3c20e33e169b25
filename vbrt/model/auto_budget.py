"""Dynamic GPU budget for `tiers.gpu.budget = "auto"` and `gpu_memory`: follows the free memory, of the GPU and of the
process's share of it, while models run."""

import time

from vbrt.config.budgets import CONTEXT_BYTES
from vbrt.config.tier_records import TIERS
from vbrt.host import accelerator
from vbrt.host.logger import warn
from vbrt.residency.plan import GpuRoom, format_bytes
from vbrt.residency.room_division import rebalanced

__all__ = ["GpuBalance"]

_LOOK_SECONDS = 0.1  # least interval between polls of the GPU's free memory
_LONGEST = 2.0
_LOOKS = 500  # a poll takes at most 1/_LOOKS of the time


class GpuBalance:
    """GPU budget controller: follows free memory, up to `wanted_bytes`.

    The margin is the memory that `budget = "auto"` left free, or that a share of the GPU has for temporary tensors; it
    doubles after each out-of-memory error within a pass.

    Args:
        wanted_bytes: the budget.
        room: the share; None: the whole GPU.

    Attributes:
        active: False once a budget change failed: then the budget stays.
        fallbacks: messages for users, for `stats()`.
    """

    def __init__(self, wanted_bytes: int, room: GpuRoom | None = None) -> None:
        self.wanted_bytes, self.fallbacks, self.active, self._room = wanted_bytes, [], True, room
        auto = wanted_bytes * (100 - TIERS["gpu"].auto_percent) // TIERS["gpu"].auto_percent
        self.margin_bytes = auto if room is None else room.passing_bytes
        self._next_look = 0.0
        self._ran_out = _times_out_of_memory()

    def due(self) -> bool:
        """True if the next poll is due; a poll takes about a millisecond."""
        return time.monotonic() >= self._next_look

    def wanted_now(self, budget_bytes: int, page_bytes: int, ahead_bytes: int = 0) -> int:
        """Return the budget that free memory allows now, at most the bytes of all pages; `ahead_bytes` of what is free
        are about to be taken."""
        wanted, free = min(self.wanted_bytes, page_bytes), accelerator.mem_get_info()[0]
        if self._room is not None:
            free = min(free, self._room.limit_bytes - CONTEXT_BYTES - accelerator.memory_reserved())
        free -= ahead_bytes
        ran_out = _times_out_of_memory() > self._ran_out
        if budget_bytes >= wanted and free >= self.margin_bytes // 2 and not ran_out:
            return budget_bytes  # most passes: torch's allocator stats cost more
        free += accelerator.memory_reserved() - accelerator.memory_allocated()
        if ran_out:
            return self._after_running_out(budget_bytes, free)
        return rebalanced(budget_bytes, wanted, free, self.margin_bytes)

    def looked(self, seconds: float) -> None:
        """Note the duration of a poll, and schedule the next one so that its cost is negligible."""
        self._next_look = time.monotonic() + max(_LOOK_SECONDS, min(_LOOKS * seconds, _LONGEST))

    def look_soon(self) -> None:
        """Make the next poll due now."""
        self._next_look = 0.0

    def _after_running_out(self, budget_bytes: int, free_bytes: int) -> int:
        self._ran_out = _times_out_of_memory()
        shortage = max(self.margin_bytes, 2 * self.margin_bytes - free_bytes)
        self.margin_bytes *= 2
        left = format_bytes(self.margin_bytes)
        self.fallbacks = [f"GPU memory ran out in a pass: {self._what} leaves {left} free from now on"]
        return max(0, budget_bytes - shortage)

    def note(self, reason: str) -> None:
        """Tell once what is done otherwise for lack of memory."""
        if reason not in self.fallbacks:
            self.fallbacks.append(reason)
            warn(reason, stacklevel=2)

    @property
    def _what(self) -> str:
        return 'tiers.gpu.budget = "auto"' if self._room is None else "the budget of pages within gpu_memory"

    def stop(self, error: Exception) -> None:
        """Stop following, and warn once that the budget stays."""
        self.active = False
        self.note(f"{self._what} stays as it is although GPU memory is short: {error}")


def _times_out_of_memory() -> int:
    return accelerator.memory_stats_as_nested_dict().get("num_ooms", 0)
