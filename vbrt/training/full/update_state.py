"""WeightState: optimizer state of one weight, in memory or in a file."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from vbrt.errors import WrapError
from vbrt.formats.page import PageLayout
from vbrt.host.host_memory import Loan
from vbrt.kernels.update import (
    BLOCK,
    TILE,
    Coded,
    Halves,
    decode_first,
    decode_second,
    encode_first,
    encode_second,
    join_master,
)
from vbrt.tiers import Owner, TierStack
from vbrt.tiers.stack.slots import Page
from vbrt.training.full.update_pages import Fields, StatePage, state_layout

__all__ = ["HighPage", "Plain", "Spare", "WeightState"]

_LOWER = ("low", "ties", "tied")  # parts of a master besides its high half
_CODES = {"first": "int8", "second": "uint8"}
_DECODE, _ENCODE = {"first": decode_first, "second": decode_second}, {"first": encode_first, "second": encode_second}


class HighPage(Protocol):
    """Page of a weight's high half.

    Attributes:
        gone: True once the weight was collected, whoever holds this.
    """

    @property
    def gone(self) -> bool: ...

    def rewriting(self) -> contextlib.AbstractContextManager[Tensor]:
        """Yield the high half (bf16, the module's shape, on the CPU), to change in place."""

    def expect(self, token: object, *, unless: Callable[[], bool]) -> None:
        """Block leases and copies of the page until `forgo` with the same token; not if `unless` says it already
        happened."""

    def forgo(self, token: object) -> None:
        """Unblock them. Idempotent."""

    def peek(self) -> Tensor | None:
        """Return the high half in host memory, valid until it is rewritten; None if it lives elsewhere. Blocks no
        lease."""

    def preparing(self, memory: StatePage, spare: "Spare") -> contextlib.AbstractContextManager[list[Fields | None]]:
        """Yield the fields of the state's page, of a spare's one, and of its high page, whose homes are fixed
        meanwhile; None for a page in a file."""

    def take(self, spare: "Spare", done: Callable[[], object]) -> bool:
        """Make a spare's bytes the page's, and the page's memory the spare's; call `done` once that is so. False if
        they are not in one memory."""


class Plain:
    """State in plain tensors: of a weight without an optimizer, or outside the tiers."""

    in_memory = True

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self.nbytes = sum(value.nbytes for value in fields.values())

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[Fields]:
        """Yield its fields, to change in place."""
        yield self._fields


@dataclass(eq=False)
class Spare:
    """Spare memory of a weight, for an update ahead of the step; its pages are retired with it.

    Attributes:
        memory: page in the layout of the state's.
        high: page in the layout of the high half's, and its owner.
        nbytes: of both pages.
    """

    memory: StatePage
    high: tuple[Page, Owner]
    nbytes: int


@dataclass(eq=False)
class WeightState:
    """Optimizer state of one weight.

    Attributes:
        name: for errors.
        high: the high half's page.
        shape: of the weight.
        memory: storage of low half, ties and moments.
        kinds: torch's state name of each moment -> kernel name.
        eight_bit: True for 8-bit moments.
        rank: position of the weight in the model.
        steps: updates begun.
        shown: tensor with the same number, in state dicts next to aliased moments; None until asked for.
        has_moments: True once an update has filled them, or they were loaded.
        applied: key of the gradient of the last update begun.
        loads: number of loads of other values.
        edits: number of times that low half or moments were set, or given to users.
        spare: memory for updates ahead of the step; None without.
    """

    name: str
    high: HighPage
    shape: tuple[int, ...]
    memory: Plain | StatePage
    kinds: dict[str, str] = field(default_factory=dict)
    eight_bit: bool = False
    rank: int = 0
    steps: int = 0
    shown: Tensor | None = None
    has_moments: bool = False
    applied: object = None
    loads: int = 0
    edits: int = 0
    spare: Spare | None = None
    _loans: dict[str, Loan] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, high: HighPage, halves: Halves) -> "WeightState":
        """Return the state of a weight without an optimizer.

        Args:
            halves: of its master; the high one goes into the page.
        """
        return cls(name, high, tuple(halves.low.shape), Plain(_lower(halves)))

    # -- layout -------------------------------------------------------------------------------------------------------

    def layout(self, kinds: Mapping[str, str], *, eight_bit: bool) -> PageLayout:
        """Return the state's page layout with these moments.

        Raises WrapError for a moment without an 8-bit form.
        """
        count = self._count
        fields = {"low": ("int16", count)}
        for name, kind in kinds.items():
            if not eight_bit:
                fields[kind] = ("float32", count)
            elif kind in _CODES:
                fields[kind] = (_CODES[kind], count)
                fields[f"{kind}_scales"] = ("float32", -(-count // BLOCK))
            else:
                raise WrapError(f"{self.name}: {name} has no form of 8 bits; take moments in fp32, or no amsgrad")
        return state_layout(fields | {"ties": ("uint8", -(-count // 8)), "tied": ("uint8", -(-count // TILE))})

    def place(self, stack: TierStack, kinds: Mapping[str, str], home: str, *, eight_bit: bool) -> None:
        """Move the state into a page, with zero moments. Raises TierError as `StatePage`."""
        layout, held = self.layout(kinds, eight_bit=eight_bit), self._fields()
        page = StatePage(stack, f"{self.name}#state", layout, home, {name: held[name] for name in _LOWER})
        self.memory, self.kinds, self.eight_bit = page, dict(kinds), eight_bit

    def retire(self) -> None:
        """Retire its pages. Idempotent."""
        if self.placed:
            self.memory.retire()

    @property
    def _count(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    # -- values -------------------------------------------------------------------------------------------------------

    def _fields(self) -> Fields:
        """Return the fields in place, or copies from a file."""
        memory = self.memory
        if not memory.in_memory:
            return memory.fields_of(memory.read())
        with memory.rewriting() as fields:
            return fields

    def moments_in(self, fields: Fields) -> dict[str, Tensor | Coded]:
        """Return the moments by kernel name."""
        kinds = self.kinds.values()
        if not self.eight_bit:
            return {kind: fields[kind] for kind in kinds}
        return {kind: Coded(fields[kind], fields[f"{kind}_scales"]) for kind in kinds}

    @property
    def placed(self) -> bool:
        """True once it has a page in the tiers, with its moments."""
        return isinstance(self.memory, StatePage)

    @property
    def version(self) -> tuple[int, int]:
        """Value that changes whenever the weight's values do."""
        return self.steps, self.loads

    @property
    def reading(self) -> tuple[int, int, int]:
        """Value that changes whenever what an update reads of it does, or may."""
        return self.steps, self.loads, self.edits

    @property
    def lent(self) -> bool:
        """True while users hold moments that alias its memory."""
        return any(loan.alive for loan in self._loans.values())

    @property
    def step(self) -> Tensor:
        """Steps as an fp32 tensor, like torch's; it advances with aliased moments."""
        now = torch.tensor(float(self.steps), dtype=torch.float32, device="cpu")
        if self.eight_bit or not self.memory.in_memory:
            return now
        self.shown = now if self.shown is None else self.shown.copy_(now)
        return self.shown

    @staticmethod
    def halves_in(high: Tensor, fields: Fields) -> Halves:
        """Return the master's halves, [n], aliasing the high one."""
        return Halves(high.view(-1), *(fields[name] for name in _LOWER))

    def set_lower(self, halves: Halves) -> None:
        """Replace the master's parts besides its high half. Raises TierError."""
        self._change(_lower(halves))

    @property
    def moments(self) -> dict[str, Tensor]:
        """Moments by torch's state names, fp32 in the weight's shape; empty before the first update. Copies, except
        fp32 in memory."""
        if not self.has_moments:
            return {}
        held = self.moments_in(self._fields())
        whole = {kind: _DECODE[kind](m) if isinstance(m, Coded) else m for kind, m in held.items()}
        whole = {kind: moment.view(self.shape) for kind, moment in whole.items()}
        if self.memory.in_memory and not self.eight_bit:
            whole = {kind: self._lend(kind, moment) for kind, moment in whole.items()}
        return {name: whole[kind] for name, kind in self.kinds.items()}

    def _lend(self, kind: str, moment: Tensor) -> Tensor:
        """Return a tensor on a moment's memory, whose holders may write it."""
        self.edits += 1
        loan = self._loans.get(kind)
        if loan is None or loan.memory.data_ptr() != moment.data_ptr():
            loan = self._loans[kind] = Loan(moment)
        return loan.tensor()

    @moments.setter
    def moments(self, moments: Mapping[str, Tensor]) -> None:
        values: Fields = {}
        for name, kind in self.kinds.items():
            moment = (
                moments[name].reshape(-1).float()
                if name in moments
                else torch.zeros(self._count, device="cpu", dtype=torch.float32)
            )
            if self.eight_bit:
                values[kind], values[f"{kind}_scales"] = _ENCODE[kind](moment)
            else:
                values[kind] = moment
        self._change(values)
        self.has_moments = bool(moments)

    def _change(self, values: Fields) -> None:
        self.edits += 1
        memory = self.memory
        if memory.in_memory:
            with memory.rewriting() as fields:
                _fill(fields, values)
        else:
            staging = memory.read()
            _fill(memory.fields_of(staging), values)
            memory.write(staging)

    def master(self) -> Tensor:
        """Return a copy of the fp32 weight; no update of it may be running."""
        with self.high.rewriting() as high:
            return join_master(self.halves_in(high, self._fields())).view(self.shape)


def _lower(halves: Halves) -> Fields:
    return {name: getattr(halves, name).reshape(-1) for name in _LOWER}


def _fill(fields: Fields, values: Fields) -> None:
    for name, value in values.items():
        fields[name].copy_(value)
