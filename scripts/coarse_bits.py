"""A coarse plane of 3 bits under `exact`, beside that of 4: bits of both planes, and how far drafts by it are accepted.

    python3 scripts/coarse_bits.py         # the committed language model; scripts/accuracy.py writes what it found

No such `exact` is built. The fine plane's bits are the entropy of bf16 patterns, as offsets from the decoded weight's,
given the decoded weight's distance from zero in units of its scale: what a coder with a table for each such distance
could reach, as the coder of nvfp4's fine planes has one for each code and scale. Acceptance is greedy decoding's: a
draft counts if it and all before it in its round are the tokens of the exact model.
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import Tensor, nn

from scripts import committed
from scripts.measuring import machine, markdown_table, named_machine
from vbrt.formats import get_format
from vbrt.formats.t3 import T3, column_values
from vbrt.kernels import resolve

__all__ = ["RESULT", "section"]

RESULT = ROOT / "benchmarks" / "results" / "coarse-bits-lm.json"
FORMATS = ("nvfp4", "t3")
DRAFTS = (1, 4, 8)
_CPU = torch.device("cpu")
_CONTEXTS = 64  # distances from zero, eighths of an octave
_PROMPT, _NEW, _TEXTS = 128, 64, 12


def encoded(w_NK: Tensor, format: str) -> tuple[Tensor, Tensor, float]:
    """Decoded weight, scale of each weight, both fp32 [N, K], and bits of a weight."""
    fmt = resolve("codec", "auto", _CPU, format).run(get_format(format))
    coarse, k = fmt.encode(w_NK), w_NK.shape[1]
    decoded = fmt.decode(coarse, tuple(w_NK.shape), torch.float32)
    bits = 8 * sum(t.nbytes for t in coarse.values()) / w_NK.numel()
    if isinstance(fmt, T3):
        return decoded, fmt.block_scales(coarse, k)[:, :k] * column_values(coarse["columns"])[:k], bits
    return decoded, fmt._scales(coarse).repeat_interleave(fmt.block, 1)[:, :k], bits


def ordered(w: Tensor) -> Tensor:
    """Place of each bf16 number among all, int64."""
    bits = w.bfloat16().view(torch.int16).long()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def entropy(matrices: list[Tensor], format: str) -> tuple[float, float]:
    """(Bits of the coarse plane, entropy of the bf16 weight given it) a weight."""
    found: list[Tensor] = []
    total, bits = 0, 0.0
    for w_NK in matrices:
        decoded, scale, coarse_bits = encoded(w_NK, format)
        distance = (decoded.abs() / scale.clamp(min=1e-30)).clamp(min=2.0**-4).log2()
        # bf16's steps depend on where the decoded number lies in its octave, too
        mantissa = (decoded.bfloat16().view(torch.int16).long() & 0x7F) >> 4
        context = ((distance + 4) * 8).long().clamp_(0, _CONTEXTS - 1) * 8 + mantissa
        offset = torch.where(decoded < 0, -1, 1) * ordered(w_NK) - ordered(decoded.abs())
        found.append((context * (1 << 20) + offset + (1 << 18)).view(-1))
        total, bits = total + w_NK.numel(), bits + coarse_bits * w_NK.numel()
    keys, times = torch.unique(torch.cat(found), return_counts=True)
    times = times.double()
    contexts = torch.zeros(_CONTEXTS * 8, dtype=torch.float64).index_add_(0, keys >> 20, times)
    fine = (torch.special.xlogy(contexts, contexts).sum() - torch.special.xlogy(times, times).sum()) / math.log(2)
    return bits / total, float(fine) / total


def runs(agree: Tensor, k: int) -> Iterator[int]:
    """Accepted drafts of each round of k."""
    at = 0
    while at < len(agree):
        ahead = agree[at : at + k]
        accepted = len(ahead) if bool(ahead.all()) else int((~ahead).int().argmax())
        yield accepted
        at += accepted + 1


@torch.no_grad()
def written(model: nn.Module) -> Tensor:
    """Texts that the model continues greedily, [texts, prompt + new]."""
    text = committed.held_out().long()
    starts = torch.linspace(0, len(text) - _PROMPT, _TEXTS).long()
    ids = torch.stack([text[at : at + _PROMPT] for at in starts])
    for _ in range(_NEW):
        ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), 1)
    return ids


@torch.no_grad()
def agreements(rounded: nn.Module, ids: Tensor) -> list[Tensor]:
    """For each text, whether the rounded model's likeliest bytes are those that the exact one wrote."""
    return list(rounded(ids[:, :-1]).argmax(-1)[:, _PROMPT - 1 :] == ids[:, _PROMPT:])


