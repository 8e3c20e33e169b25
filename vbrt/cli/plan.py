"""`vbrt plan`: what wrapping a model would do, and what the machine must have for it."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vbrt.cli.expert_tables import ExpertReport
from vbrt.cli.options import add_command, add_config, config_of, integration
from vbrt.cli.plan_tables import print_plan
from vbrt.cli.screen import console_for_stdout, working
from vbrt.config import DEFAULT_PRESET, Machine, VBConfig, load_config, parse_budget
from vbrt.errors import ConfigError, VBError
from vbrt.residency.needs import tier_needs
from vbrt.residency.plan import Plan
from vbrt.residency.token_cost import LINK_GB_PER_S

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add `vbrt plan` to the subparsers `commands` of the command line."""
    parser = add_command(
        commands,
        "plan",
        _plan,
        help="show what wrapping a model would do, and what the machine must have for it",
        text="No\nweights are needed. Exits with 1 if it does not fit.",
        examples="  vbrt plan ./Llama-3.1-8B\n"
        "  vbrt plan ./config.json --config exact --gpu-memory 24GiB --ram 64GiB\n"
        "  vbrt plan ./Llama-3.1-8B --set weights.format=nf4 --set tiers.gpu.budget=4GiB\n"
        "  vbrt plan ./Mixtral-8x7B --gpu-memory none --ram 32GiB --ssd 500GiB\n"
        "  vbrt plan ./Qwen3-30B-A3B --gpu-memory 8GiB --link 50 --routing qwen.routing\n",
    )
    parser.add_argument(
        "model", metavar="MODEL_DIR|HF_CONFIG", type=Path, help="a transformers model directory, or a config.json"
    )
    add_config(parser)
    machine = parser.add_argument_group("another machine than this one")
    machine.add_argument("--gpu-memory", metavar="SIZE", help='free memory of its GPU, e.g. 8GiB; "none" for no GPU')
    machine.add_argument("--ram", metavar="SIZE", help="its free host memory")
    machine.add_argument("--ssd", metavar="SIZE", help="free space on its drive; switches the ssd tier on")
    machine.add_argument(
        "--link", metavar="GB/s", help=f"from host memory to its GPU (default {LINK_GB_PER_S['cpu']:.0f})"
    )
    machine.add_argument("--drive", metavar="GB/s", help=f"from its drive (default {LINK_GB_PER_S['ssd']:.0f})")
    parser.add_argument(
        "--routing", metavar="FILE", type=Path, help="a file of vb.record_routing: hit rates of routed experts"
    )
    parser.add_argument("--json", action="store_true", help="the whole plan as JSON, layer by layer")


def _plan(args: argparse.Namespace) -> int:
    config = config_of(args)
    if args.ssd is not None:
        path = config.tiers.ssd.path or "~/.cache/vbrt/pages"
        config = load_config(config, tiers={"ssd": {"enabled": True, "path": path}})
    sizes = {
        flag: _size(getattr(args, flag.lstrip("-").replace("-", "_")), flag)
        for flag in ("--gpu-memory", "--ram", "--ssd")
    }
    rates = {**LINK_GB_PER_S, **_rate(args.link, "--link"), **_rate(args.drive, "--drive")}
    with working("importing torch and transformers") as say:
        huggingface = integration("huggingface")
        from vbrt.model.machine import this_machine
        from vbrt.model.planner import make_plan

        say(f"reading {args.model}")
        model = huggingface.meta_model(args.model)
        machine = _machine(this_machine(config), sizes)
        try:
            plan, refusal = make_plan(model, config, machine), None
        except ConfigError as error:
            plan, refusal = _too_large(make_plan, model, config, machine), error
            if plan is None:
                raise
    needs = tier_needs(plan, machine)
    experts = ExpertReport.of(plan, rates, args.routing)
    if args.json:
        head = {"model": type(model).__name__, "config": config.to_dict(), "machine": asdict(machine)}
        tiers = [{**asdict(need), "fits": need.fits} for need in needs]
        routed = {} if experts is None else {"experts": experts.to_dict()}
        print(json.dumps({**head, "needs": tiers, **routed, **plan.to_dict()}, indent=2))
    else:
        title = f"{type(model).__name__}, config {args.config or DEFAULT_PRESET}"
        console = console_for_stdout()
        print_plan(console, title, plan, needs, refusal)
        if experts is not None:
            experts.print(console)
    return 0 if all(need.fits for need in needs) else 1


def _too_large(make_plan: Callable[..., Plan], model: Any, config: VBConfig, machine: Machine) -> Plan | None:
    """A plan that does not fit and shows by how much, or None where budgets forbid any."""
    try:
        plan = make_plan(model, config, machine, charge_kept=False)
    except ConfigError:
        return None
    return None if all(need.fits for need in tier_needs(plan, machine)) else plan


def _size(text: str | None, flag: str) -> int | None:
    """Bytes of a size on the command line; 0 for "none", None where it was not given."""
    if text is None:
        return None
    if text == "none" and flag == "--gpu-memory":
        return 0
    expected = "expected bytes, or a size such as 8GiB" + (', or "none"' if flag == "--gpu-memory" else "")
    try:
        budget = parse_budget(int(text) if text.isdecimal() else text, where=flag)
    except ConfigError as error:
        raise VBError(f"{flag} {text}: {expected}") from error
    if budget.kind != "bytes":
        raise VBError(f"{flag} {text}: {expected}")
    return int(budget.amount)


def _rate(text: str | None, flag: str) -> dict[str, float]:
    """GB/s on the command line, by the tier that they come from; empty where it was not given."""
    if text is None:
        return {}
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise VBError(f"{flag} {text}: expected gigabytes a second, such as 50")
    return {"cpu" if flag == "--link" else "ssd": rate}


def _machine(machine: Machine, sizes: dict[str, int | None]) -> Machine:
    gpu, ram, ssd = sizes["--gpu-memory"], sizes["--ram"], sizes["--ssd"]
    if gpu is not None:
        machine = replace(machine, gpu_total_bytes=gpu or None, gpu_free_bytes=gpu or None)
    if ram is not None:
        machine = replace(machine, cpu_total_bytes=ram, cpu_available_bytes=ram)
    if ssd is not None:
        machine = replace(machine, ssd_free_bytes=ssd)
    return machine
