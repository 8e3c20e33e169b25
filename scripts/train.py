"""Train a GPT-like language model on this machine, within its memory, through kills, to the same bits.

A run is a folder: `checkpoint.safetensors` (all that training goes on from), `log.jsonl` (what was computed: the same
file, byte for byte, however often the run was killed), `speed.jsonl` (what a clock and an allocator said) and at the
end `model.safetensors`. The same command starts it, goes on with it, and does nothing more once it is done.

Same bits, because each step depends on nothing but the checkpoint: batches follow from the seed and the step,
generators are saved and restored, and torch is held to its deterministic kernels.

With `--vb-full` weights, gradients and the optimizer's state live in the tiers of vbrt, for models larger than the GPU,
and the checkpoint is a folder, `checkpoint`.

With `--experts` the model is transformers' Qwen3-MoE, and the run's folder with its `config.json` a checkpoint of it.

A model that trained in 4 bits leaves `planes` too, what its forward computed with, for `vbrt.load`.
"""

import argparse
import math
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with it; read when CUDA starts

import torch
from rich.console import Console
from torch import Tensor, nn

from scripts.lm import Options, Text, Windows, build, loss_of, make_optimizer, read_text
from scripts.train_display import Display, memory_bytes
from scripts.train_files import Checkpoint, JsonLines, claimed, difference, write_checkpoint, write_tensors
from scripts.train_full import FOLDER, FullCheckpoint, checkpoint_in, wrapped
from scripts.train_memory import estimate_bytes, free_bytes, ladder_table, measure, rungs
from scripts.train_options import (
    PRESETS,
    Config,
    auto_options,
    check_fits,
    check_same,
    make_config,
    parse,
    saved_config,
)
from vbrt import ArgumentError, CheckpointError, VBError, watch_nonfinite
from vbrt.errors import NonfiniteError
from vbrt.residency.plan import format_bytes
from vbrt.saves.files.safetensors_file import TensorFile, TensorInfo

HELD_OUT_WINDOWS = 256  # of the held-out text, at each look at it


# -- training ---------------------------------------------------------------------------------------------------------


class Trainer:
    """A model, its optimizer, and how far they are."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        torch.manual_seed(config.seed)
        self.model = build(config.shape, config.options, device, dropout=config.dropout, balance=config.balance)
        self.optimizer = make_optimizer(self.model, config.lr)
        self.step, self.losses, self.log_bytes = 0, [], 0  # losses since the last line of the log

    def state(self) -> dict[str, Any]:
        """All that the next step depends on. The position in the data is the step."""
        model, optimizer = dict(self.model.state_dict()), self.optimizer.state_dict()
        return self.progress() | {"model": model, "optimizer": optimizer}

    def progress(self) -> dict[str, Any]:
        """What the next step depends on beside the model and its optimizer."""
        return {
            "config": asdict(self.config),
            "step": self.step,
            "losses": self.losses,
            "log_bytes": self.log_bytes,
            "random": self.random(),
        }

    def save(self, out: Path) -> Path:
        """Write a checkpoint into the folder of the run; return where. Raises CheckpointError."""
        write_checkpoint(out / "checkpoint.safetensors", self.state())
        return out / "checkpoint.safetensors"

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
            if name.endswith(".separation")
            and {name.removesuffix("separation") + "weight", name.removesuffix(".separation")} & own["model"].keys()
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
        file, parameters = TensorFile(path), dict(self.plain().named_parameters())
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
        return dict(self.plain().named_parameters())

    def plain(self) -> nn.Module:
        """The model, without what wraps it."""
        return self.model.module if self.config.options.fp4 or self.config.options.full else self.model

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


class FullTrainer(Trainer):
    """A model in the tiers, its optimizer, and how far they are."""

    def __init__(self, config: Config, device: torch.device, init: Path | None = None) -> None:
        built = replace(config, options=replace(config.options, checkpointing=False))
        super().__init__(built, torch.device("cpu"))
        self.config, self.device = config, device
        if init:
            self.start_from(init)
        self.model = wrapped(self.model, self.optimizer, device, checkpointing=config.options.checkpointing)

    def save(self, out: Path) -> Path:
        """Write a checkpoint into the folder of the run, one weight at a time."""
        return self.model.save_checkpoint(out / FOLDER, extra=self.progress(), progress=False)

    def restore(self, saved: FullCheckpoint) -> None:
        """Be where a checkpoint was written."""
        state = self.model.load_checkpoint(saved.path, progress=False)
        self.step, self.losses, self.log_bytes = state["step"], state["losses"], state["log_bytes"]
        self.set_random(state["random"])

    def weights(self) -> dict[str, Tensor]:
        """The fp32 weights by name, tied ones once."""
        names = {name for name, _ in self.model.named_parameters()}
        return {name: value for name, value in self.model.state_dict().items() if name in names}


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
                trainer.save(out)
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
    saved = checkpoint_in(out)
    began_as = saved_config(saved, config) if saved else None
    if args.vb_auto and saved:
        config = replace(config, options=Options(**began_as["options"]))
        print("--vb-auto: as the checkpoint has it")
    elif args.vb_auto:
        options, reasons = auto_options(config, device, free_bytes(device))
        config = replace(config, options=options)
        print("--vb-auto turned on " + "\n                and ".join(reasons))
    if saved:
        check_same(began_as, config, saved.path)
    check_fits(config, device, free_bytes(device))
    trainer = begun(config, device, None if saved else args.init)
    if saved:
        trainer.restore(saved)
    path = saved.path if saved else None
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
    if shape.experts:
        trainer.plain().config.to_json_file(out / "config.json")
    if config.options.fp4 and not (out / "planes" / "vbrt.json").exists():
        trainer.model.save(out / "planes")


def begun(config: Config, device: torch.device, init: Path | None) -> Trainer:
    """The trainer that a config asks for, with the weights of a file if one is given. Raises VBError."""
    if config.options.full:
        return FullTrainer(config, device, init)
    trainer = Trainer(config, device)
    if init:
        trainer.start_from(init)
    return trainer


def main(arguments: list[str] | None = None) -> None:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid, which costs time
    args = parse(arguments, __doc__.splitlines()[0])
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
