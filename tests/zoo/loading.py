"""What must hold for every architecture that is read into planes: the plain load's outputs, bit for bit, as it is read
from a checkpoint by `from_pretrained` of transformers, again from what it wrote itself, and both by vbrt's own readers.

`check_loading(kind, name, directory)` is what `scripts/sweep --loading` runs on all causal language models, and
`tests/integrations/test_transformers_loading.py` on a sample.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo import zoo
from tests.zoo.bits import difference, reason_of
from tests.zoo.checks import Result
from tests.zoo.swaps import ALL, looked_up, refused_tables, tables_and_heads
from vbrt import QuantizationConfig, load, of
from vbrt.integrations.hf_configs import meta_model

__all__ = ["LOADING_CHECKS", "check_loading"]

LOADING_CHECKS = ("from-pretrained", "planes-again", "dense-again", "by-vbrt", "planes-by-vbrt")


def check_loading(
    kind: str, name: str, directory: Path, *, unwrapped_done: Callable[[], None] = lambda: None
) -> Result:
    """Save a model, load it plainly and into planes, and compare; save that, load it again, and compare.

    See `tests.zoo.checks.check` for the arguments.
    """
    result = Result(kind, name)
    try:
        model, inputs = zoo.build(kind, name, dtype=torch.bfloat16)
        model.save_pretrained(directory / "plain")
        plain = _load(type(model), directory / "plain")
        expected = zoo.forward(plain, inputs)
        gap = difference(expected, zoo.forward(_load(type(model), directory / "plain"), inputs))
    except Exception as e:  # noqa: BLE001 - whatever the plain model raises is the reason that is reported
        result.reason = reason_of(e)
        return result
    if gap or not expected:
        result.reason = f"does not repeat itself when it is loaded plainly: {gap}" if gap else "no tensor in its output"
        return result
    unwrapped_done()
    result.parameters = sum(p.numel() for p in plain.parameters())
    source = directory / "plain"
    for check, stored in zip(LOADING_CHECKS[:3], ("planes", "planes", "dense"), strict=True):
        config = None if check == "planes-again" else QuantizationConfig("exact", weights=ALL, stored=stored)
        try:
            loaded = _load(type(model), source, quantization_config=config)
            plan, tables = of(loaded).plan, tables_and_heads(loaded)
            result.swapped, result.tables, result.refused = len(plan.swaps), len(tables), refused_tables(plan, tables)
            gap = difference(expected, zoo.forward(loaded, inputs))
            result.tables_used, result.decoded = looked_up(plan, of(loaded).stats().layers, tables)
            if check == "from-pretrained":
                loaded.save_pretrained(directory / "planes")
            elif check == "dense-again":
                loaded.save_pretrained(directory / "dense")
                gap = gap or difference(expected, zoo.forward(_load(type(model), directory / "dense"), inputs))
        except Exception as e:  # noqa: BLE001 - reported as this check's verdict
            gap = reason_of(e)
        result.verdicts[check] = gap or "ok"
        source = directory / "planes" if check == "from-pretrained" and not gap else directory / "plain"
        if check == "from-pretrained" and gap:
            return result
    for check, source in zip(LOADING_CHECKS[3:], ("plain", "planes"), strict=True):
        result.verdicts[check] = _by_vbrt(directory / source, inputs, expected) or "ok"
    return result


def _by_vbrt(directory: Path, inputs: Mapping[str, Any], expected: Mapping[str, Tensor]) -> str:
    """Load a checkpoint, or planes that `save_pretrained` wrote, as `vbrt.load` does; return what differs."""
    try:
        config = {"weights": ALL | {"fine": "exact"}} if directory.name == "plain" else {}
        vb = load(directory, meta_model(directory).eval(), **config)
        with vb:
            return difference(expected, zoo.forward(vb, inputs))
    except Exception as e:  # noqa: BLE001 - reported as this check's verdict
        return reason_of(e)


def _load(model_class: type[nn.Module], directory: Path, **kwargs: Any) -> nn.Module:
    torch.manual_seed(0)  # of weights that no checkpoint has
    return model_class.from_pretrained(directory, dtype="auto", **kwargs).eval()
