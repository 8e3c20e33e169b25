"""Mode "full" on a GPU: the same bits as training resident with the same update on the CPU."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vbrt
from scripts.full_models import DEVICE
from tests.training.full.full_models import TOKENS, resident

pytestmark = pytest.mark.gpu
WIDTH, BUDGETS = 1024, ("12MiB", "40MiB", "1GiB")


class Wide(nn.Module):
    """A residual stack whose weights take 2 and 4 MiB in bf16."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH, bias=False) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.recompute = False

    def block(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return x + self.downs[i](F.relu(self.ups[i](x)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for i in range(len(self.ups)):
            if self.recompute:
                x = torch.utils.checkpoint.checkpoint(self.block, i, x, use_reentrant=False)
            else:
                x = self.block(i, x)
        return self.head(self.norm(x))


class OnHost:
    """Updates weights of linear layers by the CPU's fused AdamW, on fp32 masters of its own; the rest by the GPU's."""

    def __init__(self, model: nn.Module, **options) -> None:
        linear = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
        self.pairs = [(weight, nn.Parameter(weight.detach().cpu().clone())) for weight in linear]
        ids = {id(weight) for weight in linear}
        self.rest = torch.optim.AdamW([p for p in model.parameters() if id(p) not in ids], **options)
        self.host = torch.optim.AdamW([master for _, master in self.pairs], fused=True, **options)

    def step(self) -> None:
        for weight, master in self.pairs:
            master.grad = weight.grad.cpu()
        self.host.step()
        self.rest.step()
        with torch.no_grad():
            for weight, master in self.pairs:
                weight.copy_(master)


def run(model, optimizer, steps: int, pieces: int, *, within: bool = False) -> list[float]:
    losses = []
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for piece in range(pieces):
            ids, target = torch.randint(TOKENS, (2, 4, 128), generator=draw).to(DEVICE)
            with torch.autocast(DEVICE, torch.bfloat16):
                logits = model(ids)
            loss = F.cross_entropy(logits.float().flatten(0, 1), target.flatten())
            with model.stepping() if within and piece == pieces - 1 else contextlib.nullcontext():
                loss.backward()
            losses.append(loss.item())
        if not within:
            optimizer.step()
        model.zero_grad()
    return losses


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("pieces", "recompute", "within"), [(1, False, False), (2, False, True), (1, True, True)])
def test_a_model_trains_as_resident(budget, pieces, recompute, within):
    torch.manual_seed(0)
    model = Wide().cuda()
    model.recompute = recompute
    twin = resident(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with vbrt.wrap(model, "full", optimizer=optimizer, tiers={"gpu": {"budget": budget}}) as vb:
        expected = run(twin, OnHost(twin, lr=1e-3), 6, pieces)
        assert run(vb, vb.optimizer, 6, pieces, within=within) == expected
        found = vb.state_dict()
        assert [
            name for name, value in twin.state_dict().items() if not torch.equal(value.cpu(), found[name].cpu())
        ] == []
        stats = vb.stats()
        assert stats.tiers["gpu"].peak_bytes <= stats.tiers["gpu"].budget_bytes
        assert (stats.updates.ahead > 0) == (pieces == 1 and not within)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("recompute", [False, True])
def test_updates_ahead_of_the_step_have_the_bits_of_those_at_the_step(budget, recompute):
    """In steps that wait for nothing, some of which clip below the norm, drop their gradients or are of two passes."""
    results = []
    for ahead in ("auto", 0):
        torch.manual_seed(0)
        model = Wide().cuda()
        model.recompute = recompute
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = {"tiers": {"gpu": {"budget": budget}}, "training": {"ahead": ahead}}
        with vbrt.wrap(model, "full", optimizer=optimizer, **config) as vb:
            losses = run(vb, optimizer, 6, 1)
            for norm in (1e9, 1e9, 0.01, 1e9, 1e9):
                losses += run(vb, Clipping(vb, norm), 1, 1)
            before = vb.stats().updates.ahead
            for norm in (1e9, 1e9, 0.01, 1e9, 1e9):
                losses += run(vb, Clipping(vb, norm, by_torch=True), 1, 1)
            assert (vb.stats().updates.ahead > before) == (ahead == "auto")
            losses += run(vb, Dropping(vb), 1, 1) + run(vb, optimizer, 3, 1)
            losses += run(vb, optimizer, 2, 2) + run(vb, optimizer, 3, 1)
            vb.settle()
            found = vb.stats().updates
            results.append((losses, {name: value.cpu() for name, value in vb.state_dict().items()}))
        assert bool(found.ahead) == bool(found.discarded) == bool(found.spare_bytes) == (ahead == "auto")
    (losses, weights), (expected, bits) = results
    assert losses == expected
    assert [name for name, value in bits.items() if not torch.equal(value, weights[name])] == []


class Clipping:
    """Steps of a wrapper with clipping, ours or torch's."""

    def __init__(self, vb, norm: float, *, by_torch: bool = False) -> None:
        self.vb, self.norm, self.by_torch = vb, norm, by_torch

    def step(self) -> None:
        if self.by_torch:
            torch.nn.utils.clip_grad_norm_(self.vb.parameters(), self.norm)
        else:
            self.vb.clip_grad_norm_(self.norm)
        self.vb.step()


class Dropping:
    """Steps that are left out: their gradients are dropped."""

    def __init__(self, vb) -> None:
        self.vb = vb

    def step(self) -> None:
        self.vb.zero_grad()
