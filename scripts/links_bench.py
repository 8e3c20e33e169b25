"""Several GPUs of one host, one process: pages over borrowed links, and pages in a neighbour's memory.

    python scripts/links_bench.py [raw] [links] [peer] [devices] [--layers N] [--out FILE]
    python -m torch.distributed.run --nproc-per-node=2 scripts/links_bench.py shared [--layers N] [--out FILE]

- raw: pinned host memory to the first GPU over its own link, over two at once, and between the GPUs.
- links: `exact` with nearly all pages streamed, over the own link and with the neighbour's; one token eager and as a
  CUDA graph, 2,048 tokens.
- peer: pages on two GPUs, each with 1/1.8 of their bytes, beside all of them on one: a token as a graph, 2,048 tokens;
  the rate of copies from the neighbour beside a plain copy.
- devices: layers split over two GPUs: `dense` with each 1/1.8 of the pages' bytes, `exact` streamed over both links.
- shared: ranks that each keep a part of the pages, all at once; beside one rank alone with all of them.

A part that fails is in the result as its error; the others are measured.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import nn

import vbrt
from scripts.measuring import llama_8b, machine, moved_bytes
from scripts.programme_bench import captured, decoder, median_ms
from vbrt.tiers.storage.device_copy import copying, cuda_runtime, reach
from vbrt.tiers.storage.multi_link import Lanes

OWN, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)
RING = 900 << 20


def rate(queue: Callable[[], int], times: int = 5) -> float:
    """GB/s of what a call queues on all devices; it returns the bytes."""
    found = []
    for _ in range(times):
        for device in (OWN, OTHER):
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        nbytes = queue()
        for device in (OWN, OTHER):
            torch.cuda.synchronize(device)
        found.append(nbytes / (time.perf_counter() - start) / 1e9)
    return statistics.median(found[1:])


def repeat(starts: list[Callable[[], object]], nbytes: int, times: int) -> Callable[[], int]:
    def queue() -> int:
        for _ in range(times):
            for start in starts:
                start()
        return nbytes * times

    return queue


def raw(options: argparse.Namespace) -> dict:
    """Copies of 32 MiB pages, without vbrt's tiers."""
    runtime, page = cuda_runtime(), 32 << 20
    reach(OWN, OTHER)
    host = torch.empty(page, dtype=torch.uint8, pin_memory=True)
    here, there = (torch.empty(page, dtype=torch.uint8, device=device) for device in (OWN, OTHER))
    joining, own = torch.cuda.Stream(OWN), torch.cuda.Stream(OWN)
    far = torch.cuda.Stream(OTHER)
    half = page // 2
    lanes = Lanes(runtime, joining, [OTHER])
    parts = lanes.parts(here, SimpleNamespace(view=host))
    both = [copying(runtime, here[:half], host[:half], own), copying(runtime, here[half:], host[half:], far)]
    ways = {
        "own_link": [copying(runtime, here, host, own)],
        "neighbours_link": [copying(runtime, there, host, far)],
        "both_into_own_memory": [
            copying(runtime, here[:half], host[:half], own),
            copying(runtime, there[half:], host[half:], far),
        ],
        "both_through_chunks": [lambda: lanes.copy(parts)],
        "both_directly": both,
        "neighbours_link_directly": [copying(runtime, here, host, far)],
        "peer_pulled": [copying(runtime, here, there, own)],
        "peer_pushed": [copying(runtime, here, there, far)],
        "peer_by_torch": [lambda: here.copy_(there, non_blocking=True)],
    }
    return {f"{name}_gb_s": rate(repeat(starts, page, 24)) for name, starts in ways.items()}


def prompt(model: nn.Module, tokens: int, device: torch.device = OWN) -> Callable[[], torch.Tensor]:
    ids = torch.randint(0, 1000, (1, tokens), generator=torch.Generator().manual_seed(tokens)).to(device)

    def step() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits

    return step


def times_of(
    vb: vbrt.VBModelWrapper, *, graph: bool = True, device: torch.device = OWN
) -> tuple[dict, dict[str, torch.Tensor]]:
    """Milliseconds and outputs: one token eager and as a graph, 2,048 tokens."""
    row, out = {}, {}
    for tokens in (1, 2048):
        step = prompt(vb.module, tokens, device)
        out[f"T{tokens}"] = step().clone()
        row[f"T{tokens}_ms"], row[f"T{tokens}_host_ms"] = median_ms(step, 4, warm=4)
        row[f"T{tokens}_leases"] = vb.stats().leases
    if graph:
        try:
            step, rewind = decoder(vb.module)
            for _ in range(4):
                rewind()
                step()
            replay, logits, row["capture_s"] = captured(vb, step)
            rewind()
            assert replay()
            out["graph"] = logits.clone()
            row["graph_ms"], row["graph_host_ms"] = median_ms(replay, 6)
        except Exception:  # noqa: BLE001 - the eager figures count without it
            row["graph_error"] = traceback.format_exc(limit=4)
    return row, out


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, bool]:
    return {name: torch.equal(one[name], other[name]) for name in one if name in other}


