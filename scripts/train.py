"""Train a GPT-like language model on this machine, within its memory, through kills, to the same bits.

A run is a folder: `checkpoint.safetensors` (all that training goes on from), `log.jsonl` (what was computed: the same
file, byte for byte, however often the run was killed), `speed.jsonl` (what a clock and an allocator said) and at the
end `model.safetensors`. The same command starts it, goes on with it, and does nothing more once it is done.

Same bits, because each step depends on nothing but the checkpoint: batches follow from the seed and the step,
generators are saved and restored, and torch is held to its deterministic kernels.

A model that trained in 4 bits leaves `planes` too, what its forward computed with, for `vbrt.load`.
"""

import argparse
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with it; read when CUDA starts

import torch
from rich.console import Console
from torch import Tensor, nn

from scripts.lm import Options, Shape, Text, Windows, build, loss_of, make_optimizer, read_text
from scripts.train_display import Display, memory_bytes
from scripts.train_files import Checkpoint, JsonLines, claimed, difference, write_checkpoint, write_tensors
from scripts.train_memory import Case, estimate_bytes, free_bytes, ladder_table, measure, rungs
from vbrt import ArgumentError, CheckpointError, VBError, watch_nonfinite
from vbrt.errors import NonfiniteError
from vbrt.residency.plan import format_bytes
from vbrt.saves.tensorfile import TensorFile, TensorInfo

HELD_OUT_WINDOWS = 256  # of the held-out text, at each look at it


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


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/train", description=__doc__.splitlines()[0])
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
        "--vb-auto",
        action="store_true",
        help="turn on what the free memory asks for, and say why; never --use-fp4, which trains another model",
    )
    memory.add_argument("--ladder", action="store_true", help="measure what each option saves, and train nothing")
    numbers = parser.add_argument_group("numbers instead of the preset's")
    for name in ("layers", "width", "heads", "context", "batch", "steps"):
        numbers.add_argument(f"--{name}", type=int)
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
    batch = preset.batch if args.batch is None else args.batch
    steps = preset.steps if args.steps is None else args.steps
    counts = {
        **asdict(shape),
        "batch": batch,
        "steps": steps,
        "log-every": args.log_every,
        "checkpoint-every": args.checkpoint_every,
    }
    for name, value in counts.items():
        if value is not None and value < 1 and name != "tied":
            raise ArgumentError(f"--{name} {value}: expected at least 1")
    if shape.width % shape.heads:
        raise ArgumentError(f"--heads {shape.heads}: expected a divisor of the width, {shape.width}")
    lr = preset.lr if args.lr is None else args.lr
    if not 0 < lr < math.inf or not 0 <= args.dropout < 1:
        raise ArgumentError(f"--lr {lr} --dropout {args.dropout}: expected lr > 0 and 0 <= dropout < 1")
    options = Options(
        "vbrt" if args.use_flash_attn else "plain", args.mixed_precision, args.gradient_checkpointing, args.use_fp4
    )
    init = str(args.init.resolve()) if args.init else None
    return Config(shape, options, batch, steps, lr, args.dropout, args.seed, text.digest, init)


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
    if isinstance(theirs, dict) and isinstance(theirs.get("init"), str | None):
        ours["init"] = theirs.get("init")
    wrong = difference(theirs, ours, "state.config")
    if wrong is not None:
        raise saved.damaged(wrong)
    return theirs


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


# -- training ---------------------------------------------------------------------------------------------------------


