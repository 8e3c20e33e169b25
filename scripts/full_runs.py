"""mode "full" in `full_bench.py`: models that train from the tiers, and what a step cannot be faster than.

    link     the bytes that a step streamed to the GPU, at the rate of a copy from page-locked memory
    update   the optimizer's step by itself
    compute  forward and backward of the same model with all weights on the GPU

Each function prints a line of JSON for each thing that it found out, the last of which has everything.
"""

import argparse
import hashlib
import json
import time
from typing import Any

import psutil
import torch
from torch import Tensor, nn

import vbrt
from scripts.full_models import DEVICE, SHAPES, Trainee, batch, emptied, made, measured, passed, waited
from scripts.full_profile import profiled

__all__ = ["RUNS", "limited"]

LR, CONTEXT = 1e-4, 2048
_SLOTS = 10  # of the largest page, on the GPU


def limited(gigabytes: float | None) -> None:
    """Make the GPU as small as that for torch's allocator."""
    if gigabytes is not None and DEVICE == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(gigabytes * 1e9 / total)


def wrapped(model: Trainee, *, slots: int = _SLOTS, **training: Any) -> vbrt.VBFullWrapper:
    """Return a model in the tiers, with AdamW; the GPU holds a ring of pages, tables and norms.

    Args:
        training: keys of the config; `host` is the budget in host memory, `drive` a folder for what exceeds it.
    """
    optimizer = torch.optim.AdamW(model.parameters(), LR, fused=True)
    blocks = [p.numel() for name, p in model.named_parameters() if "layers." in name]
    tiers = {"gpu": {"budget": slots * 2 * max(blocks)}} if DEVICE == "cuda" else {"gpu": {"enabled": False}}
    tiers |= {"cpu": {"budget": training.pop("host")}} if "host" in training else {}
    tiers |= {"ssd": {"enabled": True, "path": training.pop("drive")}} if "drive" in training else {}
    tables = next(model.parameters()).dtype is torch.bfloat16  # those in fp32 stay on the GPU
    weights = {"keep_head": True, "embeddings": tables}
    return vbrt.wrap(model, "full", optimizer=optimizer, tiers=tiers, training=training, weights=weights)


def trained(vb: vbrt.VBFullWrapper, ids: Tensor, *, parts: int = 1) -> Tensor:
    """Do one step, in so many passes over parts of the batch; return its loss. Updates begin within the last pass."""
    *others, last = ids.chunk(parts)
    total = torch.zeros((), device=ids.device)
    for part in others:
        total += passed(vb, part, 1 / parts)
    total += passed(vb, last, 1 / parts, vb.stepping)
    vb.zero_grad()
    return total


def compute_seconds(model: nn.Module, ids: Tensor) -> float:
    """Return the seconds of forward and backward with all weights on the GPU."""

    def both() -> None:
        passed(model, ids)
        model.zero_grad()

    return measured(both, steps=1, warm=1)["seconds"]


def apart(vb: vbrt.VBFullWrapper, ids: Tensor) -> dict:
    """Return what a step's update takes by itself, the bytes that it streams, and how fast a link carries them."""
    vb.settle()
    before = vb.stats().bytes_moved
    passed(vb, ids)
    waited()
    after = vb.stats().bytes_moved
    start = time.perf_counter()
    vb.step()
    vb.settle()
    update = time.perf_counter() - start
    vb.zero_grad()
    moved = {link: nbytes - before.get(link, 0) for link, nbytes in after.items()}
    rate = link_rate()
    return {
        "update_s": update,
        "moved_bytes": moved,
        "link_bytes_per_s": rate,
        "link_s": moved.get("cpu>gpu", 0) / rate,
    }


def link_rate(nbytes: int = 1 << 28) -> float:
    """Return bytes a second of copies from page-locked memory to the GPU."""
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
    target, spans = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE), []
    for _ in range(6):
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        waited()
        spans.append(time.perf_counter() - start)
    return nbytes / min(spans)


