"""Rows of an estimate: weights from the plan, and a step's tensors at its peak."""

from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from vbrt.config import Machine, VBConfig
from vbrt.estimation.memory.cuda_allocator import Blocks, allocated_bytes
from vbrt.estimation.memory.estimate_report import AHEAD, Row, records
from vbrt.estimation.memory.expert_workspace import HeldExperts
from vbrt.estimation.memory.fake_trace import Trace
from vbrt.estimation.memory.task import Task
from vbrt.residency.memory_needs import TierNeed, tier_needs
from vbrt.residency.plan import Plan
from vbrt.residency.training_memory import ahead_bytes

__all__ = ["more_parts", "parts", "stages", "step_rows", "swapped_parameters", "weight_rows"]

_WORKSPACE = 32 << 20  # cuBLAS workspace per thread and stream, on sm_90: ATen/cuda/CUDABlas.cpp
#: long-lived tensors by stage
_THERE = {
    "prompt": ("KV cache",),
    "step": ("KV cache",),
    "pass": ("outputs",),
    "forward": ("optimizer", "activations"),
    "backward": ("optimizer", "activations", "gradients"),
    "optimizer": ("optimizer", "gradients"),
}


def weight_rows(
    model: nn.Module, plan: Plan | None, config: VBConfig | None, machine: Machine, tier: str, task: Task
) -> list[Row]:
    """Return the bytes of weights and buffers by tier; `tier` is the computing one."""
    sized = allocated_bytes if tier == "gpu" else int
    parameters = {id(p): sized(p.numel() * p.element_size()) for p in model.parameters()}
    buffers = {id(b): sized(b.numel() * b.element_size()) for b in model.buffers()}
    if plan is None:
        rows = [Row("parameters", tier, sum(parameters.values()), "counted", "all, as the model has them")]
    else:
        swapped = {id(parameter) for parameter in swapped_parameters(model, plan)}
        kept = [p for p in model.parameters() if id(p) not in swapped]
        rounded = sum(parameters[id(p)] - p.numel() * p.element_size() for p in kept)
        nbytes = plan.unbudgeted_bytes + rounded
        rows = [*_page_rows(plan, machine, task), Row("not swapped", tier, nbytes, "counted", "parameters")]
        if config is not None and task.trains:
            rows.append(Row(AHEAD, "cpu", ahead_bytes(plan, config, machine), "counted", "if it is free"))
    return [*rows, *_merged_row(plan, tier), Row("buffers", tier, sum(buffers.values()), "counted")]


def swapped_parameters(model: nn.Module, plan: Plan) -> Iterator[nn.Parameter]:
    """Yield the parameters that a plan swaps."""
    for swap in plan.swaps:
        for site in swap.sites:
            yield model.get_submodule(site.module).get_parameter(site.parameter)


def _merged_row(plan: Plan | None, tier: str) -> Iterator[Row]:
    """Yield the buffer for weights restored from two planes: the largest dense weight."""
    exact = [swap for swap in plan.swaps if swap.fine == "exact"] if plan is not None and plan.mode == "infer" else []
    if exact:
        largest = max(swap.dense_bytes // max(1, swap.experts) for swap in exact)
        yield Row("restored weight", tier, largest, "counted", "from two planes, one at a time")


def _page_rows(plan: Plan, machine: Machine, task: Task) -> Iterator[Row]:
    for depth, need in enumerate(tier_needs(plan, machine)):
        held = need.most_bytes if depth else need.home_bytes + _passing_bytes(plan, need, task)
        share = f"{100 * need.home_bytes / max(1, plan.page_bytes):.0f} % resident"
        passing = held > need.home_bytes
        if held:
            yield Row("pages", need.tier, held, "counted", share + (", others streamed" if passing else ""))


def _passing_bytes(plan: Plan, need: TierNeed, task: Task) -> int:
    """Return the bytes of streamed pages held at once in the computing tier: as many as there is room for, and for
    prefill no more than the pages that one prompt touches."""
    room = need.most_bytes - plan.unbudgeted_bytes - need.home_bytes
    if task.kind != "prefill":
        return room
    touched = 0.0
    for swap in plan.swaps:
        below = sum(page.nbytes for page in swap.pages if page.home != need.tier and not page.by_rows)
        pairs = task.batch * task.context * swap.top_k
        share = HeldExperts.of(swap, plan, task).touched(pairs) / swap.experts if swap.experts else 1.0
        touched += share * below
    return min(room, round(touched))


def more_parts(
    task: Task, plan: Plan | None, machine: Machine, tier: str, stages: Iterable[str], traced: Trace
) -> dict[str, dict[str, int]]:
    """Return the GPU's further bytes by stage: cuBLAS workspaces (one, one more for the backward thread, one more for
    captured steps, which come after the first prompt), and the allocator's unsplit remainders."""
    if tier != "gpu":
        return {stage: {} for stage in stages}
    blocks = Blocks()
    pages = _rests(blocks, _top_pages(plan, machine, task)) if plan is not None else 0
    found = {stage: {"workspace": _WORKSPACE * (1 + task.trains), "rests": pages} for stage in stages}
    if records(task, plan, tier):
        found["step"]["workspace"] += _WORKSPACE
        found["step"]["rests"] += _rests(blocks, traced.cache_bytes(traced.room))
    return found


def _top_pages(plan: Plan, machine: Machine, task: Task) -> Iterator[int]:
    """Yield the bytes of the pages that the computing tier holds at once: resident ones, and streamed ones in order
    while they fit."""
    need = tier_needs(plan, machine)[0]
    room = _passing_bytes(plan, need, task)
    for page in (page for swap in plan.swaps for page in swap.pages):
        if page.home == need.tier:
            yield page.nbytes
        elif not page.by_rows and page.nbytes <= room:
            room -= page.nbytes
            yield page.nbytes


def _rests(blocks: Blocks, tensors: Iterable[int]) -> int:
    """Return the bytes that the allocator gives tensors beyond their own, in whole granules."""
    return sum(blocks.take(nbytes) - nbytes for nbytes in tensors)


def step_rows(held: Mapping[str, int], task: Task, tier: str, stage: str) -> list[Row]:
    """Return the rows of a stage: long-lived tensors, and temporaries at the peak."""
    tokens = f"{task.batch} × {task.context + task.new if task.kind == 'decode' else task.context} tokens"
    notes = {
        "KV cache": f"{tokens}, by the model's own cache",
        "activations": "kept from the forward to the backward pass",
        "gradients": "of trained parameters",
        "optimizer": f"state of {task.optimizer}",
        "outputs": "of the forward",
        "temporaries": f"at the peak: {stage}",
    }
    return [Row(name, tier, nbytes, "traced", notes[name]) for name, nbytes in held.items()]


def stages(traced: Trace) -> dict[str, int]:
    """Return the peak bytes of each stage of a step."""
    found: dict[str, int] = {}
    for phase, nbytes in traced.peaks.items():
        stage = phase.partition(":")[0]
        found[stage] = max(found.get(stage, 0), nbytes)
    return found


def parts(traced: Trace, stage: str) -> Mapping[str, int]:
    """Return the breakdown of a stage's peak: long-lived tensors, then temporaries as the rest."""
    left, found = stages(traced)[stage], {}
    for name in _THERE[stage]:
        found[name] = min(left, traced.rows.get(name, 0))
        left -= found[name]
    return found | {"temporaries": left}
