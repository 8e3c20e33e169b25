"""The command `vbrt`: demo, plan, run, stats, tune.

Results go to stdout, everything else (progress, warnings, errors) to stderr. Exit codes: 0 done; 1 done, and the answer
is no (the demo's results changed, the plan does not fit); 2 a wrong command, file or config; 130 interrupted.
torch and transformers are imported by the commands that need them, after what can be checked without them.
"""

import argparse
import contextlib
import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vbrt import __version__
from vbrt.config import DEFAULT_PRESET, Machine, VBConfig, assign, load_config, parse_budget, preset_names
from vbrt.errors import ConfigError, VBError
from vbrt.host.files import expanded, read_bounded, write_file
from vbrt.report.stats import Stats
from vbrt.residency.plan import FILE_HEADER_BYTES, Plan, format_bytes

if TYPE_CHECKING:
    from vbrt.integrations.minilm import DemoResult
    from vbrt.kernels.cuda.e2m1.launch_table import Launch
    from vbrt.kernels.cuda.e2m1.tuning import Case, Found

__all__ = ["TierNeed", "main", "stats_path", "tier_needs"]

_PIPE_WIDTH = 132  # columns of a table that goes into a file or a pipe


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code.

    Raises:
        SystemExit: from argparse, for --help, --version and wrong usage.
    """
    args = _parser().parse_args(argv)
    try:
        code = args.command(args)
        sys.stdout.flush()
        return code
    except VBError as error:
        _complain("error", error)
        return 2
    except KeyboardInterrupt:
        _complain("interrupted", "")
        return 130
    except BrokenPipeError:  # `vbrt plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter fails to flush at exit
        return 141


def _complain(kind: str, what: object) -> None:
    text = " ".join(str(what).split())
    print(f"vbrt: {kind}: {text}" if text else f"vbrt: {kind}", file=sys.stderr)


# -- the command line -------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vbrt",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run PyTorch models that are larger than the memory they run in.",
        epilog="examples:\n"
        "  vbrt demo                                          search with a trained model, streamed from files\n"
        "  vbrt plan ./Llama-3.1-8B --gpu-memory 8GiB         what would be swapped, and what it takes\n"
        '  vbrt run ./Llama-3.1-8B "The sea is"               wrap, generate, show hit rates\n'
        "  vbrt stats --json                                  the counters of the last run\n"
        "  vbrt tune ./Llama-3.1-8B                           look for faster launches on this machine's GPU\n",
    )
    parser.add_argument("--version", action="version", version=f"vbrt {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_plan(commands)
    _add_run(commands)
    _add_stats(commands)
    _add_tune(commands)
    return parser


def _add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], *, help: str, examples: str, text: str = ""
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=help,
        description=f"{help[0].upper()}{help[1:]}. {text}".strip(),
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=run)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="PRESET|FILE", help=f"a preset ({', '.join(preset_names())}) or a TOML file; default: fp4"
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        dest="settings",
        action="append",
        default=[],
        help="change one key of it, e.g. tiers.gpu.budget=8GiB or weights.format=nf4; repeatable",
    )


def _config(args: argparse.Namespace) -> VBConfig:
    return assign(load_config(args.config), args.settings)


def _add_demo(commands: Any) -> None:
    parser = _add_command(
        commands,
        "demo",
        _demo,
        help="search with a trained sentence encoder, dense and wrapped, and compare",
        text="The pages of the\nwrapped model lie in temporary files, memory may hold half of them. Exits with 1 if a "
        "search result changed.",
        examples="  vbrt demo\n  vbrt demo --config nf4\n",
    )
    _add_config(parser)


def _add_plan(commands: Any) -> None:
    parser = _add_command(
        commands,
        "plan",
        _plan,
        help="show what wrapping a model would do, and what the machine must have for it",
        text="No\nweights are needed. Exits with 1 if it does not fit.",
        examples="  vbrt plan ./Llama-3.1-8B\n"
        "  vbrt plan ./config.json --config exact --gpu-memory 24GiB --ram 64GiB\n"
        "  vbrt plan ./Llama-3.1-8B --set weights.format=nf4 --set tiers.gpu.budget=4GiB\n"
        "  vbrt plan ./Mixtral-8x7B --gpu-memory none --ram 32GiB --ssd 500GiB\n",
    )
    parser.add_argument(
        "model", metavar="MODEL_DIR|HF_CONFIG", type=Path, help="a transformers model directory, or a config.json"
    )
    _add_config(parser)
    machine = parser.add_argument_group("another machine than this one")
    machine.add_argument("--gpu-memory", metavar="SIZE", help='free memory of its GPU, e.g. 8GiB; "none" for no GPU')
    machine.add_argument("--ram", metavar="SIZE", help="its free host memory")
    machine.add_argument("--ssd", metavar="SIZE", help="free space on its drive; switches the ssd tier on")
    parser.add_argument("--json", action="store_true", help="the whole plan as JSON, layer by layer")


def _add_run(commands: Any) -> None:
    parser = _add_command(
        commands,
        "run",
        _run,
        help="wrap a causal language model, continue a prompt, show the stats",
        text="Greedy, and the\nprompt is taken as it is.",
        examples='  vbrt run ./Llama-3.1-8B "The sea is"\n'
        '  vbrt run ./Llama-3.1-8B "The sea is" --config my.toml --max-new-tokens 200\n'
        '  vbrt run ./Llama-3.1-8B "The sea is" --set tiers.ssd.enabled=true --set tiers.ssd.path=/nvme\n'
        "  echo The sea is | vbrt run ./Llama-3.1-8B - --json\n",
    )
    parser.add_argument("model", metavar="MODEL_DIR", type=Path, help="a directory with config, weights and tokenizer")
    parser.add_argument("prompt", help='the text to continue; "-" reads it from stdin')
    _add_config(parser)
    parser.add_argument("--max-new-tokens", metavar="N", type=_positive, default=64, help="stop after N tokens (64)")
    parser.add_argument("--json", action="store_true", help="text and stats as JSON")


def _add_stats(commands: Any) -> None:
    parser = _add_command(
        commands,
        "stats",
        _stats,
        help="show the stats of the last `vbrt run` or `vbrt demo`",
        examples="  vbrt stats\n  vbrt stats --json | jq .hit_rate\n  vbrt stats saved.json\n",
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        type=Path,
        help="JSON of Stats.to_dict() or of `vbrt run --json`; default: that of the last run",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def _add_tune(commands: Any) -> None:
    parser = _add_command(
        commands,
        "tune",
        _tune,
        help="look for faster launch configurations on this machine's GPU, and keep them",
        text="For the\nlayers of a model in nvfp4 or mxfp4, at few tokens; seconds a shape, on an idle GPU. No "
        "weights\nare needed. Each result is kept as it comes, and later processes use it by themselves.\n\n"
        "R2 WK16 ahead: two tiles of rows a warp, 16 warps along K, the next tile is read ahead.",
        examples="  vbrt tune ./Llama-3.1-8B\n"
        "  vbrt tune ./config.json --tokens 4 --set weights.format=mxfp4\n"
        "  vbrt tune --show\n",
    )
    parser.add_argument(
        "model",
        metavar="MODEL_DIR|HF_CONFIG",
        type=Path,
        nargs="?",
        help="a transformers model directory, or a config.json",
    )
    _add_config(parser)
    parser.add_argument(
        "--tokens",
        metavar="N,N",
        type=_numbers,
        default=(1, 16),
        help="numbers of tokens from 1 to 16; one stands for 1 to 8, one for 9 to 16 (1,16)",
    )
    parser.add_argument("--device", metavar="N", type=_number, default=0, help="the CUDA device (0)")
    parser.add_argument("--show", action="store_true", help="time nothing: what is kept for this GPU, and where")


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number, 1 or more")
    return int(text)


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_number(part) for part in text.split(","))


# -- demo -------------------------------------------------------------------------------------------------------------


def _demo(args: argparse.Namespace) -> int:
    config = _config(args)
    with _working("importing torch and transformers") as say:
        minilm = _needing_transformers("minilm")
        with _no_warnings_of_wrap():  # the stats say how much is not swapped
            result = minilm.run_demo(config, say=say, progress=False)
    console = _console()
    _print_search(console, minilm.QUERIES, minilm.SENTENCES, result)
    console.print(result.stats)
    _save(result.stats)
    return 1 if result.changed else 0


def _print_search(console: Console, queries: Sequence[str], sentences: Sequence[str], result: "DemoResult") -> None:
    table = _table("query, and the best sentence for it", ">dense", ">wrapped", "top 3")
    found = zip(result.dense.results(), result.wrapped.results(), strict=True)
    reordered = 0
    for query, (dense, wrapped) in enumerate(found):
        same = query not in result.changed
        reordered += same and dense != wrapped
        _row(table, queries[query], "", "", "CHANGED" if not same else "same" if dense == wrapped else "reordered")
        _row(
            table,
            f"  {sentences[dense[0]]}",
            f"{result.dense.score(query, dense[0]):.3f}",
            f"{result.wrapped.score(query, dense[0]):.3f}",
            "",
        )
        if wrapped[0] != dense[0]:
            _row(
                table,
                f"  {sentences[wrapped[0]]}",
                f"{result.dense.score(query, wrapped[0]):.3f}",
                f"{result.wrapped.score(query, wrapped[0]):.3f}",
                "now best",
            )
    console.print(table)
    console.print()
    unchanged = len(queries) - len(result.changed)
    verdict = f"{unchanged} of {len(queries)} queries find the same best sentence and the same three best"
    verdict += f" ({reordered} in another order)" if reordered else ""
    cosines, dense, wrapped = result.cosines, result.dense, result.wrapped
    sizes = [result.linear_bytes, result.page_bytes, result.memory_bytes, dense.process_bytes, wrapped.process_bytes]
    linear, pages, held, before, after = map(format_bytes, sizes)
    count = len(result.stats.layers)
    memory = f"{count} linear layers: {linear} dense; {pages} as pages in files, at most {held} of them in memory"
    process = f"{before} of memory with the dense model, {after} with the wrapped one (libraries and all)"
    seconds = f"{dense.seconds:.2f} s dense, {wrapped.seconds:.2f} s wrapped, for all sentences and queries"
    facts = Table.grid(padding=(0, 2))
    _row(facts, "model", f"{result.model}, {len(sentences)} sentences, {len(queries)} queries")
    facts.add_row("search", Text(verdict, style="bold red" if result.changed else "bold green"))
    _row(facts, "embeddings", f"cosine with the dense model's: mean {cosines.mean():.4f}, lowest {cosines.min():.4f}")
    for name, fact in (("weights", memory), ("process", process), ("time", seconds), ("", "")):
        _row(facts, name, fact)
    console.print(facts)


# -- plan -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TierNeed:
    """What a plan asks of one tier of the machine, in bytes.

    pages, home_bytes: what has its home there. least_bytes: the least that it works with (pages at home, the largest
    layer if pages pass through, and in the computing tier what is not swapped). most_bytes: the most that it will take.
    machine_bytes: what is free there, None where that is not known.
    """

    tier: str
    budget_bytes: int
    pages: int
    home_bytes: int
    least_bytes: int
    most_bytes: int
    machine_bytes: int | None

    @property
    def fits(self) -> bool:
        """Whether the machine has the least; unknown counts as yes."""
        return self.machine_bytes is None or self.least_bytes <= self.machine_bytes


def tier_needs(plan: Plan, machine: Machine) -> list[TierNeed]:
    """What a plan asks of each tier that takes part, the computing one first."""
    has = {"gpu": machine.gpu_free_bytes, "cpu": machine.cpu_available_bytes, "ssd": machine.ssd_free_bytes}
    largest = plan.largest_layer_bytes
    needs = []
    tiers = list(plan.budgets)
    for depth, tier in enumerate(tiers):
        pages = [page for swap in plan.swaps for page in swap.pages if page.home == tier]
        home = sum(page.nbytes for page in pages) + (FILE_HEADER_BYTES * len(pages) if tier == "ssd" else 0)
        below = sum(plan.home_bytes(lower) for lower in tiers[depth + 1 :])
        kept = plan.unbudgeted_bytes if depth == 0 else 0
        needs.append(
            TierNeed(
                tier,
                plan.budgets[tier],
                len(pages),
                home,
                home + kept + (largest if below else 0),
                min(plan.budgets[tier], home + below) + kept,
                has[tier],
            )
        )
    return needs


def _plan(args: argparse.Namespace) -> int:
    config = _config(args)
    if args.ssd is not None:
        path = config.tiers.ssd.path or "~/.cache/vbrt/pages"
        config = load_config(config, tiers={"ssd": {"enabled": True, "path": path}})
    sizes = {
        flag: _size(getattr(args, flag.lstrip("-").replace("-", "_")), flag)
        for flag in ("--gpu-memory", "--ram", "--ssd")
    }
    with _working("importing torch and transformers") as say:
        huggingface = _needing_transformers("huggingface")
        from vbrt.model.planner import make_plan, this_machine

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
    if args.json:
        head = {"model": type(model).__name__, "config": config.to_dict(), "machine": asdict(machine)}
        tiers = [{**asdict(need), "fits": need.fits} for need in needs]
        print(json.dumps({**head, "needs": tiers, **plan.to_dict()}, indent=2))
    else:
        title = f"{type(model).__name__}, config {args.config or DEFAULT_PRESET}"
        _print_plan(_console(), title, plan, needs, refusal)
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


def _machine(machine: Machine, sizes: dict[str, int | None]) -> Machine:
    gpu, ram, ssd = sizes["--gpu-memory"], sizes["--ram"], sizes["--ssd"]
    if gpu is not None:
        machine = replace(machine, gpu_total_bytes=gpu or None, gpu_free_bytes=gpu or None)
    if ram is not None:
        machine = replace(machine, cpu_total_bytes=ram, cpu_available_bytes=ram)
    if ssd is not None:
        machine = replace(machine, ssd_free_bytes=ssd)
    return machine


def _print_plan(console: Console, title: str, plan: Plan, needs: list[TierNeed], refusal: ConfigError | None) -> None:
    formats = sorted({swap.format + ("+exact" if swap.fine == "exact" else "") for swap in plan.swaps})
    dtypes = sorted({swap.dtype for swap in plan.swaps})
    what = f"{len(plan.swaps)} layers {'/'.join(dtypes)} -> {'/'.join(formats)}" if plan.swaps else "nothing is swapped"
    console.print(f"{title}: {what}, computing on the {plan.compute_tier}")
    for note in plan.notes if plan.swaps else plan.notes[:-1]:
        console.print(f"note: {note}")
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
    groups = _grouped(plan.swaps, lambda s: (_pattern(s.name), s.shape, s.dtype, s.format, s.note))
    labels = [_label([swap.name for swap in swaps]) for swaps in groups]
    prefix = _common_prefix(labels)
    head = f"swapped in {prefix[:-1]}" if prefix else "swapped"
    table = _table(head, ">layers", ">out x in", ">dense", ">pages", "home")
    notes: dict[str, int] = {}
    for label, swaps in zip(labels, groups, strict=True):
        homes: dict[str, int] = {}
        for page in (page for swap in swaps for page in swap.pages):
            homes[page.home] = homes.get(page.home, 0) + 1
        dense, pages = sum(swap.dense_bytes for swap in swaps), sum(swap.page_bytes for swap in swaps)
        where = next(iter(homes)) if len(homes) == 1 else ", ".join(f"{count} {home}" for home, count in homes.items())
        _row(
            table,
            label.removeprefix(prefix),
            str(len(swaps)),
            "{} x {}".format(*swaps[0].shape),
            format_bytes(dense),
            format_bytes(pages),
            where,
        )
        if swaps[0].note:
            notes[swaps[0].note] = notes.get(swaps[0].note, 0) + len(swaps)
    planes: dict[str, int] = {}
    for page in (page for swap in plan.swaps for page in swap.pages):
        planes[page.plane] = planes.get(page.plane, 0) + page.nbytes
    _foot(
        table,
        "in all" if len(planes) == 1 else " + ".join(f"{k} {format_bytes(v)}" for k, v in planes.items()),
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
    table = _table("stays as it is", ">modules", ">bytes", "why")
    skips = sorted(plan.skipped.items(), key=lambda item: -item[1].nbytes)
    for group in sorted(_grouped(skips, lambda item: item[1].reason), key=lambda g: -sum(skip.nbytes for _, skip in g)):
        labels = [_label([name for name, _ in part]) for part in _grouped(group, lambda item: _pattern(item[0]))]
        shown = "\n".join(labels[:3]) + (f"\nand {len(labels) - 3} more like these" if len(labels) > 3 else "")
        _row(table, shown, str(len(group)), format_bytes(sum(skip.nbytes for _, skip in group)), group[0][1].reason)
    _foot(table, "in all", str(len(skips)), format_bytes(plan.kept_bytes), "")
    return table


def _need_table(needs: list[TierNeed]) -> Table:
    table = _table("tier", ">budget", ">pages at home", ">takes at least", ">at most", ">machine has")
    for need in needs:
        _row(
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
        console.print(plan.notes[-1].replace("nothing is swapped", "NOTHING IS SWAPPED", 1) + ".", style="bold red")
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


def _common_prefix(names: Sequence[str]) -> str:
    """The leading parts that all dotted names share, with a dot at the end; "" for fewer than two names."""
    prefix = ""
    for level in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(names) < 2 or len(set(level)) > 1:
            break
        prefix += f"{level[0]}."
    return prefix


def _grouped(items: Sequence[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _pattern(name: str) -> str:
    """A module name without its numbers: layers of one kind share it."""
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


def _label(names: Sequence[str]) -> str:
    """One name for modules of one pattern: model.layers.0-31.mlp.up_proj."""
    parts = []
    for values in zip(*(name.split(".") for name in names), strict=True):
        numbers = sorted({int(value) for value in values if value.isdigit()})
        if len(numbers) < 2:
            parts.append(values[0])
        elif numbers[-1] - numbers[0] + 1 == len(numbers):
            parts.append(f"{numbers[0]}-{numbers[-1]}")
        else:
            parts.append(",".join(map(str, numbers)) if len(numbers) < 5 else f"{numbers[0]}..{numbers[-1]}")
    return ".".join(parts)


# -- run --------------------------------------------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> int:
    config = _config(args)
    prompt = sys.stdin.read().rstrip("\n") if args.prompt == "-" else args.prompt
    if not prompt:
        raise VBError("the prompt is empty; expected some text to continue")
    with _working("importing torch and transformers") as say:
        huggingface = _needing_transformers("huggingface")
        from vbrt.wrapper.wrapper import wrap

        say(f"loading {args.model}")
        model, tokenizer = huggingface.load_causal_lm(args.model, warn=lambda text: _complain("warning", text))
    with _no_warnings_of_wrap():
        vb = wrap(model, config)
    for text in vb.plan.warnings:
        _complain("warning", text)
    with vb:
        vb.materialize(progress=sys.stderr.isatty())
        with _working("generating") as spinner:
            speak = None if args.json else _Speaker(prompt, spinner)
            reply = huggingface.generate(vb, tokenizer, prompt, max_new_tokens=args.max_new_tokens, say=speak)
        stats = vb.stats()
    _save(stats)
    if args.json:
        print(json.dumps({"prompt": prompt, **asdict(reply), "stats": stats.to_dict()}, indent=2))
        return 0
    console = _console()
    rate = reply.new_tokens / reply.seconds if reply.seconds else 0.0
    console.print(
        f"\n\n{reply.prompt_tokens} tokens read, {reply.new_tokens} written in {reply.seconds:.1f} s: "
        f"{rate:.1f} tokens/s\n"
    )
    console.print(stats)
    return 0


@contextlib.contextmanager
def _no_warnings_of_wrap() -> Iterator[None]:
    """They are said in the words of a command."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="vbrt.wrap: ")
        yield


