"""Milliseconds a token where weights do not fit: streamed, and shared between the link and the CPU; writes JSON.

The 8B shape with random weights in `fp4`, batch 1, a prompt of 128 tokens, `generate`. For each room on the GPU: all
missing weights moved (`compute.where = "device"`), all computed by the CPU ("cpu"), and as "auto" divides them. A
slower link is emulated by copying each page's bytes several times; rows say so.

    python3 scripts/hosted_bench.py [--layers 32] [--shares ring 25 50 75] [--copies 1 2 4] [--threads 15] [--out FILE]

`scripts/hosted_peers.py` times llama.cpp at the same budgets.
"""

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path

import vbrt
from scripts.measuring import llama_8b, machine, moved_bytes
from vbrt.integrations.token_times import Clock
from vbrt.layers.weights import hosted_rates
from vbrt.residency.hosted_share import HostRates
from vbrt.tiers.schedule.stream_link import StreamLink

PROMPT, RING = 128, 110 << 20
ALL_ON_CPU = HostRates(link_bytes_s=1.0, cpu_bytes_s=1e15)


@contextlib.contextmanager
def emulated(copies: int) -> Iterator[None]:
    """A link that takes `copies` times as long: each page's bytes are copied so often."""
    if copies == 1:
        yield
        return
    copy, measured = StreamLink._copy, hosted_rates._copied

    def slow(self, slot, target, source):
        for _ in range(copies):
            copy(self, slot, target, source)

    with (
        mock.patch.object(StreamLink, "_copy", slow),
        mock.patch.object(hosted_rates, "_copied", lambda *args: measured(*args) / copies),
    ):
        yield


def tokens_of(model, new: int, clock: Clock | None = None, batch: int = 1) -> torch.Tensor:
    torch.manual_seed(3)
    ids = torch.randint(10, 1000, (batch, PROMPT), device="cuda")
    criteria = {} if clock is None else {"stopping_criteria": [clock]}
    return model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0, **criteria)


def logits_of(vb, batch: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(3)
    ids = torch.randint(10, 1000, (batch, PROMPT), device="cuda")
    how = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False, "pad_token_id": 0}
    return vb.generate(ids, max_new_tokens=8, min_new_tokens=8, **how).logits


def timed(vb, new: int, batch: int = 1) -> dict:
    begun = time.perf_counter()
    tokens_of(vb, 4, batch=batch)
    first_s = time.perf_counter() - begun
    first = logits_of(vb, batch)
    before = counted(vb)
    again = logits_of(vb, batch)
    short, clock = counted(vb), Clock()
    tokens = tokens_of(vb, new, clock, batch)
    row = {"ms": clock.ms, "median_ms": statistics.median(clock.spans_ms), "spans_ms": clock.spans_ms}
    row |= {"first_call_s": first_s, "tokens": tokens[0, PROMPT:].tolist()}
    for name, *counts in zip(("moved_mb", "computed_mb"), before, short, counted(vb), strict=True):
        eight, long = counts[1] - counts[0], counts[2] - counts[1]
        row[name] = (long - eight) / 1e6 / (new - 8)  # of a step: both calls have a prompt
    row["same_bits_twice"] = all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    row["logits"] = first[1]  # of the first step that is no prompt
    steps = vb.stats().steps
    row["steps"] = {"captured": steps.captured, "eager": steps.eager, "reasons": dict(steps.reasons)}
    return row


def counted(vb) -> tuple[int, int]:
    """Bytes that have moved, and bytes that the CPU has computed with."""
    weights = vb._attachment.registry.handles
    computed = sum(weight.computed * weight.pages[0].nbytes for weight in weights if len(weight.pages) == 1)
    return moved_bytes(vb), computed


def put(vb, room: int, where: str) -> None:
    """Give the pages so much room, and forget rates and recorded steps. where: as `compute.where`, or "cpu": all that
    does not fit is computed there."""
    hosting = vb._attachment.hosting
    hosting.release()
    vb.set_budget("gpu", room)
    hosting.rates.clear()
    if where == "cpu":
        hosting.rates.update(dict.fromkeys(range(1, 17), ALL_ON_CPU))
    hosting._where = "auto" if where == "cpu" else where
    for each in vb._attachment.follower.generating:
        each.steps.release()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--shares", nargs="*", default=["ring", "50"], help="'ring', or per cent of the pages")
    parser.add_argument("--copies", type=int, nargs="*", default=[1], help="of each page: 2 and 4 emulate slower links")
    parser.add_argument("--threads", type=int, help="of torch, and so of the CPU's team")
    parser.add_argument("--where", nargs="*", default=["device", "auto"], help="also: cpu")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    tiers = {"gpu": {"budget": RING}, "cpu": {"budget": "40GiB"}}
    moved = None
    rows, vb = [], vbrt.wrap(llama_8b(args.layers), "fp4", tiers=tiers).materialize(progress=False)
    for share in args.shares:
        for copies in args.copies:
            for where in args.where:
                row = {"share": share, "copies": copies, "where": where, "threads": torch.get_num_threads()}
                row |= {"batch": args.batch, "layers": args.layers}
                try:
                    with emulated(copies):
                        put(vb, RING if share == "ring" else int(vb.plan.page_bytes * int(share) / 100), where)
                        row |= timed(vb, args.new, args.batch)
                        hosting = vb._attachment.hosting
                        rates = hosting.rates.get(args.batch)
                        row["rates_bytes_s"] = [rates.link_bytes_s, rates.cpu_bytes_s] if rates else []
                        row["call_us"] = round(1e6 * rates.call_s, 1) if rates else None
                        stats = vb.stats()
                        row |= {"told": hosting.told(), "fallbacks": list(stats.fallbacks)}
                        row["libraries"] = dict(stats.libraries)
                except Exception:  # noqa: BLE001 - other rows go on
                    row["error"] = traceback.format_exc()
                    traceback.print_exc()
                moved = row.pop("logits", None) if where == "device" else moved
                if moved is not None and "logits" in row:
                    other = row.pop("logits")
                    row["logits_error"] = float((other - moved).float().norm() / moved.float().norm())
                row.pop("logits", None)
                gc.collect()
                torch.cuda.empty_cache()
                rows.append(row)
                short = {
                    key: value
                    for key, value in row.items()
                    if key not in ("tokens", "error", "steps", "fallbacks", "libraries", "spans_ms")
                }
                print({k: round(v, 2) if isinstance(v, float) else v for k, v in short.items()}, flush=True)
                if args.out:
                    args.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