class Trainer:
    """A model, its optimizer, and how far they are."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        torch.manual_seed(config.seed)
        self.model = build(config.shape, config.options, device, dropout=config.dropout)
        self.optimizer = make_optimizer(self.model, config.lr)
        self.step, self.losses, self.log_bytes = 0, [], 0  # losses since the last line of the log

    def state(self) -> dict[str, Any]:
        """All that the next step depends on. The position in the data is the step."""
        return {
            "config": asdict(self.config),
            "step": self.step,
            "losses": self.losses,
            "log_bytes": self.log_bytes,
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "random": self.random(),
        }

    def restore(self, saved: Checkpoint) -> None:
        """Be where a checkpoint was written. Raises CheckpointError: it is not one of this training."""
        self.check(saved)
        state = saved.read()
        try:
            self.set_state(state)
        except (RuntimeError, ValueError, TypeError) as error:  # a generator's state, a history of scales
            raise saved.damaged(f"torch cannot go on from it: {str(error).splitlines()[0]}") from error

    def check(self, saved: Checkpoint) -> None:
        """Raises CheckpointError where a checkpoint has what this training cannot have, before its tensors are read."""
        try:
            wrong = difference(saved.state, self._like(saved.state), "state") or self._wrong_groups(saved.state)
        except (KeyError, TypeError, AttributeError) as error:
            raise saved.damaged(f"state has no {error}") from error
        step, losses = saved.state["step"], saved.state["losses"]
        if wrong is None and not (0 <= step <= self.config.steps and saved.state["log_bytes"] >= 0):
            wrong = f"state.step is {step} of {self.config.steps}, with {saved.state['log_bytes']} bytes of log"
        if wrong is None and not all(type(loss) is float and math.isfinite(loss) for loss in losses):
            wrong = f"state.losses is {losses!r:.80}"
        if wrong is not None:
            raise saved.damaged(wrong)

    def _like(self, saved: dict[str, Any]) -> dict[str, Any]:
        """A state of this training, as long after its start as another."""
        own = self.state()
        histories = {
            name: TensorInfo(name, torch.uint8, info.shape)
            for name, info in saved["model"].items()
            if name.endswith(".separation") and name.removesuffix("separation") + "weight" in own["model"]
        }
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        moments = {i: {"step": torch.tensor(0.0), "exp_avg": p, "exp_avg_sq": p} for i, p in enumerate(parameters)}
        optimizer = {"state": moments if saved["step"] else {}, "param_groups": saved["optimizer"]["param_groups"]}
        random = {name: own["random"].get(name, state) for name, state in saved["random"].items()} | {
            "cpu": own["random"]["cpu"]
        }
        return own | {
            "config": saved["config"],
            "losses": saved["losses"],
            "model": own["model"] | histories,
            "optimizer": optimizer,
            "random": random,
        }

    def _wrong_groups(self, saved: dict[str, Any]) -> str | None:
        """Where an optimizer has other settings than the config gives it; its lr is set in each step."""
        theirs, ours = saved["optimizer"]["param_groups"], self.optimizer.state_dict()["param_groups"]
        if len(theirs) != len(ours):
            return f"state.optimizer.param_groups has {len(theirs)} groups; expected {len(ours)}"
        for number, (group, own) in enumerate(zip(theirs, ours, strict=True)):
            for name, value in group.items():
                wanted = list(own[name]) if isinstance(own.get(name), tuple) else own.get(name)
                chosen_here = name in ("foreach", "fused", "capturable") and (value is None or type(value) is bool)
                if value != wanted and not chosen_here and not (name == "lr" and type(value) is float):
                    return f"state.optimizer.param_groups.{number}.{name} is {value!r:.80}; expected {wanted!r:.80}"
        return None

    def set_state(self, state: dict[str, Any]) -> None:
        """Be where a state was taken."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.losses, self.log_bytes = state["step"], state["losses"], state["log_bytes"]
        self.set_random(state["random"])

    def random(self) -> dict[str, Tensor]:
        """The states of torch's generators."""
        cuda = {"cuda": torch.cuda.get_rng_state()} if self.device.type == "cuda" else {}
        return {"cpu": torch.get_rng_state(), **cuda}

    def set_random(self, states: dict[str, Tensor]) -> None:
        """Put the generators where they were."""
        torch.set_rng_state(states["cpu"])
        if self.device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"])

    def start_from(self, path: Path) -> None:
        """Take the weights of a file. Raises CheckpointError: missing, damaged, or of another shape."""
        file, parameters = TensorFile(path), dict(self._plain().named_parameters())
        for name, parameter in parameters.items():
            shape = file.tensors[name].shape if name in file.tensors else None
            if shape != tuple(parameter.shape):
                raise CheckpointError(
                    f"{path}: {name} is {'missing' if shape is None else shape} there, and "
                    f"{tuple(parameter.shape)} here; start from a model of the same shape"
                )
            parameter.data.copy_(file.read(name))

    def weights(self) -> dict[str, Tensor]:
        """The parameters by name, tied ones once."""
        return dict(self._plain().named_parameters())

    def _plain(self) -> nn.Module:
        return self.model.model if self.config.options.fp4 else self.model

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Of a batch, in nats a byte."""
        with self.config.options.autocast(self.device):
            return self.model(ids.to(self.device), targets.to(self.device))

    def advance(self, ids: Tensor, targets: Tensor) -> dict[str, float]:
        """One step; its loss, the gradient's norm and the learning rate.

        Raises:
            NonfiniteError: the loss or a gradient is not finite, and where that began; no weight has changed.
        """
        random, lr = self.random(), self.config.lr_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self.loss(ids, targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        loss, norm = torch.stack([loss.detach(), norm]).tolist()  # the step's one wait for the device
        if not math.isfinite(loss + norm):
            self.set_random(random)
            raise NonfiniteError(
                f"step {self.step + 1}: the loss is {loss} and the gradient's norm {norm}; "
                f"{self.blame(ids, targets)}. Take a lower --lr"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.losses.append(loss)
        return {"loss": loss, "grad_norm": norm, "lr": lr}

    def blame(self, ids: Tensor, targets: Tensor) -> str:
        """Where a batch first goes out of bounds: the forward is run again under a watch."""
        with watch_nonfinite(self.model) as watch, torch.no_grad():
            self.loss(ids, targets)
        if watch.first is not None:
            return str(watch.first)
        bad = [name for name, p in self.weights().items() if p.grad is not None and not p.grad.isfinite().all()]
        return f"all layers' outputs are finite, and the gradients that are not are of {', '.join(bad[-3:]) or 'none'}"


def train(trainer: Trainer, text: Text, out: Path, *, log_every: int, checkpoint_every: int) -> None:
    """From where the trainer is to the end of its config."""
    config, device = trainer.config, trainer.device
    windows = Windows(text.train, config.shape.context, config.batch, config.seed)
    began, since = time.perf_counter(), trainer.step
    with (
        JsonLines(out / "log.jsonl", trainer.log_bytes) as log,
        JsonLines(out / "speed.jsonl", None) as speed,
        Display(trainer.step, config.steps) as display,
    ):
        while trainer.step < config.steps:
            figures = trainer.advance(*windows.batch(trainer.step))
            step, last = trainer.step, trainer.step == config.steps
            if step % log_every == 0 or last:
                loss, trainer.losses = sum(trainer.losses) / len(trainer.losses), []
                tokens = step * config.batch * config.shape.context
                record = {"step": step, **figures, "loss": loss, "tokens": tokens}
                seconds = time.perf_counter() - began
                rate = (step - since) * config.batch * config.shape.context / seconds
                measured = {"step": step, "tokens_per_s": rate, "memory_bytes": memory_bytes(device)}
                log.write(record)
                speed.write(measured)
                display.step(record, measured)
                began, since = time.perf_counter(), step
            if step % checkpoint_every == 0 or last:
                with config.options.autocast(device):
                    loss = loss_of(trainer.model, text.held_out, config.shape.context, at_most=HELD_OUT_WINDOWS)
                log.write({"step": step, "held_out_loss": loss, "held_out_perplexity": math.exp(loss)})
                display.say(f"step {step}  held-out loss {loss:.4f}, perplexity a byte {math.exp(loss):.4f}")
                trainer.log_bytes = log.sync()
                write_checkpoint(out / "checkpoint.safetensors", trainer.state())
                began, since = time.perf_counter(), step


def run(args: argparse.Namespace) -> None:
    """What the command line asks for. Raises VBError."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device cuda: torch finds no CUDA device here; leave it out, or install torch for CUDA")
    text = read_text(args.text, args.context or PRESETS[args.preset].shape.context)
    config = make_config(args, text)
    if args.ladder:
        case = config.case(device)
        Console(width=None if sys.stdout.isatty() else 110).print(
            ladder_table(case, [measure(name, rung) for name, rung in rungs(case)])
        )
        return
    out = args.out or ROOT / "runs" / args.preset
    with claimed(out):
        go_on(args, config, text, device, out)