def told(found: dict) -> dict:
    """Print what is known so far: whoever started this has it if the rest takes too long."""
    print(json.dumps(found), flush=True)
    return found


def about(vb: vbrt.VBFullWrapper) -> dict:
    """Return what a model says of itself."""
    stats = vb.stats()
    tiers = {name: tier.held_bytes for name, tier in stats.tiers.items()}
    host = psutil.Process().memory_info().rss
    return {
        "host_bytes": host,
        "tier_bytes": tiers,
        "activations": str(stats.activations),
        "fallbacks": list(stats.fallbacks),
    }


# -- what the parts run ------------------------------------------------------------------------------------------------


def steps_of(options: argparse.Namespace) -> None:
    """Make a model of fp32 weights, limit the GPU, and train it for some steps."""
    start, shape = time.perf_counter(), SHAPES[options.shape]
    vb = wrapped(made(shape, recompute=False), activations=options.activations, **options.training)
    emptied()
    limited(options.limit)
    found = {"ready_s": round(time.perf_counter() - start, 1)}
    ids = batch(shape, options.tokens, CONTEXT)
    before = vb.stats().updates.wait_us
    found["losses"] = []

    def step() -> None:
        found["losses"].append(trained(vb, ids, parts=options.parts).item())
        told(found)

    found |= measured(step, steps=options.steps, warm=2)
    found["waited_s"] = (vb.stats().updates.wait_us - before) / 1e6 / (options.steps + 2)
    found |= {"profile": profiled(lambda: trained(vb, ids, parts=options.parts))} if options.profile else {}
    told(found | {"tokens_per_s": options.tokens / found["seconds"]} | about(vb))
    told(found | {"tokens_per_s": options.tokens / found["seconds"]} | apart(vb, ids) | about(vb))


