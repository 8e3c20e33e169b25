"""The protocol of carriers: what brings pages into the computing device by more than one copy."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from vbrt.tiers.protocols.tier import Tier

__all__ = ["Carrier", "Source"]


class Moved(Protocol):
    """A page, as far as its bytes are copied."""

    key: str
    nbytes: int


class Source(Protocol):
    """A page where its bytes are: a slot of the stack.

    Attributes:
        page: whose bytes they are.
        tier: where they are.
        room: that the tier has given them; of its own class.
        view: uint8, the bytes in a memory.
    """

    page: Moved
    room: Any

    @property
    def tier(self) -> Tier: ...

    @property
    def view(self) -> torch.Tensor: ...


class Carrier(Protocol):
    """What brings pages into the computing device by more than one copy on its copy stream.

    A page has arrived with what the tier's copy stream does next.

    Attributes:
        together: True if several processes bring pages together: only threads that lease do it then, never workers.
    """

    together: bool

    def take(self, source: Source) -> bool:
        """True if it brings this page."""

    def parts(self, target: torch.Tensor, source: Source) -> Any:
        """Return what `copy` takes to bring a page into memory of the computing device."""

    def copy(self, parts: Any) -> None:
        """Queue the copies of a page, and have the tier's copy stream wait for them."""

    def wait(self, event: torch.cuda.Event) -> None:
        """Have copies from now on wait for an event."""

    def begin_capture(self) -> None:
        """Have the copies that follow be recorded by a capture, until `end_capture`."""

    def join(self) -> None:
        """Have the tier's copy stream wait for all that was queued."""

    def end_capture(self) -> Sequence:
        """Go on as before the capture, if there is one; return what `follow` is to be told after each replay."""

    def follow(self, event: torch.cuda.Event, recorded: Sequence) -> None:
        """Go on after a replay, which ends with an event."""

    def check(self) -> None:
        """Verify what has been brought since the last time. Raises TierError."""
