"""What ranks that share pages are asked to do, on the CPU, whose own memory stands for the GPU's: so the shared tier
below it goes by the name of the ssd's."""

import os
import time

import torch
import torch.distributed as dist

import vbrt
from tests.distributed.cases import TOKENS, llama
from tests.models import config
from vbrt.config import VBConfig, load_config
from vbrt.model.runtime import Runtime
from vbrt.residency.simulate import make_policy
from vbrt.tiers import Level, MemoryTier, TierStack
from vbrt.tiers.storage.rank_shared_memory import SharedTier
from vbrt.tiers.storage.sharing_ranks import Sharers

CPU = torch.device("cpu")


def runtime_of(settings: VBConfig, near: int, far: int) -> tuple[Runtime, SharedTier]:
    tier = SharedTier(Sharers(dist.group.WORLD), far)
    tier.name = "ssd"
    top = Level(MemoryTier("cpu", CPU, near), make_policy("scheduled", near, prefetch=2))
    tier.gathering.use(None)
    top.lanes = tier.gathering
    stack = TierStack([top, tier])
    return Runtime(stack, settings, {"cpu": near, "ssd": far}), tier


def wrapped(preset: str, share: float = 0.4, seed_of_rank: bool = False):
    """A wrapped Llama whose pages ranks share, its tier, and the logits that it should give."""
    model = llama()
    if seed_of_rank and dist.get_rank() == 1:
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[3, 5] += 1
    plain = llama()
    settings = load_config(config(preset))
    pages = vbrt.make_plan(model, settings).page_bytes
    runtime, tier = runtime_of(settings, int(share * pages), 2 * pages)
    vb = vbrt.wrap(model, settings, runtime=runtime).materialize()
    with torch.no_grad():
        want = plain(TOKENS).logits
    return vb, tier, want


def logits(vb) -> torch.Tensor:
    with torch.no_grad():
        return vb(TOKENS).logits


def same_bits(preset: str) -> dict:
    """Passes of a model whose pages are in parts on all ranks, decided one by one and by a programme."""
    vb, tier, want = wrapped(preset)
    equal = [torch.equal(logits(vb), want) for _ in range(6)]
    vb.set_budget("cpu", vb.plan.page_bytes // 2)
    equal += [torch.equal(logits(vb), want) for _ in range(4)]
    links = {link for page in vb.stack.pages.values() for link, nbytes in page.bytes_moved.items() if nbytes}
    kept = sum(page.nbytes for page in vb.stack.pages.values() if page.home)
    leases, own = vb.stats().leases, tier.own_bytes
    vb.set_budget("cpu", 2 * vb.plan.page_bytes)
    return {
        "equal": all(equal),
        "links": links,
        "leases": leases,
        "share": own / kept,
        "resident": torch.equal(logits(vb), want) and tier.own_bytes == 0,
        "unwrapped": torch.equal(vb.unwrap()(TOKENS).logits, want),
    }


def damaged(rank: int) -> None:
    """One bit of one rank's part of a page flips after it was written, before the page comes up again."""
    vb, tier, _ = wrapped("dense")
    logits(vb)
    if dist.get_rank() == rank:
        resident = vb.stack.levels[0].slots
        room = next(room for key, room in tier.rooms.items() if room.nbytes and key not in resident)
        room.room.tensor[5] ^= 4
    for _ in range(2):
        logits(vb)


def other_weights() -> None:
    """Rank 1 has another model."""
    logits(wrapped("dense", seed_of_rank=True)[0])


def other_order() -> None:
    """Rank 1 runs the layers in another order, in which pages have the same sizes."""
    vb, _, _ = wrapped("dense", share=0.3)
    logits(vb)
    if dist.get_rank() == 1:
        layers = vb.module.model.layers
        layers[0].mlp.up_proj, layers[0].mlp.gate_proj = layers[0].mlp.gate_proj, layers[0].mlp.up_proj
    logits(vb)


def dies(rank: int) -> None:
    """A rank ends between two passes."""
    vb, _, _ = wrapped("dense")
    logits(vb)
    if dist.get_rank() == rank:
        os._exit(1)
    time.sleep(0.2)
    logits(vb)
