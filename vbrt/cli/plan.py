"""`vbrt plan`: the plan of wrapping a model, and the memory that it needs."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vbrt.cli.expert_tables import ExpertReport
from vbrt.cli.machine_options import add_machine, machine_of, rate_of, sizes_of, speed_of
from vbrt.cli.options import add_command, add_config, config_of, integration
from vbrt.cli.plan_tables import print_plan
from vbrt.cli.rank_tables import print_ways, ways_on
from vbrt.cli.screen import complain, console_for_stdout, working
from vbrt.config import DEFAULT_PRESET, Machine, VBConfig
from vbrt.errors import NoRoomError, VBError
from vbrt.integrations.model_paths import model_path
from vbrt.residency.memory_needs import tier_needs
from vbrt.residency.miss_policy import CPU_GB_PER_S
from vbrt.residency.plan import Plan
from vbrt.residency.token_cost import LINK_GB_PER_S

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add `vbrt plan` to the subparsers `commands` of the command line."""
    parser = add_command(
        commands,
        "plan",
        _plan,
        help="show the plan of wrapping a model, and the memory that it needs",
        text="No\nweights are needed. Exits with 1 if it does not fit.",
        examples="  vbrt plan ./Llama-3.1-8B\n"
        "  vbrt plan ./config.json --config exact --gpu-memory 24GiB --ram 64GiB\n"
        "  vbrt plan ./Llama-3.1-8B --set weights.format=nf4 --set tiers.gpu.budget=4GiB\n"
        "  vbrt plan ./Mixtral-8x7B --gpu-memory none --ram 32GiB --ssd 500GiB\n"
        "  vbrt plan ./Qwen3-30B-A3B --gpu-memory 8GiB --link 50 --routing qwen.routing\n"
        "  vbrt plan ./Llama-3.1-70B --config exact --gpu-memory 24GiB --link 55 --ranks 4\n",
    )
    parser.add_argument(
        "model", metavar="MODEL_DIR|HF_CONFIG", type=Path, help="a transformers model directory, or a config.json"
    )
    add_config(parser)
    machine = add_machine(parser)
    machine.add_argument(
        "--host",
        metavar="RATE",
        help="of missed experts computed by its CPU, for experts.miss (default: as measured here by vbrt tune "
        f"--machine, else {CPU_GB_PER_S:.0f})",
    )
    machine.add_argument("--drive", metavar="RATE", help=f"from its drive (default {LINK_GB_PER_S['ssd']:.0f})")
    parser.add_argument(
        "--routing", metavar="FILE", type=Path, help="a file of vb.record_routing: hit rates of routed experts"
    )
    parser.add_argument("--ranks", metavar="N", type=int, help="compare parallelism over N such GPUs of one host")
    parser.add_argument("--json", action="store_true", help="the whole plan as JSON, layer by layer")


def _plan(args: argparse.Namespace) -> int:
    config = config_of(args)
    sizes, speed = sizes_of(args), speed_of(args)
    if args.ranks is None and (idle := [flag for flag in ("--memory", "--tflops") if flag in speed.given]):
        raise VBError(f"{', '.join(idle)}: applies to the ways over several GPUs; expected --ranks N")
    given = {"cpu": speed.link_gb_s, "ssd": rate_of(args.drive, "--drive")}
    rates = LINK_GB_PER_S | {tier: rate for tier, rate in given.items() if rate is not None}
    host = rate_of(args.host, "--host")
    model_path(args.model)  # before seconds of imports
    with working("importing torch and transformers") as say:
        hf_configs = integration("hf_configs")
        from vbrt.model.planner import make_plan

        say(f"reading {args.model}")
        model = hf_configs.meta_model(args.model)
        machine, config = machine_of(sizes, config)
        try:
            plan, refusal = make_plan(model, config, machine), None
        except NoRoomError as error:
            plan, refusal = _too_large(make_plan, model, config, machine), error
    if plan is None:
        complain("error", refusal)
        return 1
    needs = tier_needs(plan, machine)
    experts = ExpertReport.of(plan, rates, args.routing)
    if experts is not None:
        fetches = any(swap.lossless for swap in plan.routed)
        experts = replace(
            experts, miss="fetch" if fetches else config.experts.miss, cpu_gb_per_s=host or _measured_host()
        )
    ways, of = None, (model, config, machine)
    if args.ranks is not None:
        ways = ways_on(args.ranks, plan, of, rates["cpu"], speed)
    if args.json:
        head = {"model": type(model).__name__, "config": config.to_dict(), "machine": asdict(machine)}
        tiers = [{**asdict(need), "fits": need.fits} for need in needs]
        routed = {} if experts is None else {"experts": experts.to_dict()}
        over = {} if ways is None else {"ranks": ways.to_dict()}
        print(json.dumps({**head, "needs": tiers, **routed, **over, **plan.to_dict()}, indent=2))
    else:
        title = f"{type(model).__name__}, config {args.config or DEFAULT_PRESET}"
        console = console_for_stdout()
        print_plan(console, title, plan, needs, refusal)
        if experts is not None:
            experts.print(console)
        if ways is not None:
            print_ways(console, ways)
    return 0 if all(need.fits for need in needs) else 1


def _too_large(make_plan: Callable[..., Plan], model: Any, config: VBConfig, machine: Machine) -> Plan | None:
    """Return a plan that does not fit, to show by how much; None if budgets allow no plan."""
    try:
        plan = make_plan(model, config, machine, charge_kept=False)
    except NoRoomError:
        return None
    return None if all(need.fits for need in tier_needs(plan, machine)) else plan


def _measured_host() -> float:
    """Return the measured GB/s of experts computed by this machine's CPU; the assumed one without a measurement."""
    from vbrt.estimation.advice.machine_rates import kept_rates

    kept = kept_rates()
    return CPU_GB_PER_S if kept is None else kept.experts_gb_s
