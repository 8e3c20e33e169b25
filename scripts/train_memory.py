"""What training takes: an estimate in bytes, and the memory ladder, which is measured.

Each rung of the ladder is the one before with one option more: a new model, some real steps, the peak that torch's
allocator saw. On a GPU that is `max_memory_allocated`. On a CPU the profiler's record of every allocation is added up,
in a process of its own: resident memory would tell of the C library's habits too.

Legend: B batch, S context, d width, e bytes of an activation.
"""

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # after the checkout is on the path
import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from scripts.lm import Options, Shape, build, make_optimizer
from scripts.train_full import wrapped
from vbrt.residency.plan import format_bytes

STEPS = 3  # the second is the first with the optimizer's state in memory
_IN_FLIGHT = 4  # inputs of blocks that are on their way to host memory, or back
_GRADIENTS = 2  # of weights, on their way to host memory
GPU_STEPS = 6  # they are short, and their time is asked for too


@dataclass(frozen=True, slots=True)
class Case:
    """One training set-up whose memory is asked for."""

    shape: Shape
    batch: int
    options: Options
    dropout: float = 0.0
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Rung:
    """A case as measured; `peak_bytes` None: it did not fit, or would not."""

    name: str
    estimated_bytes: int
    peak_bytes: int | None
    step_ms: float | None


# -- the estimate -----------------------------------------------------------------------------------------------------


def estimate_bytes(case: Case) -> int:
    """The peak of a training step, from the shape alone.

    fp32 weights and AdamW's two moments stay; then either all gradients or all activations are the larger part, and
    the activations are largest when the backward pass begins. What a block keeps until then is counted tensor by
    tensor; `tests/scripts/test_train_memory.py` holds all of it to what is measured.
    """
    shape, options = case.shape, case.options
    tokens, d, e = case.batch * shape.context, shape.width, 2 if case.options.mixed_precision else 4
    # autocast keeps the weights in 16 bits until then; those that train in 4 bits are rounded anew each time
    matrices = _block_matrices(shape) * shape.layers * (not options.fp4) + shape.vocabulary * d
    casts = 2 * matrices if options.mixed_precision else 0
    kept = tokens * _kept_a_token(case)
    loss = tokens * shape.vocabulary * 12  # log-softmax and the gradients on both of its sides, in fp32
    scores = tokens * shape.heads * shape.context * (4 if shape.experts else e) if options.attention == "plain" else 0
    widest = shape.active * (d + 2 * shape.inner) if shape.experts else 4 * d
    backward = tokens * 2 * e * widest + scores  # in the block at hand
    inputs = (shape.layers + 1) * 4 * d * tokens
    if options.checkpointing:
        activations = inputs + max(loss, kept + backward)
    else:
        activations = shape.layers * kept + max(loss, backward)
    if options.full:
        waiting = max(0, inputs - _IN_FLIGHT * 4 * d * tokens) if options.checkpointing and case.device != "cpu" else 0
        return _full_bytes(case, activations - waiting)
    return 12 * shape.parameters + max(4 * shape.parameters, casts + activations)


def _full_bytes(case: Case, activations: int) -> int:
    """The peak with all state in the tiers: on a GPU what stays there and the halves of the weights, which a budget of
    "auto" has room for as long as the GPU has; on a CPU all of it."""
    shape, d = case.shape, case.shape.width
    stays = shape.vocabulary * d + shape.context * d + shape.layers * 9 * d  # tables, norms and biases, in fp32
    if case.device == "cpu":
        return 16 * stays + 14 * (shape.parameters - stays) + activations
    return 16 * stays + 2 * (shape.parameters - stays) + _GRADIENTS * 2 * 4 * d * d + activations


def _kept_a_token(case: Case) -> int:
    """Bytes that one block keeps of one token until its backward pass."""
    shape, options, d = case.shape, case.options, case.shape.width
    e, gpu = 2 if options.mixed_precision else 4, case.device != "cpu"
    inputs = 3 * e * d if options.mixed_precision else 4 * d  # q, k, v each cast the norm's output for themselves
    attention = 4 * e * d  # q, k, v and what comes out
    if options.attention == "plain":
        attention += e * d  # the heads side by side again, a copy
        # softmax's result; under autocast a GPU and transformers compute it in fp32, and keep it and its cast
        attention += shape.heads * shape.context * (e + 4 if e == 2 and (gpu or shape.experts) else e)
        if case.dropout:
            attention += shape.heads * shape.context * (e + (1 if gpu else e))
    if shape.experts:
        return 2 * 4 * d + attention + _kept_by_experts(shape, e)
    mlp = e * d + 2 * e * 4 * d  # the norm's output, `up` before and after its activation
    dropped = 2 * d * (1 if gpu else e) if case.dropout else 0
    return 2 * 4 * d + inputs + attention + mlp + dropped  # twice the residual stream in fp32


