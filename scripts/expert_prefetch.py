"""Prefetch of the next layer's likely experts, predicted by its router from the previous layer's router input.

The router of a layer, behind its norm, scores the hidden state that the layer before routed; its likeliest experts are
the prediction, and those of them that are missing the prefetch. Predictions are recorded with the routing, and counted
against what policy "experts" misses; compared with the layer's experts of the previous token, and its busiest ones so
far. The first layer has none before it, and is left out.

    python3 scripts/expert_prefetch.py                      # counts the recordings in tests/data/experts
    python3 scripts/expert_prefetch.py --record balanced    # predictions of the committed model
    python3 scripts/expert_prefetch.py --record short --run runs/short    # routing and predictions of another run

"short" was trained without load balancing, on a CPU, by `scripts/train tiny --layers 4 --width 192 --heads 6 --context
256 --batch 8 --steps 400 --lr 2e-3 --dropout 0.1 --experts 48 --expert-width 64 --balance 0 --use-flash-attn`.

Cost model: a prefetch is queued when the layer before is routed, behind that layer's misses. The link then rests for
the time of `idle` pages, until the layer itself is routed. A page that was needed saves its time; what exceeds the idle
time delays the layer, needed or not:

    saved = right - max(0, right + wrong - idle)     # pages a layer and token

So nothing can be gained where the link never rests, and a prefetch pays, roughly, if fewer pages come in vain than the
link could bring while it rests. Prefetched pages have a buffer of their own: what is resident does not depend on them.
Writes benchmarks/results/routing-prefetch.json, of which `scripts/bench --tables` makes the table.

Legend: T tokens, L layers, E experts, H hidden, k experts a token, R ranks.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import Tensor, nn

from scripts.committed import EXPERTS, about, filled, held_out, with_experts
from scripts.lm import Shape, loss_of
from scripts.measuring import machine
from scripts.routing import SHARES, record, recording
from scripts.train_files import Checkpoint
from vbrt.model.phase import DECODE
from vbrt.residency.access_trace import Pass
from vbrt.residency.expert_pages import ExpertsPolicy
from vbrt.residency.expert_room import largest_pages
from vbrt.residency.routing_file import read_routing, write_routing
from vbrt.residency.routing_trace import Routed, Routing

RESULT = ROOT / "benchmarks" / "results" / "routing-prefetch.json"
DECODED = ROOT / "benchmarks" / "results" / "experts-decode-nvidia-h200.json"
RUNS = ("balanced", "short")
TOKENS = 4096
RANKS = 8  # recorded of each prediction: 2 k
#: of Qwen3-30B-A3B in nvfp4, as scripts/experts_decode.py measures it
PAGE_BYTES, LINK_BYTES_S = 768 * 2048 * 3 * 9 // 16, 50e9

Ranked = list[list[tuple[int, ...]]]  # by token and layer: experts, the likeliest first

# -- recordings -------------------------------------------------------------------------------------------------------


def ahead_path(run: str) -> Path:
    return EXPERTS / f"{run}.ahead.routing"


@torch.no_grad()
def predictions(model: nn.Module, text: Tensor, tokens: int) -> Ranked:
    """Ranked experts of each layer by its router, for the hidden state that the layer before routed; none of the first.

    Windows of the context in one pass each: attention is causal, so they equal those of decoding byte by byte.
    """
    layers, seen_TH = list(model.model.layers), []
    hooks = [
        layer.post_attention_layernorm.register_forward_pre_hook(lambda module, args: seen_TH.append(args[0]))
        for layer in layers
    ]
    context = min(model.shape.context, tokens)
    model(text[: tokens // context * context].view(-1, context).long().to(model.device))
    for hook in hooks:
        hook.remove()
    ranks_LTR = [
        layer.mlp.gate(layer.post_attention_layernorm(before.flatten(0, -2)))[0].topk(RANKS).indices.tolist()
        for layer, before in zip(layers[1:], seen_TH, strict=False)
    ]
    return [[(), *map(tuple, ranks)] for ranks in zip(*ranks_LTR, strict=True)]


def write_ahead(ranked: Ranked, routing: Routing, path: Path) -> None:
    """Write predictions as a file of routing, in which each rank is a token of one expert."""
    records: list[Pass | Routed] = []
    for token in ranked:
        records.append(Pass(DECODE))
        records += [Routed(layer, tuple((expert,) for expert in ranks)) for layer, ranks in enumerate(token) if ranks]
    write_routing(Routing(routing.layers, tuple(records)), path)


def read_ahead(path: Path) -> Ranked:
    """Read the predictions of `write_ahead`."""
    ranked: Ranked = []
    for item in read_routing(path).records:
        if isinstance(item, Pass):
            ranked.append([()])
        else:
            ranked[-1].append(tuple(expert for (expert,) in item.tokens))
    return ranked


def keep(run: str, folder: Path | None) -> None:
    """Record the predictions of the committed model, or of a run of scripts/train with its routing."""
    if folder is None:
        model, routing = with_experts(), recording(run)
    else:
        from scripts.lm_experts import ExpertsLanguageModel  # transformers takes seconds to import

        config = Checkpoint(folder / "checkpoint.safetensors").state["config"]
        shape = Shape(**config["shape"])
        model = filled(ExpertsLanguageModel(shape), folder / "model.safetensors").eval()
        routing = record(model, held_out(), TOKENS)
        found = about(EXPERTS)
        found["training"][run] = config | {"loss": loss_of(model, held_out(), shape.context)}
        (EXPERTS / "run.json").write_text(json.dumps(found, indent=1) + "\n")
        write_routing(routing, EXPERTS / f"{run}.routing")
    write_ahead(predictions(model, held_out(), TOKENS), routing, ahead_path(run))


# -- predictors -------------------------------------------------------------------------------------------------------


def selections(routing: Routing, tokens: int) -> list[list[tuple[int, ...]]]:
    """The experts of each token and layer."""
    width = len(routing.layers)
    chosen = [item.tokens[0] for item in routing.records if isinstance(item, Routed)]
    return [chosen[first : first + width] for first in range(0, tokens * width, width)]


def previous_token(chosen: list[list[tuple[int, ...]]]) -> Ranked:
    """A layer's experts of the token before."""
    return [[()] * len(chosen[0]), *chosen[:-1]]


