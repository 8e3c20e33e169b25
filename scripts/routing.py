"""How tokens of a trained model are routed, and what a cache of experts makes of it.

The model with routed experts, traces of its routing and of that of a twin without load balancing are committed in
tests/data/experts; scripts/train --experts made the models, and `--pack` put them there. Reuse is counted and policies
are simulated on the traces alone. docs/benchmarks.md is generated from benchmarks/results/routing-lm.json.

Legend: T tokens, L layers with experts, k experts a token, E experts a layer.
"""

import json
import lzma
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import Tensor

from scripts.committed import EXPERTS, about, filled, held_out
from scripts.lm import Shape, loss_of, read_text
from scripts.lm_experts import ExpertsLanguageModel, config_of
from scripts.train_files import Checkpoint, write_tensors

RESULT = ROOT / "benchmarks" / "results" / "routing-lm.json"
RUNS = ("balanced", "free")  # with and without the loss that spreads tokens over experts
TRACED_TOKENS = 8192
SHARES = (0.10, 0.25, 0.50)  # of all pages
WITHIN = 8  # tokens

# -- the committed model and its traces -------------------------------------------------------------------------------


def trace(run: str) -> Tensor:
    """The experts of each token in each layer, uint8 [T, L, k]."""
    shape = Shape(**about(EXPERTS)["shape"])
    ids = torch.frombuffer(bytearray(lzma.decompress((EXPERTS / f"routing-{run}.xz").read_bytes())), dtype=torch.uint8)
    return ids.view(-1, shape.layers, shape.active)


@torch.no_grad()
def record(model: ExpertsLanguageModel, text: Tensor, tokens: int) -> Tensor:
    """The routing of the first bytes of a text, in windows of the context, as decoding them would route; [T, L, k]."""
    chosen: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, args, out: chosen.append(out[2]))
        for layer in model.model.layers
    ]
    context = min(model.shape.context, tokens)
    model(text[: tokens // context * context].view(-1, context).long().to(model.device))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).to("cpu", torch.uint8)


def pack(runs: dict[str, Path]) -> None:
    """Make tests/data/experts of finished runs of scripts/train --experts, with balancing and without."""
    text, found = held_out(), {}
    for name, folder in runs.items():
        config = found[name] = Checkpoint(folder / "checkpoint.safetensors").state["config"]
        shape = Shape(**config["shape"])
        weights = filled(ExpertsLanguageModel(shape), folder / "model.safetensors").bfloat16().eval()
        if name == RUNS[0]:
            write_tensors(EXPERTS / "model.safetensors", dict(weights.named_parameters()))
            config_of(shape, balance=config["balance"]).to_json_file(EXPERTS / "config.json")
        chosen = record(weights.float(), text, TRACED_TOKENS)
        (EXPERTS / f"routing-{name}.xz").write_bytes(lzma.compress(chosen.numpy().tobytes(), preset=9))
        found[name] = {k: v for k, v in config.items() if k != "shape"} | {
            "loss": loss_of(weights, text, shape.context)
        }
    source = read_text(None, shape.context).source
    run = {"shape": config["shape"], "text": source, "training": found}
    (EXPERTS / "run.json").write_text(json.dumps(run, indent=1) + "\n")


# -- reuse ------------------------------------------------------------------------------------------------------------


def reuse(chosen_Tk: Tensor, experts: int) -> dict[str, float]:
    """How the selections of one layer repeat, and how they spread.

    "next": the share of selections that the next token makes too; "within": that one of the next WITHIN tokens makes;
    "busiest": the share of all selections that the busiest tenth of experts has; "used": experts with any.
    """
    tokens, k = chosen_Tk.shape
    hot_TE = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen_Tk.long(), True)
    soon_TE = torch.stack([hot_TE.roll(-ahead, 0) for ahead in range(1, WITHIN + 1)]).any(0)
    counts = hot_TE.sum(0).sort(descending=True).values
    return {
        "next": (hot_TE[:-1] & hot_TE[1:]).sum().item() / (k * (tokens - 1)),
        "within": (hot_TE & soon_TE)[:-WITHIN].sum().item() / (k * (tokens - WITHIN)),
        "busiest": counts[: round(experts / 10)].sum().item() / counts.sum().item(),
        "used": int((counts > 0).sum()),
    }
