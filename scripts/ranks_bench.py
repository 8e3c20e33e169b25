"""Tensor parallel over the GPUs of one host against one of them: correctness through NCCL, then tokens a second.

    torchrun --nproc-per-node 2 scripts/ranks_bench.py [--parts check exact fp4] [--out results.json]

Random weights, made on the GPUs. `check`: a small model, lossless outputs bit for bit those of the same plan unwrapped,
4-bit ones those of the parts of one GPU's planes, tokens of `generate`, recorded. `exact`: the 8B shape, every page
streamed, forwards of 1 and of 2,048 tokens. `fp4`: the 70B shape with fewer layers, resident, `generate` with one CUDA
graph a token. In `exact` and `fp4` rank 0 first computes alone, while the others wait, then all together: each rank has
its part of the weights and of the budget. Encoding is timed on the way.
"""

import argparse
import faulthandler
import gc
import inspect
import json
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import tensor_parallel

import vbrt
from scripts.full_models import drawn_in
from scripts.measuring import machine

PARTS = ("check", "links", "exact", "fp4")
SMALL = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 4}
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
PROMPT = 128
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where `check` can be tried out


class Group:
    """The ranks: NCCL for tensors, Gloo for what this script says to itself."""

    def __init__(self) -> None:
        local = int(os.environ["LOCAL_RANK"])
        options: dict[str, Any] = {"backend": "gloo"}
        if DEVICE == "cuda":
            torch.cuda.set_device(local)
            options = {"backend": "nccl", "device_id": torch.device("cuda", local)}
        dist.init_process_group(timeout=timedelta(seconds=90), **options)
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.host = dist.new_group(backend="gloo", timeout=timedelta(seconds=240))
        self.mesh = init_device_mesh(DEVICE, (self.count,), mesh_dim_names=("tp",))

    def wait(self) -> None:
        """Wait for all, GPUs included."""
        finish()
        dist.barrier(group=self.host)

    def all(self, value: Any) -> list[Any]:
        """What every rank has."""
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self.host)
        return found


