"""Every class of routed experts that transformers decorates gives the bits of its implementation, whatever has room."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vbrt
from tests.matrix import matrix
from tests.models import config
from tests.zoo.experts import DECORATED, Holder, experts_module, routed
from vbrt.layers.experts import VBExperts

#: a class for each layout, gate and sum that there is
UNLIKE = (
    "MixtralExperts",
    "AriaExperts",
    "GptOssExperts",
    "OpenAIPrivacyFilterExperts",
    "NemotronHExperts",
    "MuseSparkExperts",
    "Inkling2Experts",
    "MiniMaxM3VLExperts",
    "BeamExperts",
)
LIKE = sorted(set(DECORATED) - set(UNLIKE))
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
#: tokens, experts of each
SIZES = ((1, 2), (12, 2), (3, 4), (9, 3))


def settings(model: nn.Module, format: str, path: Path | None = None) -> dict[str, Any]:
    """All pages resident, or, with a path for an ssd tier, host memory for the experts of one token."""
    found = config(format)
    if path is not None:
        plan = vbrt.make_plan(model, vbrt.load_config(found))
        found["tiers"]["cpu"] = {"budget": plan.largest_layer_bytes}
        found["tiers"]["ssd"] = {"enabled": True, "path": str(path)}
    return found


def check_bits(name: str, implementation: str, dtype: torch.dtype, format: str, path: Path) -> None:
    model = Holder(experts_module(name, dtype=dtype, implementation=implementation)).eval()
    inputs = [routed(model.experts, *size, dtype=dtype, seed=seed) for seed, size in enumerate(SIZES)]
    with torch.no_grad():
        expected = [model(*args) for args in inputs]
        for where in (None, path):
            with vbrt.wrap(model, settings(model, format, where)) as vb:
                got = [vb(*args) for args in inputs]
                assert isinstance(model.experts, VBExperts)
                assert vb.plan.swaps[0].top_k == 2
                vb.unwrap()
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(expected, got, strict=True))


@pytest.mark.sample(5)
@matrix(implementation=IMPLEMENTATIONS, name=UNLIKE)
def test_float32_experts_give_the_bits_of_the_implementation(name: str, implementation: str, tmp_path: Path) -> None:
    check_bits(name, implementation, torch.float32, "dense", tmp_path)


@pytest.mark.sample(5)
@matrix(implementation=IMPLEMENTATIONS, name=UNLIKE)
def test_exact_bfloat16_experts_give_the_bits_of_the_implementation(
    name: str, implementation: str, tmp_path: Path
) -> None:
    check_bits(name, implementation, torch.bfloat16, "exact", tmp_path)


@pytest.mark.exhaustive
@matrix(implementation=IMPLEMENTATIONS, name=LIKE)
def test_the_other_classes_give_the_bits_of_the_implementation(name: str, implementation: str, tmp_path: Path) -> None:
    check_bits(name, implementation, torch.float32, "dense", tmp_path)
    check_bits(name, implementation, torch.bfloat16, "exact", tmp_path)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", UNLIKE)
def test_4_bits_give_what_the_decoded_weights_give(name: str, tmp_path: Path) -> None:
    model = Holder(experts_module(name)).eval()
    inputs = [routed(model.experts, *size, seed=seed) for seed, size in enumerate(SIZES)]
    with torch.no_grad():
        vb = vbrt.wrap(model, settings(model, "nvfp4", tmp_path))
        got = [vb(*args) for args in inputs]
        vb.unwrap()  # holds the weights that 4 bits have rounded
        expected = [model(*args) for args in inputs]
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