def busiest(chosen: list[list[tuple[int, ...]]], top_k: int) -> Ranked:
    """A layer's experts with most selections so far."""
    counts, ranked = [Counter[int]() for _ in chosen[0]], []
    for token in chosen:
        ranked.append([tuple(expert for expert, _ in count.most_common(top_k)) for count in counts])
        for count, experts in zip(counts, token, strict=True):
            count.update(experts)
    return ranked


def recall(ranked: Ranked, chosen: list[list[tuple[int, ...]]], most: int) -> float:
    """The share of selections that are among the first `most` predicted ones, from the second layer on."""
    pairs = [
        pair for guess, token in zip(ranked, chosen, strict=True) for pair in zip(guess[1:], token[1:], strict=True)
    ]
    return sum(len({*guess[:most]} & {*real}) for guess, real in pairs) / sum(len(real) for _, real in pairs)


# -- misses -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Access:
    """A layer's lease by a token: experts that were resident before it, and those that it missed."""

    token: int
    layer: int
    resident: frozenset[int]
    missed: frozenset[int]


def accesses(routing: Routing, tokens: int, capacity_bytes: int) -> Iterator[Access]:
    """Yield the leases of policy "experts", layer by layer, as `vbrt.simulate` takes them."""
    policy = ExpertsPolicy(capacity_bytes, layers=largest_pages(routing.sizes))
    resident: list[set[int]] = [set() for _ in routing.layers]
    numbers = {
        key: (n, e) for n, each in enumerate(routing.layers) for e in range(each.experts) for key in each.keys(e)
    }
    for token, experts_of in enumerate(selections(routing, tokens)):
        policy.begin_pass(DECODE)
        for layer, experts in enumerate(experts_of):
            before, missed = frozenset(resident[layer]), set()
            keys = tuple(key for expert in experts for key in routing.layers[layer].keys(expert))
            for key in keys:
                decision = policy.access(key, routing.layers[layer].expert_bytes, keys)
                for gone in decision.evict:
                    resident[numbers[gone][0]].discard(numbers[gone][1])
                resident[layer].add(numbers[key][1])
                if not decision.hit:
                    missed.add(numbers[key][1])
            policy.ahead(keys)
            yield Access(token, layer, before, frozenset(missed))


