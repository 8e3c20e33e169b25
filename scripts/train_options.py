"""What scripts/train was asked for: its options, the presets, and the config that decides what comes out."""

import argparse
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from scripts.lm import Options, Shape, Text
from scripts.train_files import Checkpoint, difference
from scripts.train_memory import Case, estimate_bytes
from vbrt import ArgumentError, CheckpointError
from vbrt.residency.plan import format_bytes


@dataclass(frozen=True, slots=True)
class Preset:
    """A shape, and training that suits it."""

    shape: Shape
    batch: int
    steps: int
    lr: float


PRESETS = {
    "tiny": Preset(Shape(layers=2, width=64, heads=2, context=64), batch=8, steps=200, lr=3e-3),
    "small": Preset(Shape(layers=7, width=256, heads=4, context=512), batch=64, steps=4000, lr=2e-3),
    "medium": Preset(Shape(layers=24, width=1024, heads=16, context=1024), batch=8, steps=20_000, lr=3e-4),
    "large": Preset(Shape(layers=36, width=1280, heads=20, context=1024), batch=8, steps=40_000, lr=2.5e-4),
    "xl": Preset(Shape(layers=48, width=1600, heads=25, context=1024), batch=16, steps=60_000, lr=2e-4),
    "7b": Preset(Shape(layers=34, width=4096, heads=32, context=2048), batch=16, steps=100_000, lr=1.2e-4),
}


@dataclass(frozen=True, slots=True)
class Config:
    """All that decides what comes out. A checkpoint holds it, and goes on under no other."""

    shape: Shape
    options: Options
    batch: int
    steps: int
    lr: float
    dropout: float
    seed: int
    text_digest: str
    init: str | None
    balance: float = 0.0  # weight of the loss that spreads bytes over experts

    def lr_at(self, step: int) -> float:
        """A short warm-up, then a cosine down to a tenth."""
        warm_up = min(200, self.steps // 10)
        if step < warm_up:
            return self.lr * (step + 1) / warm_up
        done = (step - warm_up) / max(1, self.steps - warm_up)
        return self.lr * (0.55 + 0.45 * math.cos(math.pi * done))

    def case(self, device: torch.device) -> Case:
        """The question of what it takes."""
        return Case(self.shape, self.batch, self.options, self.dropout, device.type)


# -- what was asked for -----------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None, summary: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/train", description=summary)
    parser.add_argument("preset", nargs="?", default="tiny", choices=list(PRESETS), help="(default: tiny)")
    parser.add_argument("--text", type=Path, help="a file, or a folder of them (default: Python's standard library)")
    parser.add_argument("--out", type=Path, help="folder of the run (default: runs/PRESET)")
    parser.add_argument("--init", type=Path, help="a model.safetensors to start from")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="(default: cuda where there is a GPU)")
    memory = parser.add_argument_group("memory")
    memory.add_argument("--mixed-precision", action="store_true", help="bf16 autocast, fp32 weights")
    memory.add_argument("--use-flash-attn", action="store_true", help="attention without its S × S scores")
    memory.add_argument("--gradient-checkpointing", action="store_true", help="compute blocks again, keep their inputs")
    memory.add_argument("--use-fp4", action="store_true", help="train through NVFP4 weights (quantization-aware)")
    memory.add_argument(
        "--vb-full",
        action="store_true",
        help="weights, gradients and optimizer state in host memory, streamed through the GPU (with --mixed-precision)",
    )
    memory.add_argument(
        "--vb-auto",
        action="store_true",
        help="turn on what the free memory asks for, and say why; never --use-fp4, which trains another model",
    )
    memory.add_argument("--ladder", action="store_true", help="measure what each option saves, and train nothing")
    numbers = parser.add_argument_group("numbers instead of the preset's")
    for name in ("layers", "width", "heads", "context", "batch", "steps"):
        numbers.add_argument(f"--{name}", type=int)
    routed = parser.add_argument_group("routed experts, in each block instead of its MLP: transformers' Qwen3-MoE")
    routed.add_argument("--experts", type=int, metavar="E", help="how many (default: none)")
    routed.add_argument("--active", type=int, metavar="K", help="of them for each byte (default: 4, or all there are)")
    routed.add_argument("--expert-width", type=int, metavar="I", help="(default: a quarter of the model's width)")
    routed.add_argument(
        "--balance",
        type=float,
        default=0.01,
        metavar="C",
        help="weight of the loss that spreads bytes evenly over experts (default: 0.01; 0 turns it off)",
    )
    numbers.add_argument("--untied", action="store_true", help="a head of its own instead of the embedding's weight")
    numbers.add_argument("--lr", type=float)
    numbers.add_argument("--dropout", type=float, default=0.0)
    numbers.add_argument("--seed", type=int, default=0)
    numbers.add_argument("--log-every", type=int, help="steps (default: a hundredth of all)")
    numbers.add_argument("--checkpoint-every", type=int, help="steps (default: a tenth of all)")
    return parser.parse_args(arguments)


