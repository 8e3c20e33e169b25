"""FullWeight: one weight that trains from the tiers, with everything that belongs to it.

The high half (bf16) is a page of the stack: forwards, recomputation and backward lease it as they lease any page. The
low half, the moments and the gradient stay on the host (`optimizer_update.py`). Forwards compute with the high half, so
a model in fp32 runs under bf16 autocast.
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
from vbrt.residency.plan import PageSpec
from vbrt.tiers import Lease, Owner, TierStack
from vbrt.training.full.host_gradients import Gradient, Outlet
from vbrt.training.full.optimizer_update import Updater, WeightState, split_master
from vbrt.training.full.streamed_parameter import StreamedParameter

__all__ = ["FullWeight", "graphs_end_here"]

#: for what leases a weight when it runs; a graph that is compiled ends before it, and the next one begins after it
graphs_end_here = uncompiled(
    reason='mode = "full" leases weights from the tiers when a layer runs, so a compiled graph ends there, and the '
    "next one begins behind it; compile without fullgraph=True"
)


class FullWeight(PagesHandle):
    """One weight in training from the tiers; shared by all layers that are tied to it.

    Attributes:
        parameter: the object that optimizers hold.
        dtype: of the parameter.
        state: halves, moments and steps; None before `store`.
        gradient: on the host.
        outlet: through which it leaves the computing device.
        updater: updates the weight; None before an optimizer was taken.
        wait_ns: time for which layers have waited for updates.
        layers: the live layers that hold the weight.
    """

    kernel, separation = "reference", None
    tied = False

    def __init__(self, spec: HandleSpec, stack: TierStack, outlet: Outlet) -> None:
        super().__init__(stack)
        self.spec = replace(spec, dtype=torch.float32)  # of what it is; its page is bf16
        self.dtype = spec.dtype
        self.layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.parameter: StreamedParameter | None = None
        self.state: WeightState | None = None
        home = spec.home("gradient", stack.names[-1])
        self.gradient = Gradient(self.name, stack, self.dtype, home, outlet.sums)
        self.gradient.settle = functools.partial(_settle, weakref.ref(self))
        self.outlet = outlet
        self.updater: Updater | None = None
        self.wait_ns = 0
        self._device_before = torch.device("cpu")

    @property
    def trainable(self) -> bool:
        """True if the parameter requires grad."""
        return self.parameter is None or self.parameter.requires_grad

    # -- pages --------------------------------------------------------------------------------------------------------

    def retire(self) -> None:
        """Retire the pages, those of state and gradient too; the handle is empty again."""
        super().retire()
        self.gradient.retire()

    def store(self, parameter: nn.Parameter) -> None:
        """Take a parameter's values into pages; the object stays, without values.

        Raises:
            FormatError: it has no data, or is neither bf16 nor fp32.
            WrapError: hooks wait for its gradient.
            TierError: the pages do not fit or cannot be written; the parameter is as it was.
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
        # no call from here on that may fail
        self.state = WeightState.of(self.name, _High(self), halves)
        self.owner, self.pages, self.keys = owner, (page,), (key,)
        self.parameter = StreamedParameter.become_(parameter, self)

    def master(self) -> Tensor:
        """Return a copy of the fp32 weight, in the module's orientation, after its update."""
        self.settle()
        return self.state.master()

    def load(self, values: Tensor) -> None:
        """Take other values, of the same shape; moments stay. Raises WrapError for another shape."""
        if tuple(values.shape) != self.state.shape:
            raise WrapError(f"{self.name}: the new weight has shape {tuple(values.shape)}; expected {self.state.shape}")
        self.settle()
        new = split_master(values.detach().to("cpu", torch.float32))
        self.state.loads += 1
        with self.state.high.rewriting() as high:
            high.copy_(new.high)
            self.state.set_lower(new)

    def give_back(self) -> None:
        """Give the parameter its values back, the fp32 master, and its gradient. Idempotent."""
        parameter = self.parameter
        if parameter is None:
            return
        gradient, master = self.gradient.tensor(), self.master()
        parameter.restore_(master.to(self._device_before))
        self.parameter = None  # no call in between that may fail
        if gradient is not None:
            parameter.grad = gradient.to(parameter.device, parameter.dtype)

    def encoded_layouts(self) -> list[PageLayout]:
        """Those of `encoded`."""
        return [get_format("dense").layout(self.state.shape, torch.float32)]

    @contextlib.contextmanager
    def encoded(self) -> Iterator[Planes]:
        """The plane that an inference model holds: the fp32 master. Raises TierError."""
        yield [(self.encoded_layouts()[0], {"weight": self.master()})]

    def check_cast(self, dtype: torch.dtype) -> None:
        """Raise WrapError for a cast of the layers: halves and moments are of the dtype that the parameter has."""
        if dtype is not self.dtype:
            raise WrapError(
                f"{self.name}: a cast from {self.dtype} to {dtype} while the weight trains in the tiers; unwrap() first"
            )

    def assign_homes(self, homes: Mapping[PageSpec, str]) -> None:
        """Do nothing: pages are stored as a model is wrapped."""

    def forget_ready(self) -> None:
        """Do nothing: there are no views of pages outside of leases."""

    def all_fallbacks(self) -> list[str]:
        """What is done otherwise than asked."""
        updates = [] if self.updater is None else self.updater.fallbacks
        return [*self.fallbacks, *self.gradient.pages.fallbacks, *updates]

    def settle(self) -> None:
        """Wait for the weight's update. Raises what went wrong in it."""
        if self.updater is not None and self.updater.waiting:
            start = time.perf_counter_ns()
            try:
                self.updater.wait(self.state)
            finally:
                self.wait_ns += time.perf_counter_ns() - start

    @contextlib.contextmanager
    def lease(self) -> Iterator[Tensor]:
        """Lease the high half in the computing tier, in the module's orientation, once it is up to date.

        Raises TierError as `TierStack.lease`, and what went wrong in the weight's update.
        """
        self.check_pages()
        self.settle()
        with Lease(self.stack, self.keys) as (tensors,):
            yield tensors["weight"]

    # -- computing ----------------------------------------------------------------------------------------------------

    def check_dtype(self, x: Tensor) -> None:
        """Raise WrapError for an input that would need the whole fp32 weight."""
        if x.dtype is not torch.bfloat16:
            raise WrapError(
                f'{self.name}: its input is {x.dtype}; mode = "full" computes with the bf16 halves of weights: run '
                "the forward under torch.autocast(device, torch.bfloat16), or wrap model.to(torch.bfloat16)"
            )


