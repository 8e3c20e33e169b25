"""PagesHandle: base of weight handles, for any number of pages."""

import secrets
from typing import Any, Self

import torch

from vbrt.errors import TierError, WrapError
from vbrt.tiers import Owner, Page, TierStack

__all__ = ["PagesHandle"]


class PagesHandle:
    """Handle to the pages of one weight, or of one module's weights, in a stack. It begins empty.

    Attributes:
        keys: pages in the stack; none before `store` and after `retire`.
        computed: counts products of the CPU where the pages lie, without a lease.
        generation: counts the weights that this handle has held before.
        id: random, so that a graph of another process never names a handle of this one.
        token: names handle and generation in graphs.
    """

    spec: Any
    _what = "its weight was"  # for errors

    def __init__(self, stack: TierStack) -> None:
        self.stack = stack
        self.device, self.device_name = stack.device, str(stack.device)
        self.keys: tuple[str, ...] = ()
        self.pages: tuple[Page, ...] = ()
        self.owner: Owner | None = None
        self.forwards = self.weight_reads = self.computed = self.tokens = self.input_at = self.generation = 0
        self.id = secrets.randbits(63)
        self.token = self.token_at(0)
        self.fallbacks: list[str] = []
        self._streams: tuple[int, tuple[Page, ...], bool] = (-1, (), False)

    @property
    def streams(self) -> bool:
        """True if any page lives below the computing tier; cached until pages are added, moved or retired."""
        changes, pages, streams = self._streams
        if changes != self.stack.ledger.changes or pages is not self.pages:
            changes, pages = self.stack.ledger.changes, self.pages
            streams = any(page.home for page in pages)
            self._streams = changes, pages, streams
        return streams

    @property
    def name(self) -> str:
        """The name of the weight, or of the module whose weights these are."""
        return self.spec.name

    def token_at(self, generation: int) -> torch.Tensor:
        """A tensor, and not constants, so that layers share one compiled graph."""
        return torch.tensor([self.id, generation], dtype=torch.int64, device="cpu")

    def retire(self) -> None:
        """Retire the pages; the handle is empty again."""
        owner, generation = self.owner, self.generation + (self.owner is not None)
        token = self.token_at(generation)
        retired, claims = self.stack.retired, () if owner is None else (owner.claim,)
        # no call from here on: Ctrl-C finds pages that are owned, or an empty handle
        retired += claims
        self.keys, self.pages, self.owner, self.generation, self.token = (), (), None, generation, token
        self.forget_ready()

    def forget_ready(self) -> None:
        """Drop views into pages, because they may move."""
        raise NotImplementedError

    def count_replays(self, forwards: int) -> None:
        """Count forwards that a graph has run."""
        self.forwards += forwards

    def still(self, generation: int) -> Self:
        """Return the handle. Raises WrapError if its generation has changed."""
        if self.keys and self.generation != generation:
            raise WrapError(
                f"{self.name}: {self._what} loaded anew between forward and backward; run the forward again"
            )
        return self

    def check_pages(self) -> None:
        """Raise TierError if there are no pages any more."""
        if not self.keys:
            raise TierError(
                f"{self.name}: its pages are gone, the model was closed; wrap it again, or call "
                "unwrap() instead of close() to keep the weights"
            )
