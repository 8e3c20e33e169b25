"""Prompts through routed experts of which a share is on the GPU; write benchmarks/results/experts-prompt-<gpu>.json.

Layers of Qwen3-30B-A3B's shape with random weights, in 4 bits by default: a forward of a prompt with all pages on the
GPU, and with a share of the expert pages there, the others page-locked in host memory. Each token goes to experts at
random, all alike, so a prompt reads them all. The limit of a forward is the larger of the resident one's time and that
of the bytes of all experts, once over the link at the rate of copies of 64 MiB.

    python3 scripts/experts_prompt.py [--layers 12] [--shares 25 10 5] [--tokens 512 2048] [--formats nvfp4] [--profile]
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import nn
from torch.utils.hooks import RemovableHandle

import vbrt
from scripts.experts_decode import budget_of, build, expert_handles, host_decides, put_below, routers, weights_of
from scripts.measuring import machine
from vbrt.estimation.advice.machine_rates import link_gb_s

TURNS = 3


def seconds(model: nn.Module, ids: torch.Tensor) -> float:
    """The least time of a forward; the first ones compile, or fill the cache."""
    found, wait = [], torch.cuda.synchronize if ids.is_cuda else lambda: None
    for _ in range(TURNS + 1):
        wait()
        start = time.perf_counter()
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
        wait()
        found.append(time.perf_counter() - start)
    return min(found[1:])


def route_at_random(model: nn.Module) -> list[RemovableHandle]:
    """Have routers name experts at random, the same ones each time, with the scores that they find."""
    named = {}

    def name(router: nn.Module, args: object, out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        tokens = len(out[-1])
        if (router, tokens) not in named:
            order = torch.rand(tokens, router.num_experts, device=out[-1].device).argsort(dim=1)
            named[router, tokens] = order[:, : router.top_k].contiguous()
        return *out[:-1], named[router, tokens]

    return [router.register_forward_hook(name) for router in routers(model)]


def profiled(model: nn.Module, ids: torch.Tensor) -> None:
    """Print what takes the GPU's time."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as found:
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
        torch.cuda.synchronize()
    print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=16, max_name_column_width=48))


def rows(
    layers: int, shares: Sequence[float], tokens: Sequence[int], format: str, *, profile: bool
) -> Iterator[dict[str, object]]:
    """A row for each share and number of tokens."""
    device = torch.device("cuda")
    model = build(layers, device)
    route_at_random(model)
    tiers = {"gpu": {"budget": "24GiB"}, "cpu": {"budget": "40GiB"}}
    vb = vbrt.wrap(model, "fp4", policy={"kind": "experts"}, weights=weights_of(format), tiers=tiers).materialize()
    torch.manual_seed(0)
    prompts = {t: torch.randint(0, 1000, (1, t), device=device) for t in tokens}
    with torch.no_grad():
        resident = {t: seconds(vb, ids) for t, ids in prompts.items()}
        want = {t: vb(input_ids=ids, use_cache=False, logits_to_keep=1).logits for t, ids in prompts.items()}
        nbytes = sum(page.nbytes for handle in expert_handles(vb) for page in handle.pages)
        link = link_gb_s() * 1e9
        put_below(vb)
        for share in shares:
            vb.set_budget("gpu", budget_of(vb, share))
            for t, ids in prompts.items():
                taken = seconds(vb, ids)
                same = torch.equal(vb(input_ids=ids, use_cache=False, logits_to_keep=1).logits, want[t])
                if profile:
                    profiled(vb, ids)
                limit = max(resident[t], nbytes / link)
                yield {
                    "format": format,
                    "layers": layers,
                    "share": share,
                    "tokens": t,
                    "decides": "host" if host_decides(vb) else "gpu",
                    "ms": taken * 1e3,
                    "resident_ms": resident[t] * 1e3,
                    "link_ms": nbytes / link * 1e3,
                    "of_limit": taken / limit,
                    "tokens_s": t / taken,
                    "same_logits": same,
                }
    vb.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--shares", type=float, nargs="+", default=[25, 10, 5])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--formats", nargs="+", default=["nvfp4"])
    parser.add_argument("--profile", action="store_true", help="print where the GPU's time goes")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    result: dict[str, object] = {"machine": machine(), "rows": []}
    for format in asked.formats:
        for row in rows(asked.layers, [s / 100 for s in asked.shares], asked.tokens, format, profile=asked.profile):
            print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
            result["rows"].append(row)
    slug = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower())
    out = asked.out or ROOT / "benchmarks" / "results" / f"experts-prompt-{slug}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(0 if all(row["same_logits"] for row in result["rows"]) else 1)


if __name__ == "__main__":
    main()