def _halves(values: Tensor) -> Halves:
    """Return the halves of a weight on the host; they are made where the weight is."""
    if values.dtype is torch.bfloat16:  # the high half, and the same low half for every number
        return without_ties(values.to("cpu"), torch.full(values.shape, -0x8000, dtype=torch.int16, device="cpu"))
    return Halves(*(half.to("cpu") for half in split_master(values.float())))


def _settle(weight: "weakref.ref[FullWeight]") -> None:
    found = weight()
    if found is not None:
        found.settle()


class _High:
    """The page of a weight's high half, as the update sees it."""

    def __init__(self, weight: FullWeight) -> None:
        self._weight = weakref.ref(weight)

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[Tensor]:
        """Yield the high half at home (bf16, CPU), to be changed in place."""
        weight = self._weight()
        weight.check_pages()
        (page,) = weight.pages
        with weight.stack.rewriter.rewriting(page.key) as whole:
            yield unpack(whole, page.layout)["weight"]

    def expect(self, token: object, *, unless: Callable[[], bool]) -> None:
        """Have leases and copies of the page wait, and none be made of the old bytes, until `forgo`."""
        weight = self._weight()
        weight.stack.rewriter.expect(weight.keys, token, unless=unless)

    def forgo(self, token: object) -> None:
        """End that. Idempotent."""
        weight = self._weight()
        if weight is not None:
            weight.stack.rewriter.forgo(weight.keys, token)