def links(options: argparse.Namespace) -> dict:
    """`exact`: one wrapped model, with and without the neighbour's link."""
    tiers = {"gpu": {"budget": RING, "links": [0, 1]}}
    start = time.perf_counter()
    vb = vbrt.wrap(llama_8b(options.layers), "exact", weights={"keep_head": True}, tiers=tiers).materialize()
    result = {"ready_s": time.perf_counter() - start, "page_bytes": vb.plan.page_bytes}
    lanes, rows, outs = vb.stack.levels[0].lanes, {}, {}
    for turn, name in enumerate(("two_links", "own_link")):
        vb.stack.levels[0].lanes = lanes if name == "two_links" else None
        vb.set_budget("gpu", RING + (turn + 1) * (1 << 20))  # a programme of its own
        rows[name], outs[name] = times_of(vb)
    result |= {"rows": rows, "same": same(outs["two_links"], outs["own_link"])}
    result["gain"] = {
        key: rows["own_link"][key] / rows["two_links"][key]
        for key in ("T1_ms", "T2048_ms", "graph_ms")
        if key in rows["own_link"] and key in rows["two_links"]
    }
    result["fallbacks"] = list(vb.stats().fallbacks)
    vb.close()
    return result


def peer(options: argparse.Namespace) -> dict:
    """`dense` on one GPU, then on two."""
    tiers = {"peer": {"enabled": True, "budget": "60GiB"}, "cpu": {"enabled": False}}
    vb = vbrt.wrap(llama_8b(options.layers), "dense", weights={"keep_head": True}, tiers=tiers).materialize()
    pages, rows, outs = vb.plan.page_bytes, {}, {}
    rows["one"], outs["one"] = times_of(vb)
    vb.set_budget("gpu", int(pages / 1.8))
    rows["two"], outs["two"] = times_of(vb)
    before = moved_bytes(vb)
    step = prompt(vb.module, 1)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    span = time.perf_counter() - start
    result = {
        "page_bytes": pages,
        "rows": rows,
        "same": same(outs["one"], outs["two"]),
        "share": {
            key: rows["one"][key] / rows["two"][key] for key in ("T1_ms", "T2048_ms", "graph_ms") if key in rows["two"]
        },
        "peer_bytes_a_pass": (moved_bytes(vb) - before) // 4,
        "peer_gb_s_in_passes_of_one_token": (moved_bytes(vb) - before) / span / 1e9,
        "tiers": {name: tier.peak_bytes for name, tier in vb.stats().tiers.items()},
        "fallbacks": list(vb.stats().fallbacks),
    }
    vb.close()
    return result


def devices(options: argparse.Namespace) -> dict:
    """Blocks split over two GPUs, eager; beside all of them on one."""
    rows, outs = {}, {}
    cases = {
        "dense_on_one": ("dense", "60GiB", "current"),
        "dense_on_two": ("dense", "60GiB", [0, 1]),
        "exact_streamed_on_two": ("exact", RING // 2, [0, 1]),
    }
    for name, (preset, budget, where) in cases.items():
        tiers = {"gpu": {"budget": budget, "devices": where}}
        vb = vbrt.wrap(llama_8b(options.layers), preset, weights={"keep_head": True}, tiers=tiers)
        if where == "current":
            vb.materialize()
        rows[name], outs[name] = times_of(vb, graph=False)
        outs[name] = {key: out.to(OWN) for key, out in outs[name].items()}
        rows[name]["tiers"] = {tier: held.peak_bytes for tier, held in vb.stats().tiers.items()}
        vb.close()
        del vb
        gc.collect()
        torch.cuda.empty_cache()
    return {
        "rows": rows,
        "same": {name: same(outs["dense_on_one"], out) for name, out in outs.items()},
        "share": {key: rows["dense_on_one"][key] / rows["dense_on_two"][key] for key in ("T1_ms", "T2048_ms")},
    }


def shared(options: argparse.Namespace) -> dict:
    """`exact` on every rank at once, with parts of the pages on each; then with all pages on each, rank 0 alone."""
    import torch.distributed as dist

    rank = int(os.environ["LOCAL_RANK"])
    own = torch.device("cuda", rank)
    torch.cuda.set_device(own)
    dist.init_process_group("nccl", device_id=own)
    rows, outs, result = {}, {}, {}
    for name in ("shared", "alone"):
        tiers = {"gpu": {"budget": RING}, "cpu": {"shared": name == "shared"}}
        if name == "shared" or rank == 0:
            vb = vbrt.wrap(llama_8b(options.layers), "exact", weights={"keep_head": True}, tiers=tiers).materialize()
            rows[name], outs[name] = times_of(vb, device=own)
            result[f"{name}_host_bytes"] = getattr(
                vb.stack.levels[1].tier, "own_bytes", vb.stack.levels[1].tier.held_bytes
            )
            vb.close()
            del vb
            gc.collect()
            torch.cuda.empty_cache()
        dist.barrier()
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, rows["shared"])
    if rank == 0:
        result |= {"ranks": every, "alone": rows["alone"], "same": same(outs["shared"], outs["alone"])}
        result["gain_of_each_rank"] = {
            key: [rows["alone"][key] / row[key] for row in every]
            for key in ("T1_ms", "T2048_ms", "graph_ms")
            if all(key in row for row in [rows["alone"], *every])
        }
    dist.destroy_process_group()
    return result


PARTS = {"raw": raw, "links": links, "peer": peer, "devices": devices, "shared": shared}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="some of raw, links, peer, devices (by default these), or shared")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result: dict = {"machine": machine() | {"gpus": torch.cuda.device_count()}, "layers": options.layers}
    first = os.environ.get("RANK", "0") == "0"
    for name in options.parts or ("raw", "links", "peer", "devices"):
        start = time.perf_counter()
        try:
            result[name] = PARTS[name](options)
        except Exception as error:  # noqa: BLE001 - the other parts count
            traceback.print_exc()
            result[name] = {"error": f"{type(error).__name__}: {error}"}
        result[name]["took_s"] = time.perf_counter() - start
        if first:
            print(name, json.dumps(result[name], indent=1), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        if options.out and first:
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