class _Speaker:
    """Writes text to stdout as it comes, after the prompt, and ends the spinner before the first piece."""

    def __init__(self, prompt: str, spinner: "_Spinner") -> None:
        self._before, self._spinner = prompt, spinner

    def __call__(self, text: str) -> None:
        self._spinner.stop()
        sys.stdout.write(self._before + text)
        sys.stdout.flush()
        self._before = ""


# -- stats ------------------------------------------------------------------------------------------------------------


def stats_path() -> Path:
    """Where the last run's stats are kept: $XDG_STATE_HOME/vbrt/last-stats.json, by default below ~/.local/state."""
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not base.is_absolute():  # unset, or to be ignored, says the XDG base directory specification
        base = Path("~/.local/state").expanduser()
    return base / "vbrt" / "last-stats.json"


def _stats(args: argparse.Namespace) -> int:
    path = args.file or stats_path()
    stats = _read_stats(path, given=args.file is not None)
    if args.json:
        print(json.dumps(stats.to_dict(), indent=2))
    else:
        _console().print(stats)
    return 0


_MAX_STATS_BYTES = 256 << 20  # of half a million layers


def _read_stats(path: Path, *, given: bool) -> Stats:
    try:
        data = json.loads(read_bounded(expanded(path), _MAX_STATS_BYTES).decode())
    except FileNotFoundError as error:
        hint = "expected JSON of Stats.to_dict()" if given else "`vbrt run` and `vbrt demo` leave their stats there"
        raise VBError(f"{path}: no such file; {hint}") from error
    except OSError as error:
        raise VBError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise VBError(f"{path}: not valid JSON ({error}); expected that of Stats.to_dict()") from error
    if isinstance(data, dict) and "layers" not in data and "stats" in data:
        data = data["stats"]  # what `vbrt run --json` prints
    try:
        return Stats.from_dict(data)
    except VBError as error:
        raise VBError(f"{path}: {error}") from error