def large(options: argparse.Namespace) -> None:
    """Compute resident first, then train the same model from the tiers on a small GPU, at several sizes of a step."""
    start, shape = time.perf_counter(), SHAPES[options.shape]
    model = made(shape, recompute=True, dtype=torch.bfloat16)
    found: dict[str, Any] = {"parameters": shape.parameters, "compute_s": {}, "rows": []}
    passes = {_at_once(options, tokens) for tokens in options.sizes}
    once = {tokens: compute_seconds(model, batch(shape, tokens, CONTEXT)) for tokens in passes}
    found["compute_s"] = {
        tokens: once[_at_once(options, tokens)] * (tokens // _at_once(options, tokens)) for tokens in options.sizes
    }
    emptied()
    model.llama.gradient_checkpointing_disable()
    told(found | {"resident_ready_s": round(time.perf_counter() - start, 1)})
    start = time.perf_counter()
    vb = wrapped(model, activations=options.activations, **options.training)
    emptied()
    limited(options.limit)
    found |= {"wrap_s": round(time.perf_counter() - start, 1), "limit_gb": options.limit} | about(vb)
    told(found)
    for tokens in options.sizes:
        ids, parts = batch(shape, tokens, CONTEXT), tokens // _at_once(options, tokens)
        row = {"tokens": tokens, "parts": parts}
        first = not found["rows"]
        row |= measured(lambda: trained(vb, ids, parts=parts), steps=options.steps, warm=int(first))  # noqa: B023
        found["rows"].append(row | {"tokens_per_s": tokens / row["seconds"]})
        told(found)
        if first:
            found |= apart(vb, ids) | about(vb)
            told(found)
    vb.close()


def _at_once(options: argparse.Namespace, tokens: int) -> int:
    """Return the tokens of one pass."""
    return min(tokens, options.at_once)


def largest(options: argparse.Namespace) -> None:
    """Train a model for some steps, without measuring anything apart."""
    start, shape = time.perf_counter(), SHAPES[options.shape]
    vb = wrapped(made(shape, recompute=False, dtype=torch.bfloat16), activations="offload", **options.training)
    emptied()
    limited(options.limit)
    found = {"parameters": shape.parameters, "ready_s": round(time.perf_counter() - start, 1), "losses": []}
    ids = batch(shape, options.tokens, CONTEXT)
    told(found | about(vb))

    def step() -> None:
        found["losses"].append(trained(vb, ids).item())
        told(found)

    found |= measured(step, steps=options.steps - 1, warm=1)
    told(found | {"tokens_per_s": options.tokens / found["seconds"], "training": options.training} | about(vb))
    vb.close()


def bits(options: argparse.Namespace) -> None:
    """Train the same model step by step, twice with weights of blocks updated by torch on the CPU, and in the tiers. It
    ends when its time is over, or where losses differ, and names weights that do."""
    torch.use_deterministic_algorithms(True)  # with warn_only, attention's backward pass would not be deterministic
    torch.backends.cuda.enable_cudnn_sdp(False)  # whose backward pass is not either
    shape, start = SHAPES[options.shape], time.perf_counter()
    resident, again = (_Resident(made(shape, recompute=True)) for _ in range(2))
    vb = wrapped(made(shape, recompute=False), activations=options.activations, **options.training)
    ways = {"resident": resident.trained, "resident again": again.trained, "full": lambda ids: trained(vb, ids)}
    losses: dict[str, list[float]] = {way: [] for way in ways}
    for seed in range(options.steps):
        ids = batch(shape, options.tokens, min(CONTEXT, options.tokens), seed)
        for way, step in ways.items():
            losses[way].append(step(ids).item())
        told({"steps": seed + 1, **{way: found[-1] for way, found in losses.items()}})
        if len({found[-1] for found in losses.values()}) > 1 or time.perf_counter() - start > options.seconds:
            break
    states = {"resident": resident.model, "resident again": again.model, "full": vb}
    digests = {way: _digests(model.state_dict()) for way, model in states.items()}
    other = {
        way: [name for name, digest in digests["resident"].items() if found[name] != digest]
        for way, found in digests.items()
    }
    equal = {way: found == losses["resident"] and not other[way] for way, found in losses.items()}
    told(
        {
            "full": {"losses": losses["full"]},
            "steps": len(losses["full"]),
            "parameters": shape.parameters,
            "tokens": options.tokens,
            "seconds": round(time.perf_counter() - start, 1),
            "equal": equal["full"],
            "resident_equals_itself": equal["resident again"],  # if not, it is the GPU's kernels that differ
            "other": {way: names[:8] for way, names in other.items() if names},
        }
    )


class _Resident:
    """A model on the GPU, whose blocks' weights are updated by torch's fused AdamW on the CPU, in fp32."""

    def __init__(self, model: Trainee) -> None:
        self.model, pinned = model, DEVICE == "cuda"
        self.linears = [m for name, m in model.named_modules() if type(m) is nn.Linear and "layers." in name]
        theirs = {id(module.weight) for module in self.linears}
        kept = torch.optim.AdamW([p for p in model.parameters() if id(p) not in theirs], LR, fused=True)
        self.masters = [nn.Parameter(_host(module.weight, pinned=pinned)) for module in self.linears]
        for master in self.masters:
            master.grad = _host(master, pinned=pinned)
        self.optimizers = kept, torch.optim.AdamW(self.masters, LR, fused=True)

    def trained(self, ids: Tensor) -> Tensor:
        """Do a step; return its loss."""
        loss, pairs = passed(self.model, ids), list(zip(self.masters, self.linears, strict=True))
        for master, module in pairs:
            master.grad.copy_(module.weight.grad, non_blocking=True)
        waited()
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()
        for master, module in pairs:
            module.weight.data.copy_(master.detach(), non_blocking=True)
        waited()
        return loss


def _host(tensor: Tensor, *, pinned: bool) -> Tensor:
    """Return a copy in host memory."""
    out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return out.copy_(tensor.detach())


def _digests(state: dict[str, Tensor]) -> dict[str, str]:
    return {
        name: hashlib.blake2b(tensor.detach().float().cpu().contiguous().numpy().tobytes(), digest_size=16).hexdigest()
        for name, tensor in state.items()
    }


RUNS = {"steps": steps_of, "large": large, "largest": largest, "bits": bits}
