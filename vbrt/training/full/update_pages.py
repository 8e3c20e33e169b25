"""Where the state of a weight lies that only the update needs: a page of host memory, or of a file.

The computing device never sees it. In a memory it is updated in place. In a file it is read ahead into staging memory,
verified; updated there; and written behind as a new file, which takes the old one's place once it is there as a whole.
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

STAGED = 3  # pages of files that are in memory at a time: one comes, one is updated, one goes

Fields = dict[str, Tensor]


def state_layout(fields: Mapping[str, tuple[str, int]]) -> PageLayout:
    """Return the page of fields by name: dtype and numbers of each."""
    return build_layout("dense", "state", [(name, dtype, (count,)) for name, (dtype, count) in fields.items()])


class StatePage:
    """The page of one weight's state; it goes with its owner.

    Args:
        stack: its tiers.
        owner: the weight's.
        key: names it.
        home: the tier that it lives in first; budgets that change may give it another one.
        values: to begin with, by name; zeros for the others.

    Raises:
        TierError: no room, or it cannot be written.
    """

    def __init__(self, stack: TierStack, owner: Owner, key: str, layout: PageLayout, home: str, values: Fields) -> None:
        self._stack = stack

        def write(out: Tensor) -> None:
            out.zero_()
            views = unpack(out, layout)
            for name, value in values.items():
                views[name].copy_(value)

        self._page = stack.add(key, layout, home, write, owner, local=True)

    @property
    def nbytes(self) -> int:
        """Bytes of the page."""
        return self._page.nbytes

    @property
    def home(self) -> Slot:
        """Its slot in the tier that it lives in now."""
        ledger = self._stack.ledger
        ledger.check_open(self._page.key)
        return ledger.levels[self._page.home].slots[self._page.key]

    @property
    def in_memory(self) -> bool:
        """True if it lives in a memory."""
        return self.home.level.tier.memory

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[Fields]:
        """Yield its fields where they lie, in a memory, to be changed in place; it keeps its home meanwhile."""
        with self._stack.rewriter.rewriting(self._page.key) as whole:
            yield unpack(whole, self._page.layout)

    def fields_of(self, staging: Tensor) -> Fields:
        """Return the fields of what `read` has returned."""
        return unpack(staging, self._page.layout)

    def read(self) -> Tensor:
        """Return a copy of its bytes, from wherever it lives; verified if that is a file. Raises TierError."""
        home, staging = self.home, aligned(self._page.nbytes)
        try:
            if home.level.tier.memory:
                staging.copy_(home.view)
            else:
                home.level.tier.get(home.room, staging, key=self._page.key)
        except TierError:
            if self.home is home:
                raise
        return staging if self.home is home else self.read()  # a budget has changed meanwhile

    def write(self, staging: Tensor) -> None:
        """Replace its bytes. In a file, the old ones stay until the new ones are there. Raises TierError."""
        with self._stack.rewriter.rewriting(self._page.key, fresh=True) as whole:
            whole.copy_(staging)
