"""Viterbi encoder of `t3` on a CPU: `trellis.c` finds the paths of tiles; all else is the format's own.

Paths are as good as the reference's, not always the same: costs are summed in another order.
"""

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vbrt.formats.format import EncodedGroup, Format
from vbrt.formats.t3 import PAIRS, STATES, T3, WARM, codebook, trellis_path
from vbrt.kernels.cpu.build import library, refusal

__all__ = ["FORMATS", "codec", "encode_many"]

FORMATS = ("t3",)


def encode_many(
    format: Format, w_ENK: Tensor, amax_E: Sequence[float] | None = None, squares: Tensor | None = None
) -> Iterator[EncodedGroup]:
    """See `Format.encode_many`."""
    return codec(format).encode_many(w_ENK, amax_E, squares)


def codec(format: Format) -> Format:
    """Return a format that encodes in C; cached per format."""
    return format if isinstance(format, _InC) else _codec(format)


@functools.cache
def _codec(format: Format) -> Format:
    return _InC(format.record)


class _InC(T3):
    """`t3` with paths found in C where there is a compiler."""

    def path(self, x_TP2: Tensor) -> Tensor:
        """See `T3.path`."""
        if not x_TP2.is_cpu or refusal(x_TP2.device, "trellis") is not None:
            return trellis_path(x_TP2)
        x_TP2, threads = x_TP2.contiguous(), torch.get_num_threads()
        states = torch.empty(len(x_TP2), PAIRS, dtype=torch.int32, device="cpu")
        c = library("trellis")
        scratch = torch.empty(threads * c.vbrt_trellis_scratch(), dtype=torch.uint8, device="cpu")
        read = (x_TP2.data_ptr(), len(x_TP2), _table().data_ptr(), WARM)
        c.vbrt_trellis(*read, states.data_ptr(), scratch.data_ptr(), threads)
        return states


@functools.cache
def _table() -> Tensor:
    """Values of each state and their squared norm, fp32 [3, S]."""
    table = codebook(torch.device("cpu"))
    made = torch.cat((table.t(), table.square().sum(1).unsqueeze(0))).contiguous()
    assert made.shape == (3, STATES)
    return made
