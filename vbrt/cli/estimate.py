"""`vbrt estimate`: memory of a model for a task, without weights."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vbrt.cli.machine_options import add_machine, gpu_share_of, machine_of, sizes_of, speed_of
from vbrt.cli.options import (
    add_budget,
    add_command,
    add_config,
    add_model,
    config_of,
    integration,
    locate_model,
    number,
    positive,
)
from vbrt.cli.plots import Bars, bars, check_plot
from vbrt.cli.screen import complain, console_for_stdout, warnings_as_lines, working
from vbrt.config import load_config
from vbrt.errors import NoRoomError, VBError

if TYPE_CHECKING:
    from torch import nn

    from vbrt.config import VBConfig
    from vbrt.estimation.advice.machine_rates import Rates
    from vbrt.estimation.advice.step_time import Speed
    from vbrt.estimation.memory.estimate_report import Estimate
    from vbrt.estimation.memory.option_savings import Option
    from vbrt.estimation.memory.task import Task

__all__ = ["add"]

_GIB = 1 << 30


def add(commands: argparse._SubParsersAction) -> None:
    """Add `vbrt estimate` to the subparsers `commands` of the command line."""
    parser = add_command(
        commands,
        "estimate",
        _estimate,
        help="estimate the memory of a model for a task, by tier",
        text="No weights\nare needed, and nothing is loaded. Exits with 1 if it does not fit.",
        examples="  vbrt estimate ./Llama-3.1-8B --context 8192\n"
        "  vbrt estimate ./config.json --task train --batch 4 --context 2048 --config none --options\n"
        "  vbrt estimate ./Qwen3-32B --config fp4 --gpu 'RTX 3060' --ram 64GiB\n"
        "  vbrt estimate ./Llama-3.1-8B --task train --lora 16 --checkpointing --gpu-memory 24GiB\n"
        "  vbrt estimate ./Llama-3.1-70B --gpu-memory 24GiB --ram 256GiB --ranks 4\n",
    )
    add_model(parser, "a transformers model directory, a config.json", metavar="MODEL|HF_CONFIG")
    add_task(parser)
    add_config(parser)
    add_budget(parser)
    add_machine(parser)
    parser.add_argument(
        "--ranks", metavar="N", type=positive, default=1, help="for one of N such GPUs of one host, sharded by tp_plan"
    )
    parser.add_argument("--options", action="store_true", help="also the savings of each option")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="memory by stage, .svg or .png; needs matplotlib")
    parser.add_argument("--json", action="store_true", help="all figures as JSON")


def add_task(parser: argparse.ArgumentParser) -> None:
    """Add the options of the task."""
    task = parser.add_argument_group("the task")
    task.add_argument("--task", choices=("decode", "prefill", "train"), default="decode", help="(default decode)")
    task.add_argument("--batch", type=positive, default=1, metavar="N", help="sequences, or images, at once (1)")
    task.add_argument("--context", type=positive, default=2048, metavar="N", help="tokens of each (2048)")
    task.add_argument("--new", type=positive, default=128, metavar="N", help="tokens that decode adds (128)")
    train = parser.add_argument_group("training")
    train.add_argument("--optimizer", default="AdamW", metavar="CLASS", help="of torch.optim (AdamW)")
    train.add_argument("--lora", type=number, default=0, metavar="RANK", help="PEFT's adapters on all linear layers")
    train.add_argument("--checkpointing", action="store_true", help="blocks recompute in the backward pass")
    train.add_argument("--mixed", action="store_true", help="fp32 parameters under bf16 autocast")
    train.add_argument("--attention", choices=("flash", "math"), default="flash", help="(flash)")


def task_of(args: argparse.Namespace) -> "Task":
    """Return the task of the options."""
    from vbrt.estimation.memory.task import Task

    names = ("batch", "context", "new", "optimizer", "lora", "checkpointing", "mixed", "attention")
    return Task(args.task, **{name: getattr(args, name) for name in names})


def _check_task(args: argparse.Namespace) -> None:
    """Raise VBError for options without effect on the task."""
    asked = {"--optimizer": args.optimizer != "AdamW", "--checkpointing": args.checkpointing, "--mixed": args.mixed}
    idle = [flag for flag, given in asked.items() if given and args.task != "train"]
    if idle:
        raise VBError(f"{', '.join(idle)} with --task {args.task}: applies to training only; expected --task train")


def _estimate(args: argparse.Namespace) -> int:
    _check_task(args)  # checks come before slow work
    sizes, speed = sizes_of(args), speed_of(args)
    if speed.given and args.ranks > 1:
        raise VBError(f"{', '.join(speed.given)} with --ranks: times over several GPUs are those of vbrt plan --ranks")
    if args.plot is not None:
        check_plot(args.plot)
    plain = args.config == "none"
    config = None if plain else config_of(args)
    locate_model(args, "config")
    with working("importing torch and transformers") as say, warnings_as_lines():
        hf_configs = integration("hf_configs")
        from vbrt.estimation.advice.step_time import predict
        from vbrt.estimation.memory.option_savings import with_and_without
        from vbrt.estimation.memory.planned_estimate import bare_model

        say(f"reading {args.model}")
        model, task = hf_configs.meta_model(args.model), task_of(args)
        if task.trains and task.mixed:
            model = model.float()
        machine, config = machine_of(sizes, config or load_config("fp4"))
        config, asked = (None, None) if plain else (config, gpu_share_of(args, config))
        say(f"tracing a {task.kind} of {type(model).__name__}")
        try:
            with hf_configs.unadvised():
                found = _found(model, task, (asked, config), machine=machine, ranks=args.ranks)
                options = with_and_without(model, task, config, machine, args.ranks) if args.options else ()
        except NoRoomError as error:
            say.stop()
            complain("error", error)
            return 1
    rates, step = speed.rates(), None
    if rates is not None and args.ranks == 1 and not found.refused and found.compute_tier == "gpu":
        step = predict(bare_model(model, task), found, rates)
    if args.json:
        known = {"options": [option.to_dict() for option in options]} if options else {}
        if step is not None:
            shown = {
                name: getattr(step, name) for name in ("ms", "tokens_s", "bound", "hosted_bytes", "cpu_ms", "link_ms")
            }
            known["predicted"] = {**shown, "rates": asdict(rates)}
        print(json.dumps({**found.to_dict(), **known}, indent=2))
    else:
        console = console_for_stdout()
        console.print(found.table(width=console.width), soft_wrap=True)
        if step is not None:
            console.print(_predicted(step, rates), soft_wrap=True)
        for option in options:
            console.print(str(option), soft_wrap=True)
    if args.plot is not None:
        bars(args.plot, _panels(found, options), "GiB")
    return 0 if found.fits else 1


def _found(
    model: "nn.Module", task: "Task", configs: "tuple[VBConfig | None, VBConfig | None]", **where: Any
) -> "Estimate":
    """Return the estimate of the first config; if its share of the GPU is too small, of the second, and say so."""
    from vbrt.estimation.memory.estimate import estimate

    asked, plain = configs
    try:
        return estimate(model, task, asked, **where)
    except NoRoomError as error:
        if asked is plain:
            raise
        complain("error", error)
        return estimate(model, task, plain, **where)


def _predicted(step: "Speed", rates: "Rates") -> str:
    bound = "CPU" if step.bound == "cpu" else step.bound
    computed = f", with {step.computed}" if step.computed else ""
    return (
        f"A step takes {step.ms:.1f} ms, {step.tokens_s:.1f} tokens/s, bound by the {bound}{computed}: predicted by "
        f"the rates of {rates.name} ({rates.source}), not measured."
    )


def _panels(found: "Estimate", options: "Sequence[Option]") -> list[tuple[str, Bars]]:
    """Return the stages of a step with their breakdown, and each option's peak without and with it."""
    step = "step" if found.task.trains else "call"
    stages = {stage: {k: n / _GIB for k, n in parts.items() if n} for stage, parts in found.parts.items()}
    panels = [(f"peaks of a {step}, in the {found.compute_tier} memory", stages)]
    had = [option for option in options if option.having is not None]
    if had:
        pairs = ((f"{o.name}: {word}", n) for o in had for word, n in (("without", o.without), ("with", o.having)))
        panels.append(("peak without and with each option", {label: {"peak": n / _GIB} for label, n in pairs}))
    return panels
