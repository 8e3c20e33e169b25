"""`vbrt.wrap`: plan, swap layers in place, return a wrapper.

Wrapping moves nothing: layers become shells, whose handles hold their dense weights. The first pass that calls a layer
or reads its weight, or `materialize()` for all of them, encodes the weight, stores its pages and frees it.
"""

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import torch
from torch import nn

from vbrt.config import VBConfig, load_config
from vbrt.config.overrides import Config
from vbrt.distributed.pipeline_devices import SplitModel, devices_of, split_over
from vbrt.errors import WrapError
from vbrt.estimation.advice.advise import advise
from vbrt.estimation.memory.gpu_share import settle_budget
from vbrt.estimation.precision.choose_precision import settled
from vbrt.estimation.precision.input_statistics import with_inputs
from vbrt.model.attach import Attempt, attach, plan_for
from vbrt.model.runtime import Runtime
from vbrt.model.shared_config import shared_config
from vbrt.residency.user_policy import Overrides
from vbrt.wrapper.full_wrapper import Optimizer, VBFullWrapper, take_optimizer_of
from vbrt.wrapper.pipeline import VBPipelineWrapper
from vbrt.wrapper.wrap_pipeline import wrap_holder
from vbrt.wrapper.wrapper import VBModelWrapper
from vbrt.wrapper.wrapper_choice import facade_of, user_policy, warn_of_plan

__all__ = ["facade_of", "user_policy", "warn_of_plan", "wrap"]


class WrapOverrides(Overrides, total=False):
    """Type of `wrap`'s keyword overrides."""

    optimizer: Optimizer


Advised = Config | Literal["auto"]
"""A config, or "auto": that of `vbrt.advise`."""


@overload
def wrap(
    model: nn.Module,
    config: Config | Literal["auto"] = None,
    *,
    runtime: Runtime | None = None,
    **overrides: Unpack[WrapOverrides],
) -> VBModelWrapper: ...


@overload
def wrap(
    model: object,
    config: Config | Literal["auto"] = None,
    *,
    runtime: Runtime | None = None,
    **overrides: Unpack[WrapOverrides],
) -> VBPipelineWrapper: ...


def wrap(
    model: object,
    config: Config | Literal["auto"] = None,
    *,
    runtime: Runtime | None = None,
    **overrides: Unpack[WrapOverrides],
) -> VBModelWrapper | VBPipelineWrapper | SplitModel:
    """Wrap a model so that its linear layers live as planes in the tiers of a config.

    Args:
        model: any nn.Module; changed in place (`unwrap` restores it). Or an object that holds models: a pipeline of
            diffusers or transformers, whose models all go onto one runtime; or any other with a single module among its
            attributes.
        config: a preset name ("fp4", the default, "exact", "dense", ...), a path to a TOML file, a dict, or a VBConfig;
            "auto": the first answer of `vbrt.advise` for this model and this machine.
        runtime: `vb.runtime` of another model: both share its tiers, budgets and policy from then on, each with its own
            weight formats.
        **overrides: of the config, merged key by key. `gpu_memory="12GB"`: most that this process takes of the GPU,
            with `context=8192` prompt tokens (default 2048), from which an estimate derives the pages' budget;
            `budget="6GiB"`: that budget itself, of the tier that computes. Sections: `weights={"format": "nf4"}`,
            `tiers={"ssd": {...}}`; also `mode="train"`. `policy=` also takes a custom policy
            (`vbrt.residency.policy.Policy`): an object, which is copied for each tier, or a factory such as its class,
            called with each tier's room in bytes. `optimizer=` for mode = "full": a torch optimizer over the model's
            parameters, taken over in place, or a function of parameters that returns one.

    Returns:
        The wrapper. Everything of the model is reachable through it; `vb.module` is the same model, swapped. With mode
            = "train" it is a VBTrainingWrapper: weights stay parameters, and the forward sees them in 4 bits. For an
            object that holds models, a VBPipelineWrapper, through which everything of the object is reachable. With
            `tiers.gpu.devices` a `vbrt.distributed.pipeline_devices.SplitModel`, whose layers are encoded already.

    Raises:
        NoRoomError: `gpu_memory` is too little for the model, with the bytes by purpose.
        ConfigError: the config is invalid, impossible for this model or machine, or contradicts the runtime's tiers or
            policy; or a policy lacks a method, named.
        WrapError: the model is wrapped already, or TorchScript, or the runtime closed; or an object has no module, or
            several (named).
        TierError: the ssd tier's directory cannot be used.

    Warns, once per reason, if nothing is swapped, or if the unswapped rest does not fit next to the budgets; names the
    largest part. `vb.plan.warnings` keeps the texts; `vb.plan.notes` says if more than a tenth is not swapped.
    """
    if not isinstance(model, nn.Module):
        return wrap_holder(model, config, runtime, overrides)
    if isinstance(model, VBModelWrapper):
        raise WrapError("the model is wrapped already; unwrap() it first")
    if isinstance(model, torch.jit.ScriptModule):
        raise WrapError(
            f"{type(model).__name__}: layers of TorchScript are compiled; wrap the model that it is made of"
        )
    policy, optimizer = user_policy(overrides, runtime), take_optimizer_of(overrides)
    asked = load_config(_advised(model) if config == "auto" else config, **overrides)
    if optimizer is not None and asked.mode != "full":
        raise WrapError(f'optimizer=...: mode = "{asked.mode}" leaves optimizers alone; mode = "full" takes one over')
    if runtime is not None:
        asked = shared_config(asked, runtime, config, overrides)
    devices = devices_of(asked)
    if devices:
        return _split(model, asked, devices, alone=runtime is None and policy is None)
    share = settle_budget(model, settled(model, asked))
    asked = share.config
    plan = with_inputs(model, share.noted(plan_for(model, asked, runtime)), asked)
    warn_of_plan(plan, "vbrt.wrap", stacklevel=3)
    attempt = Attempt(model, runtime)
    try:
        vb = facade_of(model, attach(model, asked, plan, runtime=runtime, policy=policy))
        if isinstance(vb, VBFullWrapper):
            _begin_training(vb, optimizer)
        return vb
    except BaseException:  # Ctrl-C may come in between
        attempt.undo()
        raise


def _split(model: nn.Module, config: VBConfig, devices: Sequence[torch.device], *, alone: bool) -> SplitModel:
    if not alone:
        raise WrapError(
            "tiers.gpu.devices: a model over several devices has runtimes of its own, with the config's policy; leave "
            "out runtime= and policy=, or the key"
        )
    return split_over(model, settled(model, config), devices)


def _begin_training(vb: VBFullWrapper, optimizer: Any) -> None:
    """Materialize the weights, and take the optimizer over; undone on failure."""
    try:
        vb.vbrt.materialize()
        if optimizer is not None:
            vb.vbrt.take_optimizer(optimizer)
    except BaseException:
        vb.vbrt.unwrap()
        raise


def _advised(model: nn.Module) -> VBConfig:
    """Return the config of `vbrt.advise`'s best answer; "dense" for a model that fits unwrapped."""
    return advise(model).best.config or load_config("dense")
