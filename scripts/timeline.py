"""Timelines of real passes, as pages and as traces for Perfetto: streamed decoding, speculation, a step of LoRA.

The shape is an 8B model's, with random weights made on the GPU; `--tiny` is a model for machines without one.

    python3 scripts/timeline.py [--tiny] [--layers 32] [--parts decode speculation lora] [--out .]
"""

import argparse
import contextlib
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import nn

import vbrt
from scripts.measuring import llama_8b
from vbrt.report.timeline_files import write_timeline

SHARE = 0.4  # of the pages on the computing device
RANK = 8


def tiny(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, vocab_size=512, num_hidden_layers=layers)).to(torch.bfloat16).eval()


@contextlib.contextmanager
def recorded(vb: vbrt.VBModelWrapper, path: Path) -> Iterator[None]:
    """One recording of a block, as a page and as a trace."""
    with vb.timeline(path.with_suffix(".html")) as recorder:
        yield
    write_timeline(recorder.timeline, path.with_suffix(".json"))
    totals = recorder.timeline.totals
    waiting = f"{totals.recorded_us / 1e3:.1f} ms, {totals.wait_share:.1%} waiting"
    print(f"{path.name}: {len(recorder.timeline.spans)} spans, {waiting}", flush=True)


def wrapped(model: nn.Module, preset: str, tier: str) -> vbrt.VBModelWrapper:
    """The model with a share of its pages in the computing tier; the others come over a link."""
    pages = sum(swap.page_bytes for swap in vbrt.make_plan(model, vbrt.load_config(preset)).swaps)
    tiers = {tier: {"budget": int(SHARE * pages)}}
    if tier == "cpu":
        tiers["ssd"] = {"enabled": True, "path": tempfile.gettempdir()}
    return vbrt.wrap(model, preset, tiers=tiers).materialize()


def decode(model: nn.Module, tier: str, write: Callable) -> None:
    """Greedy tokens with streamed 4-bit weights."""
    with wrapped(model, "fp4", tier) as vb, torch.no_grad():
        ids = torch.randint(10, 500, (1, 64), device=vb.stack.device)
        ask = {"do_sample": False, "pad_token_id": 0}
        vb.generate(ids, max_new_tokens=4, min_new_tokens=4, **ask)
        with write(vb, "decode"):
            vb.generate(ids, max_new_tokens=8, min_new_tokens=8, **ask)


def speculation(model: nn.Module, tier: str, write: Callable) -> None:
    """Drafts by the coarse planes, verified by exact weights that stream."""
    with wrapped(model, "exact", tier) as vb, torch.no_grad():
        ids = torch.randint(10, 500, (1, 64), device=vb.stack.device)
        ask = {"do_sample": False, "pad_token_id": 0, "speculate": 3}
        vb.generate(ids, max_new_tokens=8, min_new_tokens=8, **ask)
        with write(vb, "speculation"):
            vb.generate(ids, max_new_tokens=12, min_new_tokens=12, **ask)


def lora(model: nn.Module, tier: str, write: Callable) -> None:
    """Steps of AdamW on adapters of rank 8 beside the query projections; the weights stream, forward and backward."""
    with wrapped(model, "fp4", tier) as vb:
        device, dtype = vb.stack.device, torch.bfloat16
        adapters = []
        for name, module in vb.module.named_modules():
            if name.endswith("q_proj"):
                down = nn.Parameter(0.01 * torch.randn(RANK, module.in_features, device=device, dtype=dtype))
                up = nn.Parameter(torch.zeros(module.out_features, RANK, device=device, dtype=dtype))
                adapters += [down, up]
                module.register_forward_hook(lambda m, args, y, down=down, up=up: y + args[0] @ down.mT @ up.mT)
        optimizer = torch.optim.AdamW(adapters, lr=1e-4)
        ids = torch.randint(10, 500, (1, 128), device=device)

        def step() -> None:
            vb(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        with write(vb, "lora"):
            step()
            step()


PARTS = {"decode": decode, "speculation": speculation, "lora": lora}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a model for machines without a GPU")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path())
    args = parser.parse_args()
    failed = 0
    for part in args.parts:
        model = tiny(args.layers) if args.tiny else llama_8b(args.layers)
        tier = "gpu" if torch.cuda.is_available() else "cpu"
        try:
            PARTS[part](model, tier, lambda vb, name: recorded(vb, args.out / name))
        except Exception:  # noqa: BLE001 - the other parts are still worth having
            failed += 1
            traceback.print_exc()
        del model
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
