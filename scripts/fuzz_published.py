"""Checkpoints of other libraries that scripts/fuzz damages: a quantized layer, and the config that says how."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import vbrt
from scripts.fuzz_damage import Damage, Part, bent, keeping, mixed, writing
from scripts.fuzz_models import content, header_damages
from tests.saves.published.published_files import LAYOUTS, TORCHAO, described

_ROWS, _COLUMNS = 32, 64


def published_part(layout: str) -> Callable[[Path, random.Random], Part]:
    """A layer in a layout of `LAYOUTS`, without digests, so that other content may load."""

    def make(directory: Path, dice: random.Random) -> Part:
        maker, scheme, _ = LAYOUTS[layout]
        weight = (torch.randn(_ROWS, _COLUMNS, generator=torch.Generator().manual_seed(0)) * 0.05).bfloat16()
        tree = {"dtype": "bfloat16", "quantization_config": scheme}
        directory.mkdir()
        file, config = directory / "model.safetensors", directory / "config.json"
        tensors = {f"0{suffix}": tensor.contiguous() for suffix, tensor in maker(weight).tensors.items()}
        save_file(tensors, file, {"0.weight": described(layout, weight.shape)} if layout in TORCHAO else None)
        config.write_text(json.dumps(tree))
        data, of_header, of_config = file.read_bytes(), header_damages(file, dice), mixed(config, dice, tree, None)

        def damages() -> Iterator[Damage]:
            while True:
                kind = dice.random()
                yield (
                    next(of_config)
                    if kind < 0.4
                    else next(of_header)
                    if kind < 0.8
                    else writing(file, *bent(data, dice))
                )

        def load() -> dict[str, Any]:
            with torch.device("meta"):
                model = nn.Sequential(nn.Linear(_COLUMNS, _ROWS, bias=False, dtype=torch.bfloat16)).eval()
            return content(vbrt.load(directory, model, weights={"min_parameters": 0, "keep_head": False}))

        return Part(layout, directory, keeping(directory), damages(), load, load(), lambda what: True)

    return make
