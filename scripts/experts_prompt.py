"""Prompts through routed experts of which a share is on the GPU; write benchmarks/results/experts-prompt-<gpu>.json.

Layers of Qwen3-30B-A3B's shape with random weights, in 4 bits by default: a forward of a prompt with all pages on the
GPU, and with a share of the expert pages there, the others page-locked in host memory. Each token goes to experts at
random, all alike, so a prompt reads them all. The limit of a forward is the larger of the resident one's time and that
of the bytes of all experts, once over the link at the rate of copies of 64 MiB.

`--copies 2 4` emulates slower links, whose rows go to experts-prompt-emulated-<gpu>.json: each page is copied so often,
and where vbrt measures the link's rate for experts, to decide who decides residency, it finds that part of it.

    python3 scripts/experts_prompt.py [--layers 12] [--shares 25 10 5] [--tokens 512 2048] [--formats nvfp4] [--profile]
    python3 scripts/experts_prompt.py --copies 2 4
"""

import argparse
import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import nn
from torch.utils.hooks import RemovableHandle

import vbrt
from scripts.experts_decode import budget_of, build, expert_handles, host_decides, put_below, routers, weights_of
from scripts.measuring import machine
from vbrt.estimation.advice.machine_rates import link_gb_s
from vbrt.layers.experts import hosted_experts, missed_experts, prompt_ring
from vbrt.layers.experts.device_cache import DeviceCache
from vbrt.residency.hosted_share import HostRates

TURNS = 3


@dataclass
class Passed:
    """Experts that reached the GPU over an emulated link, in counts of them: copied through the prompt ring, which is
    slowed, and leased by kernels that fetch misses themselves, which are not."""

    copied: int = 0
    leased: int = 0

    @contextlib.contextmanager
    def all_slowed(self) -> Iterator[None]:
        """Raises RuntimeError at the end of prompts whose pages took a way other than the ring."""
        copied, leased = self.copied, self.leased
        yield
        if self.copied == copied:
            raise RuntimeError("no page came through the prompt ring: the link was not emulated")
        if self.leased > leased:
            raise RuntimeError(
                f"{self.leased - leased} experts did not come through the prompt ring: kernels fetch them"
            )


@contextlib.contextmanager
def emulated(copies: int) -> Iterator[Passed]:
    """A link that takes `copies` times as long for a prompt's experts: the ring copies each page so often, and vbrt's
    own measurements of the link, for experts that miss, find its rate divided by as much."""
    passed, fetch = Passed(), DeviceCache._fetch

    def slow(slots: Sequence, pages: Sequence, stream: torch.Stream | None) -> None:
        passed.copied += min(len(slots), len(pages))
        for _ in range(copies):
            copy(slots, pages, stream)

    def lease(self: DeviceCache, layer: int, ids: torch.Tensor, experts: int, **how: object) -> torch.Tensor:
        passed.leased += experts
        return fetch(self, layer, ids, experts, **how)

    def slower(measure: Callable[..., HostRates | None]) -> Callable[..., HostRates | None]:
        def measured(*args: object) -> HostRates | None:
            rates = measure(*args)
            return None if rates is None else replace(rates, link_bytes_s=rates.link_bytes_s / copies)

        return measured

    copy = prompt_ring.copy_pages
    with (
        mock.patch.object(prompt_ring, "copy_pages", slow),
        mock.patch.object(DeviceCache, "_fetch", lease),
        mock.patch.object(missed_experts, "measured_rates", slower(missed_experts.measured_rates)),
        mock.patch.object(hosted_experts, "posted_rates", slower(hosted_experts.posted_rates)),
    ):
        yield passed


def forget_rates(vb: vbrt.VBModelWrapper) -> None:
    """Have the next forward measure the link again, and decide by that who decides residency."""
    cache = vb._attachment.expert_cache
    for measured in (cache.missed, cache.hosted):
        if measured is not None:
            measured.rates = None
    cache.reset()


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