def go_on(args: argparse.Namespace, config: Config, text: Text, device: torch.device, out: Path) -> None:
    """Begin the run of a folder, or go on with it, to its end. Raises VBError."""
    path = out / "checkpoint.safetensors"
    saved = Checkpoint(path) if path.exists() else None
    began_as = saved_config(saved, config) if saved else None
    if args.vb_auto and saved:
        config = replace(config, options=Options(**began_as["options"]))
        print("--vb-auto: as the checkpoint has it")
    elif args.vb_auto:
        options, reasons = auto_options(config, device, free_bytes(device))
        config = replace(config, options=options)
        print("--vb-auto turned on " + "\n                and ".join(reasons))
    if saved:
        check_same(began_as, config, path)
    check_fits(config, device, free_bytes(device))
    trainer = Trainer(config, device)
    if saved:
        trainer.restore(saved)
    elif args.init:
        trainer.start_from(args.init)
    del saved
    shape = config.shape
    print(
        f"{shape.layers} layers × {shape.width}, {shape.parameters:,} parameters, on {device.type}; batch "
        f"{config.batch} × {shape.context}; about {format_bytes(estimate_bytes(config.case(device)))} estimated"
    )
    print(f"text: {text.source}, {len(text.train):,} bytes, {len(text.held_out):,} more held out")
    if trainer.step:
        done = ": all of them; there is nothing left to do" if trainer.step == config.steps else ", going on from there"
        print(f"{path}: step {trainer.step} of {config.steps}{done}", flush=True)
    train(
        trainer,
        text,
        out,
        log_every=args.log_every or max(1, config.steps // 100),
        checkpoint_every=args.checkpoint_every or max(1, config.steps // 10),
    )
    if not (out / "model.safetensors").exists():
        write_tensors(out / "model.safetensors", trainer.weights())
    if config.options.fp4 and not (out / "planes" / "vbrt.json").exists():
        trainer.model.save(out / "planes")


def main(arguments: list[str] | None = None) -> None:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid, which costs time
    args = parse(arguments)
    try:
        run(args)
    except VBError as error:
        sys.exit(f"error: {error}")
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):  # a CPU's
            raise
        sys.exit(f"error: out of memory: {str(error).splitlines()[0]} Take a smaller --batch, or --vb-auto")
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
