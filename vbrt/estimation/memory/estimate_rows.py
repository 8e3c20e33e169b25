"""The rows of an estimate: weights as the plan has them, and what a step adds at its largest moment."""

from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from vbrt.config import Machine
from vbrt.estimation.memory.cuda_allocator import Blocks, allocated_bytes
from vbrt.estimation.memory.estimate_report import Row, records
from vbrt.estimation.memory.expert_workspace import HeldExperts
from vbrt.estimation.memory.fake_trace import Trace
from vbrt.estimation.memory.task import Task
from vbrt.residency.memory_needs import TierNeed, tier_needs
from vbrt.residency.plan import Plan

__all__ = ["more_parts", "parts", "stages", "step_rows", "swapped_parameters", "weight_rows"]

_WORKSPACE = 32 << 20  # of cuBLAS for a thread and a stream, on sm_90: ATen/cuda/CUDABlas.cpp
#: what of all that lasts is there in a stage
_THERE = {
    "prompt": ("KV cache",),
    "step": ("KV cache",),
    "pass": ("outputs",),
    "forward": ("optimizer", "activations"),
    "backward": ("optimizer", "activations", "gradients"),
    "optimizer": ("optimizer", "gradients"),
}


def weight_rows(model: nn.Module, plan: Plan | None, machine: Machine, tier: str, task: Task) -> list[Row]:
    """Return what weights and buffers take, in each tier; `tier` is that of what computes."""
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
    return [*rows, *_merged_row(plan, tier), Row("buffers", tier, sum(buffers.values()), "counted")]


def swapped_parameters(model: nn.Module, plan: Plan) -> Iterator[nn.Parameter]:
    """Yield the parameters that a plan swaps."""
    for swap in plan.swaps:
        for site in swap.sites:
            yield model.get_submodule(site.module).get_parameter(site.parameter)


def _merged_row(plan: Plan | None, tier: str) -> Iterator[Row]:
    """Yield what restoring weights from two planes takes: the largest of them, as it was."""
    exact = [swap for swap in plan.swaps if swap.fine == "exact"] if plan is not None and plan.mode == "infer" else []
    if exact:
        largest = max(swap.dense_bytes // max(1, swap.experts) for swap in exact)
        yield Row("restored weight", tier, largest, "counted", "from two planes, one at a time")


def _page_rows(plan: Plan, machine: Machine, task: Task) -> Iterator[Row]:
    for depth, need in enumerate(tier_needs(plan, machine)):
        held = need.most_bytes if depth else need.home_bytes + _passing_bytes(plan, need, task)
        share = f"{100 * need.home_bytes / max(1, plan.page_bytes):.0f} % live here"
        passing = held > need.home_bytes
        if held:
            yield Row("pages", need.tier, held, "counted", share + (", others pass through" if passing else ""))


def _passing_bytes(plan: Plan, need: TierNeed, task: Task) -> int:
    """Return the bytes of the pages that pass through the computing tier and are held there at once: as many as find
    room, and of routed experts no more than one prompt touches, if that is all."""
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
    """Return what each stage has beside that on a GPU: cuBLAS's workspaces, one, one of the thread of backward passes,
    and one of recorded steps, which the first prompt comes before; and the rests of the allocator's blocks."""
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
    """Yield the bytes of the pages that the computing tier holds at once: its own, and as many as find room of those
    that pass through, in their order."""
    need = tier_needs(plan, machine)[0]
    room = _passing_bytes(plan, need, task)
    for page in (page for swap in plan.swaps for page in swap.pages):
        if page.home == need.tier:
            yield page.nbytes
        elif not page.by_rows and page.nbytes <= room:
            room -= page.nbytes
            yield page.nbytes


def _rests(blocks: Blocks, tensors: Iterable[int]) -> int:
    """Return the bytes that tensors get beyond their own, in whole granules."""
    return sum(blocks.take(nbytes) - nbytes for nbytes in tensors)


def step_rows(held: Mapping[str, int], task: Task, tier: str, stage: str) -> list[Row]:
    """Return what a stage of a step adds: what lives on beside weights, and what comes and goes at its largest."""
    tokens = f"{task.batch} × {task.context + task.new if task.kind == 'decode' else task.context} tokens"
    notes = {
        "KV cache": f"{tokens}, by the model's own cache",
        "activations": "kept from the forward to the backward pass",
        "gradients": "of what trains",
        "optimizer": f"state of {task.optimizer}",
        "outputs": "what the pass returns",
        "temporaries": f"at the largest moment: {stage}",
    }
    return [Row(name, tier, nbytes, "traced", notes[name]) for name, nbytes in held.items()]


def stages(traced: Trace) -> dict[str, int]:
    """Return the stages of a step, and the bytes of the largest moment of each."""
    found: dict[str, int] = {}
    for phase, nbytes in traced.peaks.items():
        stage = phase.partition(":")[0]
        found[stage] = max(found.get(stage, 0), nbytes)
    return found


def parts(traced: Trace, stage: str) -> Mapping[str, int]:
    """Return what is there at the largest moment of a stage: of all that lasts, and temporaries, which come last."""
    left, found = stages(traced)[stage], {}
    for name in _THERE[stage]:
        found[name] = min(left, traced.rows.get(name, 0))
        left -= found[name]
    return found | {"temporaries": left}
