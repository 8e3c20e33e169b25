"""GPU side of a mailbox: posts the inputs of products to host threads, and waits for their results.

The host side, with the layout of the mailbox, is `vbrt/kernels/cpu/hosted.py`. A post and its wait are one kernel of
one program, so that they can be captured in a CUDA graph: the number of a post counts up on the device.
"""

import functools

import torch
from torch import Tensor

from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.launcher import Launcher

__all__ = ["GROUP", "NEEDS", "Outbox"]

NEEDS = devices.PTX
#: numbers of x and y are copied in groups of so many
GROUP = 8
_BLOCK, _WARPS = 8192, 8
_WORD_BYTES = 8
#: a waiting kernel gives up after this time: less than Windows lets a kernel run (2 s)
_WAIT_NS = 1_500_000_000


class Outbox:
    """Posts of one mailbox. All its launches are in one stream, or ordered by the caller.

    Args:
        room: the mailbox, uint8, in page-locked memory.
        words: byte offsets of the words POST, ANSWER and GAVE_UP, and of the inputs.
        entry_bits: low bits of a post that name its entry.
        device: of the posts.
    """

    def __init__(self, room: Tensor, words: tuple[int, int, int, int], entry_bits: int, device: torch.device) -> None:
        post, answer, gave_up, inputs = (offset // _WORD_BYTES for offset in words)
        self._words, self._state = room.view(torch.int64), torch.zeros(2, dtype=torch.int64, device=device)
        self._constants = {"POST": post, "ANSWER": answer, "GAVE_UP": gave_up, "INPUT": inputs}
        self._constants["ENTRY_BITS"] = entry_bits
        self.wait_ns = _WAIT_NS

    def exchange(self, x_MK: Tensor, y_MN: Tensor, bias_N: Tensor | None, entry: int, result_at: int) -> None:
        """y = what host threads answer for x, plus a bias; NaN if they do not answer in time.

        Args:
            x_MK, y_MN: contiguous, aligned to 16 bytes, of one dtype; K and N are multiples of `GROUP`.
            entry: names the product to the host.
            result_at: byte offset of the results in the mailbox, a multiple of 64.
        """
        rows, columns = y_MN.shape
        has_bias = bias_N is not None
        tensors = (x_MK, y_MN, bias_N if has_bias else x_MK, self._words, self._state)
        numbers = (entry, x_MK.numel() // GROUP, rows, columns // GROUP, result_at // _WORD_BYTES, self.wait_ns)
        _launcher()(
            x_MK.device.index,
            (1, 1),
            tensors,
            numbers,
            warps=_WARPS,
            specialized=(x_MK.dtype, tensors[2].dtype),
            **self._constants,
            HAS_BIAS=has_bias,
            BLOCK=_BLOCK,
        )

    def mend(self) -> None:
        """Wait for answers again, after the device has given up on one."""
        self._state[1] = 0


@functools.cache
def _launcher() -> Launcher:
    from vbrt.kernels.cuda import mailbox_triton

    return Launcher(mailbox_triton.exchange_kernel)