def _save(stats: Stats) -> None:
    """Keep the stats for `vbrt stats`; a directory that cannot be written costs a warning, not the run."""
    path = stats_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(stats.to_dict()).encode(), mode=0o600)
    except OSError as error:
        _complain("warning", f"{path}: the stats were not kept: {error.strerror or error}")


# -- tune -------------------------------------------------------------------------------------------------------------

_TUNE_LINE = "{:>14} {:6} {:>6} {:>13} {:>7} {:>13} {:>7} {:>6}"  # 79 columns


def _tune(args: argparse.Namespace) -> int:
    config = _config(args)
    if args.model is None and not args.show:
        raise VBError("tune: no model; expected a model directory or a config.json, or --show")
    with _working("importing torch") as say, _warnings_as_lines():
        from vbrt.kernels.cuda.e2m1 import tuning

        tuning.check(args.tokens, args.device)
        if args.show:
            say.stop()
            _show_tuned(tuning, args.device)
            return 0
        say("importing transformers")
        huggingface = _needing_transformers("huggingface")
        from vbrt.model.planner import make_plan

        say(f"reading {args.model}")
        plan = make_plan(huggingface.meta_model(args.model), config)
        rows = _TuneRows(tuning.cases(plan, tokens=args.tokens, device=args.device), say)
        try:
            tuning.tune(plan, tokens=args.tokens, device=args.device, report=rows)
        finally:  # an interrupted search keeps what it has found
            say.stop()
            rows.end(tuning.tuning_file(args.device))
    return 0