def _kept_by_experts(shape: Shape, e: int) -> int:
    """What a block of Qwen3-MoE keeps of one token besides residual stream and attention, in bytes."""
    d, mixed = shape.width, e == 2
    norms = 2 * 4 * d + (6 * e * d if mixed else 2 * 4 * d)  # their results in fp32, and each consumer's cast
    heads = 2 * (4 * d + e * d)  # norms of queries and keys; then they are turned by their positions
    router = 3 * 4 * shape.experts
    pair = e * (2 * d + 4 * shape.inner) + 4 * 8  # gathered, both of up, its gate's, the product, what comes out; ids
    return norms + heads + e * d + router + shape.active * pair


def _block_matrices(shape: Shape) -> int:
    """Elements of a block's matrices."""
    d = shape.width
    return 4 * d * d + (shape.experts * 3 * d * shape.inner if shape.experts else 8 * d * d)


def free_bytes(device: torch.device) -> int:
    """What a new allocation could have now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return psutil.virtual_memory().available


# -- measuring --------------------------------------------------------------------------------------------------------


def rungs(case: Case) -> Iterator[tuple[str, Case]]:
    """The ladder of a case, from fp32 and the definition of attention down."""
    options = Options()
    steps = {
        "fp32, plain attention": {},
        "+ mixed precision": {"mixed_precision": True},
        "+ flash attention": {"attention": "vbrt"},
        "+ gradient checkpointing": {"checkpointing": True},
        "+ fp4 weights": {"fp4": True},
    }
    if case.device != "cpu":  # whose memory is the tier that the state would go to
        steps["instead, all state in the tiers"] = {"fp4": False, "full": True}
    for name, change in steps.items():
        options = replace(options, **change)
        yield name, replace(case, options=options)


def measure(name: str, case: Case) -> Rung:
    """Train a new model of a case for a few steps."""
    estimated, free = estimate_bytes(case), free_bytes(torch.device(case.device))
    if estimated > 1.5 * free:  # a machine without memory kills processes
        return Rung(name, estimated, None, None)
    if case.device != "cpu":
        return Rung(name, estimated, *_on_gpu(case))
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(asdict(case)),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise SystemExit(f"ladder: {name}: the measuring process ended with {done.returncode}")
    return Rung(name, estimated, *json.loads(done.stdout.splitlines()[-1]))


def _on_gpu(case: Case) -> tuple[int | None, float | None]:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        taken = _steps(case, GPU_STEPS)
    except torch.OutOfMemoryError:
        return None, None
    return torch.cuda.max_memory_allocated() - before, 1e3 * taken


def _on_cpu(case: Case) -> tuple[int, float]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        taken = _steps(case, STEPS)
    now = peak = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak, 1e3 * taken


def _steps(case: Case, steps: int) -> float:
    """Some steps as scripts/train takes them; the median seconds of all but the first."""
    device, spans = torch.device(case.device), []
    torch.manual_seed(0)
    model = build(case.shape, case.options, torch.device("cpu") if case.options.full else device, dropout=case.dropout)
    optimizer = make_optimizer(model, 1e-4)
    if case.options.full:
        model = wrapped(model, optimizer, device, checkpointing=case.options.checkpointing)
    ids = torch.randint(case.shape.vocabulary, (case.batch, case.shape.context + 1), device=device)
    for _ in range(steps):
        start = time.perf_counter()
        with case.options.autocast(device):
            loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        spans.append(time.perf_counter() - start)
    return statistics.median(spans[1:])


# -- the table --------------------------------------------------------------------------------------------------------


def ladder_table(case: Case, measured: list[Rung]) -> Table:
    """Peak bytes, the share of the first rung, and what each option saved."""
    how = "torch.cuda.max_memory_allocated" if case.device != "cpu" else "all allocations of torch on the CPU"
    shape = case.shape
    table = Table(
        title=f"memory ladder: {shape.layers} layers × {shape.width}, batch {case.batch} × {shape.context}",
        caption=f"peak of some training steps: {how}",
        title_justify="left",
        caption_justify="left",
    )
    for column in ("", "peak", "of the first", "saved by the option", "estimated", "step ms"):
        table.add_column(column, justify="left" if not column else "right")
    known = [rung for rung in measured if rung.peak_bytes is not None]
    for index, rung in enumerate(measured):
        before = measured[index - 1].peak_bytes if index else None
        if rung.peak_bytes is None:
            table.add_row(rung.name, "does not fit", "", "", format_bytes(rung.estimated_bytes), "")
            continue
        saved = "" if before is None else format_bytes(before - rung.peak_bytes)
        table.add_row(
            rung.name,
            format_bytes(rung.peak_bytes),
            f"{rung.peak_bytes / known[0].peak_bytes:.2f}×",
            saved,
            format_bytes(rung.estimated_bytes),
            f"{rung.step_ms:.1f}",
        )
    return table


def main() -> None:
    """A case in JSON on stdin -> [peak bytes, milliseconds a step], on the CPU."""
    given = json.loads(sys.stdin.read())
    case = Case(**given | {"shape": Shape(**given["shape"]), "options": Options(**given["options"])})
    print(json.dumps(_on_cpu(case)))


if __name__ == "__main__":
    main()
