"""A user's program, as strict type checkers read it."""

from pathlib import Path

import torch
from torch import nn

import vbrt


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def sizes(stats: vbrt.Stats) -> dict[str, int]:
    return {name: layer.hits for name, layer in stats.layers.items()}


def main(directory: Path) -> None:
    vb = vbrt.wrap(build(), "exact", tiers={"gpu": {"budget": "6GiB"}, "ssd": {"enabled": True, "path": directory}})
    out = vb(torch.zeros(1, 64, dtype=torch.float32, device="cpu"))
    print(out.shape, vb.lossless, vb.plan.notes)
    vb.set_budget("cpu", "2GiB")
    tokens = vb.generate(torch.zeros(1, 4, dtype=torch.long, device="cpu"), max_new_tokens=8, speculate="auto")
    print(tokens.shape[0] + 1, sizes(vb.stats(verbose=True)))
    with vb.timeline(directory / "pass.html") as recorder:
        vb(out)
    print(recorder)
    model: nn.Module = vb.unwrap()
    plan: vbrt.Plan = vbrt.make_plan(model, vbrt.load_config("nf4", weights={"exclude": ["lm_head"]}))
    print(plan, vbrt.estimate(model, context=4096, batch=2), vbrt.advise(model, goal="exact").best)
    loaded = vbrt.from_pretrained(directory, "fp4", policy={"kind": "lru"}, compute={"captures": False})
    try:
        with loaded:
            loaded.materialize(progress=False)
    except vbrt.VBError as error:
        print(error)
    trained = vbrt.wrap(build(), mode="full", optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    print(type(trained), vbrt.QuantizationConfig("exact", tiers={"cpu": {"pinned": False}}).settings)


if __name__ == "__main__":
    main(Path("pages"))
