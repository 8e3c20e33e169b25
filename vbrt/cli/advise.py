"""`vbrt advise`: config and options for a model, a task and a machine."""

import argparse
import json
from pathlib import Path

from vbrt.cli.machine_options import add_machine, machine_of, sizes_of, speed_of
from vbrt.cli.options import (
    add_command,
    add_model,
    check_config_file,
    integration,
    locate_model,
    positive,
    write_config,
)
from vbrt.cli.screen import complain, console_for_stdout, warnings_as_lines, working
from vbrt.config import load_config
from vbrt.config.toml_text import toml_text
from vbrt.errors import ConfigError
from vbrt.estimation.memory.task import GOALS

__all__ = ["add"]


def add(commands: argparse._SubParsersAction) -> None:
    """Add `vbrt advise` to the subparsers `commands` of the command line."""
    parser = add_command(
        commands,
        "advise",
        _advise,
        help="recommend format, budgets and options for a model on a machine",
        text="Nothing\nis loaded. Exits with 1 if nothing fits.",
        examples="  vbrt advise ./Llama-3.1-8B\n"
        "  vbrt advise ./Qwen3-32B --gpu 'RTX 4090' --ram 64GiB\n"
        "  vbrt advise ./Qwen3-32B --gpu-memory 11GiB --link 12GB/s --memory 360GB/s --tflops 25.5\n"
        "  vbrt advise ./Llama-3.1-8B --goal exact --context 8192 --explain\n"
        "  vbrt advise ./Llama-3.1-8B --goal train --batch 4 --write my.toml\n",
    )
    add_model(parser, "a transformers model directory, a config.json", metavar="MODEL|HF_CONFIG")
    parser.add_argument("--goal", choices=GOALS, default="fastest", help="(default fastest)")
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="sequences at once (1)")
    parser.add_argument("--context", type=positive, default=2048, metavar="N", help="tokens of each (2048)")
    machine = add_machine(parser)
    machine.add_argument(
        "--cost-model",
        metavar="FILE",
        help="TOML: coefficients of its predicted times (default: an H200's; without a GPU, a Zen 4's)",
    )
    parser.add_argument("--explain", action="store_true", help="explain each candidate")
    parser.add_argument("--write", metavar="FILE", type=Path, help="the config as TOML")
    parser.add_argument("--json", action="store_true", help="all candidates as JSON")


def _advise(args: argparse.Namespace) -> int:
    sizes, speed = sizes_of(args), speed_of(args)
    if args.write is not None:
        check_config_file(args.write)  # before any slow work
    locate_model(args, "config")
    with working("importing torch and transformers") as say, warnings_as_lines():
        hf_configs = integration("hf_configs")
        from vbrt.estimation.advice.advise import advise

        rates = speed.rates()
        say(f"reading {args.model}")
        model = hf_configs.meta_model(args.model)
        machine, _ = machine_of(sizes, load_config("fp4"))
        say.stop()  # what follows has its own bars
        with hf_configs.unadvised():
            how = {"machine": machine, "rates": rates, "cost_model": args.cost_model}
            advice = advise(model, args.goal, **how, batch=args.batch, context=args.context)
    if args.json:
        print(json.dumps(advice.to_dict(), indent=2))
    else:
        console = console_for_stdout()
        console.print(str(advice), soft_wrap=True)
        if args.explain:
            console.print(f"\n{advice.explain()}", soft_wrap=True)
    try:
        best = advice.best
    except ConfigError as error:
        complain("error", error)
        return 1
    if not args.json:
        console.print(f"\n{best.name}: {advice.command(args.name)}", soft_wrap=True)
    if args.write is not None:
        write_config(args.write, toml_text(best.found.config or load_config("dense")))
    return 0
