"""How many routed experts one lease takes, where the host leases them: what the runtime does and estimates count."""

from typing import NamedTuple

__all__ = ["ExpertLeases", "gathered_at_once"]

_CHUNK_BYTES = 256 << 20  # of decoded or gathered weights, which are outside of the budgets


def gathered_at_once(page_bytes: int) -> int:
    """Return of how many experts the device copies the pages together at most."""
    return max(1, _CHUNK_BYTES // max(1, page_bytes))


class ExpertLeases(NamedTuple):
    """The experts of a layer, as leases see them.

    Attributes:
        experts, top_k: of the layer, and of a token.
        decoded_bytes: of one expert.
        page_bytes: of each plane of one expert.
        lossless: leased experts are decoded together.
    """

    experts: int
    top_k: int
    decoded_bytes: int
    page_bytes: tuple[int, ...]
    lossless: bool

    def at_once(self, *, scan: bool, room_bytes: int | None, scan_pages: int = 0) -> int:
        """Return how many one lease takes: what the tier has room for, in a scan what its policy wants, or else a third
        of that, so that the pages of the chunk before and of the one behind have room too.

        Args:
            room_bytes: of the pages that move; None: none does.
            scan_pages: what the policy wants; 0: it wants nothing.
        """
        at_once = max(1, _CHUNK_BYTES // max(1, self.decoded_bytes)) if self.lossless else self.experts
        if room_bytes is None:
            return max(at_once, self.top_k)
        room = room_bytes // max(1, sum(self.page_bytes))
        if scan and scan_pages:
            return min(at_once, max(1, scan_pages // len(self.page_bytes)))
        return min(at_once, max(1, room // 3)) if scan and room < self.experts else min(max(at_once, self.top_k), room)
