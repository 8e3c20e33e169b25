"""Training from the tiers on a CPU: 35.8 M parameters with half of their state in files, beside the same resident.

Writes benchmarks/results/tiers-training-cpu.json; `scripts/bench --tables` makes the table of it.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import Tensor, nn

import vbrt
from scripts.bench_parts import small_model
from scripts.measuring import interleaved, machine

ROWS, LR = 512, 1e-4


def made() -> nn.Module:
    """Return the model, the same each time."""
    torch.manual_seed(0)
    return small_model().train()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return the optimizer."""
    return torch.optim.AdamW(model.parameters(), LR, fused=True)


def stepping(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Callable[[], Tensor]:
    """Return a step of training; it returns the loss."""

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(x).float() - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measured(times: int, pages: Path) -> dict:
    """Return seconds a step of both, taking turns, and whether losses and weights are equal after all of them."""
    x = torch.randn(ROWS, 544)
    plain, model = made(), made()
    state = 12 * sum(p.numel() for p in model.parameters())  # halves and moments
    tiers = {"cpu": {"budget": state // 2}, "ssd": {"enabled": True, "path": str(pages)}, "gpu": {"enabled": False}}
    optimizer = adamw(model)
    with vbrt.wrap(model, "full", optimizer=optimizer, tiers=tiers) as vb:
        steps = {"resident": stepping(plain, adamw(plain), x), "tiers": stepping(vb, optimizer, x)}
        seconds = interleaved(steps, times=times)
        equal = torch.equal(steps["resident"](), steps["tiers"]())
        own, theirs = vb.state_dict(), plain.state_dict()
        held = {name: tier.held_bytes for name, tier in vb.stats().tiers.items()}
    return {
        "parameters": sum(p.numel() for p in plain.parameters()),
        "rows": ROWS,
        "state_bytes": state,
        "held_bytes": held,
        "seconds": seconds,
        "ratio": seconds["tiers"] / seconds["resident"],
        "equal": equal and all(torch.equal(own[name], value) for name, value in theirs.items()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--pages", type=Path, help="folder on the drive to use (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.pages) as pages:
        result = {"machine": machine(), "figures": measured(options.times, Path(pages))}
    print(json.dumps(result["figures"]))
    (options.out / "tiers-training-cpu.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