def row_of(seconds: float, resident_s: float, nbytes: int, link_bytes_s: float, copies: int) -> dict[str, object]:
    """Milliseconds of a prompt, and how it compares with its limit.

    Args:
        nbytes: of all experts.
        link_bytes_s: of the link as it is.
        copies: of each page.
    """
    link_s = nbytes / (link_bytes_s / copies)
    return {
        "copies": copies,
        "ms": seconds * 1e3,
        "resident_ms": resident_s * 1e3,
        "link_ms": link_s * 1e3,
        "of_limit": seconds / max(resident_s, link_s),
    }


def rows(
    layers: int,
    shares: Sequence[float],
    tokens: Sequence[int],
    format: str,
    *,
    copies: Sequence[int] = (1,),
    profile: bool,
) -> Iterator[dict[str, object]]:
    """A row for each share, emulated link and number of tokens.

    Args:
        copies: of each page, by link.
    """
    device = torch.device("cuda")
    model = build(layers, device)
    route_at_random(model)
    tiers = {"gpu": {"budget": "24GiB"}, "cpu": {"budget": "40GiB"}}
    vb = vbrt.wrap(model, "fp4", policy={"kind": "experts"}, weights=weights_of(format), tiers=tiers).materialize()
    torch.manual_seed(0)
    prompts = {t: torch.randint(0, 1000, (1, t), device=device) for t in tokens}
    with torch.no_grad():
        resident = {t: seconds(vb, ids) for t, ids in prompts.items()}
        want = {t: logits_of(vb, ids) for t, ids in prompts.items()}
        nbytes = sum(page.nbytes for handle in expert_handles(vb) for page in handle.pages)
        link = link_gb_s() * 1e9
        put_below(vb)
        for share in shares:
            vb.set_budget("gpu", budget_of(vb, share))
            for n in copies:
                with contextlib.nullcontext() if list(copies) == [1] else emulated(n) as passed:
                    if passed is not None:
                        forget_rates(vb)
                    for t, ids in prompts.items():
                        taken, same = timed(vb, ids, want[t], passed)
                        if profile:
                            profiled(vb, ids)
                        yield {
                            "format": format,
                            "layers": layers,
                            "share": share,
                            "tokens": t,
                            "decides": "host" if host_decides(vb) else "gpu",
                            **row_of(taken, resident[t], nbytes, link, n),
                            "tokens_s": t / taken,
                            "same_logits": same,
                        }
    vb.close()


def logits_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits


def timed(model: nn.Module, ids: torch.Tensor, want: torch.Tensor, passed: Passed | None) -> tuple[float, bool]:
    """Seconds of a prompt, and whether its logits are the ones wanted.

    Args:
        passed: counts of an emulated link; None: the link is as it is.

    Raises RuntimeError: pages came by a way that the emulation does not slow.
    """
    if passed is None:
        return seconds(model, ids), torch.equal(logits_of(model, ids), want)
    logits_of(model, ids)  # kernels fill the free slots of a new cache; later prompts leave what those have
    with passed.all_slowed():
        return seconds(model, ids), torch.equal(logits_of(model, ids), want)


def file_name(gpu: str, copies: Sequence[int]) -> str:
    """Name the file of results."""
    return f"experts-prompt-{'emulated-' if max(copies) > 1 else ''}{gpu}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--shares", type=float, nargs="+", default=[25, 10, 5])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--formats", nargs="+", default=["nvfp4"])
    parser.add_argument("--copies", type=int, nargs="+", default=[1], help="of each page: 2 and 4 emulate slower links")
    parser.add_argument("--profile", action="store_true", help="print where the GPU's time goes")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    result: dict[str, object] = {"machine": machine(), "rows": []}
    shares, how = [s / 100 for s in asked.shares], {"copies": asked.copies, "profile": asked.profile}
    for format in asked.formats:
        for row in rows(asked.layers, shares, asked.tokens, format, **how):
            print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
            result["rows"].append(row)
    slug = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower())
    out = asked.out or ROOT / "benchmarks" / "results" / file_name(slug, asked.copies)
    out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(0 if all(row["same_logits"] for row in result["rows"]) else 1)


if __name__ == "__main__":
    main()
