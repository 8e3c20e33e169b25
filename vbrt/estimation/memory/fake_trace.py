"""Trace of a task on fake tensors: peak bytes per phase, and long-lived tensors between phases."""

import contextlib
import copy
import inspect
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vbrt.errors import ArgumentError, VBError
from vbrt.estimation.memory.data_dependent_loops import shorten_
from vbrt.estimation.memory.example_inputs import inputs_of
from vbrt.estimation.memory.gpu_operator_sizes import gpu_sizes
from vbrt.estimation.memory.live_bytes import Meter
from vbrt.estimation.memory.planned_weights import Held
from vbrt.estimation.memory.representative_blocks import cut
from vbrt.estimation.memory.task import Task
from vbrt.estimation.memory.traced_checkpointing import hold_
from vbrt.libraries.torch_api import FakeTensorMode
from vbrt.libraries.transformers_api import cache_argument, cache_of, checkpointing_name, checkpointing_switch
from vbrt.model.repeated_blocks import Stack
from vbrt.residency.activation_plan import KEEP
from vbrt.training.full.resident_params import step_kept

__all__ = ["Trace", "Untraceable", "trace"]


class Untraceable(VBError):
    """The model cannot run on fake tensors."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Bytes of a model cut to some blocks.

    Attributes:
        peaks: peak bytes by phase, without parameters.
        rows: tensors that outlive an operator: "KV cache", "activations", "outputs", "gradients", "optimizer".
        growth: KV-cache bytes per further token; the cache then holds two tokens more than the prompt.
        cache: (bytes, growth per token) of its tensors -> their number.
        room: further tokens that it will hold.
        work: operations in a step (one token with "decode"), as `Meter.work` has them.
        refused: why tracing failed; "": traced.
    """

    peaks: Mapping[str, int]
    rows: Mapping[str, int]
    growth: int = 0
    work: Mapping[str, int] = field(default_factory=dict)
    refused: str = ""
    cache: Mapping[tuple[int, int], int] = field(default_factory=dict)
    room: int = 0

    def cache_bytes(self, tokens: int) -> list[int]:
        """Return the bytes of each KV-cache tensor after so many further tokens."""
        return [nbytes + each * tokens for (nbytes, each), count in self.cache.items() for _ in range(count)]


def trace(
    model: nn.Module, task: Task, chosen: Mapping[str, tuple[Stack, Sequence[int]]], held: Held | None = None
) -> Trace:
    """Run a task on a copy of a meta model cut to the chosen blocks of each stack.

    Args:
        held: the plan's effect on weights; None: the plain model.

    Raises:
        ArgumentError: the model's inputs are unknown, or no parameter trains.
        Untraceable: it cannot run on fake tensors; the first line of the reason.
    """
    held = held or Held()
    cut_model = cut(copy.deepcopy(model), {name: indices for name, (_, indices) in chosen.items()})
    with _refusals(model), warnings.catch_warnings(), FakeTensorMode():
        warnings.simplefilter("ignore")  # silences warnings of hooks, and the model's own in training
        _materialize(cut_model)
        held.prepare(cut_model)
        asked = held.activations if task.trains else KEEP
        kept = hold_(cut_model, asked, recorded=held.recorded)  # noqa: F841  # keeps its hooks alive
        run = _Run(cut_model, task, widens=held.full)
        shorten_(cut_model, run.meter)
        weights = {id(weight) for weight in held.rounded(cut_model)}
        with run.watching(chosen), gpu_sizes(task.attention, weights, run.meter), run.meter:
            return run.train() if task.trains else run.infer()


