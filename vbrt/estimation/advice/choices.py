"""Result of `vbrt.advise`: candidates, the Pareto front, the best one, and why the others lose."""

import html
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vbrt.config import Machine, VBConfig
from vbrt.config.budgets import CONTEXT_BYTES
from vbrt.config.format_records import FORMATS
from vbrt.errors import ConfigError
from vbrt.estimation.advice.cost_model import CostModel
from vbrt.estimation.advice.machine_rates import Rates
from vbrt.estimation.advice.step_time import Speed
from vbrt.estimation.memory.estimate_report import Estimate
from vbrt.estimation.memory.task import Task
from vbrt.libraries.transformers_api import checkpointing_name
from vbrt.residency.byte_text import format_bytes
from vbrt.residency.memory_needs import machine_bytes

__all__ = ["Advice", "Choice", "Nearest"]

_SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"  # as `vbrt` sets it for itself
_FP8_NOISE = 0.033  # relative error of a layer from FP8 activations, and weights rounded once more
_INT8_NOISE = 0.007  # maximum relative error of int8 activations
_ALIKE = 1.05  # predicted times within this factor count as equal


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run a task.

    Attributes:
        config: of the wrapper, with its budgets; None: unwrapped.
        preset: the config's origin.
        share: resident share of its pages; None: as many as fit.
        found: its memory; None if it cannot be planned, with `why`.
        speed: its time; None if it does not fit.
        missing: the tier that is too small, and the missing bytes.
        longest: its task has the longest context that fits.
    """

    name: str
    task: Task
    config: VBConfig | None
    found: Estimate | None = None
    speed: Speed | None = None
    missing: tuple[str, int] | None = None
    why: str = ""
    longest: bool = False
    preset: str | None = None
    share: float | None = None

    @property
    def fits(self) -> bool:
        """True if it fits in the machine's memory."""
        return self.speed is not None

    @property
    def lossless(self) -> bool:
        """True if results equal the model's own bit for bit."""
        if self.config is None or self.found is None:
            weights = None if self.config is None else self.config.weights
            return weights is None or weights.fine == "exact" or FORMATS[weights.format].lossless
        return all(swap.lossless for swap in self.found.plan.swaps)

    @property
    def noise(self) -> float:
        """Relative error of rounded weights and of FP8 or int8 activations; 0 if lossless."""
        if self.lossless:
            return 0.0
        plan, compute = self.found.plan, self.found.config.compute
        weights = max(FORMATS[swap.format].noise for swap in plan.swaps if not swap.lossless)
        return math.hypot(weights, compute.fp8 * _FP8_NOISE, compute.int8 * _INT8_NOISE)

    @property
    def bits(self) -> int:
        """Fewest bits of rounded weights' codes; 0 without rounded weights."""
        swaps = () if self.lossless else self.found.plan.swaps
        return min((FORMATS[swap.format].bits for swap in swaps if not swap.lossless), default=0)

    @property
    def rounds_moments(self) -> bool:
        """True if optimizer moments are rounded to 8 bits."""
        config = None if self.found is None else self.found.config
        return config is not None and config.mode == "full" and config.training.moments != "fp32"

    @property
    def given_up(self) -> tuple[bool, float, bool]:
        """Compromises of a way to train, the worst first: adapters only, weight noise, rounded moments."""
        return bool(self.task.lora), self.noise, self.rounds_moments

    @property
    def reason(self) -> str:
        """Why it does not fit; "" if it does."""
        if self.missing is not None:
            return f"the {self.missing[0]} lacks {format_bytes(self.missing[1])}"
        return self.why

    def settings(self) -> tuple[str, ...]:
        """Return the keys that differ from the preset, in the form of --set."""
        if self.found is None or self.found.config is None:
            return ()
        config = self.found.config
        tier = self.found.compute_tier
        found = [f"tiers.{tier}.budget={getattr(config.tiers, tier).budget}"]
        if config.tiers.ssd.enabled:
            found += ["tiers.ssd.enabled=true", f"tiers.ssd.path={config.tiers.ssd.path}"]
        if config.compute.int8:
            found.append("compute.int8=true")
        if self.rounds_moments:
            found.append(f"training.moments={config.training.moments}")
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        speed = self.speed
        return {
            "name": self.name,
            "preset": self.preset,
            "fits": self.fits,
            "lossless": self.lossless,
            "noise": self.noise if self.fits else None,
            "context": self.task.context,
            "batch": self.task.batch,
            "tiers": None if self.found is None else self.found.tiers,
            "ms": None if speed is None else speed.ms,
            "tokens_s": None if speed is None else speed.tokens_s,
            "bound": None if speed is None else speed.bound,
            "hosted_bytes": None if speed is None else speed.hosted_bytes,
            "settings": list(self.settings()),
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Nearest:
    """The way that lacks the least memory, where nothing fits.

    Attributes:
        lacks: missing bytes by tier.
        by_task: True if the task's traced bytes exceed the lack, so that a smaller task may fit.
    """

    name: str
    lacks: Mapping[str, int]
    by_task: bool


@dataclass(frozen=True, slots=True)
class Advice:
    """All candidates for a goal, and the best of them; `nearest`: what is missing, if nothing fits."""

    model: str
    goal: str
    task: Task
    machine: Machine
    rates: Rates
    cost_model: CostModel
    choices: tuple[Choice, ...]
    nearest: Nearest | None = None

    @property
    def fitting(self) -> tuple[Choice, ...]:
        """Candidates that fit, and with goal "exact" are lossless."""
        return tuple(c for c in self.choices if c.fits and (c.lossless or self.goal != "exact"))

    @property
    def front(self) -> tuple[Choice, ...]:
        """Pareto front of the fitting candidates: time, throughput, memory, exactness, context, and what trains."""
        return tuple(c for c in self.fitting if not any(_beats(other, c) for other in self.fitting))

    @property
    def best(self) -> Choice:
        """Best choice for the goal: among near-equal times, the one with the least compromise.

        Raises ConfigError: nothing fits; by how much, and what would.
        """
        fitting = self.fitting
        if not fitting:
            raise ConfigError(self._nothing())
        if self.task.trains:
            least = min(choice.given_up for choice in fitting)
            fitting = tuple(choice for choice in fitting if choice.given_up == least)
        if self.goal == "longest":
            most = max(choice.task.context for choice in fitting)
            fitting = tuple(choice for choice in fitting if choice.task.context == most)
        if self.goal == "throughput":
            most = max(choice.speed.tokens_s for choice in fitting)
            return next(choice for choice in fitting if choice.speed.tokens_s * _ALIKE >= most)
        asked = [choice for choice in fitting if choice.task.batch == self.task.batch]
        least = min(choice.speed.ms for choice in asked)
        return next(choice for choice in asked if choice.speed.ms <= _ALIKE * least)

    def _nothing(self) -> str:
        if self.nearest is None:
            why = next((c.reason for c in self.choices if c.reason), "")
            return f"{self.model}: no candidate can be planned: {why}"
        lacks, has = self.nearest.lacks, machine_bytes(self.machine)
        if has["gpu"] is not None:
            has["gpu"] += CONTEXT_BYTES  # as --gpu-memory counts
        missing = " and ".join(f"{format_bytes(nbytes)} of {tier} memory" for tier, nbytes in lacks.items())
        enough = " and ".join(f"{format_bytes((has[tier] or 0) + n)} of {tier} memory" for tier, n in lacks.items())
        drive = " (or a drive, --ssd)" if "cpu" in lacks else ""
        other = ", or a shorter context or a smaller batch," if self.nearest.by_task else ""
        name = self.nearest.name
        return f"{self.model}: nothing fits; {name} comes nearest and lacks {missing}; {enough}{drive}{other} would do"

    def command(self, model: str) -> str:
        """Return how to run the best choice: a command line for a model's directory; Python for training."""
        best = self.best
        if self.task.trains:
            return "; ".join(_steps(best))
        if best.config is None:
            return "# it fits as it is: no wrapper is needed"
        settings = " ".join(f"--set {shlex.quote(setting)}" for setting in best.settings())
        return f"vbrt run {shlex.quote(model)} --config {best.preset} {settings}".rstrip()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        front = {id(choice) for choice in self.front}
        rows = [choice.to_dict() | {"front": id(choice) in front} for choice in self.choices]
        return {"model": self.model, "goal": self.goal, "cost_model": self.cost_model.to_dict(), "choices": rows}

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def explain(self) -> str:
        """Return the decision as sentences, with this machine's figures."""
        return "\n".join(_reasons(self))


def _steps(choice: Choice) -> Iterator[str]:
    """Yield the Python lines that train a model as chosen."""
    task, config = choice.task, choice.found.config
    if task.lora:
        yield f'model = get_peft_model(model, LoraConfig(r={task.lora}, target_modules="all-linear"))'
    if config is not None:
        tier = choice.found.compute_tier
        tiers = {tier: {"budget": getattr(config.tiers, tier).budget}}
        moments = f', training={{"moments": "{config.training.moments}"}}' if choice.rounds_moments else ""
        optimizer = f", optimizer=torch.optim.{task.optimizer}" if config.mode == "full" else ""
        yield f'model = vbrt.wrap(model, "{choice.preset}", tiers={tiers}{moments}{optimizer})'
    if task.checkpointing:
        yield f'model.{checkpointing_name()}({{"use_reentrant": False}})'
    if task.mixed:
        yield "with torch.autocast(model.device.type, torch.bfloat16): loss = model(**batch).loss"
    if not (task.lora or config or task.checkpointing or task.mixed):
        yield "# it trains as it is: no wrapper is needed"


def _beats(one: Choice, other: Choice) -> bool:
    """True if a choice is no worse in everything and better in something (Pareto dominance)."""
    mine, its = _merits(one), _merits(other)
    return all(a >= b for a, b in zip(mine, its, strict=True)) and mine != its


def _merits(choice: Choice) -> tuple[float, ...]:
    everything = not choice.task.lora  # all weights train
    speed = choice.speed
    kept = (-choice.noise, not choice.rounds_moments, everything)
    return (-speed.ms, speed.tokens_s, -choice.found.peak_bytes, choice.task.context, *kept)


def _lines(advice: Advice) -> Iterator[str]:
    task, rates = advice.task, advice.rates
    yield f"{advice.model}: {task.kind}, batch {task.batch}, context {task.context}, goal {advice.goal}"
    link = f"link {rates.link_gb_s:.0f}, " if rates.link_gb_s else ""
    link += f"memory {rates.memory_gb_s:.0f}, drive {rates.drive_gb_s:.1f} GB/s"
    refused = next((choice.found.refused for choice in advice.choices if choice.found and choice.found.refused), "")
    if refused:
        yield f"NOT TRACED, only weights are counted: {refused}"
    yield f"{rates.name}, {rates.source}: {link}, {rates.tflops:.3g} TFLOP/s"
    unseen = "" if rates.source == "measured here" else "; predictions, this machine was not measured"
    yield f"times by the cost model of {advice.cost_model}{unseen}"
    yield ""
    yield f"  {'':<42}{'gpu':>10}{'cpu':>10}{'ms':>9}{'tokens/s':>10}  {'weights':<12}bound by"
    front = {id(choice) for choice in advice.front}
    for choice in advice.choices:
        varied = choice.share is not None or choice.task.batch != task.batch
        if id(choice) in front or not varied:
            yield _row(choice, "*" if id(choice) in front else " ")
    yield ""
    yield "* Pareto front: time, tokens a second, memory, rounding, context, trained weights"
    yield "±: relative error of the weights, not of the outputs; vbrt precision measures those"
    if any("gpu" in choice.found.tiers for choice in advice.choices if choice.found):
        yield f"in your own Python code, set {_SEGMENTS} first: budgets fill the GPU"


def _row(choice: Choice, mark: str) -> str:
    name = f"{choice.name}, {choice.task.context} tokens" if choice.longest else choice.name
    tiers = {} if choice.found is None else choice.found.tiers
    sizes = "".join(f"{format_bytes(tiers[tier]) if tier in tiers else '-':>10}" for tier in ("gpu", "cpu"))
    if choice.speed is None:
        return f"{mark} {name:<42}{sizes}  {choice.reason}"
    weights = "lossless" if choice.lossless else f"{choice.bits} bits ±{choice.noise:.0%}"
    speed = choice.speed
    bound = f"{speed.bound}, {speed.computed}" if speed.computed else speed.bound
    return f"{mark} {name:<42}{sizes}{speed.ms:>9.1f}{speed.tokens_s:>10.1f}  {weights:<11} {bound}"


def _reasons(advice: Advice) -> Iterator[str]:
    """Yield a sentence for each candidate, least compromise first."""
    try:
        best: Choice | None = advice.best
    except ConfigError:
        best = None
    for choice in advice.choices:
        yield f"- {choice.name}: {_sentence(choice)}{' This is it.' if choice is best else ''}"
    if best is None:
        yield f"- {advice._nothing()}."


def _sentence(choice: Choice) -> str:
    if choice.speed is None:
        return f"does not fit: {choice.reason}."
    speed, found = choice.speed, choice.found
    bits = "The model's own bits" if choice.lossless else f"{choice.bits}-bit weights, {choice.noise:.1%} of noise"
    bits += ", moments of 8 bits" if choice.rounds_moments else ""
    peak = f"{format_bytes(found.peak_bytes)} in the {found.compute_tier} memory"
    hidden = f"{speed.device_ms:.1f} ms of computing"
    if speed.computed:
        hidden += f" and {speed.cpu_ms:.1f} ms of the CPU: {speed.computed}"
    what = {
        "link": f"copies over the link take {speed.link_ms:.1f} ms and hide {hidden}",
        "cpu": f"{speed.computed} take {speed.cpu_ms:.1f} ms, the device {speed.device_ms:.1f}; both hide "
        f"{speed.link_ms:.1f} ms of copies over the link",
        "device": f"reading and computing take {speed.device_ms:.1f} ms",
        "update": f"the update on the host takes {speed.update_ms:.1f} ms",
        "host": f"launching takes {speed.host_ms:.1f} ms, the device {speed.device_ms:.1f}",
    }[speed.bound]
    return f"fits, {peak}. {bits}; {what}."
