"""`tiers.gpu.budget = "auto"` while models run: how large the budget should be, by what the GPU has free."""

import time
import warnings

import torch

from vbrt.config.tier_records import TIERS
from vbrt.residency.plan import format_bytes
from vbrt.residency.room_division import rebalanced

__all__ = ["GpuBalance"]

_LOOK_SECONDS = 0.1  # between looks at the GPU's free memory, at least
_LONGEST = 2.0
_LOOKS = 500  # a look takes one part in so many of the time, at most


class GpuBalance:
    """Follows the GPU's free memory up to `wanted_bytes`.

    The margin is what `budget = "auto"` left free; it doubles each time that a model runs out in the middle of a pass.

    Attributes:
        active: false once the budget could not follow; it stays then.
        fallbacks: what users should hear, for `stats()`.
    """

    def __init__(self, wanted_bytes: int) -> None:
        self.wanted_bytes, self.fallbacks, self.active = wanted_bytes, [], True
        self.margin_bytes = wanted_bytes * (100 - TIERS["gpu"].auto_percent) // TIERS["gpu"].auto_percent
        self._next_look = 0.0
        self._ran_out = _times_out_of_memory()

    def due(self) -> bool:
        """True if it is time for another look, which takes about a millisecond."""
        return time.monotonic() >= self._next_look

    def wanted_now(self, budget_bytes: int, page_bytes: int) -> int:
        """Return the budget that memory allows now, at most all pages."""
        wanted, free = min(self.wanted_bytes, page_bytes), torch.cuda.mem_get_info()[0]
        ran_out = _times_out_of_memory() > self._ran_out
        if budget_bytes >= wanted and free >= self.margin_bytes // 2 and not ran_out:
            return budget_bytes  # most passes: torch's own figures cost more
        free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if ran_out:
            return self._after_running_out(budget_bytes, free)
        return rebalanced(budget_bytes, wanted, free, self.margin_bytes)

    def looked(self, seconds: float) -> None:
        """Note that a look has taken so long; the next one is due after a time that it does not weigh in."""
        self._next_look = time.monotonic() + max(_LOOK_SECONDS, min(_LOOKS * seconds, _LONGEST))

    def look_soon(self) -> None:
        """Make the next look due."""
        self._next_look = 0.0

    def _after_running_out(self, budget_bytes: int, free_bytes: int) -> int:
        self._ran_out = _times_out_of_memory()
        shortage = max(self.margin_bytes, 2 * self.margin_bytes - free_bytes)
        self.margin_bytes *= 2
        left = format_bytes(self.margin_bytes)
        self.fallbacks = [f'GPU memory ran out in a pass: tiers.gpu.budget = "auto" leaves {left} free from now on']
        return max(0, budget_bytes - shortage)

    def stop(self, error: Exception) -> None:
        """Announce once that the budget stays."""
        reason = f'tiers.gpu.budget = "auto" stays as it is although GPU memory is short: {error}'
        self.fallbacks.append(reason)
        self.active = False
        warnings.warn(reason, stacklevel=2)


def _times_out_of_memory() -> int:
    return torch.cuda.memory_stats_as_nested_dict().get("num_ooms", 0)