@contextlib.contextmanager
def _refusals(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except VBError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise Untraceable(
            f"{type(model).__name__} cannot be traced without weights: {type(error).__name__}: {reason[0]}; give "
            "estimate(..., step=...), a function of the model that runs it once"
        ) from error


def _materialize(model: nn.Module) -> None:
    """Replace meta tensors by fake ones; ties stay ties."""
    seen: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = seen.setdefault(id(tensor), _fake(tensor))


def _fake(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


class _Run:
    """A model on fake tensors, and its meter."""

    def __init__(self, model: nn.Module, task: Task, *, widens: bool = False) -> None:
        self.model, self.task, self.meter = model, task, Meter()
        self._widens, self._steps = widens, 0
        self._stage = ""
        self.meter.leave_out((*model.parameters(), *model.buffers()))

    @contextlib.contextmanager
    def watching(self, chosen: Mapping[str, tuple[Stack, Sequence[int]]]) -> Iterator[None]:
        """Set phases by block hooks: per kind its first block and the further ones, and the gaps before, between and
        after. Blocks between the first and the last of a kind allocate amounts in between."""
        hooks = []
        for name, (stack, indices) in chosen.items():
            blocks, kinds = self.model.get_submodule(name), [stack.kinds[index] for index in indices]
            for at, (block, kind) in enumerate(zip(blocks, kinds, strict=True)):
                where = f"{name}.{kind}." + ("first" if kind not in kinds[:at] else "more")
                after = f"after {name}" if at + 1 == len(kinds) else f"{name}.between"
                before = f"before {name}" if at == 0 else f"{name}.between"
                hooks.append(block.register_forward_pre_hook(lambda *_, where=where: self._enter(where, inside=True)))
                hooks.append(block.register_forward_hook(lambda *_, after=after: self._enter(after)))
                begin = lambda *_, where=where: self._back(where, inside=True)  # noqa: E731
                hooks.append(block.register_full_backward_pre_hook(begin))
                hooks.append(block.register_full_backward_hook(lambda *_, before=before: self._back(before)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, where: str, *, inside: bool = False) -> None:
        if self._stage != "backward":
            self._phase(where, inside=inside)

    def _back(self, where: str, *, inside: bool = False) -> None:
        if self._stage == "backward":
            self._phase(where, inside=inside)

    def _phase(self, where: str, *, inside: bool = False) -> None:
        self.meter.phase, self.meter.in_block = f"{self._stage}: {where}", inside
        self.meter.note()

    def _begin(self, stage: str, kind: str) -> None:
        self._stage, self.meter.kind = stage, kind
        self._phase("")

    # -- inference ----------------------------------------------------------------------------------------------------

    def infer(self) -> Trace:
        """Run a forward, and with "decode" two steps on its KV cache."""
        with torch.no_grad():
            self._begin("prompt" if self.task.kind == "decode" else "pass", "temporaries")
            if self.task.step is not None:
                outputs = self.task.step(self.model)
            else:
                outputs = self.model(**self._generated(inputs_of(self.model, self.task)), **self._how())
            self._name(outputs, "outputs")
            cache = self._cache(outputs)
            rows = {"outputs": self.meter.live["outputs"], "KV cache": self.meter.live["KV cache"]}
            rows["prompt in place"] = _filled_bytes(cache)
            once, twice = [], []  # bytes, not allocator blocks, which few heads do not fill
            if self.task.kind == "decode" and cache is not None:
                del outputs
                self._one_token(cache)  # a sliding window drops the prompt's older tokens here
                once = _held_bytes(cache)
                rows["KV cache"] = self._one_token(cache)
                twice = _held_bytes(cache)
            held = Counter((now, now - before) for before, now in zip(once, twice, strict=False))
            growth = sum(twice) - sum(once)
            return Trace(self._peaks(), rows, growth, dict(self.meter.work), cache=held)

    def _how(self) -> dict[str, Any]:
        known = inspect.signature(self.model.forward).parameters
        decode = self.task.kind == "decode"
        how = {"use_cache": decode, **({"logits_to_keep": 1} if decode else {})}
        return {name: value for name, value in how.items() if name in known or (name == "use_cache" and _kwargs(known))}

    def _generated(self, inputs: dict[str, Any], *, past: int = 0) -> dict[str, Any]:
        """Add the inputs that `generate` passes besides tokens: attention mask and positions."""
        ids, known = inputs.get("input_ids"), inspect.signature(self.model.forward).parameters
        if self.task.kind != "decode" or ids is None or "decoder_input_ids" in inputs:
            return inputs
        given = {"attention_mask": (ids.shape[0], past + ids.shape[1]), "position_ids": tuple(ids.shape)}
        more = {
            name: torch.ones(shape, dtype=torch.long, device="cpu") for name, shape in given.items() if name in known
        }
        return inputs | more

    def _cache(self, outputs: Any) -> Any:
        cache = cache_of(outputs)
        self._name(cache, "KV cache")
        return cache

    def _name(self, value: Any, kind: str) -> None:
        for tensor in _tensors(value):
            self.meter.name(tensor, kind)

    def _one_token(self, cache: Any) -> int:
        """Run a one-token step; return the cache's bytes after it."""
        self._begin("step", "temporaries")
        self.meter.work.clear()
        inputs = inputs_of(self.model, self.task, tokens=1)
        inputs = {k: v for k, v in inputs.items() if k != "input_ids" or "decoder_input_ids" not in inputs}
        inputs = self._generated(inputs, past=self.task.context + self._steps)
        self._steps += 1
        name = cache_argument(self.model.forward)
        outputs = self.model(**inputs, **{name: cache}, use_cache=True)
        cache = self._cache(outputs)
        return self.meter.live["KV cache"]

    # -- training -----------------------------------------------------------------------------------------------------

    def train(self) -> Trace:
        """Run a training step twice: the first creates the optimizer state."""
        model, meter = self.model.train(), self.meter
        if self.task.checkpointing:
            _checkpoint(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            raise ArgumentError(f"{type(model).__name__}: no parameter requires a gradient; nothing trains")
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(lambda p: meter.name(p.grad, "gradients"))
        optimizer = _optimizer(self.task.optimizer, trained)
        rows: dict[str, int] = {}
        for turn in range(2):
            if turn:
                meter.peaks.clear()
                meter.work.clear()
            self._begin("forward", "activations")
            loss = self._loss()
            rows["activations"] = meter.live["activations"]
            self._begin("backward", "temporaries")
            loss.backward()
            del loss
            rows["gradients"] = meter.live["gradients"]
            self._begin("optimizer", "optimizer")
            if self._widens:
                step_kept(optimizer, type(optimizer))
            else:
                optimizer.step()
            rows["optimizer"] = meter.live["optimizer"]
            optimizer.zero_grad()
        return Trace(self._peaks(), rows, work=dict(meter.work))

    def _loss(self) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.task.mixed):
            if self.task.step is not None:
                return self.task.step(self.model)
            inputs = inputs_of(self.model, self.task)
            if "labels" in inspect.signature(self.model.forward).parameters:
                inputs["labels"] = inputs.get("decoder_input_ids", inputs.get("input_ids"))
            if inputs.get("labels", ()) is None:
                del inputs["labels"]
            known = inspect.signature(self.model.forward).parameters
            outputs = self.model(**inputs, **({"use_cache": False} if "use_cache" in known else {}))
            loss = getattr(outputs, "loss", None)
            return loss if loss is not None else sum(t.float().sum() for t in _tensors(outputs) if t.requires_grad)

    def _peaks(self) -> dict[str, int]:
        return dict(self.meter.peaks)


def _kwargs(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _filled_bytes(cache: Any) -> int:
    """Return the bytes of a prompt's cache that further `generate` calls compute in the captured steps' own cache."""
    layers = [layer for layer in getattr(cache, "layers", ()) if type(layer).__name__ == "DynamicLayer"]
    return sum(sum(_held_bytes(layer)) for layer in layers)


def _held_bytes(cache: Any) -> list[int]:
    """Return the bytes of each storage of a cache, in order."""
    return list({s._cdata: s.nbytes() for s in (tensor.untyped_storage() for tensor in _tensors(cache))}.values())


def _tensors(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors in outputs or a cache."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, depth)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, depth)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        yield from _tensors(list(vars(value).values()), depth - 1)


def _checkpoint(model: nn.Module) -> None:
    """Enable activation checkpointing. Raises ArgumentError: the model has no switch for it."""
    switch = checkpointing_switch(model)
    if switch is None:
        raise ArgumentError(
            f"{type(model).__name__} has no {checkpointing_name()}(); give a model that checkpoints by itself"
        )
    switch({"use_reentrant": False})


def _optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    kind = getattr(torch.optim, name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ArgumentError(f"optimizer = {name!r}; expected a class of torch.optim, such as 'AdamW' or 'SGD'")
    known = inspect.signature(kind).parameters
    return kind(parameters, lr=1e-4, **({"foreach": True} if "foreach" in known else {}))
