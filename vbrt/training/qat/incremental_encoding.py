"""Incremental encoding of a weight in training: block scales and codebook are kept across optimizer steps.

The costly parts of any 4-bit format (block scales, searched for least squared error, and a fitted codebook) are kept,
and each step rounds the weight under them. They are detached, and of constant size.
"""

import copy
from dataclasses import replace

import torch
from torch import Tensor

from vbrt.errors import FormatError
from vbrt.formats import Format, SeparationCounters
from vbrt.formats.block_formats import BlockFormat, Frame
from vbrt.formats.fitted_codebook import check_separation, clipping_bound, identity
from vbrt.formats.quantile import MAGNITUDES
from vbrt.host import accelerator

__all__ = ["TrainedSeparation"]


class TrainedSeparation:
    """Scales (and codebook) of a weight in training, refitted `refresh_every` optimizer steps after a fit.

    A step is a change of the weight seen by a training forward; further micro-batches, recomputed and evaluation
    forwards see none. In each step, blocks that the weight has outgrown get a larger scale, without a search. An early
    refit happens if the share of clipped weights still grows by more than half; a step's share is read one step later,
    so that no step waits for the device.

    Attributes:
        generation: number of fits and loads, which a backward pass compares.

    Raises FormatError for values out of range.
    """

    def __init__(self, format: Format, levels: int = MAGNITUDES, refresh_every: int = 100) -> None:
        check_separation(levels, refresh_every)
        if not isinstance(format, BlockFormat):
            raise FormatError(f"format {format.name!r} has no 4-bit codes in blocks to train through")
        self.format, self._levels, self._refresh_every = format, levels, refresh_every
        self.generation = 0
        self.reset()

    def reset(self) -> None:
        """Refit at the next forward, because the weight was replaced."""
        self._frame: Frame | None = None
        self._seen: tuple[object, ...] | None = None  # identity of the weight in the last training forward
        self._as_seen = False  # True if the next weight is the same one in other memory
        self._steps = 0  # since the fit
        self._late: _LateCount | None = None  # clipped weights at the last step, on the device
        self._accepted_share = -1.0  # right after the fit; -1 while unknown
        self._share = 0.0
        self._counters = SeparationCounters()
        self.generation += 1

    @property
    def counters(self) -> SeparationCounters:
        """Snapshot of the counters; synchronizes on the last step's clipping count."""
        self._settle()
        return replace(self._counters, clipped_share=self._share)

    @property
    def nbytes(self) -> int:
        """Bytes kept between forwards."""
        return sum(t.nbytes for t in self._frame.tensors.values()) if self._frame else 0

    def forward(self, weight: Tensor, w_NK: Tensor, dtype: torch.dtype, *, training: bool) -> Tensor:
        """Return the rounded weight [N, K] in `dtype`; counts a step, and refits, where due.

        Args:
            weight: the parameter, whose version is tracked; w_NK is a view of it.

        Raises:
            FormatError: (at a refit) NaN, Inf, or a dtype that the format does not support.
        """
        if self._frame is None:
            self._seen = identity(weight)
            self._refresh(w_NK)
        elif training and self._has_changed(weight):
            self._step(w_NK)
        else:
            return self.repeat(w_NK, dtype)
        clipped = torch.zeros((), dtype=torch.float32, device=w_NK.device)
        rounded = self._frame.round(w_NK, dtype, clipped=clipped)
        self._late = _LateCount(clipped, w_NK.numel())
        return rounded

    def repeat(self, w_NK: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight as the last forward rounded it."""
        return self._frame_on(w_NK.device).round(w_NK, dtype)

    def encode(self, w_NK: Tensor) -> dict[str, Tensor]:
        """Return the coarse plane under the kept scales, or under new ones before the first forward."""
        return (self._frame_on(w_NK.device) if self._frame else self._fitted(w_NK)).encode(w_NK)

    def encode_rows(self, w_RK: Tensor, first: int) -> dict[str, Tensor]:
        """`encode` for the weight's rows from `first` on."""
        if self._frame is None:
            return self._fitted(w_RK).encode(w_RK)
        tensors = self._frame_on(w_RK.device).tensors
        return Frame(self.format, tensors | {"scales": tensors["scales"][first : first + len(w_RK)]}).encode(w_RK)

    def _has_changed(self, weight: Tensor) -> bool:
        now = identity(weight)
        changed = now != self._seen and not self._as_seen
        self._seen, self._as_seen = now, False
        return changed

    def _step(self, w_NK: Tensor) -> None:
        self._settle()
        self._steps += 1
        if self._steps >= self._refresh_every or self._share > clipping_bound(self._accepted_share):
            self._refresh(w_NK)
            return
        self._frame = self._frame_on(w_NK.device).widened(w_NK)
        self._counters = replace(self._counters, hits=self._counters.hits + 1)

    def _settle(self) -> None:
        """Read the clipping count of the last step."""
        if self._late is None:
            return
        self._share, self._late = self._late.share(), None
        if self._accepted_share < 0:
            self._accepted_share = self._share

    def _refresh(self, w_NK: Tensor) -> None:
        self._frame = self._fitted(w_NK)
        self._steps, self._accepted_share = 0, -1.0
        self._counters = replace(self._counters, refreshes=self._counters.refreshes + 1)
        self.generation += 1

    def _fitted(self, w_NK: Tensor) -> Frame:
        with torch.inference_mode(False), torch.no_grad():  # a frame fitted in evaluation must be usable in training
            if self.format.record.fitted:
                return self.format.frame(w_NK, self.format.fit(w_NK, self._levels))
            return self.format.frame(w_NK)

    def _frame_on(self, device: torch.device) -> Frame:
        """Return the frame on the weight's current device."""
        if self._frame.tensors["scales"].device != device:
            self._frame = Frame(self.format, {name: t.to(device) for name, t in self._frame.tensors.items()})
        return self._frame

    # -- serialization ------------------------------------------------------------------------------------------------

    def state(self, weight: Tensor) -> Tensor | None:
        """Return the whole state as one uint8 tensor [bytes] on the CPU, for state dicts; None before the first
        forward."""
        if self._frame is None:
            return None
        self._settle()
        changed = self._seen != identity(weight) and not self._as_seen
        c = self._counters
        numbers = [changed, self._steps, self._accepted_share, self._share, c.hits, c.refreshes]
        parts = [torch.tensor(numbers, dtype=torch.float64, device="cpu"), *self._frame.tensors.values()]
        return torch.cat([part.detach().cpu().contiguous().view(torch.uint8).flatten() for part in parts])

    def load(self, state: Tensor, shape: tuple[int, int]) -> None:
        """Load another engine's `state`. Raises FormatError: of another format or shape (N, K), or not a tensor with
        values."""
        if not isinstance(state, Tensor):
            raise FormatError(f"a {type(state).__name__}; expected the uint8 tensor that state_dict() returned")
        if state.is_nested or state.layout is not torch.strided or state.is_meta:
            kind = "nested" if state.is_nested else state.layout
            raise FormatError(
                f"a {kind} tensor on {state.device}; expected the dense tensor with values that state_dict() returned"
            )
        layout = self.format.layout(shape, torch.float32)
        fields = [field for field in layout.fields if field.name != "codes"]
        sizes = [8 * _NUMBERS, *(field.nbytes for field in fields)]
        if state.dtype is not torch.uint8 or state.numel() != sum(sizes):
            raise FormatError(
                f"{state.numel()} values of {state.dtype}; expected {sum(sizes)} bytes for a weight of "
                f"{shape[0]} x {shape[1]} in {self.format.name}: saved with another weights.format?"
            )
        head, *parts = state.detach().cpu().flatten().split(sizes)
        numbers = head.clone().view(torch.float64)
        if not numbers.isfinite().all():
            raise FormatError(f"a history of {numbers.tolist()}; expected finite numbers: the state dict is damaged")
        changed, steps, accepted, share, hits, refreshes = numbers.tolist()
        self.reset()
        self._frame = Frame(
            self.format,
            {
                f.name: part.clone().view(getattr(torch, f.dtype)).view(f.shape)
                for f, part in zip(fields, parts, strict=True)
            },
        )
        self._as_seen = not changed
        self._steps, self._accepted_share, self._share = int(steps), accepted, share
        self._counters = SeparationCounters(int(hits), int(refreshes))

    def copied(self, weight: Tensor) -> "TrainedSeparation":
        """Return a copy for a copied weight; it shares the frame, which is replaced and never written."""
        clone = copy.copy(self)
        self._settle()
        clone._late, clone._share, clone._accepted_share = None, self._share, self._accepted_share
        clone._as_seen = self._as_seen or self._seen == identity(weight)
        return clone


_NUMBERS = 6  # scalars in a state, before the frame


class _LateCount:
    """Device-side count with an asynchronous D2H copy, read one step later without stalling."""

    def __init__(self, count: Tensor, size: int) -> None:
        self._count, self._size, self._event = count, size, None
        if accelerator.has_streams(count.device):
            pinned = torch.empty((), dtype=count.dtype, device="cpu", pin_memory=accelerator.pins())
            self._count = pinned.copy_(count, non_blocking=True)
            self._event = accelerator.Event()
            self._event.record()

    def share(self) -> float:
        """Return the count over the size."""
        if self._event is not None:
            self._event.synchronize()
        return self._count.item() / self._size
