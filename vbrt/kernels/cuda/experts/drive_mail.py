"""GPU side of fetches from a drive: posts the numbers of missing pages, waits, and copies them from where they lie.

The host side is `vbrt/layers/experts/drive_pages.py`: a thread reads the posted pages into page-locked memory and
answers with their addresses. A post and its fetch are two kernels without synchronization, so that a CUDA graph may
capture them; the number of a post counts up on the device. A lease without pages on the drive posts nothing and waits
for nobody.
"""

import functools

import torch
from torch import Tensor

from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.launcher import Launcher

__all__ = ["ANSWER", "COUNT", "GAVE_UP", "LIST", "NEEDS", "POST", "WORD_BYTES", "DriveMail", "room_words"]

NEEDS = devices.PTX
#: words of the mailbox, int64, each in a cache line of its own: number of the last post; number of the last answer,
#: negative without addresses; the post that the device gave up on; pages of the post; from LIST on their numbers
POST, ANSWER, GAVE_UP, COUNT, LIST = 0, 8, 16, 24, 32
WORD_BYTES = 8
_BLOCK, _PROGRAMS, _WARPS = 1024, 264, 4  # as of a fetch from host memory
_ASKING_LANES = 128  # table entries per warp of the asking program


def room_words(pages: int) -> int:
    """Return the words of a mailbox for posts of so many pages: addresses follow the numbers."""
    return LIST + 2 * pages


class DriveMail:
    """Posts of one mailbox. All its launches are in one stream, or ordered by the caller.

    Args:
        words: the mailbox, int64 [room_words(pages)], zeros, in page-locked memory.
        pages: of a post, at most.
        table: pages that one lease may be missing, at most.
        wait_us: the device waits so long for an answer; an int32.
        device: of the posts.
    """

    def __init__(self, words: Tensor, pages: int, table: int, wait_us: int, device: torch.device) -> None:
        self.pages, self.wait_us, self._words = pages, wait_us, words
        zeros = functools.partial(torch.zeros, dtype=torch.int64, device=device)
        self._ranks, self._state = zeros(table), zeros(3)

    def fetch(self, table: Tensor, base: Tensor, units: int, *, pages: int, missing: int) -> None:
        """Copy the pages of a fetch table, from host memory and from the drive.

        Args:
            table, base, units, pages: as of `fetch_kernel`; sources below 0 are -1 - number of a page on the drive.
            missing: pages in the table, at most.
        """
        device = table.device.index
        for first in range(0, missing, self.pages):
            _launch("ask")(
                device, (1, 1), (table, self._ranks, self._words, self._state), (first, self.pages),
                warps=max(1, min(8, pages // _ASKING_LANES)), POST=POST, COUNT=COUNT, LIST=LIST, PAGES=pages,
            )  # fmt: skip
            _launch("bring")(
                device, (_PROGRAMS, 1), (table, self._ranks, base, self._words, self._state), (units, self.wait_us),
                warps=_WARPS, ANSWER=ANSWER, GAVE_UP=GAVE_UP, ADDRESSES=LIST + self.pages, FIRST=first == 0,
                PAGES=pages, BLOCK=_BLOCK, PROGRAMS=_PROGRAMS,
            )  # fmt: skip

    def mend(self) -> None:
        """Wait for answers again, after the device has given up on one."""
        self._state[1] = 0


@functools.cache
def _launch(name: str) -> Launcher:
    from vbrt.kernels.cuda.experts import drive_triton

    return Launcher({"ask": drive_triton.ask_kernel, "bring": drive_triton.bring_kernel}[name])
