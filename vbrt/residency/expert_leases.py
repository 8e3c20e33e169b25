"""Batch size of expert leases; shared by the runtime and the cost model."""

from typing import NamedTuple

__all__ = ["ExpertLeases", "gathered_at_once"]

_CHUNK_BYTES = 256 << 20  # scratch for decoded or gathered weights, outside the budgets


def gathered_at_once(page_bytes: int) -> int:
    """Return the maximum number of experts that the device gathers at once."""
    return max(1, _CHUNK_BYTES // max(1, page_bytes))


class ExpertLeases(NamedTuple):
    """Sizes of a layer's experts, for leases.

    Attributes:
        experts, top_k: number per layer, and per token.
        decoded_bytes: bytes of one decoded expert.
        page_bytes: bytes of one expert's page, by plane.
        lossless: True if leased experts are decoded together.
    """

    experts: int
    top_k: int
    decoded_bytes: int
    page_bytes: tuple[int, ...]
    lossless: bool

    def at_once(self, *, scan: bool, room_bytes: int | None, scan_pages: int = 0) -> int:
        """Return the number of experts per lease: as many as fit into the tier; in a scan the policy's chunk, or by
        default a third of the room, so that the previous and the next chunk fit too.

        Args:
            room_bytes: room for streamed pages; None: no page is streamed.
            scan_pages: pages per lease preferred by the policy; 0: no preference.
        """
        at_once = max(1, _CHUNK_BYTES // max(1, self.decoded_bytes)) if self.lossless else self.experts
        if room_bytes is None:
            return max(at_once, self.top_k)
        room = room_bytes // max(1, sum(self.page_bytes))
        if scan and scan_pages:
            return min(at_once, max(1, scan_pages // len(self.page_bytes)))
        return min(at_once, max(1, room // 3)) if scan and room < self.experts else min(max(at_once, self.top_k), room)