class _TuneRows:
    """Writes a line for each result as it comes, and beside the spinner what is timed next."""

    def __init__(self, todo: "list[Case]", spinner: "_Spinner") -> None:
        self._todo, self._spinner, self._console, self._done = todo, spinner, _console(), 0
        self._announce()

    def _announce(self) -> None:
        if self._done < len(self._todo):
            case = self._todo[self._done]
            what = f"{case.n} x {case.k}, {case.tokens} token{'s' if case.tokens > 1 else ''}"
            self._spinner(f"timing {what} ({self._done + 1} of {len(self._todo)})")

    def __call__(self, found: "Found") -> None:
        self._spinner.stop()  # or the line would be printed into it
        if not self._done:
            self._line("out x in", "format", "tokens", "table", "µs", "found", "µs", "gain")
        case, same = found.case, found.launch == found.table
        self._line(
            f"{case.n} x {case.k}",
            case.format,
            case.tokens,
            _launch(found.table),
            f"{found.table_us:.2f}",
            "same" if same else _launch(found.launch),
            f"{found.us:.2f}",
            "" if same else f"{100 * (found.table_us / found.us - 1):.1f} %",
        )
        self._done += 1
        self._announce()
        self._spinner.start()

    def end(self, path: Path) -> None:
        if self._done:
            self._console.print(f"\n{self._done} of {len(self._todo)} kept in {path}", soft_wrap=True)

    def _line(self, *cells: object) -> None:
        self._console.print(_TUNE_LINE.format(*cells).rstrip(), soft_wrap=True)


