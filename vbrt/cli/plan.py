"""`vbrt plan`: the plan of wrapping a model, and the memory that it needs."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vbrt.cli.expert_tables import ExpertReport
from vbrt.cli.machine_options import add_machine, gpu_share_of, machine_of, rate_of, sizes_of, speed_of
from vbrt.cli.options import (
    add_budget,
    add_command,
    add_config,
    add_model,
    config_of,
    integration,
    locate_model,
    positive,
)
from vbrt.cli.plan_tables import print_plan
from vbrt.cli.rank_tables import print_ways, ways_on
from vbrt.cli.screen import complain, console_for_stdout, working
from vbrt.cli.streaming_report import StreamingReport
from vbrt.config import DEFAULT_PRESET, Machine, VBConfig
from vbrt.errors import ConfigError, NoRoomError, VBError
from vbrt.residency.memory_needs import tier_needs
from vbrt.residency.miss_policy import CPU_GB_PER_S
from vbrt.residency.plan import Plan
from vbrt.residency.token_cost import LINK_GB_PER_S

if TYPE_CHECKING:
    from vbrt.estimation.memory.gpu_share import GpuShare

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
        "  vbrt plan Qwen/Qwen3-32B --gpu-memory 12GiB --ram 32GiB\n"
        "  vbrt plan ./config.json --config exact --gpu-memory 24GiB --ram 64GiB\n"
        "  vbrt plan ./Llama-3.1-8B --set weights.format=nf4 --set tiers.gpu.budget=4GiB\n"
        "  vbrt plan ./Mixtral-8x7B --gpu-memory none --ram 32GiB --ssd 500GiB\n"
        "  vbrt plan ./Qwen3-30B-A3B --gpu-memory 8GiB --link 50 --routing qwen.routing\n"
        "  vbrt plan ./Llama-3.1-70B --config exact --gpu-memory 24GiB --link 55 --ranks 4\n",
    )
    add_model(parser, "a transformers model directory, a config.json", metavar="MODEL|HF_CONFIG")
    add_config(parser)
    add_budget(parser)
    parser.add_argument(
        "--context", metavar="N", type=positive, help="tokens to have room for with --gpu-memory (2048)"
    )
    machine = add_machine(parser)
    machine.add_argument(
        "--host",
        metavar="RATE",
        help="of weights computed by its CPU where they lie, for compute.where and experts.miss (default: as measured "
        f"here by vbrt tune --machine, else {CPU_GB_PER_S:.0f})",
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
    host = rate_of(args.host, "--host")
    locate_model(args, "config")
    with working("importing torch and transformers") as say:
        hf_configs = integration("hf_configs")
        from vbrt.model.planner import make_plan

        say(f"reading {args.model}")
        model = hf_configs.meta_model(args.model)
        machine, config = machine_of(sizes, config)
        share, refusal = _share(args, model, config, machine)
        config = share.config
        try:
            plan = share.noted(make_plan(model, config, machine))
        except NoRoomError as error:
            plan, refusal = _too_large(make_plan, model, config, machine), refusal or error
    if plan is None:
        complain("error", refusal)
        return 1
    needs, (link, measured) = tier_needs(plan, machine), _measured()
    rates = LINK_GB_PER_S | {"cpu": link} | {tier: rate for tier, rate in given.items() if rate is not None}
    streaming = StreamingReport.of(plan, config, rates["cpu"], host or measured)
    experts = ExpertReport.of(plan, rates, args.routing)
    if experts is not None:
        fetches = any(swap.lossless for swap in plan.routed)
        miss = "fetch" if fetches else config.missed_experts
        experts = replace(experts, miss=miss, cpu_gb_per_s=host or measured)
    ways, of = None, (model, config, machine)
    if args.ranks is not None:
        ways = ways_on(args.ranks, plan, of, rates["cpu"], speed)
    if args.json:
        head = {"model": type(model).__name__, "config": config.to_dict(), "machine": asdict(machine)}
        tiers = [{**asdict(need), "fits": need.fits} for need in needs]
        routed = {} if experts is None else {"experts": experts.to_dict()}
        routed |= {} if streaming is None else {"streaming": streaming.to_dict()}
        over = {} if ways is None else {"ranks": ways.to_dict()}
        over |= {} if refusal is None else {"refusal": str(refusal)}
        print(json.dumps({**head, "needs": tiers, **routed, **over, **plan.to_dict()}, indent=2))
    else:
        title = f"{type(model).__name__}, config {args.config or DEFAULT_PRESET}"
        console = console_for_stdout()
        print_plan(console, title, plan, needs, refusal)
        if experts is not None:
            experts.print(console)
        if streaming is not None:
            streaming.print(console)
        if ways is not None:
            print_ways(console, ways)
    return 0 if refusal is None and all(need.fits for need in needs) else 1


def _share(
    args: argparse.Namespace, model: Any, config: VBConfig, machine: Machine
) -> tuple["GpuShare", NoRoomError | None]:
    """Return the config with the budget for a share of the GPU, as wrapping derives it, and why there is none."""
    from vbrt.estimation.memory.gpu_share import GpuShare, settle_budget

    asked = config if args.ranks is not None else gpu_share_of(args, config)
    try:
        return settle_budget(model, asked, machine), None
    except NoRoomError as error:
        return GpuShare(config), error
    except ConfigError as error:  # a model that cannot be traced
        if asked is config:
            raise
        return GpuShare(config, f"--gpu-memory is not divided by an estimate: {error}"), None


def _too_large(make_plan: Callable[..., Plan], model: Any, config: VBConfig, machine: Machine) -> Plan | None:
    """Return a plan that does not fit, to show by how much; None if budgets allow no plan."""
    try:
        plan = make_plan(model, config, machine, charge_kept=False)
    except NoRoomError:
        return None
    return None if all(need.fits for need in tier_needs(plan, machine)) else plan


def _measured() -> tuple[float, float]:
    """Return the GB/s of this machine's link, and of weights that its CPU computes, as `vbrt tune --machine` measured
    them; assumed ones without a measurement."""
    from vbrt.estimation.advice.machine_rates import kept_rates

    kept = kept_rates()
    if kept is None or not kept.link_gb_s:
        return LINK_GB_PER_S["cpu"], CPU_GB_PER_S
    return kept.link_gb_s, kept.experts_gb_s
