"""The README's three stories, on a model of your own or on random weights of a published shape.

    python3 scripts/stories.py generate --shape qwen3-32b --gpu-memory 12GB      a model that is too large for the GPU
    python3 scripts/stories.py lora --shape qwen3-32b --gpu-memory 12GB          adapters on it, with Trainer and PEFT
    python3 scripts/stories.py experts --shape qwen3-30b-a3b --shares 25 10      experts that wait in host memory
    python3 scripts/stories.py generate path/to/model --gpu-memory 12GB          the same with a directory

`--gpu-memory` makes a larger GPU a smaller one: torch may reserve that much less what CUDA itself takes, from before
the first weight is made. The budget of the gpu tier is what then remains beside embeddings, output head and
`--spare`. Results are printed, and written as JSON with `--out`.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path

import vbrt
from scripts.generate_bench import Clock
from scripts.measuring import machine
from scripts.story_models import SHAPES, kept_bytes, outline, wrapped
from vbrt.config.parse_budgets import parse_budget
from vbrt.residency.plan import format_bytes

CONTEXT_BYTES = 700_000_000  # what CUDA takes for itself on a GPU
PROMPT = 128


def bytes_of(text: str) -> int:
    """Return the bytes of a size such as "12GB". Raises ConfigError."""
    return int(parse_budget(text, where="size").amount)


class Room:
    """What a GPU of `--gpu-memory` has room for; everything, without one."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._memory = bytes_of(args.gpu_memory) if args.gpu_memory else None
        self._spare, self._where, self._preset = bytes_of(args.spare), args.where, args.preset
        if self._memory and self.device.type == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction((self._memory - CONTEXT_BYTES) / total)

    def tiers(self) -> dict:
        """Return the tiers of the config: a budget for pages beside all else on the GPU."""
        if self._memory is None or self.device.type != "cuda":
            return {}
        beside = CONTEXT_BYTES + kept_bytes(self._where, self._preset) + self._spare
        if beside >= self._memory:
            need = f"what stays dense, --spare and CUDA take {format_bytes(beside)}"
            raise SystemExit(f"--gpu-memory {format_bytes(self._memory)} is too small: {need}")
        return {"gpu": {"budget": self._memory - beside}}