def make_config(args: argparse.Namespace, text: Text) -> Config:
    """Raises ArgumentError, naming the option."""
    preset = PRESETS[args.preset]
    given = {name: getattr(args, name) for name in ("layers", "width", "heads", "context")}
    shape = replace(preset.shape, **{k: v for k, v in given.items() if v is not None}, tied=not args.untied)
    shape = with_experts(shape, args)
    batch = preset.batch if args.batch is None else args.batch
    steps = preset.steps if args.steps is None else args.steps
    counts = {
        **given,
        "batch": batch,
        "steps": steps,
        "log-every": args.log_every,
        "checkpoint-every": args.checkpoint_every,
    }
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ArgumentError(f"--{name} {value}: expected at least 1")
    if shape.width % shape.heads:
        raise ArgumentError(f"--heads {shape.heads}: expected a divisor of the width, {shape.width}")
    lr = preset.lr if args.lr is None else args.lr
    if not 0 < lr < math.inf or not 0 <= args.dropout < 1:
        raise ArgumentError(f"--lr {lr} --dropout {args.dropout}: expected lr > 0 and 0 <= dropout < 1")
    if args.vb_full and args.use_fp4:
        raise ArgumentError("--vb-full --use-fp4: weights in the tiers train in full precision; take one of them")
    options = Options(
        "vbrt" if args.use_flash_attn else "plain",
        args.mixed_precision or args.vb_full,
        args.gradient_checkpointing,
        args.use_fp4,
        args.vb_full,
    )
    init = str(args.init.resolve()) if args.init else None
    balance = args.balance if shape.experts else 0.0
    return Config(shape, options, batch, steps, lr, args.dropout, args.seed, text.digest, init, balance)


def with_experts(shape: Shape, args: argparse.Namespace) -> Shape:
    """The shape with the routed experts that were asked for. Raises ArgumentError, naming the option."""
    if args.experts is None:
        for name in ("active", "expert_width"):
            if getattr(args, name) is not None:
                option = name.replace("_", "-")
                raise ArgumentError(f"--{option} {getattr(args, name)}: of which experts? Give --experts too")
        return shape
    active = min(4, args.experts) if args.active is None else args.active
    inner = max(1, shape.width // 4) if args.expert_width is None else args.expert_width
    if args.experts < 1 or inner < 1 or not 1 <= active <= args.experts or not 0 <= args.balance < math.inf:
        raise ArgumentError(
            f"--experts {args.experts} --active {active} --expert-width {inner} --balance {args.balance}: expected at "
            "least 1 expert of a width of at least 1, from 1 to all of them active, and a balance of at least 0"
        )
    return replace(shape, experts=args.experts, active=active, inner=inner)


def auto_options(config: Config, device: torch.device, free: int) -> tuple[Options, list[str]]:
    """What to turn on for a config to fit, and the reasons."""
    options, room = replace(config.options, attention="vbrt"), int(0.9 * free)
    reasons = ["--use-flash-attn: the same result in less memory, and no slower"]
    if device.type == "cuda" and not options.mixed_precision:
        options = replace(options, mixed_precision=True)
        reasons.append("--mixed-precision: matrix units of a GPU run bf16 many times as fast as fp32")
    for name, flag in (("mixed_precision", "--mixed-precision"), ("checkpointing", "--gradient-checkpointing")):
        needed = estimate_bytes(replace(config, options=options).case(device))
        if needed > room and not getattr(options, name):
            options = replace(options, **{name: True})
            reasons.append(
                f"{flag}: about {format_bytes(needed)} without it, and {format_bytes(room)} is nine tenths "
                "of what is free"
            )
    needed = estimate_bytes(replace(config, options=options).case(device))
    if needed > room and device.type == "cuda" and not (options.full or options.fp4):
        options = replace(options, full=True, mixed_precision=True)
        reasons.append(
            f"--vb-full: about {format_bytes(needed)} without it; weights, gradients and moments in host memory"
        )
    return options, reasons


def check_fits(config: Config, device: torch.device, free: int) -> None:
    """Raises ArgumentError where the estimate is far above what is free: on a CPU the system would kill us."""
    needed = estimate_bytes(config.case(device))
    if needed > 1.25 * free:
        raise ArgumentError(
            f"not enough memory: this training needs about {format_bytes(needed)}, and "
            f"{format_bytes(free)} are free on {device.type}; take a smaller --batch or --context, or "
            "--vb-auto"
        )


def saved_config(saved: Checkpoint, config: Config) -> dict[str, Any]:
    """The config of a checkpoint. Raises CheckpointError: it has none."""
    theirs, ours = saved.state.get("config") if isinstance(saved.state, dict) else None, asdict(config)
    if isinstance(theirs, dict):
        if isinstance(theirs.get("init"), str | None):
            ours["init"] = theirs.get("init")
        _fill_in(theirs)
    wrong = difference(theirs, ours, "state.config")
    if wrong is not None:
        raise saved.damaged(wrong)
    return theirs


def _fill_in(config: dict[str, Any]) -> None:
    """Give the config of a checkpoint from before there were experts, or --vb-full, what says that there are none."""
    config.setdefault("balance", 0.0)
    if isinstance(config.get("options"), dict):
        config["options"].setdefault("full", False)
    if isinstance(config.get("shape"), dict):
        for name in ("experts", "active", "inner"):
            config["shape"].setdefault(name, 0)


def check_same(saved: dict[str, Any], config: Config, path: Path) -> None:
    """Raises CheckpointError, naming what differs: a run goes on as what it began as."""
    now = asdict(config)
    saved["options"]["checkpointing"] = now["options"]["checkpointing"]  # changes memory and time, and no bit
    for key, ours in now.items():
        pairs = ours.items() if isinstance(ours, dict) else [(key, ours)]
        theirs = saved[key] if isinstance(ours, dict) else saved
        for name, value in pairs:
            if theirs[name] != value:
                raise CheckpointError(
                    f"{path}: was trained with {name} = {theirs[name]}, and now it is {value}; ask "
                    "for the same, remove the run, or take another --out"
                )