def _launch(launch: "Launch") -> str:
    return f"R{launch.R} WK{launch.WK}{' ahead' if launch.PREFETCH else ''}"


def _show_tuned(tuning: ModuleType, device: int) -> None:
    """What is kept for a device, where shapes are whole tiles of 16 x 128 weights."""
    path, kept = tuning.tuning_file(device), tuning.tuned(device)
    console = _console()
    if kept:
        table = _table("tokens", ">out, up to", ">in, up to", "configuration")
        for (groups, rows, columns), launch in sorted(kept.items()):
            _row(table, f"{8 * groups - 7} to {8 * groups}", f"{16 * rows}", f"{128 * columns}", _launch(launch))
        console.print(table)
        console.print()
    what = f"{len(kept)} kept in" if path.exists() else "nothing is kept yet; it would be in"
    console.print(f"{what} {path}", soft_wrap=True)


@contextlib.contextmanager
def _warnings_as_lines() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_args, **_kwargs: _complain("warning", message)
        yield


# -- the screen -------------------------------------------------------------------------------------------------------


def _console() -> Console:
    is_narrow_enough = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if is_narrow_enough else _PIPE_WIDTH, highlight=False, markup=False, emoji=False)


class _Spinner:
    """What is going on now, on the terminal; calling it with a text changes the text."""

    def __init__(self, text: str) -> None:
        self._status = Console(stderr=True, markup=False).status(text) if sys.stderr.isatty() else None

    def __call__(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)

    def start(self) -> None:
        if self._status is not None:
            self._status.start()

    def stop(self) -> None:
        if self._status is not None:
            self._status.stop()


