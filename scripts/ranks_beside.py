"""A model that does not fit, on the GPUs of one host, beside accelerate with the same memory; and how fast ranks load.

    torchrun --nproc-per-node 2 scripts/ranks_beside.py [--parts accelerate load] [--layers 16] [--out results.json]

`accelerate`: the 70B shape with fewer layers, `exact`, tensor parallel, with a budget of 1/7 of the pages a GPU; then
in one process with `device_map="auto"`, in bf16, with as much memory for weights on each GPU as vbrt's ranks have
taken in all. `load`: a checkpoint of the 8B shape, read from the page cache, onto one GPU and, cut by transformers'
plan, onto all. `--tiny`: on any machine, to see that it runs.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
import torch.distributed as dist
from torch import nn

import vbrt
from scripts import ranks_bench as bench
from scripts.measuring import machine

PARTS = ("accelerate", "load")
TINY = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}


def forwards(model: Any, times: int) -> dict[str, float]:
    """Milliseconds of forwards without a cache."""
    row = {}
    for count in (1, 2048):
        ids = torch.randint(10, 1000, (1, count), device=bench.DEVICE)
        run = [bench.once(lambda ids=ids: model(ids, use_cache=False, logits_to_keep=1)) for _ in range(times + 1)]
        row[f"T{count}_ms"] = sorted(run[1:])[times // 2] * 1e3
    return row


@torch.no_grad()
def accelerate(group: bench.Group, asked: argparse.Namespace) -> dict[str, Any]:
    """vbrt on all ranks, then accelerate on rank 0 with all GPUs."""
    sizes = TINY if asked.tiny else bench.LLAMA_70B
    found, every = with_vbrt(group, sizes, asked.layers)
    bench.clean()
    group.wait()
    room = max(row["peak_gb"] for row in every)
    found["accelerate"] = with_accelerate(sizes, asked.layers, room, group.count) if group.rank == 0 else None
    group.wait()
    return found


def with_vbrt(group: bench.Group, sizes: dict[str, int], layers: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What was measured, the slowest rank's, and what each rank has."""
    model = bench.llama(sizes, layers, group.mesh)
    settings = bench.settings(
        "nvfp4", "exact", gpu={"budget": "60GiB"} if bench.DEVICE == "cuda" else {"enabled": False}
    )
    pages = vbrt.make_plan(model, vbrt.load_config(settings)).page_bytes
    budget = pages * group.count // 7
    if bench.DEVICE == "cuda":
        settings["tiers"] = {"gpu": {"budget": budget}, "cpu": {"budget": pages}}
    vb = vbrt.wrap(model, settings)
    found = {"layers": layers, "page_gb": group.count * pages / 1e9, "budget_gb_a_gpu": budget / 1e9}
    found["ready_s"] = bench.once(vb.materialize)
    reset_peak()
    row = forwards(vb, 5) | {"token_ms": token_ms(vb), "peak_gb": peak() / 1e9}
    every = group.all(row)
    found["vbrt"] = {key: max(r[key] for r in every) for key in row}
    found["steps"], found["fallbacks"] = str(vb.stats().steps), list(vb.stats().fallbacks)
    vb.close()
    return found, every


def token_ms(vb: Any) -> float:
    """Milliseconds of a token of `generate`."""
    ids = torch.randint(10, 1000, (1, bench.PROMPT), device=bench.DEVICE)

    def run(count: int) -> float:
        lengths = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        return bench.once(lambda: vb.generate(ids, **lengths))

    run(12)
    return (run(20) - run(4)) / 16 * 1e3


def with_accelerate(sizes: dict[str, int], layers: int, room_gb: float, gpus: int) -> dict[str, Any]:
    """The same model with `device_map="auto"`, and `room_gb` for weights on each GPU."""
    from accelerate import dispatch_model, infer_auto_device_map

    model = bench.llama(sizes, layers, None).cpu()
    bench.clean()
    room = {at: int(room_gb * 1e9) for at in range(gpus)} if bench.DEVICE == "cuda" else {}
    places = infer_auto_device_map(
        model,
        max_memory={**room, "cpu": 200 << 30},
        no_split_module_classes=["LlamaDecoderLayer"],
        dtype=torch.bfloat16,
    )
    where = [str(place) for place in places.values()]
    model = dispatch_model(model, device_map=places) if room else model
    reset_peak()
    row = forwards(model, 3)
    return row | {
        "room_gb": room_gb,
        "modules": {place: where.count(place) for place in set(where)},
        "peak_gb": peak() / 1e9,
    }


def reset_peak() -> None:
    if bench.DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak() -> int:
    return torch.cuda.max_memory_allocated() if bench.DEVICE == "cuda" else 1 << 30


@torch.no_grad()
def load(group: bench.Group, asked: argparse.Namespace) -> dict[str, Any]:
    """Seconds of `from_pretrained` into planes: on rank 0 alone, and on all ranks together."""
    folder = [tempfile.mkdtemp() if group.rank == 0 else None]
    dist.broadcast_object_list(folder, 0, group=group.host)
    if group.rank == 0:
        bench.llama(TINY if asked.tiny else bench.LLAMA_8B, 2 if asked.tiny else 12, None).save_pretrained(folder[0])
        bench.clean()
    group.wait()
    found: dict[str, Any] = {}
    for fine in ("none", "exact"):
        alone = [seconds(folder[0], fine, 1) for _ in range(3)] if group.rank == 0 else None
        group.wait()
        every = []
        for _ in range(3):
            group.wait()
            every.append(max(group.all(seconds(folder[0], fine, group.count))))
        if group.rank == 0:
            one, many = min(alone), min(every)
            found[fine] = {"one_s": one, "ranks_s": many, "times_faster": one / many, "all": [alone, every]}
    return found


def whole_tables() -> dict[str, str] | str:
    """Return the plan of transformers' by which each rank holds whole tables of embeddings: torch looks up in one that
    is cut by DTensor's operators. Older versions (5.17) cut none and know no such style."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    return {"model.embed_tokens": "replicate"} if "replicate" in ALL_PARALLEL_STYLES else "auto"


def seconds(path: str, fine: str, ranks: int) -> float:
    from transformers import AutoModelForCausalLM, DistributedConfig

    cut = {"distributed_config": DistributedConfig(tp_size=ranks, tp_plan=whole_tables())} if ranks > 1 else {}
    quantization = vbrt.QuantizationConfig(bench.settings("nvfp4", fine))
    bench.finish()
    start = time.perf_counter()
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=quantization, dtype=torch.bfloat16, **(cut or {"device_map": bench.DEVICE})
    )
    bench.finish()
    took = time.perf_counter() - start
    vbrt.of(model).close()
    del model
    bench.clean()
    return took


def main() -> None:
    """Run the parts; rank 0 prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ["VBRT_PROGRESS"] = "0"
    group, found = bench.Group(), {}
    for name in asked.parts:
        with bench.told(group, name, found):
            found[name] = {"accelerate": accelerate, "load": load}[name](group, asked)
        if group.rank == 0:
            print(json.dumps({name: found[name]}, default=str), flush=True)
            if asked.out:
                result = {"machine": machine(), "ranks": group.count, **found}
                asked.out.write_text(json.dumps(result, indent=1, default=str) + "\n")
    group.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
