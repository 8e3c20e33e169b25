"""Offloading activations on a GPU: the same bits as without it, in less of its memory, behind the computing."""

import pytest
import torch
from torch import nn

import vbrt

pytestmark = pytest.mark.gpu

LAYERS, WIDTH, TOKENS = 12, 1024, 8192


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def trained(activations, mode):
    """Losses and gradients of three passes, the peak of the allocator beyond the weights, counters."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Model().train()
    vb = vbrt.wrap(model, mode, weights={"exclude": ["*.norm"]}, training={"activations": activations})
    vb.materialize()
    x = torch.randn(TOKENS, WIDTH, device="cuda", requires_grad=True)
    found = []
    for turn in range(3):
        if turn == 2:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            loss = vb(x).float().square().mean()
        loss.backward()
        found.append(loss.detach())
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    found += [x.grad, *(p.grad for p in vb.parameters() if p.grad is not None)]
    stats = vb.stats().activations
    vb.close()
    return found, peak, stats


@pytest.mark.parametrize("mode", ["train", "fp4"])
def test_offloaded_activations_give_the_same_bits_in_less_memory(mode):
    kept, peak, _ = trained("keep", mode)
    inputs = LAYERS * TOKENS * WIDTH * 4
    _, recomputed, _ = trained("recompute", mode)
    for activations, room in (("recompute", peak), ("offload", recomputed - inputs // 2), ("512MiB", peak)):
        found, used, stats = trained(activations, mode)
        assert all(torch.equal(a, b) for a, b in zip(found, kept, strict=True))
        assert used < room
        print(mode, activations, f"{used / 2**20:.0f} MiB of {peak / 2**20:.0f}", stats)
        if activations == "offload":
            assert stats.offloaded_bytes == 3 * inputs
            assert stats.late == 0
            assert stats.host_peak_bytes <= inputs
