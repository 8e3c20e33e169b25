"""Bits that a fine plane takes: plain, coded, and the entropy of bf16 weights given their codes and scales.

python3 scripts/fine_rates.py [--format nvfp4]    # normal and heavy-tailed weights, the trained model, SmolLM2 in bf16
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from safetensors.torch import load_file
from torch import Tensor

from scripts.smollm2 import smollm2
from vbrt.formats import get_format, split_fine
from vbrt.formats.block_formats import BlockFormat
from vbrt.formats.fine_coding import code_fine, decode_coded, offsets_in_cells

_LM = ROOT / "tests" / "data" / "lm" / "dense.safetensors"
_SHAPE = (2048, 4096)


def weights() -> Iterator[tuple[str, list[Tensor]]]:
    """(name, matrices in bf16)."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(_SHAPE, generator=generator)
    yield "normal", [normal.mul(0.02).bfloat16()]
    freedom = torch.randn(5, *_SHAPE, generator=generator).square_().mean(0).sqrt_()
    yield "Student's t, 5 degrees", [(normal / freedom).bfloat16()]
    yield "trained model", [w.bfloat16() for w in load_file(_LM).values() if w.dim() == 2]
    model, _ = smollm2()
    yield "SmolLM2-135M", [layer.weight.data for layer in model.modules() if isinstance(layer, torch.nn.Linear)]


def bits(matrices: list[Tensor], fmt: BlockFormat) -> tuple[float, float, float, float]:
    """Bits a weight: plain, coded, entropy given the cell; and the share of escapes."""
    plain = coded = escapes = count = 0
    found: Counter[int] = Counter()
    for w_NK in matrices:
        coarse = fmt.encode(w_NK)
        fine = code_fine(w_NK, coarse, fmt)
        assert torch.equal(decode_coded(coarse, fine, fmt, tuple(w_NK.shape)).view(torch.int16), w_NK.view(torch.int16))
        plain += sum(t.nbytes for t in split_fine(w_NK, coarse, fmt).values())
        coded += sum(t.nbytes for t in fine.values())
        escapes += len(fine["escapes"])
        count += w_NK.numel()
        cell_NK, offset_NK = offsets_in_cells(w_NK, coarse, fmt)
        keys, times = torch.unique(cell_NK.long() * (1 << 20) + offset_NK + (1 << 16), return_counts=True)
        found.update(dict(zip(keys.tolist(), times.tolist(), strict=True)))
    keys, times = torch.tensor(list(found)), torch.tensor(list(found.values()), dtype=torch.float64)
    cells = torch.zeros(256, dtype=torch.float64).index_add_(0, keys >> 20, times)
    entropy = float((cells.xlogy(cells).sum() - times.xlogy(times).sum()) / count / torch.log(torch.tensor(2.0)))
    return plain * 8 / count, coded * 8 / count, entropy, escapes / count


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", nargs="+", default=["nvfp4", "mxfp4", "nf4", "quantile"])
    formats = parser.parse_args().format
    print("| weights | format | plain | coded | entropy | escapes | of bf16's bytes |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, matrices in weights():
        for format in formats:
            fmt = get_format(format)
            assert isinstance(fmt, BlockFormat)
            plain, coded, entropy, escapes = bits(matrices, fmt)
            share = f"{escapes:.2%} | {coded / 16:.3f}"
            print(f"| {name} | {format} | {plain:.2f} | {coded:.2f} | {entropy:.2f} | {share} |", flush=True)


if __name__ == "__main__":
    main()
