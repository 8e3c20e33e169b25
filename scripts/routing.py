"""How tokens of a trained model are routed, and what a cache of experts makes of it.

The model with routed experts, recordings of its routing and of that of a twin without load balancing are committed in
tests/data/experts; scripts/train --experts made the models, and `--pack` put them there. Reuse is counted and policies
are simulated on the recordings alone, whatever machine this runs on. Writes benchmarks/results/routing-lm.json, of
which `scripts/bench --tables` makes the table.

Legend: T tokens, L layers with experts, k experts a token.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import Tensor

import vbrt
from scripts.committed import EXPERTS, filled, held_out
from scripts.lm import Shape, loss_of, read_text
from scripts.train_files import Checkpoint, write_tensors
from vbrt.model.phase import DECODE
from vbrt.residency.access_trace import Pass
from vbrt.residency.routing_file import read_routing, write_routing
from vbrt.residency.routing_trace import Routed, Routing, generate_routing, plan_layers

RESULT = ROOT / "benchmarks" / "results" / "routing-lm.json"
RUNS = ("balanced", "free")  # with and without the loss that spreads tokens over experts
TRACED_TOKENS = 8192
SHARES = (0.10, 0.25, 0.50)  # of all pages
WITHIN = 8  # tokens
#: what is simulated: the policy and its scope
POLICIES = {"lru": ("lru", "layer"), "experts, layer": ("experts", "layer"), "experts, model": ("experts", "model")}

# -- recordings -------------------------------------------------------------------------------------------------------


def recording(run: str) -> Routing:
    """The committed recording of a run."""
    return read_routing(EXPERTS / f"{run}.routing")


@torch.no_grad()
def record(model: torch.nn.Module, text: Tensor, tokens: int) -> Routing:
    """The routing of the first bytes of a text in windows of the context, one pass a byte as decoding them takes."""
    chosen: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, args, out: chosen.append(out[2]))
        for layer in model.model.layers
    ]
    context = min(model.shape.context, tokens)
    model(text[: tokens // context * context].view(-1, context).long().to(model.device))
    for hook in hooks:
        hook.remove()
    layers = plan_layers(vbrt.make_plan(model, vbrt.load_config({"tiers": {"gpu": {"enabled": False}}})))
    return Routing(layers, tuple(_records(torch.stack(chosen, dim=1).sort(-1).values.tolist())))


def _records(chosen_TLk: list[list[list[int]]]) -> Iterator[Pass | Routed]:
    for token in chosen_TLk:
        yield Pass(DECODE)
        for layer, experts in enumerate(token):
            yield Routed(layer, (tuple(experts),))


def pack(runs: dict[str, Path]) -> None:
    """Make tests/data/experts of finished runs of scripts/train --experts, with balancing and without."""
    from scripts.lm_experts import ExpertsLanguageModel, config_of  # transformers takes seconds to import

    text, found = held_out(), {}
    for name, folder in runs.items():
        config = Checkpoint(folder / "checkpoint.safetensors").state["config"]
        shape = Shape(**config["shape"])
        model = filled(ExpertsLanguageModel(shape), folder / "model.safetensors").bfloat16().eval()
        loss = loss_of(model, text, shape.context)
        if name == RUNS[0]:
            write_tensors(EXPERTS / "model.safetensors", dict(model.named_parameters()))
            config_of(shape, balance=config["balance"]).to_json_file(EXPERTS / "config.json")
        write_routing(record(model.float(), text, TRACED_TOKENS), EXPERTS / f"{name}.routing")
        found[name] = {k: v for k, v in config.items() if k != "shape"} | {"loss": loss}
    about = {"shape": config["shape"], "text": read_text(None, shape.context).source, "training": found}
    (EXPERTS / "run.json").write_text(json.dumps(about, indent=1) + "\n")


# -- reuse ------------------------------------------------------------------------------------------------------------


def reuse(routing: Routing) -> list[dict[str, float]]:
    """How the selections of each layer repeat, and how they spread.

    "next": the share of selections that the next token makes too; "within": that one of the next WITHIN tokens makes;
    "busiest": the share of all selections that the busiest tenth of experts has; "used": experts with any.
    """
    return [_reuse(routing.only(number)) for number in range(len(routing.layers))]


def _reuse(routing: Routing) -> dict[str, float]:
    (layer,) = routing.layers
    tokens = [set(record.tokens[0]) for record in routing.records if isinstance(record, Routed)]
    soon = [set().union(*tokens[t + 1 : t + 1 + WITHIN]) for t in range(len(tokens) - WITHIN)]
    counts = sorted((sum(e in token for token in tokens) for e in range(layer.experts)), reverse=True)
    return {
        "next": sum(len(a & b) for a, b in pairwise(tokens)) / sum(map(len, tokens[:-1])),
        "within": sum(len(a & b) for a, b in zip(tokens, soon, strict=False)) / sum(map(len, tokens[:-WITHIN])),
        "busiest": sum(counts[: round(layer.experts / 10)]) / sum(counts),
        "used": sum(count > 0 for count in counts),
    }


def hit_rates(routing: Routing) -> dict[str, list[float]]:
    """The hit rate of each policy in room for each of SHARES of all pages."""
    rooms = [int(share * routing.page_bytes) for share in SHARES]
    return {
        name: [vbrt.simulate(policy, routing, room, scope=scope).hit_rate for room in rooms]
        for name, (policy, scope) in POLICIES.items()
    }


def measure() -> dict:
    """Reuse and hit rates of the recordings, and of a made-up routing of the same layers."""
    routings = {run: recording(run) for run in RUNS}
    routings["generated"] = generate_routing(routings[RUNS[0]].layers, tokens=TRACED_TOKENS, phase=DECODE)
    runs = {}
    for name, routing in routings.items():
        runs[name] = {"reuse": reuse(routing), "hits": hit_rates(routing)}
        print(name, json.dumps(runs[name]), flush=True)
    layer = routings[RUNS[0]].layers[0]
    model = {"layers": len(routing.layers), "experts": layer.experts, "top_k": layer.top_k, "tokens": routing.tokens}
    return {**model, "within": WITHIN, "shares": SHARES, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = "make tests/data/experts of two runs of scripts/train --experts first, with balancing and without"
    parser.add_argument("--pack", nargs=2, type=Path, metavar=("BALANCED", "FREE"), help=what)
    args = parser.parse_args()
    if args.pack:
        pack(dict(zip(RUNS, args.pack, strict=True)))
    RESULT.write_text(json.dumps(measure(), indent=1) + "\n")


if __name__ == "__main__":
    main()
