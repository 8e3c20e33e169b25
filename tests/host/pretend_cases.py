"""Runs a small Llama and a small MoE model on the pretend accelerator and on the CPU; prints a JSON of what came out.

A process of its own, because torch has one plug-in device, and vbrt looks for an accelerator when it is imported.
"""

import copy
import json
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.host.pretend_gpu import DEVICE, WITHOUT_STREAMS, counts  # isort: skip  (before vbrt)

import torch

import vbrt
from vbrt.errors import VBError
from vbrt.host import accelerator

CPU, RESIDENT, STREAMED = {"gpu": {"enabled": False}}, {"gpu": {"budget": "64MiB"}}, {"gpu": {"budget": "20KiB"}}
STREAMED_STATE = {"gpu": {"budget": "40KiB"}, "cpu": {"budget": "50MiB"}}
IDS = torch.arange(1, 9)[None]


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 64, "attn_implementation": "eager"}
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


def wrapped(model, config, tiers, **other):
    device = "cpu" if tiers is CPU else DEVICE
    return vbrt.wrap(copy.deepcopy(model), config, tiers=tiers, **other), device


@torch.no_grad()
def forward(model, config, tiers, backend="reference"):
    """Logits of the third pass, greedy tokens, fallbacks, and what was counted meanwhile."""
    before = dict(counts)
    vb, device = wrapped(model, config, tiers, compute={"backend": backend})
    for _ in range(3):
        logits = vb(IDS.to(device)).logits
    assert logits.device == torch.device(device), logits.device
    tokens = vb.generate(IDS.to(device), max_new_tokens=3, do_sample=False, pad_token_id=0).tolist()
    stats = vb.stats()
    moved = {link: nbytes for link, nbytes in stats.bytes_moved.items() if nbytes}
    used = {name: counts[name] - before[name] for name in counts}
    found = {"tokens": tokens, "fallbacks": list(stats.fallbacks), "used": used, "moved": moved}
    vb.close()
    return logits.cpu(), found


def training(tiers, mode, move):
    """Losses of three steps in fp32."""
    device = "cpu" if tiers is CPU else DEVICE
    model = llama().train().to(device if move else "cpu")
    if mode == "full":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        vb = vbrt.wrap(model.to(torch.bfloat16), "full", optimizer=optimizer, tiers=tiers)
    else:
        vb = vbrt.wrap(model, "fp4", mode="train", tiers=tiers, compute={"backend": "reference"})
        optimizer = torch.optim.SGD(vb.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = vb(IDS.to(device), labels=IDS.to(device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def refused(*args, **kwargs):
    try:
        vb = vbrt.wrap(llama(), "fp4", *args, **kwargs)
        vb(IDS.to(DEVICE))
    except VBError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def shares(directory):
    """Settings, note and bytes of the tier, of a model wrapped or read with a share of the GPU."""
    llama().save_pretrained(directory)
    share = {"gpu_memory": "700MiB", "context": 16}
    ways = {
        "wrap": lambda: vbrt.wrap(llama(), "fp4", **share),
        "load": lambda: vbrt.load(directory, llama(), "fp4", **share),
        "from_pretrained": lambda: vbrt.from_pretrained(directory, **share),
    }
    found = {}
    for name, made in ways.items():
        vb = made()
        gpu, settings = vb.runtime.budgets["gpu"], vb.vbrt.settings
        found[name] = [settings.gpu_memory, settings.tiers.gpu.budget, gpu, vb.vbrt.plan.notes[-1]]
        vb.close()
    other = torch.zeros(4 << 20, dtype=torch.uint8, device=DEVICE)
    vb = vbrt.wrap(llama(), "fp4", **share)
    found["beside"] = [vb.runtime.budgets["gpu"], other.nbytes, vb.vbrt.plan.notes[-1]]
    vb.close()
    return found


def main():
    from tests.generation.families import tiny

    model, moe = llama(), tiny("qwen3_moe")
    found = {"type": accelerator.TYPE, "lacks": accelerator.LACKS, "vendor": accelerator.vendor(DEVICE)}
    with tempfile.TemporaryDirectory() as directory:
        found["shares"] = shares(directory)
    with tempfile.TemporaryDirectory() as directory:
        drive = STREAMED | {"cpu": {"budget": "20KiB"}, "ssd": {"enabled": True, "path": directory, "budget": "10MiB"}}
        runs = {
            "fp4": (model, "fp4", {"resident": RESIDENT, "streamed": STREAMED, "drive": drive}),
            "exact": (model, "exact", {"streamed": STREAMED_STATE}),
            "experts": (moe, "fp4", {"streamed": STREAMED}),
        }
        for name, (of, config, places) in runs.items():
            want, tokens = forward(of, config, CPU)
            for place, tiers in places.items():
                got, told = forward(of, config, tiers, "auto" if place == "resident" else "reference")
                error = (got - want).abs().max().item()
                found[f"{name} {place}"] = told | {"error": error, "same": told["tokens"] == tokens["tokens"]}
    found["train"] = [training(tiers, "train", move=True) for tiers in (CPU, RESIDENT)]
    found["full"] = [training(tiers, "full", move=True) for tiers in (CPU, RESIDENT, STREAMED_STATE)]
    found["refused"] = {
        "links": refused(tiers={"gpu": {"links": [1]}}),
        "peer": refused(tiers={"peer": {"enabled": True, "devices": [1]}}),
        "devices": refused(tiers={"gpu": {"devices": [0, 1]}}),
        "share": refused(gpu_memory="620MiB"),
        "kernels": refused(compute={"backend": "triton"}),
    }
    try:
        training(RESIDENT, "full", move=False)
    except VBError as error:
        found["refused"]["full"] = f"{type(error).__name__}: {error}"
    return found


@torch.no_grad()
def without_streams():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    x, found = torch.randn(2, 64), {"lacks": accelerator.LACKS}
    want = wrapped(model, "fp4", CPU, compute={"backend": "reference"})[0](x)
    vb, _ = wrapped(model, "fp4", {"gpu": {"budget": "8KiB"}})
    errors = [(vb(x.to(DEVICE)).cpu() - want).abs().max().item() for _ in range(4)]
    moved = dict(vb.stats().bytes_moved)
    return found | {"errors": errors, "moved": moved, "fallbacks": list(vb.stats().fallbacks), "counts": counts}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(without_streams() if WITHOUT_STREAMS else main()))
