"""scripts/typed_training.py on a CPU: ways of one family start alike, and the page's table is what was measured."""

import argparse

import pytest
import torch

from scripts import typed_training as typed

OPTIONS = {"layers": 2, "steps": 1, "profile": False}


@pytest.mark.parametrize(
    "family, names",
    [
        ("full", ["resident, recomputed", "vbrt, offloaded"]),
        ("lora", ["bf16"]),
        ("experts", ["bf16"]),
        *((family, ["resident, kept", "vbrt, recomputed"]) for family in typed.MODELS),
    ],
)
def test_ways_begin_with_the_loss_of_the_plain_model(family, names):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    options = argparse.Namespace(**OPTIONS, family=family)
    rows = [typed.row_of(typed.WAYS[family][name], [32], options)["32"] for name in names]
    first, second = rows[0]["losses"]
    assert all(row["losses"] == [first, second] for row in rows)
    if family in ("lora", "experts"):  # adapters begin at zero
        assert second != first and second == pytest.approx(first, abs=1e-3)
    else:
        assert second < first
    assert all(row["seconds"] > 0 for row in rows)
    torch.manual_seed(0)


@pytest.mark.filterwarnings("ignore")
def test_trainer_is_timed_as_it_is():
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState

    options = argparse.Namespace(**OPTIONS, family="full")
    try:
        for name in ("Trainer, resident, recomputed", "Trainer, vbrt, recomputed"):
            row = typed.row_of(typed.FULL[name], [32], options)["32"]
            assert len(row["each"]) == 1 and row["seconds"] > 0
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_the_page_has_what_was_measured():
    page = typed.PAGE.read_text()
    assert typed.between(page, typed.MARKS, typed.tables()) == page
