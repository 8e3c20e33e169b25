"""Page of a weight's optimizer state, in host memory or a file.

Only the host's update uses it. In memory it is updated in place. From a file it is read ahead into staging memory
(verified), updated there, and written behind as a new file, which replaces the old one atomically.
"""

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor

from vbrt.errors import TierError
from vbrt.formats.page import PageLayout, build_layout, unpack
from vbrt.host.host_memory import aligned
from vbrt.tiers import Owner, TierStack
from vbrt.tiers.stack.slots import Slot

__all__ = ["STAGED", "Fields", "StatePage", "state_layout"]

STAGED = 3  # staging slots for files: one being read, one updated, one written

Fields = dict[str, Tensor]


def state_layout(fields: Mapping[str, tuple[str, int]]) -> PageLayout:
    """Return the page layout of fields by name: dtype and element count of each."""
    return build_layout("dense", "state", [(name, dtype, (count,)) for name, (dtype, count) in fields.items()])


class StatePage:
    """Page of one weight's optimizer state; retired by `retire`, or with the object.

    Args:
        stack: its tiers.
        key: page key.
        home: initial tier; budget changes may re-home it.
        values: initial values by name; other fields are zero.
        unseen: True for a page that comes and goes while passes are recorded: see `TierStack.add`.

    Raises:
        TierError: no room, or it cannot be written.
    """

    def __init__(
        self, stack: TierStack, key: str, layout: PageLayout, home: str, values: Fields, *, unseen: bool = False
    ) -> None:
        self._stack, self._owner = stack, Owner(stack)

        def write(out: Tensor) -> None:
            out.zero_()
            views = unpack(out, layout)
            for name, value in values.items():
                views[name].copy_(value)

        self._page = stack.add(key, layout, home, write, self._owner, local=True, unseen=unseen)

    def retire(self) -> None:
        """Retire the page. Idempotent."""
        self._stack.retire(self._owner)

    @property
    def key(self) -> str:
        """Key of the page."""
        return self._page.key

    @property
    def layout(self) -> PageLayout:
        """Layout of the page."""
        return self._page.layout

    @property
    def nbytes(self) -> int:
        """Bytes of the page."""
        return self._page.nbytes

    @property
    def home(self) -> Slot:
        """Its slot in the current home tier."""
        ledger = self._stack.ledger
        ledger.check_open(self._page.key)
        return ledger.levels[self._page.home].slots[self._page.key]

    @property
    def in_memory(self) -> bool:
        """True if it lives in a memory tier."""
        return self.home.level.tier.memory

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[Fields]:
        """Yield its fields in place, in a memory tier, for writing; its home is fixed meanwhile."""
        with self._stack.rewriter.in_memory((self._page.key,)) as (fields,):
            if fields is not None:
                yield fields
                return
        with self._stack.rewriter.rewriting(self._page.key) as whole:
            yield unpack(whole, self._page.layout)

    def fields_of(self, staging: Tensor) -> Fields:
        """Return the fields of a buffer from `read`."""
        return unpack(staging, self._page.layout)

    def read(self) -> Tensor:
        """Return a copy of its bytes from its home, verified if that is a file. Raises TierError."""
        home, staging = self.home, aligned(self._page.nbytes)
        try:
            if home.level.tier.memory:
                staging.copy_(home.view)
            else:
                home.level.tier.get(home.room, staging, key=self._page.key)
        except TierError:
            if self.home is home:
                raise
        return staging if self.home is home else self.read()  # re-homed meanwhile by a budget change

    def write(self, staging: Tensor) -> None:
        """Replace its bytes. A file's old bytes stay until the new ones are complete. Raises TierError."""
        with self._stack.rewriter.rewriting(self._page.key, fresh=True) as whole:
            whole.copy_(staging)
