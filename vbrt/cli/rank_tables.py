"""`vbrt plan --ranks N`: comparison of multi-GPU parallelism; and `vbrt tune --machine` of ranks."""

import os
from typing import TYPE_CHECKING

from rich.console import Console

from vbrt.cli.machine_options import GpuSpeed
from vbrt.cli.screen import add_row, table_of
from vbrt.errors import VBError, describe_os_error
from vbrt.residency.plan import Plan

if TYPE_CHECKING:
    from torch import nn

    from vbrt.config import Machine, VBConfig
    from vbrt.estimation.advice.parallelism import Comparison

__all__ = ["measure_ranks", "print_ways", "ways_on"]


def ways_on(
    ranks: int, plan: Plan, of: "tuple[nn.Module, VBConfig, Machine]", link_gb_s: float, speed: GpuSpeed
) -> "Comparison":
    """Compare the ways to use N GPUs, by rates measured on this machine, or those of H200s.

    Args:
        of: what was planned.
        link_gb_s: of one GPU.
        speed: of each GPU, as the user gives it, before the measured one.

    Raises:
        VBError: fewer than two ranks, or the plan computes on the CPU.
    """
    from dataclasses import replace

    from vbrt.estimation.advice.machine_rates import data_sheet, device_name, kept_rates
    from vbrt.estimation.advice.multi_gpu_rates import kept_group_rates, nvlink_rates
    from vbrt.estimation.advice.parallelism import compare_ways
    from vbrt.estimation.memory.rank_share import rank_plan

    if ranks < 2:
        raise VBError(f"--ranks {ranks}: expected 2 or more; one GPU is among the ways that are compared")
    if plan.compute_tier != "gpu":
        raise VBError(f"--ranks {ranks}: this plan computes on the cpu; name the GPUs' memory, e.g. --gpu-memory 24GiB")
    kept = kept_group_rates(ranks)
    usable = kept is not None and kept.link_gb_s > 0 and kept.name == device_name()
    group = kept if usable else nvlink_rates(ranks)
    if kept is not None and not usable:
        group = replace(group, source=f"{group.source}; what was measured here is of {kept.name}, {kept.backend}")
    rates = kept_rates()
    if rates is None or not rates.link_gb_s:  # a single link is at least as fast as concurrent ones
        rates = replace(data_sheet("H200"), link_gb_s=max(link_gb_s, kept.link_gb_s) if usable else link_gb_s)
    rates = speed.rates(rates) or rates
    model, config, machine = of
    part = rank_plan(model, ranks, config, machine)
    return compare_ways(plan, part, rates, replace(group, link_gb_s=min(group.link_gb_s, rates.link_gb_s)))


def measure_ranks(console: Console) -> None:
    """Measure the ranks that a launcher has started on this machine, and store the rates; rank 0 prints them.

    Raises VBError: they are on several machines, or cannot form a group.
    """
    import torch.distributed as dist

    from vbrt.estimation.advice.multi_gpu_rates import group_rates_file, measure_group_rates
    from vbrt.host import accelerator

    count, here = (int(os.environ.get(name, "0")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if here != count:
        raise VBError(
            f"tune --machine: {count} ranks, {here} of them on this machine; the ways of `vbrt plan --ranks` are those "
            "of one host: start ranks there only, torchrun --nproc-per-node N -m vbrt tune --machine"
        )
    if accelerator.is_available():
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    try:
        dist.init_process_group(dist.get_default_backend_for_device(accelerator.default_device()))
    except (ValueError, RuntimeError) as error:
        raise VBError(f"tune --machine: {count} ranks form no process group: {str(error).splitlines()[0]}") from error
    try:
        found = measure_group_rates()
        if dist.get_rank():
            return
        console.print(
            f"{count} ranks, {found.backend}: a sum {found.sum_us:.0f} µs and {found.sum_gb_s:.1f} GB/s, gathers "
            f"{found.gather_gb_s:.1f} GB/s,\nto the next rank {found.neighbour_gb_s:.1f} GB/s, links all at once "
            + (f"{found.link_gb_s:.1f} GB/s each" if found.link_gb_s else "none: no GPU")
        )
        console.print(f"kept in {group_rates_file(count)}", soft_wrap=True)
    except OSError as error:
        raise VBError(f"{group_rates_file(count)}: the rates were not kept: {describe_os_error(error)}") from error
    finally:
        dist.destroy_process_group()


def print_ways(console: Console, found: "Comparison") -> None:
    """Print a row per way, and the advice."""
    head = (">1 token ms", ">by", f">{found.tokens} tokens ms", ">by", ">tokens/s", ">streamed GB", ">host GB")
    table = table_of(f"on {found.ranks} GPUs", *head)
    for way in found.ways:
        one, many = way.pass_ms
        add_row(
            table,
            way.name,
            f"{one:.1f}",
            way.bound[0],
            f"{many:.0f}",
            way.bound[1],
            f"{way.tokens_s[1]:,.0f}",
            f"{way.streamed_gb:.1f}",
            f"{way.host_gb:.1f}",
        )
    console.print()
    console.print(table)
    if found.refused:
        console.print(f"tensor parallel: {found.refused}", highlight=False, soft_wrap=True)
    console.print(f"rates: {found.source}", style="dim")
    for line in found.advice:
        console.print(line, highlight=False, soft_wrap=True)
