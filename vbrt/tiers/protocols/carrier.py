"""Carrier protocol: H2D transports that split a page over several copies (several links, or several ranks)."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from vbrt.tiers.protocols.tier import Tier

__all__ = ["Carrier", "Source"]


class Moved(Protocol):
    """Key and size of a page that is copied."""

    key: str
    nbytes: int


class Source(Protocol):
    """Source of a copy: a slot of the stack that holds the page's bytes.

    Attributes:
        page: the page that is copied.
        tier: the tier of the slot.
        room: the tier's allocation for the page; its class is the tier's own.
        view: uint8, the page's bytes; of a memory tier only.
    """

    page: Moved
    room: Any

    @property
    def tier(self) -> Tier: ...

    @property
    def view(self) -> torch.Tensor: ...


class Carrier(Protocol):
    """Transport that fills pages of the computing tier by more than one copy.

    The tier's copy stream waits for the copies of a page: work queued on it afterwards sees the whole page.

    Attributes:
        together: True if a copy is a collective of several processes: only leasing threads issue it, never prefetch
            workers, whose order is not deterministic.
    """

    together: bool

    def take(self, source: Source) -> bool:
        """True if this carrier copies the page of `source`."""

    def parts(self, target: torch.Tensor, source: Source) -> Any:
        """Return the prepared copies, for `copy`, of a page into memory of the computing device."""

    def copy(self, parts: Any) -> None:
        """Queue the copies of a page, and have the tier's copy stream wait for them."""

    def wait(self, event: torch.Event) -> None:
        """Make all later copies wait for an event."""

    def begin_capture(self) -> None:
        """Record the copies that follow into the CUDA graph under capture, until `end_capture`."""

    def join(self) -> None:
        """Make the tier's copy stream wait for all queued copies."""

    def end_capture(self) -> Sequence:
        """Return to eager copies, if a capture is open; return the argument of `follow` after each replay."""

    def follow(self, event: torch.Event, recorded: Sequence) -> None:
        """Order later copies after a replay that ends with `event`."""

    def check(self) -> None:
        """Verify the pages copied since the last check. Raises TierError."""
