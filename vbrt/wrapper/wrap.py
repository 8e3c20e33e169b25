"""`vbrt.wrap`: plan, swap in place, put a façade in front.

Nothing moves when a model is wrapped: its layers become shells, whose handles hold their dense weights. The first pass
that calls a layer or reads its weight, or `materialize()` for all of them, encodes it, stores its pages and frees it.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, overload

import torch
from torch import nn

from vbrt.config import VBConfig, load_config
from vbrt.distributed.pipeline_devices import SplitModel, devices_of, split_over
from vbrt.errors import WrapError
from vbrt.estimation.advice.advise import advise
from vbrt.estimation.precision.choose_precision import settled
from vbrt.estimation.precision.input_statistics import with_inputs
from vbrt.model.attach import Attempt, attach, plan_for
from vbrt.model.runtime import Runtime
from vbrt.model.shared_config import shared_config
from vbrt.wrapper.full_wrapper import VBFullWrapper, take_optimizer_of
from vbrt.wrapper.pipeline import VBPipelineWrapper
from vbrt.wrapper.wrap_pipeline import wrap_holder
from vbrt.wrapper.wrapper import VBModelWrapper
from vbrt.wrapper.wrapper_choice import facade_of, user_policy, warn_of_plan

__all__ = ["facade_of", "user_policy", "warn_of_plan", "wrap"]

Config = VBConfig | Mapping[str, Any] | str | PathLike | None


@overload
def wrap(
    model: nn.Module, config: Config = None, *, runtime: Runtime | None = None, **overrides: Any
) -> VBModelWrapper: ...


@overload
def wrap(
    model: object, config: Config = None, *, runtime: Runtime | None = None, **overrides: Any
) -> VBPipelineWrapper: ...


def wrap(
    model: object, config: Config = None, *, runtime: Runtime | None = None, **overrides: Any
) -> VBModelWrapper | VBPipelineWrapper | SplitModel:
    """Wrap a model so that its linear layers live as planes in the tiers of a config.

    Args:
        model: any nn.Module; changed in place (`unwrap` gives it back). Or an object that holds some: a pipeline of
            diffusers or transformers, whose models all go onto one runtime; any other with one module among its
            attributes.
        config: a preset name ("fp4", the default, "exact", "dense", ...), a path to a TOML file, a dict, or a VBConfig;
            "auto": the first answer of `vbrt.advise` for this model and this machine.
        runtime: `vb.runtime` of another model: both share its tiers, its budgets and its policy from then on, each with
            weights in formats of its own.
        **overrides: sections of the config, merged key by key: `weights={"format": "nf4"}`, `tiers={"ssd": {...}}`,
            `mode="train"`. `policy=` also takes a policy of your own (`vbrt.residency.policy.Policy`): an object, of
            which each tier gets a copy, or a factory such as its class, called with each tier's room in bytes.
            `optimizer=` for mode = "full": a torch optimizer over the model's parameters, taken over in place, or a
            function of parameters that returns one.

    Returns:
        The wrapper. Everything of the model is reachable through it; `vb.module` is the same model, swapped. With
        mode = "train" it is a VBTrainingWrapper: weights stay parameters, and the forward sees them in 4 bits. Of an
        object that holds models, a VBPipelineWrapper, through which everything of the object is reachable. With
        `tiers.gpu.devices` it is a `vbrt.distributed.pipeline_devices.SplitModel`, whose layers are encoded already.

    Raises:
        ConfigError: the config is wrong, or impossible for this model or machine, or says something else of tiers or
            policy than the runtime; or a policy lacks a method, named.
        WrapError: the model is wrapped already, or the runtime closed; or there is no module, or not one only, in an
            object: its modules are named.
        TierError: the ssd tier's directory cannot be used.

    Warns, once for a reason, where nothing at all is swapped, more than a tenth of the model is not, or what is not
    does not fit beside the budgets: with the largest part. `vb.plan.warnings` keeps that.
    """
    if not isinstance(model, nn.Module):
        return wrap_holder(model, config, runtime, overrides)
    if isinstance(model, VBModelWrapper):
        raise WrapError("the model is wrapped already; unwrap() it first")
    policy, optimizer = user_policy(overrides, runtime), take_optimizer_of(overrides)
    asked = load_config(_advised(model) if config == "auto" else config, **overrides)
    if optimizer is not None and asked.mode != "full":
        raise WrapError(f'optimizer=...: mode = "{asked.mode}" leaves optimizers alone; mode = "full" takes one over')
    if runtime is not None:
        asked = shared_config(asked, runtime, config, overrides)
    devices = devices_of(asked)
    if devices:
        return _split(model, asked, devices, alone=runtime is None and policy is None)
    asked = settled(model, asked)
    plan = with_inputs(model, plan_for(model, asked, runtime), asked)
    warn_of_plan(plan, "vbrt.wrap", stacklevel=3)
    attempt = Attempt(model, runtime)
    try:
        vb = facade_of(model, attach(model, asked, plan, runtime=runtime, policy=policy))
        if isinstance(vb, VBFullWrapper):
            _begin_training(vb, optimizer)
        return vb
    except BaseException:  # Ctrl-C may come between the two
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
    """Take the weights into the tiers and the optimizer over; undone if that fails."""
    try:
        vb.vbrt.materialize()
        if optimizer is not None:
            vb.vbrt.take_optimizer(optimizer)
    except BaseException:
        vb.vbrt.unwrap()
        raise


def _advised(model: nn.Module) -> VBConfig:
    """Return the config of the first answer of `vbrt.advise`; that of a model which fits as it is, is "dense"."""
    return advise(model).best.config or load_config("dense")
