"""FullWeight: one weight that trains from the tiers, with its pages, optimizer state and gradient.

The high half (bf16) is a page of the stack, leased by forward, recomputation and backward like any page. The low half,
the moments and the gradient stay on the host (`optimizer_update.py`). Forwards compute with the high half, so an fp32
model runs under bf16 autocast.
"""

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from vbrt.errors import FormatError, WrapError
from vbrt.formats import get_format
from vbrt.formats.page import PageLayout, pack, unpack
from vbrt.kernels.uncompiled import uncompiled
from vbrt.kernels.update import GRADIENTS, Halves, without_ties
from vbrt.layers.weights.pages_handle import PagesHandle
from vbrt.layers.weights.weight_encoding import Planes
from vbrt.layers.weights.weight_spec import HandleSpec
from vbrt.libraries.torch_api import moves_in_place
from vbrt.residency.plan import PageSpec
from vbrt.tiers import Owner, TierStack
from vbrt.training.full.host_gradients import Gradient, Outlet
from vbrt.training.full.optimizer_update import Updater, WeightState, split_master
from vbrt.training.full.streamed_parameter import StreamedParameter
from vbrt.training.full.update_pages import Fields, StatePage
from vbrt.training.full.update_state import Spare

__all__ = ["FullWeight", "graphs_end_here"]

#: for methods that lease a weight at run time; a compiled graph breaks around them
graphs_end_here = uncompiled(
    reason='mode = "full" leases weights from the tiers when a layer runs, so a compiled graph ends there, and the '
    "next one begins behind it; compile without fullgraph=True"
)


