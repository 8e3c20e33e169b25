"""The part of `scripts/bench` that trains: loss curves under cached and fresh scales."""

import copy
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from scripts.measuring import seconds

CURVES_STEPS, CURVES_REFRESH = 300, 100


def train_curves() -> dict:
    """Byte-level Llamas of 1.6 M swapped weights on Python's standard library, from one seed and on the same batches.

    The runs take turns step by step. `fresh` searches scales (and, for quantile, fits the table) in each step, `cached`
    every 100 steps. `separation` is what the engine does in a forward, `again` what the backward pass rounds anew.
    """
    import torch

    data = library_bytes()
    held_out = data[-len(data) // 20 :]
    torch.manual_seed(0)
    model, runs = byte_llama(), {}
    for name, format, every in (
        ("dense", "dense", 1),
        ("nvfp4 fresh", "nvfp4", 1),
        ("nvfp4 cached", "nvfp4", CURVES_REFRESH),
        ("quantile fresh", "quantile", 1),
        ("quantile cached", "quantile", CURVES_REFRESH),
    ):
        runs[name] = TrainingRun(copy.deepcopy(model), format, every)
    draw = torch.Generator().manual_seed(1)
    for _ in range(CURVES_STEPS):
        batch = draw_batch(data[: -len(held_out)], draw)
        for run in runs.values():
            run.step(batch)
    draw.manual_seed(2)
    batches = [draw_batch(held_out, draw) for _ in range(20)]
    rows = [{"run": name, **run.figures(batches)} for name, run in runs.items()]
    return {
        **curve_figures({row["run"]: row for row in rows}),
        "rows": rows,
        "curves": {name: run.curve() for name, run in runs.items()},
    }


def library_bytes():
    """uint8 [bytes]: the sources of the standard library's top level, in the order of their names."""
    import torch

    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def byte_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=2,
            vocab_size=256,
            num_attention_heads=4,
            max_position_embeddings=128,
        )
    ).train()


def draw_batch(data, generator):
    """int64 [8, 128]."""
    import torch

    starts = torch.randint(len(data) - 128, (8,), generator=generator)
    return torch.stack([data[start : start + 128] for start in starts.tolist()]).long()


class TrainingRun:
    """One model in training: its losses, the time of its steps, and what of that the engine has taken."""

    def __init__(self, model, format: str, every: int) -> None:
        import torch

        import vbrt

        self.vb = vbrt.wrap(
            model,
            mode="train",
            weights={"format": format},
            separation={"refresh_every": every},
            tiers={"gpu": {"enabled": False}},
        )
        self.optimizer = torch.optim.AdamW(self.vb.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self.spans: dict[str, list[float]] = {"step": [], "separation": [], "again": []}
        engines = [layer.handle.separation for layer in self.vb.registry.values() if layer.handle.separation]
        for engine in engines:
            engine.forward = self.timed("separation", engine.forward)
            engine.again = self.timed("again", engine.again)

    def timed(self, name: str, function: Callable) -> Callable:
        def run(*args, **kwargs):
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.spans[name][-1] += time.perf_counter() - start
            return result

        return run

    def step(self, batch) -> None:
        for spans in self.spans.values():
            spans.append(0.0)
        self.spans["step"][-1] = seconds(lambda: self._step(batch))

    def _step(self, batch) -> None:
        loss = self.vb(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def curve(self) -> dict[str, float]:
        """Mean loss of each ten steps, by the last of them."""
        return {str(end): statistics.mean(self.losses[end - 10 : end]) for end in range(10, len(self.losses) + 1, 10)}

    def figures(self, held_out: list) -> dict:
        """Losses in nats a byte, milliseconds a step: means, so that refreshes count."""
        import torch

        self.vb.eval()
        separation, again = (1e3 * statistics.mean(self.spans[name]) for name in ("separation", "again"))
        step, stats = 1e3 * statistics.mean(self.spans["step"]), self.vb.stats()
        with torch.no_grad():
            held = statistics.mean(self.vb(input_ids=b, labels=b, use_cache=False).loss.item() for b in held_out)
        layers = stats.layers.values()
        return {
            "held-out loss": held,
            "last 20 steps": statistics.mean(self.losses[-20:]),
            "searches a layer": sum(layer.separation_refreshes for layer in layers) / len(layers),
            "step ms": step,
            "separation ms": separation,
            "again ms": again,
            "engine's share, %": 100 * (separation + again) / step,
        }


def curve_figures(rows: dict[str, dict]) -> dict:
    """Cached against fresh, for each format."""
    figures = {"steps": CURVES_STEPS, "refresh every": CURVES_REFRESH}
    for format in ("nvfp4", "quantile"):
        fresh, cached = rows[f"{format} fresh"], rows[f"{format} cached"]
        for loss in ("held-out loss", "last 20 steps"):
            figures[f"{format}, {loss}, cached / fresh"] = cached[loss] / fresh[loss]
        figures[f"{format}, separation, fresh / cached"] = fresh["separation ms"] / cached["separation ms"]
        both = [row["separation ms"] + row["again ms"] for row in (fresh, cached)]
        figures[f"{format}, with the backward pass, fresh / cached"] = both[0] / both[1]
        figures[f"{format}, whole step, fresh / cached"] = fresh["step ms"] / cached["step ms"]
    return figures
