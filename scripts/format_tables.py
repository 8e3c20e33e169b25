"""The table of published layouts in docs/howto/checkpoints.md, from the records of readers, formats and kernels.

python3 scripts/format_tables.py    # writes it
"""

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path

from scripts.hardware_tables import table
from scripts.measuring import between
from vbrt.config.format_records import BYTE_KINDS, GROUP_KINDS
from vbrt.formats import get_format
from vbrt.formats.ggml import GGML_PLANES
from vbrt.kernels import fused_on
from vbrt.saves.published.layouts import LAYOUTS

PAGE = ROOT / "docs" / "howto" / "checkpoints.md"
MARKS = "<!-- layouts: scripts/format_tables.py -->", "<!-- end of layouts -->"
_HEADS = ("weights", "held as", "bits a weight", "fused kernels", "decoded, and held losslessly", "as it is since")
_PROCESSORS = {"cuda": "GPU", "cpu": "CPU"}
_WHOLE = (4096, 4096)
_KINDS = {**GROUP_KINDS, **BYTE_KINDS}


def layouts() -> str:
    """The table: layouts in safetensors files, then GGUF's types."""
    return "\n".join(table(_HEADS, [*_safetensors(), *_gguf()]))


def _safetensors() -> Iterator[tuple[str, ...]]:
    for layout in LAYOUTS:
        held = " or ".join(f"`{each}…`" if each in _KINDS else f"`{each}`" for each in layout.becomes)
        formats = [f"{each}128-float16" if each in _KINDS else each for each in layout.becomes]
        yield layout.name, held or "–", *_of(formats), layout.rest or "–", layout.since if held else "–"


def _gguf() -> Iterator[tuple[str, ...]]:
    planes = sorted(GGML_PLANES.items(), key=lambda item: (item[1].since, item[1].format, item[0]))
    for (since, format), types in groupby(planes, lambda item: (item[1].since, item[1].format)):
        names = ", ".join(name for name, _ in types)
        yield f"GGUF {names}", f"`{format}`", *_of([format]), "–", since


def _of(formats: list[str]) -> tuple[str, str]:
    """(bits, kernels) of formats; groups of 128 weights and 16-bit scales where a layout has a choice."""
    if not formats:
        return "–", "–"
    bits = (get_format(each).layout(_WHOLE, torch.bfloat16).nbytes * 8 / (_WHOLE[0] * _WHOLE[1]) for each in formats)
    return " or ".join(f"{value:.3g}" for value in bits), " or ".join(dict.fromkeys(map(_kernels, formats)))


def _kernels(format: str) -> str:
    devices = fused_on(format)
    return ", ".join(name for device, name in _PROCESSORS.items() if device in devices) or "none"


def written(text: str) -> str:
    """A page with its table made anew."""
    return between(text, MARKS, layouts())


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")