def worth(found: Sequence[Access], ranked: Ranked, *, most: int, pages: int | None = None) -> dict[str, object]:
    """What prefetching predictions is worth, in pages a layer and token, from the second layer on.

    Args:
        most: ranks that are taken of each prediction.
        pages: prefetched at most; None: all that are missing.
    """
    counts = []
    for access in found:
        if access.layer:
            guess = ranked[access.token][access.layer][:most]
            fetched = [expert for expert in guess if expert not in access.resident][:pages]
            right = len(access.missed.intersection(fetched))
            counts.append((right, len(fetched) - right, len(access.missed)))
    right, wrong, missed = (sum(column) / len(counts) for column in zip(*counts, strict=True))
    saved = sum(saved_pages(r, w, idle_pages()) for r, w, _ in counts) / len(counts)
    return {
        "missed": missed,
        "predicted": right / missed,
        "vain_per_saved": wrong / right if right else None,
        "break_even": break_even([(r, w) for r, w, _ in counts]),
        "wait_saved": saved / missed,
    }


def saved_pages(right: int, wrong: int, idle: float) -> float:
    """Pages that a layer waits less for; below 0: that it waits more for."""
    return right - max(0.0, right + wrong - idle)


def break_even(counts: Sequence[tuple[int, int]]) -> float | None:
    """Idle time, in pages a layer, from which prefetches save more than they delay; None without prefetches."""
    if not any(right + wrong for right, wrong in counts):
        return None
    low, high = 0.0, float(max(right + wrong for right, wrong in counts))
    while high - low > 1e-4:
        middle = (low + high) / 2
        pays = sum(saved_pages(right, wrong, middle) for right, wrong in counts) > 0
        low, high = (low, middle) if pays else (middle, high)
    return high


@cache
def idle_pages() -> float:
    """Pages that the link could bring in the time that the resident step takes for a layer, on the measured GPU."""
    result = json.loads(DECODED.read_text("utf-8"))
    (resident,) = (row for row in result["rows"] if row["case"] == f"4 bits, resident, {result['how']}")
    return resident["ms"] / 1e3 / result["layers"] * LINK_BYTES_S / PAGE_BYTES


def measure(run: str) -> dict[str, object]:
    """Recall of each predictor, and what it is worth in room for each of SHARES of all pages."""
    routing, ranked = recording(run), read_ahead(ahead_path(run))
    tokens, top_k = len(ranked), routing.layers[0].top_k
    chosen = selections(routing, tokens)
    rooms = [list(accesses(routing, tokens, int(share * routing.page_bytes))) for share in SHARES]
    ways: dict[str, tuple[Ranked, int, int | None]] = {
        "router": (ranked, top_k, None),
        "router, twice as many": (ranked, 2 * top_k, None),
        "router, one page": (ranked, top_k, 1),
        "previous token": (previous_token(chosen), top_k, None),
        "busiest": (busiest(chosen, top_k), top_k, None),
    }
    return {
        name: {
            "recall": recall(guess, chosen, most),
            "rooms": [worth(found, guess, most=most, pages=pages) for found in rooms],
        }
        for name, (guess, most, pages) in ways.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", metavar="NAME", choices=RUNS, help="record predictions first")
    parser.add_argument("--run", type=Path, help="folder of scripts/train (default: the committed model)")
    args = parser.parse_args()
    if args.record:
        keep(args.record, args.run)
    runs = {}
    for run in RUNS:
        if ahead_path(run).exists():
            runs[run] = measure(run)
            for name, found in runs[run].items():
                print(run, name, json.dumps(found), flush=True)
    layer = recording(RUNS[0]).layers[0]
    head = {"machine": machine(), "tokens": TOKENS, "experts": layer.experts, "top_k": layer.top_k}
    training = about(EXPERTS)["training"]
    head |= {
        "losses": {run: training[run]["loss"] for run in runs},
        "shares": SHARES,
        "idle_pages": idle_pages(),
        "page_bytes": PAGE_BYTES,
    }
    RESULT.write_text(json.dumps(head | {"runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
