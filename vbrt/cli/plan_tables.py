"""Tables of `vbrt plan`."""

from rich.console import Console
from rich.table import Table

from vbrt.cli.screen import add_footer, add_row, table_of
from vbrt.errors import ConfigError
from vbrt.residency.memory_needs import TierNeed
from vbrt.residency.name_patterns import common_prefix, grouped, label_of, pattern_of
from vbrt.residency.plan import Plan, format_bytes
from vbrt.residency.plan_text import picture_lines

__all__ = ["print_plan"]


def print_plan(console: Console, title: str, plan: Plan, needs: list[TierNeed], refusal: ConfigError | None) -> None:
    formats = sorted({swap.label for swap in plan.swaps})
    dtypes = sorted({swap.dtype for swap in plan.swaps})
    what = f"{len(plan.swaps)} layers {'/'.join(dtypes)} -> {'/'.join(formats)}" if plan.swaps else "nothing is swapped"
    console.print(f"{title}: {what}, computing on the {plan.compute_tier}")
    for note in (note for note in plan.notes if note not in plan.warnings):
        console.print(f"note: {note}")
    console.print()
    for line in picture_lines(plan, console.width):
        console.print(line, highlight=False, soft_wrap=True)
    tables = [_swap_table(plan)] if plan.swaps else []
    tables += [_skip_table(plan)] if plan.skipped else []
    for table in (*tables, _need_table(needs)):
        console.print()
        console.print(table)
    console.print()
    _print_verdict(console, plan, needs)
    if refusal:
        console.print(f"vbrt.wrap would refuse: {refusal}.", style="red")


def _swap_table(plan: Plan) -> Table:
    groups = grouped(plan.swaps, lambda s: (pattern_of(s.name), s.experts, s.shape, s.dtype, s.format, s.note))
    labels = [label_of([swap.name for swap in swaps]) for swaps in groups]
    prefix = common_prefix(labels)
    head = f"swapped in {prefix[:-1]}" if prefix else "swapped"
    table = table_of(head, ">layers", ">out x in", ">dense", ">pages", "home")
    notes: dict[str, int] = {}
    for label, swaps in zip(labels, groups, strict=True):
        homes: dict[str, int] = {}
        for page in (page for swap in swaps for page in swap.pages):
            homes[page.home] = homes.get(page.home, 0) + 1
        dense, pages = sum(swap.dense_bytes for swap in swaps), sum(swap.page_bytes for swap in swaps)
        where = next(iter(homes)) if len(homes) == 1 else ", ".join(f"{count} {home}" for home, count in homes.items())
        add_row(
            table,
            label.removeprefix(prefix),
            str(len(swaps)),
            " x ".join(map(str, (swaps[0].experts, *swaps[0].shape) if swaps[0].experts else swaps[0].shape)),
            format_bytes(dense),
            format_bytes(pages),
            where,
        )
        if swaps[0].note:
            notes[swaps[0].note] = notes.get(swaps[0].note, 0) + len(swaps)
    planes: dict[str, int] = {}
    for page in (page for swap in plan.swaps for page in swap.pages):
        planes[page.plane] = planes.get(page.plane, 0) + page.nbytes
    add_footer(
        table,
        "total" if len(planes) == 1 else " + ".join(f"{k} {format_bytes(v)}" for k, v in planes.items()),
        str(len(plan.swaps)),
        "",
        format_bytes(plan.swapped_bytes),
        format_bytes(plan.page_bytes),
        "",
    )
    table.caption = "\n".join(f"{count} layers: {note}" for note, count in notes.items()) or None
    table.caption_justify = "left"
    return table


def _skip_table(plan: Plan) -> Table:
    table = table_of("stays as it is", ">modules", ">bytes", "why")
    skips = sorted(plan.skipped.items(), key=lambda item: -item[1].nbytes)
    for group in sorted(grouped(skips, lambda item: item[1].reason), key=lambda g: -sum(skip.nbytes for _, skip in g)):
        labels = [label_of([name for name, _ in part]) for part in grouped(group, lambda item: pattern_of(item[0]))]
        shown = "\n".join(labels[:3]) + (f"\nand {len(labels) - 3} more like these" if len(labels) > 3 else "")
        add_row(table, shown, str(len(group)), format_bytes(sum(skip.nbytes for _, skip in group)), group[0][1].reason)
    add_footer(table, "total", str(len(skips)), format_bytes(plan.kept_bytes), "")
    return table


def _need_table(needs: list[TierNeed]) -> Table:
    table = table_of("tier", ">budget", ">pages at home", ">takes at least", ">at most", ">machine has")
    for need in needs:
        add_row(
            table,
            need.tier,
            format_bytes(need.budget_bytes),
            f"{need.pages}: {format_bytes(need.home_bytes)}",
            format_bytes(need.least_bytes),
            format_bytes(need.most_bytes),
            "?" if need.machine_bytes is None else format_bytes(need.machine_bytes),
        )
    return table


def _print_verdict(console: Console, plan: Plan, needs: list[TierNeed]) -> None:
    computing = needs[0]
    if not plan.swaps:
        console.print(plan.warnings[0].replace("nothing is swapped", "NOTHING IS SWAPPED", 1) + ".", style="bold red")
    if plan.mode == "train":
        console.print(
            f"The {computing.tier} holds all parameters, {format_bytes(plan.dense_bytes)}; gradients (as "
            "many bytes again where all train), the optimizer's state and activations come on top."
        )
    else:
        console.print(
            f"The {computing.tier} also holds the {format_bytes(plan.kept_bytes)} that stay as they are; "
            "activations and caches come on top."
        )
        console.print(
            f"The dense weights ({format_bytes(plan.dense_bytes)}) are read once, to encode them: "
            "safetensors files are mapped, other files take that much host memory while they load."
        )
    for text in plan.warnings if plan.swaps else ():
        console.print(f"{text[0].upper()}{text[1:]}.", style="yellow")
    for need in needs:
        if not need.fits:
            console.print(
                f"DOES NOT FIT: the {need.tier} tier needs {format_bytes(need.least_bytes)}, the machine has "
                f"{format_bytes(need.machine_bytes)} free.",
                style="bold red",
            )
        elif need.machine_bytes is not None and need.most_bytes > need.machine_bytes:
            spare = need.machine_bytes - (plan.unbudgeted_bytes if need is computing else 0)
            console.print(
                f"The {need.tier} may run out: {format_bytes(need.machine_bytes)} are free. Set "
                f"tiers.{need.tier}.budget to less than {format_bytes(spare)}.",
                style="yellow",
            )