class FullWeight(PagesHandle):
    """One weight in training from the tiers; shared by all layers tied to it.

    Attributes:
        parameter: the object that optimizers hold.
        dtype: of the parameter.
        state: halves, moments and steps; None before `store`.
        gradient: on the host.
        outlet: D2H path of its gradients.
        updater: updates the weight; None before an optimizer was taken.
        wait_ns: time that layers have waited for updates.
        layers: live layers that hold the weight.
    """

    kernel, separation = "reference", None
    tied = False

    def __init__(self, spec: HandleSpec, stack: TierStack, outlet: Outlet) -> None:
        super().__init__(stack)
        self.spec = replace(spec, dtype=torch.float32)  # the master's dtype; the page holds its bf16 half
        self.dtype = spec.dtype
        self.layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.parameter: StreamedParameter | None = None
        self.state: WeightState | None = None
        home = spec.home("gradient", stack.names[-1])
        self.gradient = Gradient(self.name, stack, self.dtype, home, outlet.sums)
        self.gradient.settle = functools.partial(_settle, weakref.ref(self))
        self.outlet = outlet
        self.updater: Updater | None = None
        self.wait_ns = self._spares = 0
        self._device_before = torch.device("cpu")

    @property
    def trainable(self) -> bool:
        """True if the parameter requires grad."""
        return self.parameter is None or self.parameter.requires_grad

    # -- pages --------------------------------------------------------------------------------------------------------

    def retire(self) -> None:
        """Retire all pages, including state and gradient; the handle is empty again."""
        super().retire()
        self.gradient.retire()
        if self.state is not None:
            self.state.retire()

    def store(self, parameter: nn.Parameter) -> None:
        """Move a parameter's values into pages; the object stays, without values.

        Raises:
            FormatError: it has no data, or is neither bf16 nor fp32.
            WrapError: gradient hooks are registered on it; or torch cannot move it to the computing device.
            TierError: the pages do not fit or cannot be written; the parameter is unchanged.
        """
        if parameter.is_meta:
            raise FormatError(f"{self.name}: its weight is on the meta device, without data; load it first")
        if parameter.dtype not in GRADIENTS:
            raise FormatError(
                f'{self.name}: its weight is {parameter.dtype}; mode = "full" trains models in float32 or bfloat16: '
                "wrap model.to(torch.bfloat16), or model.float() under autocast"
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise WrapError(
                f"{self.name}: hooks are registered on its {self.spec.site.parameter}, and autograd has no gradient of "
                "a weight that trains in the tiers; remove them, and change parameter.grad between backward and step"
            )
        if not moves_in_place(parameter, torch.empty(0, dtype=parameter.dtype, device=self.device)):
            raise WrapError(
                f"{self.name}: its parameter is on {parameter.device}, and torch cannot move a parameter in place to "
                f"{self.device}: wrap model.to({str(self.device)!r}), and make the optimizer from that"
            )
        self.stack.rewriter.prepare()
        values = parameter.detach()
        halves = _halves(values)
        layout = get_format("dense").layout(tuple(values.shape), torch.bfloat16)
        owner = Owner(self.stack)
        home = self.spec.home("dense", self.stack.names[-1])
        key = self.spec.site.page_key("dense")
        page = self.stack.add(key, layout, home, functools.partial(pack, {"weight": halves.high}, layout), owner)
        self.dtype = self.gradient.dtype = parameter.dtype
        self._device_before = parameter.device
        self.gradient.put(parameter.grad)
        page.passes = not self.spec.by_rows
        # nothing below may fail
        self.state = WeightState.of(self.name, _High(self), halves)
        self.owner, self.pages, self.keys = owner, (page,), (key,)
        self.parameter = StreamedParameter.become_(parameter, self)

    def place_state(self, moments: Mapping[str, str], *, eight_bit: bool) -> None:
        """Give the master's low half and the moments their place in the tiers, once. Raises TierError."""
        if not self.state.placed:
            home = self.spec.home("state", self.stack.names[-1])
            self.state.place(self.stack, moments, home, eight_bit=eight_bit)

    @property
    def spare_bytes(self) -> int:
        """Bytes of spare memory for an update ahead of the step; 0 if its pages are not in host memory."""
        held = self.state is not None and self.state.placed and self.state.memory.in_memory
        return self.state.memory.nbytes + self.pages[0].nbytes if held and self.state.high.peek() is not None else 0

    def place_spare(self, *, besides: int) -> bool:
        """Allocate spare memory in the tiers of the state and of the high half; False if they lack room for it besides
        so many bytes."""
        stack, state, (page,) = self.stack, self.state, self.pages
        homes = [state.memory.home.level.tier.name, stack.names[page.home]]
        with stack.encoding:
            if self.spare_bytes + besides > min(map(stack.ledger.spare_bytes, homes)):
                return False
            self._spares += 1  # an older spare may still be in use
            ahead = f"ahead.{self._spares}"
            owner = Owner(stack)
            high = stack.add(f"{page.key}.{ahead}", page.layout, homes[1], _as_it_is, owner, unseen=True)
            high.passes = False
            memory = StatePage(stack, f"{self.name}#state.{ahead}", state.memory.layout, homes[0], {}, unseen=True)
            state.spare = Spare(memory, (high, owner), memory.nbytes + page.nbytes)
        return True

    def master(self) -> Tensor:
        """Return a copy of the fp32 weight, in the module's orientation, after its pending update."""
        self.settle()
        return self.state.master()

    def load(self, values: Tensor) -> None:
        """Load other values of the same shape; moments stay. Raises WrapError: another shape."""
        if tuple(values.shape) != self.state.shape:
            raise WrapError(f"{self.name}: the new weight has shape {tuple(values.shape)}; expected {self.state.shape}")
        self.settle()
        new = split_master(values.detach().to("cpu", torch.float32))
        self.state.loads += 1
        with self.state.high.rewriting() as high:
            high.copy_(new.high)
            self.state.set_lower(new)

    def give_back(self) -> None:
        """Restore the parameter's values (the fp32 master) and its gradient. Idempotent."""
        parameter = self.parameter
        if parameter is None:
            return
        gradient, master = self.gradient.tensor(), self.master()
        parameter.restore_(master.to(self._device_before))
        self.parameter = None  # nothing in between may fail
        if gradient is not None:
            parameter.grad = gradient.to(parameter.device, parameter.dtype)

    def encoded_layouts(self) -> list[PageLayout]:
        """Layouts of `encoded`."""
        return [get_format("dense").layout(self.state.shape, torch.float32)]

    @contextlib.contextmanager
    def encoded(self) -> Iterator[Planes]:
        """Yield the plane for inference: the fp32 master. Raises TierError."""
        yield [(self.encoded_layouts()[0], {"weight": self.master()})]

    def check_cast(self, dtype: torch.dtype) -> None:
        """Raise WrapError for a cast of the layers: halves and moments are tied to the parameter's dtype."""
        if dtype is not self.dtype:
            raise WrapError(
                f"{self.name}: a cast from {self.dtype} to {dtype} while the weight trains in the tiers; unwrap() first"
            )

    def assign_homes(self, homes: Mapping[PageSpec, str]) -> None:
        """Do nothing: pages are placed while wrapping."""

    def forget_ready(self) -> None:
        """Do nothing: pages are viewed only within leases."""

    def all_fallbacks(self) -> list[str]:
        """Deviations from the config."""
        updates = [] if self.updater is None else self.updater.fallbacks
        return [*self.fallbacks, *self.gradient.pages.fallbacks, *updates]

    def settle(self) -> None:
        """Wait for the weight's update. Raises its error."""
        if self.updater is not None and self.updater.waiting:
            start = time.perf_counter_ns()
            try:
                self.updater.wait(self.state)
            finally:
                self.wait_ns += time.perf_counter_ns() - start

    @contextlib.contextmanager
    def lease(self) -> Iterator[Tensor]:
        """Lease the high half in the computing tier, in the module's orientation, after its pending update.

        Raises TierError as `TierStack.lease`, and the error of the weight's update.
        """
        self.check_pages()
        self.settle()
        with self.stack.lease(self.keys) as (tensors,):
            yield tensors["weight"]

    # -- compute ------------------------------------------------------------------------------------------------------

    def check_dtype(self, x: Tensor) -> None:
        """Raise WrapError for an input dtype that would need the whole fp32 weight."""
        if x.dtype is not torch.bfloat16:
            raise WrapError(
                f'{self.name}: its input is {x.dtype}; mode = "full" computes with the bf16 halves of weights: run '
                "the forward under torch.autocast(device, torch.bfloat16), or wrap model.to(torch.bfloat16)"
            )


def _halves(values: Tensor) -> Halves:
    """Return a weight's halves on the host, split on the weight's own device."""
    if values.dtype is torch.bfloat16:  # the value is the high half; the low half is constant
        return without_ties(values.to("cpu"), torch.full(values.shape, -0x8000, dtype=torch.int16, device="cpu"))
    return Halves(*(half.to("cpu") for half in split_master(values.float())))


def _settle(weight: "weakref.ref[FullWeight]") -> None:
    found = weight()
    if found is not None:
        found.settle()


class _High:
    """The high half's page, as the update uses it."""

    def __init__(self, weight: FullWeight) -> None:
        self._weight = weakref.ref(weight)

    @property
    def gone(self) -> bool:
        """True once the weight was collected."""
        return self._weight() is None

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[Tensor]:
        """Yield the high half at home (bf16, CPU), to change in place."""
        weight = self._weight()
        weight.check_pages()
        (page,) = weight.pages
        with weight.stack.rewriter.rewriting(page.key) as whole:
            yield unpack(whole, page.layout)["weight"]

    def expect(self, token: object, *, unless: Callable[[], bool]) -> None:
        """Block leases and copies of the page's old bytes until `forgo`."""
        weight = self._weight()
        weight.stack.rewriter.expect(weight.keys, token, unless=unless)

    def forgo(self, token: object) -> None:
        """Unblock them. Idempotent."""
        weight = self._weight()
        if weight is not None:
            weight.stack.rewriter.forgo(weight.keys, token)

    def peek(self) -> Tensor | None:
        """Return the high half in host memory, until it is rewritten; None if it lives elsewhere."""
        weight = self._weight()
        weight.check_pages()
        (page,) = weight.pages
        fields = weight.stack.rewriter.fields(page.key)
        return None if fields is None else fields["weight"]

    @contextlib.contextmanager
    def preparing(self, memory: StatePage, spare: Spare) -> Iterator[list[Fields | None]]:
        """Yield the fields of the state's page, of a spare's one, and of its high page; None for one in a file."""
        keys = memory.key, spare.memory.key, spare.high[0].key
        with self._weight().stack.rewriter.in_memory(keys) as fields:
            yield fields

    def take(self, spare: Spare, done: Callable[[], object]) -> bool:
        """Make a spare's bytes the page's. Rows are looked up in a page's memory, which therefore stays: they are
        copied."""
        weight = self._weight()
        weight.check_pages()
        (page,), rewriter = weight.pages, weight.stack.rewriter
        if page.passes:
            return rewriter.exchange(page.key, spare.high[0].key, done)
        filled = rewriter.peek(spare.high[0].key)
        if filled is None:
            return False
        with rewriter.rewriting(page.key, fresh=True) as whole:
            whole.copy_(filled)
        done()
        return True


def _as_it_is(page: Tensor) -> None:
    """Write nothing: a spare is filled before it is read."""
