"""Dynamic GPU budget for `tiers.gpu.budget = "auto"`: follows the GPU's free memory while models run."""

import time

from vbrt.config.tier_records import TIERS
from vbrt.host import accelerator
from vbrt.host.logger import warn
from vbrt.residency.plan import format_bytes
from vbrt.residency.room_division import rebalanced

__all__ = ["GpuBalance"]

_LOOK_SECONDS = 0.1  # least interval between polls of the GPU's free memory
_LONGEST = 2.0
_LOOKS = 500  # a poll takes at most 1/_LOOKS of the time


class GpuBalance:
    """GPU budget controller: follows free memory, up to `wanted_bytes`.

    The margin is the memory that `budget = "auto"` left free; it doubles after each out-of-memory error within a pass.

    Attributes:
        active: False once a budget change failed: then the budget stays.
        fallbacks: messages for users, for `stats()`.
    """

    def __init__(self, wanted_bytes: int) -> None:
        self.wanted_bytes, self.fallbacks, self.active = wanted_bytes, [], True
        self.margin_bytes = wanted_bytes * (100 - TIERS["gpu"].auto_percent) // TIERS["gpu"].auto_percent
        self._next_look = 0.0
        self._ran_out = _times_out_of_memory()

    def due(self) -> bool:
        """True if the next poll is due; a poll takes about a millisecond."""
        return time.monotonic() >= self._next_look

    def wanted_now(self, budget_bytes: int, page_bytes: int) -> int:
        """Return the budget that free memory allows now, at most the bytes of all pages."""
        wanted, free = min(self.wanted_bytes, page_bytes), accelerator.mem_get_info()[0]
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
        self.fallbacks = [f'GPU memory ran out in a pass: tiers.gpu.budget = "auto" leaves {left} free from now on']
        return max(0, budget_bytes - shortage)

    def stop(self, error: Exception) -> None:
        """Stop following, and warn once that the budget stays."""
        reason = f'tiers.gpu.budget = "auto" stays as it is although GPU memory is short: {error}'
        self.fallbacks.append(reason)
        self.active = False
        warn(reason, stacklevel=2)


def _times_out_of_memory() -> int:
    return accelerator.memory_stats_as_nested_dict().get("num_ooms", 0)