def figures(device: torch.device) -> dict[str, float]:
    """Return the most that torch allocated and reserved, and what the device has given away in all, in GB."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info()
    peaks = {"peak_gb": torch.cuda.max_memory_allocated(), "reserved_gb": torch.cuda.max_memory_reserved()}
    return {name: nbytes / 1e9 for name, nbytes in peaks.items()} | {"device_gb": (total - free) / 1e9}


def ready(args: argparse.Namespace, tiers: dict) -> tuple[vbrt.VBModelWrapper, dict]:
    """Return the wrapped model, and what it is."""
    start = time.perf_counter()
    vb = wrapped(args.where, args.preset, tiers=tiers)
    stats = vb.stats()
    pages = sum(sum(layer.plane_bytes.values()) for layer in stats.layers.values())
    row = {
        "parameters": sum(p.numel() for p in outline(args.where).parameters()),
        "preset": args.preset,
        "ready_s": time.perf_counter() - start,
        "pages_gb": pages / 1e9,
        "budget_gb": stats.tiers[stats.compute_tier].budget_bytes / 1e9,
    }
    return vb, row


def prompt_of(where: str, device: torch.device) -> torch.Tensor:
    torch.manual_seed(3)
    vocabulary = outline(where).config.vocab_size
    return torch.randint(10, min(vocabulary, 30000), (1, PROMPT), device=device)


def timed_tokens(vb: vbrt.VBModelWrapper, ids: torch.Tensor, new: int, **given: object) -> float:
    """Return the milliseconds of a token after the first, of a second call of `generate`: the first one records."""
    for _ in range(2):
        clock = Clock()
        vb.generate(ids, max_new_tokens=new, min_new_tokens=new, pad_token_id=0, stopping_criteria=[clock], **given)
    return clock.ms


# -- a model that is too large for the GPU ----------------------------------------------------------------------------


def generate(args: argparse.Namespace) -> dict:
    """Generate from a prompt."""
    room = Room(args)
    vb, row = ready(args, room.tiers())
    row["loading"] = figures(vb.device)
    row["ms"] = timed_tokens(vb, prompt_of(args.where, vb.device), args.new, do_sample=False)
    steps = vb.stats().steps
    row |= {"tokens_s": 1e3 / row["ms"], "captured": steps.captured, "reasons": list(steps.reasons)}
    row |= figures(vb.device) | {"fallbacks": list(vb.stats().fallbacks)}
    vb.close()
    return row


# -- adapters on it ---------------------------------------------------------------------------------------------------


def rows_of_text(where: str, length: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Return tokens of the sources of Python's argparse: the tokenizer's where the model has one, else bytes."""
    text = Path(argparse.__file__).read_text()
    if where in SHAPES:
        ids = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    else:
        from transformers import AutoTokenizer

        ids = torch.tensor(AutoTokenizer.from_pretrained(where, local_files_only=True)(text)["input_ids"])
    pieces = ids.repeat(1 + length * count // len(ids))[: length * count].view(count, length)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def lora(args: argparse.Namespace) -> dict:
    """Train adapters with transformers' Trainer."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise SystemExit(f"this story needs peft ({error}); pip install '.[all]'") from error
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Ends(TrainerCallback):
        """Notes when steps end."""

        def __init__(self) -> None:
            self.moments: list[float] = []

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.moments.append(time.perf_counter())

    room, ends = Room(args), Ends()
    vb, row = ready(args, room.tiers())
    row["loading"] = figures(vb.device)
    model = get_peft_model(vb, LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
    with tempfile.TemporaryDirectory() as directory:
        settings = TrainingArguments(
            output_dir=directory,
            max_steps=args.steps,
            per_device_train_batch_size=1,
            learning_rate=1e-3,
            gradient_checkpointing=True,
            bf16=room.device.type == "cuda",
            use_cpu=room.device.type != "cuda",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        data = rows_of_text(args.where, args.length, 4)
        trainer = Trainer(model=model, args=settings, train_dataset=data, callbacks=[ends])
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    spans = [b - a for a, b in zip(ends.moments[1:], ends.moments[2:], strict=False)]
    trained = sum(p.numel() for p in vb.parameters() if p.requires_grad)
    row |= {"tokens_a_step": args.length, "step_s": statistics.median(spans), "trained_parameters": trained}
    row |= {"first_loss": losses[0], "last_loss": losses[-1], "steps": len(losses)}
    row |= figures(vb.device) | {"fallbacks": list(vb.stats().fallbacks)}
    vb.close()
    return row


# -- experts in host memory -------------------------------------------------------------------------------------------


def experts(args: argparse.Namespace) -> dict:
    """Generate with shares of the experts on the GPU. Tokens are drawn by chance, so that routing varies."""
    Room(args)
    plan = vbrt.make_plan(outline(args.where), vbrt.load_config(args.preset, tiers={"gpu": {"budget": "auto"}}))
    top = plan.compute_tier
    budgets = {share: _budget(plan, share / 100) for share in sorted(args.shares)}
    tiers = {top: {"budget": min(budgets.values())}}
    with tempfile.TemporaryDirectory() as directory:  # on a machine without a GPU, experts wait there
        vb, row = ready(args, tiers | ({"ssd": {"enabled": True, "path": directory}} if top == "cpu" else {}))
        row["shares"] = [_with_share(vb, args, share, budget) for share, budget in budgets.items()]
        row["fallbacks"] = list(vb.stats().fallbacks)
        vb.close()
    return row


def _with_share(vb: vbrt.VBModelWrapper, args: argparse.Namespace, share: float, budget: int) -> dict:
    """Generate with room for a share of the experts."""
    vb.set_budget(vb.stats().compute_tier, budget)
    if vb.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = vb.stats()
    ms = timed_tokens(vb, prompt_of(args.where, vb.device), args.new, do_sample=True)
    after = vb.stats()
    row = {"percent": share, "budget_gb": budget / 1e9, "ms": ms, "tokens_s": 1e3 / ms}
    row |= {"hit_rate": _hit_rate(before, after), "decides": _decides(after)}
    row |= {"captured": after.steps.captured - before.steps.captured, "reasons": list(after.steps.reasons)}
    row |= figures(vb.device)
    print(json.dumps(row), flush=True)
    return row


def _budget(plan: vbrt.Plan, share: float) -> int:
    """Return the bytes of a share of the experts, of one lease of them, and of all other pages."""
    routed = {swap.name for swap in plan.routed}
    others = sum(swap.page_bytes for swap in plan.swaps if swap.name not in routed)
    lease = max(sum(page.nbytes for page in swap.pages[: swap.top_k]) for swap in plan.routed)
    return others + int(share * sum(swap.page_bytes for swap in plan.routed)) + lease


def _hit_rate(before: vbrt.Stats, after: vbrt.Stats) -> float:
    """Return the share of the leases of experts that moved nothing, prompts included."""
    routed = [name for name, layer in after.layers.items() if layer.experts is not None]
    hits = sum(after.layers[name].hits - before.layers[name].hits for name in routed)
    misses = sum(after.layers[name].misses - before.layers[name].misses for name in routed)
    return hits / max(1, hits + misses)


def _decides(stats: vbrt.Stats) -> list[str]:
    return sorted({layer.experts.decides for layer in stats.layers.values() if layer.experts is not None})


STORIES: dict[str, Callable[[argparse.Namespace], dict]] = {"generate": generate, "lora": lora, "experts": experts}


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("story", choices=list(STORIES))
    parser.add_argument("directory", nargs="?", type=str, help="of a model of transformers")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights instead")
    parser.add_argument("--preset", default="fp4")
    parser.add_argument("--gpu-memory", help='such as "12GB": all that this process may take of the GPU')
    parser.add_argument("--spare", help="of it, for activations, keys and values (default: 1.8GB; lora: 3GB)")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate")
    parser.add_argument("--steps", type=int, default=10, help="of training")
    parser.add_argument("--length", type=int, default=512, help="tokens a step of training")
    parser.add_argument("--shares", type=float, nargs="*", default=[25, 10], help="percent of the experts on the GPU")
    parser.add_argument("--out", type=Path, help="a JSON file, to which the result is added")
    return parser


def main() -> None:
    parser = options()
    args = parser.parse_args()
    if (args.directory is None) == (args.shape is None):
        parser.error("name the directory of a model, or a --shape")
    args.where = args.shape or str(Path(args.directory).expanduser())
    args.spare = args.spare or ("3GB" if args.story == "lora" else "1.8GB")
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
    row = {"model": args.shape or Path(args.where).name, "gpu_memory": args.gpu_memory} | STORIES[args.story](args)
    print(json.dumps(row, indent=1))
    if args.out:
        result = json.loads(args.out.read_text()) if args.out.exists() else {}
        args.out.write_text(json.dumps(result | {"machine": machine(), args.story: row}, indent=1) + "\n")


if __name__ == "__main__":
    main()