def measure() -> dict:
    """All rows."""
    model, rows = committed.dense(), []
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "head"}
    normal = torch.randn(1024, 2048, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16()
    ids = written(model)
    for format in FORMATS:
        rounded = committed.dense()
        for name in layers:
            weight = rounded.get_parameter(f"{name}.weight")
            weight.data.copy_(encoded(weight.data, format)[0])
        agree = agreements(rounded, ids)
        row = {"format": format, "normal": entropy([normal], format)}
        row["lm"] = entropy([layer.weight.data.bfloat16() for layer in layers.values()], format)
        for k in DRAFTS:
            found = [n for text in agree for n in runs(text, k)]
            row[f"accepted_of_{k}"] = sum(found) / len(found)
        row["same"] = float(torch.stack(agree).float().mean())
        print(json.dumps(row), flush=True)
        rows.append(row)
    return {"machine": machine(), "bytes": _TEXTS * _NEW, "rows": rows}


def section() -> list[str]:
    """The section of docs/accuracy.md, from the committed results."""
    result = json.loads(RESULT.read_text())
    head = ["coarse plane", "coarse + fine, normal", "coarse + fine, trained", "same byte"]
    head += [f"accepted of {k}" for k in DRAFTS]
    rows = []
    for row in result["rows"]:
        planes = [f"{coarse:.2f} + {fine:.2f} = {coarse + fine:.2f}" for coarse, fine in (row["normal"], row["lm"])]
        cells = [row["format"], *planes, f"{row['same']:.1%}", *(f"{row[f'accepted_of_{k}']:.2f}" for k in DRAFTS)]
        rows.append(cells)
    four, three = result["rows"]
    (coarse, fine), (less, more) = four["normal"], three["normal"]
    what = (
        "An experiment, not a format: `exact` with the coarse plane in `t3` instead of `nvfp4`. Bits a weight, the "
        "fine plane's as the entropy of bf16 weights given the coarse one; how often the coarse planes alone say the "
        f"same byte as the exact model, in {result['bytes']:,} bytes that it writes greedily; drafts accepted a round."
    )
    why = (
        f"Coarse planes of 3 bits keep {coarse / less:.2f} times as many layers on the GPU, and their drafts are "
        f"accepted about as often; but the fine planes that each verification moves grow by {more / fine - 1:.0%}. So "
        "they would lose where a GPU has room for coarse planes of 4 bits, and gain between 3 and 4.5 bits a weight, "
        f"where drafts now wait for coarse planes, too; streamed whole, both planes take {less + more:.1f} bits, with "
        f"nvfp4 {coarse + fine:.1f}. Not built: a fine plane refines a code, and a decoded weight of `t3` is a sum of "
        "128 of them, so merging would decode whole blocks in fp32 first, and its coder would need tables of its own."
    )
    table = markdown_table(head, rows)
    return ["## Coarse planes of 3 bits", "", what, "", *table, "", why, "", named_machine(result["machine"]), ""]


def main() -> None:
    RESULT.write_text(json.dumps(measure(), indent=1) + "\n")


if __name__ == "__main__":
    main()
