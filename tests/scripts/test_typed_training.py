"""scripts/typed_training.py on a CPU: ways of one family start alike, and the page's table is what was measured."""

import argparse

import pytest
import torch

from scripts import typed_training as typed

OPTIONS = {"layers": 2, "steps": 1, "profile": False}


@pytest.mark.parametrize("family, names", [("full", ["resident, recomputed", "vbrt, offloaded"]), ("lora", ["bf16"])])
def test_ways_begin_with_the_loss_of_the_plain_model(family, names):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    ways = {"full": typed.FULL, "lora": typed.LORA}[family]
    rows = [typed.row_of(ways[name], [32], argparse.Namespace(**OPTIONS))["32"] for name in names]
    assert all(row["losses"] == rows[0]["losses"] and row["losses"][1] < row["losses"][0] for row in rows)
    assert all(row["seconds"] > 0 for row in rows)
    torch.manual_seed(0)


def test_the_page_has_what_was_measured():
    page = typed.PAGE.read_text()
    assert typed.between(page, typed.MARKS, typed.tables()) == page