@contextlib.contextmanager
def _working(text: str) -> Iterator[_Spinner]:
    spinner = _Spinner(text)
    spinner.start()
    try:
        yield spinner
    finally:
        spinner.stop()


def _table(*heads: str) -> Table:
    """A table; a head that begins with ">" is that of a column of numbers. The first column may wrap."""
    table = Table(
        box=SIMPLE, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1), header_style="bold", footer_style="bold"
    )
    for index, head in enumerate(heads):
        is_number = head.startswith(">")
        table.add_column(
            Text(head.removeprefix(">")),
            justify="right" if is_number else "left",
            no_wrap=is_number,
            overflow="fold",
            min_width=None if is_number else 12 if index == 0 else 6,
        )
    return table


def _row(table: Table, *cells: str) -> None:
    table.add_row(*map(Text, cells))  # Text: names are not markup


def _foot(table: Table, *cells: str) -> None:
    table.show_footer = True
    for column, cell in zip(table.columns, cells, strict=True):
        column.footer = Text(cell)


def _needing_transformers(name: str) -> ModuleType:
    """A module of vbrt.integrations, or a clear word on what to install for it."""
    try:
        return importlib.import_module(f"vbrt.integrations.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("transformers", "huggingface_hub"):
            raise
        raise VBError(f"this command needs transformers ({error}); pip install transformers") from error
