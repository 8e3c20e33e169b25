"""Batch size of leases of routed experts by the host; shared by the runtime and the estimates."""

from typing import NamedTuple

__all__ = ["ExpertLeases", "gathered_at_once"]

_CHUNK_BYTES = 256 << 20  # of decoded or gathered weights, outside the budgets


def gathered_at_once(page_bytes: int) -> int:
    """Return the most experts whose pages the device gathers at once."""
    return max(1, _CHUNK_BYTES // max(1, page_bytes))


class ExpertLeases(NamedTuple):
    """Sizes of a layer's experts, for leases.

    Attributes:
        experts, top_k: number per layer, and per token.
        decoded_bytes: of one expert.
        page_bytes: of each plane of one expert.
        lossless: True if leased experts are decoded together.
    """

    experts: int
    top_k: int
    decoded_bytes: int
    page_bytes: tuple[int, ...]
    lossless: bool

    def at_once(self, *, scan: bool, room_bytes: int | None, scan_pages: int = 0) -> int:
        """Return the number of experts per lease: as many as the tier has room for; in a scan, as many as the policy
        wants, or else a third of the room, so that the previous and the next chunk have room too.

        Args:
            room_bytes: room for moving pages; None: no page moves.
            scan_pages: pages per lease that the policy wants; 0: no preference.
        """
        at_once = max(1, _CHUNK_BYTES // max(1, self.decoded_bytes)) if self.lossless else self.experts
        if room_bytes is None:
            return max(at_once, self.top_k)
        room = room_bytes // max(1, sum(self.page_bytes))
        if scan and scan_pages:
            return min(at_once, max(1, scan_pages // len(self.page_bytes)))
        return min(at_once, max(1, room // 3)) if scan and room < self.experts else min(max(at_once, self.top_k), room)