def llama(sizes: dict[str, int], layers: int, mesh: DeviceMesh | None, seed: int = 0) -> nn.Module:
    """A random bf16 Llama on this rank's GPU: all of it, or the part that transformers' plan gives it."""
    config = LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=128256, max_position_embeddings=8192)
    with drawn_in(torch.bfloat16):
        with torch.device("meta"):
            model = LlamaForCausalLM(config).eval()
        if mesh is not None:
            parallelize(model, mesh)
        fill_(model, seed)
    return model


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Apply transformers' plan, by its version's call; the embedding stays whole."""
    plan = {name: style for name, style in model.tp_plan.items() if "embed" not in name}
    model._tp_plan = plan
    apply = tensor_parallel.apply_tensor_parallelism
    if len(inspect.signature(apply).parameters) == 2:
        apply(model, mesh)
    else:
        apply(model, mesh, model._expand_parallel_plan(plan))


def fill_(model: nn.Module, seed: int) -> None:
    """Give a model on the meta device weights: each drawn whole by its name, of which a rank keeps its part."""
    for number, (name, parameter) in enumerate(list(model.named_parameters())):
        path, _, own = name.rpartition(".")
        generator = torch.Generator(DEVICE).manual_seed(seed * 10007 + number)
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=DEVICE)
        values.fill_(1) if values.dim() == 1 else values.normal_(std=0.02, generator=generator)
        if isinstance(parameter.data, DTensor):
            values = part_of(values, parameter)
        model.get_submodule(path)._parameters[own] = nn.Parameter(values, requires_grad=False)
    with torch.device(DEVICE):
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


def part_of(values: torch.Tensor, like: Any) -> Any:
    """This rank's part of a weight, as a DTensor; nothing is sent."""
    (placement,), mesh = like.placements, like.device_mesh
    if not placement.is_replicate():
        values = values.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()].contiguous()
    return DTensor.from_local(values, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def settings(format: str, fine: str, **tiers: Any) -> dict[str, Any]:
    resident = {"gpu": {"budget": "60GiB"}} if DEVICE == "cuda" else {}
    return {"weights": {"format": format, "fine": fine}, "tiers": tiers or resident}


# -- parts ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def check(group: Group) -> dict[str, Any]:
    """Compare outputs with those of the same plan unwrapped, and tokens of recorded steps with eager ones."""
    torch.manual_seed(1)
    ids, found = torch.randint(10, 1000, (1, 64), device=DEVICE), {}
    plain = llama(SMALL, 4, group.mesh)
    want = plain(ids).logits
    for name, format, fine in (("dense", "dense", "none"), ("exact", "nvfp4", "exact"), ("fp4", "nvfp4", "none")):
        vb = vbrt.wrap(llama(SMALL, 4, group.mesh), settings(format, fine))
        got = vb(ids).logits
        row = {"equal": torch.equal(got, want), "error": float((got - want).norm() / want.norm())}
        if name == "fp4":
            whole = vbrt.wrap(llama(SMALL, 4, None), settings(format, fine))
            theirs = whole(ids).logits
            row["error_to_one_gpu"] = float((got - theirs).norm() / theirs.norm())
            whole.close()
        row |= tokens(vb, ids)
        found[name] = row
        vb.close()
    assert found["dense"]["equal"] and found["exact"]["equal"], found
    assert found["fp4"]["error_to_one_gpu"] < 0.02, found
    return found


def tokens(vb: Any, ids: torch.Tensor) -> dict[str, Any]:
    """How many tokens of `generate` were replayed, and why others were not."""
    out = vb.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    steps = vb.stats().steps
    return {"captured": steps.captured, "eager": dict(steps.reasons), "last": out[0, -3:].tolist()}


@torch.no_grad()
def links(group: Group) -> dict[str, Any]:
    """Microseconds of an all-reduce by bytes: issued one by one, and in a CUDA graph of 50."""
    found: dict[str, Any] = {}
    for kib in (8, 16, 64, 512, 4096, 32768):
        x = torch.zeros(kib << 9, dtype=torch.bfloat16, device=DEVICE)
        eager = us_of(lambda x=x: [dist.all_reduce(x) for _ in range(50)]) / 50
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(50):
                dist.all_reduce(x)
        found[f"{kib}KiB"] = {"eager_us": round(eager, 1), "graph_us": round(us_of(graph.replay) / 50, 1)}
        del graph
    return found


def us_of(function: Callable[[], object]) -> float:
    """Microseconds on the GPU, the median of 10."""
    taken = []
    for turn in range(13):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        function()
        end.record()
        end.synchronize()
        taken += [begin.elapsed_time(end) * 1e3] if turn > 2 else []
    return statistics.median(taken)


@torch.no_grad()
def exact(group: Group, mesh: DeviceMesh | None, layers: int = 16) -> dict[str, Any]:
    """The 8B shape, exact, all pages in host memory: seconds to encode, milliseconds of forwards."""
    share = 1 if mesh is None else group.count
    model, row = llama(LLAMA_8B, layers, mesh), {"layers": layers}
    budget = f"{1024 // share}MiB"
    vb = vbrt.wrap(model, settings("nvfp4", "exact", gpu={"budget": budget}, cpu={"budget": "30GiB"}))
    row["encode_s"] = once(vb.materialize)
    row["page_gb"] = vb.plan.page_bytes / 1e9
    for count, times in ((1, 8), (2048, 5)):
        ids = torch.randint(10, 1000, (1, count), device=DEVICE)
        row[f"T{count}_ms"] = median_ms(lambda ids=ids: vb(ids, use_cache=False, logits_to_keep=1), times)
    row["fallbacks"] = list(vb.stats().fallbacks)
    vb.close()
    return row


@torch.no_grad()
def fp4(group: Group, mesh: DeviceMesh | None, layers: int = 40) -> dict[str, Any]:
    """The 70B shape with fewer layers, fp4 resident: seconds to encode, milliseconds a token of recorded steps."""
    vb, row = vbrt.wrap(llama(LLAMA_70B, layers, mesh), settings("nvfp4", "none")), {"layers": layers}
    row["encode_s"] = once(vb.materialize)
    ids = torch.randint(10, 1000, (1, PROMPT), device=DEVICE)
    lengths = {"do_sample": False, "pad_token_id": 0}
    begun = time.perf_counter()
    vb.generate(ids, max_new_tokens=8, min_new_tokens=8, **lengths)
    row["first_call_s"] = time.perf_counter() - begun
    taken = {
        new: once(lambda new=new: vb.generate(ids, max_new_tokens=new, min_new_tokens=new, **lengths))
        for new in (8, 72)
    }
    row["token_ms"] = (taken[72] - taken[8]) / 64 * 1e3
    steps = vb.stats().steps
    row |= {"captured": steps.captured, "eager": dict(steps.reasons), "unjoined": dict(steps.unjoined)}
    vb.close()
    return row


def finish() -> None:
    """Wait for this rank's GPU."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def once(function: Callable[[], object]) -> float:
    finish()
    start = time.perf_counter()
    function()
    finish()
    return time.perf_counter() - start


def median_ms(function: Callable[[], object], times: int) -> float:
    for _ in range(3):
        function()
    return statistics.median(once(function) for _ in range(times)) * 1e3


# -- running ----------------------------------------------------------------------------------------------------------


def alone_and_together(group: Group, part: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Run a part on rank 0 alone, then on all; the slowest rank counts."""
    one = part(group, None) if group.rank == 0 else None
    clean()
    group.wait()
    many = part(group, group.mesh)
    rows = group.all(many)
    one = group.all(one)[0]
    slowest = {key: max(row[key] for row in rows) if is_time(key) else rows[0][key] for key in many}
    ratios = {key: round(one[key] / slowest[key], 3) for key in one if is_time(key)}
    return {"one": one, "ranks": slowest, "times_faster": ratios}


def is_time(key: str) -> bool:
    return key.endswith(("_ms", "_s"))


def clean() -> None:
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def told(group: Group, part: str, found: dict[str, Any]) -> Iterator[None]:
    """Go on with the next part where one fails, on all ranks."""
    begun = time.perf_counter()
    try:
        yield
    except Exception:  # noqa: BLE001 - it is told
        traceback.print_exc()
        found[part] = {"failed": traceback.format_exc(limit=3)}
    clean()
    if any(group.all("failed" in found.get(part, {}))):
        found.setdefault(part, {})["failed"] = found.get(part, {}).get("failed", "on another rank")
    found[part]["seconds"] = round(time.perf_counter() - begun, 1)


def main() -> None:
    """Run the parts; rank 0 writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    asked = parser.parse_args()
    faulthandler.enable()
    warnings.simplefilter("ignore")
    os.environ["VBRT_PROGRESS"] = "0"
    group, found = Group(), {}
    for part in asked.parts:
        with told(group, part, found):
            if part in ("check", "links"):
                found[part] = {"check": check, "links": links}[part](group)
            else:
                measure = {"exact": exact, "fp4": fp4}[part]
                found[part] = alone_and_together(group, measure)
        if group.rank == 0:
            print(json.dumps({part: found[part]}, default=str), flush=True)
            if asked.out:
                result = {"machine": machine(), "ranks": group.count, **found}
                asked.out.write_text(json.dumps(result, indent=1, default=str) + "\n")
    group.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
