"""GPU side of a mailbox: posts the inputs of products to host threads, and waits for their results.

The host side, with the layout of the mailbox, is `vbrt/kernels/cpu/hosted.py`. A post and its wait are one kernel of
one program, so that they can be captured in a CUDA graph: the number of a post counts up on the device. Posts of routed
experts and their waits are two kernels: what is between them overlaps with the host's work.
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
_WORD_BYTES, _LINE_BYTES = 8, 64
_LEAST_PAIRS = 16  # of a kernel, which is compiled for powers of two
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
        self._answers_in = room.view(torch.float32)
        post, answer, gave_up, inputs = (offset // _WORD_BYTES for offset in words)
        self._words, self._state = room.view(torch.int64), torch.zeros(3, dtype=torch.int64, device=device)
        answers = {"ANSWER": answer, "GAVE_UP": gave_up, "ENTRY_BITS": entry_bits}
        self._posts = {"POST": post, "INPUT": inputs, "ENTRY_BITS": entry_bits, "NOTHING": (1 << entry_bits) - 1}
        self._answers = answers
        self._constants = {"POST": post, "INPUT": inputs, **answers}
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
        numbers = (entry, x_MK.numel() // GROUP, rows, columns // GROUP, result_at // _LINE_BYTES, self.wait_ns)
        _launch("exchange")(
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

    def post(
        self, x_TK: Tensor, ids_Tk: Tensor, kept_Tk: Tensor, weights_Tk: Tensor, entry: int, places: tuple[int, int]
    ) -> None:
        """Post the experts of which `kept_Tk` has -1 in the place of `ids_Tk`; nothing if it has none.

        Args:
            x_TK, ids_Tk, kept_Tk, weights_Tk: contiguous; x is aligned to 16 bytes, and K a multiple of `GROUP`.
            entry: names the layer to the host.
            places: byte offsets of the posted ids and weights in the mailbox, multiples of 64.
        """
        pairs = ids_Tk.numel()
        _launch("post")(
            x_TK.device.index,
            (1, 1),
            (x_TK, ids_Tk, kept_Tk, weights_Tk, self._words, self._state),
            (entry, x_TK.numel() // GROUP, pairs, *(place // _WORD_BYTES for place in places)),
            warps=_WARPS,
            specialized=(x_TK.dtype, ids_Tk.dtype, weights_Tk.dtype),
            **self._posts,
            PAIRS=max(_LEAST_PAIRS, 1 << (pairs - 1).bit_length()),
            BLOCK=_BLOCK,
        )

    def add(self, y_TN: Tensor, entry: int, result_at: int) -> None:
        """y += what host threads answer to the last post, if that has experts; NaN if they do not answer in time.

        Args:
            y_TN: contiguous, aligned to 16 bytes; N is a multiple of `GROUP`.
            entry, result_at: as of the post; the results are in fp32.
        """
        _launch("add")(
            y_TN.device.index,
            (1, 1),
            (y_TN, self._answers_in, self._words, self._state),
            (entry, y_TN.numel() // GROUP, result_at // _LINE_BYTES, self.wait_ns),
            warps=_WARPS,
            specialized=(y_TN.dtype,),
            **self._answers,
            BLOCK=_BLOCK // 2,
        )

    def mend(self) -> None:
        """Wait for answers again, after the device has given up on one."""
        self._state[1] = 0


@functools.cache
def _launch(name: str) -> Launcher:
    from vbrt.kernels.cuda import mailbox_triton as device

    kernels = {"exchange": device.exchange_kernel, "post": device.post_kernel, "add": device.add_kernel}
    return Launcher(kernels[name])
