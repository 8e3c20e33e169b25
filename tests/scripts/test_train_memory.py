"""The memory ladder and the estimate behind --vb-auto: what is estimated is what is measured."""

import dataclasses
import io
import re

import pytest
import torch
from rich.console import Console

from scripts.lm import LanguageModel, Options, Shape, build
from scripts.train_memory import Case, Rung, _on_cpu, estimate_bytes, ladder_table, measure, rungs

SHAPE = Shape(layers=4, width=128, heads=4, context=256)


@pytest.mark.parametrize("tied", [False, True])
def test_a_shape_counts_the_parameters_of_its_model(tied):
    shape = dataclasses.replace(SHAPE, vocabulary=300, tied=tied)
    with torch.device("meta"):
        assert sum(p.numel() for p in LanguageModel(shape).parameters()) == shape.parameters


@pytest.mark.parametrize("attention", ["plain", "sdpa"])
def test_the_attentions_compute_the_same(attention):
    torch.manual_seed(0)
    ours, other = LanguageModel(SHAPE), LanguageModel(SHAPE, attention=attention)
    other.load_state_dict(ours.state_dict())
    ids = torch.randint(256, (2, 40))
    torch.testing.assert_close(other(ids), ours(ids))
    torch.testing.assert_close(ours(ids, last=True), ours(ids)[:, -1:])


def test_a_shape_with_experts_counts_the_parameters_of_its_model():
    for tied in (False, True):
        shape = dataclasses.replace(SHAPE, tied=tied, experts=5, active=2, inner=48)
        model = build(shape, Options(), torch.device("meta"))
        assert sum(p.numel() for p in model.parameters()) == shape.parameters


def ladder(case: Case) -> list:
    return [measure(name, rung) for name, rung in rungs(case)]


def ladder_here(case: Case) -> list:
    """The same without a process for each rung, which takes longer to start than to measure."""
    return [Rung(name, estimate_bytes(rung), *_on_cpu(rung)) for name, rung in rungs(case)]


@pytest.mark.parametrize(
    ("run", "case"),
    [
        (ladder_here, Case(dataclasses.replace(SHAPE, width=64), 2, Options())),
        pytest.param(ladder, Case(SHAPE, 8, Options()), marks=pytest.mark.exhaustive),
    ],
    ids=["small", "large"],
)
def test_each_rung_takes_what_was_estimated_and_less_than_the_one_before(run, case):
    measured = run(case)
    for rung in measured:
        assert rung.peak_bytes == pytest.approx(rung.estimated_bytes, rel=0.25), rung
    plain, mixed, flash, checkpointing, _ = (rung.peak_bytes for rung in measured)
    assert plain > 1.2 * mixed > 1.4 * flash > 2 * checkpointing
    file = io.StringIO()
    Console(file=file, width=110).print(ladder_table(case, measured))
    rows = [line for line in file.getvalue().splitlines() if re.search(r"\d×", line)]
    assert len(rows) == 5 and "+ flash attention" in rows[2] and "1.00×" in rows[0]
    assert "\x1b" not in file.getvalue()


@pytest.mark.exhaustive
def test_a_rung_is_measured_in_a_process_of_its_own():
    case = Case(Shape(layers=1, width=32, heads=1, context=32), 2, Options())
    assert measure("fp32", case).peak_bytes == pytest.approx(_on_cpu(case)[0], rel=0.01)


def test_the_estimate_holds_with_experts():
    shape = Shape(layers=2, width=64, heads=4, context=128, experts=8, active=2, inner=32)
    for name, rung in rungs(Case(shape, 2, Options())):
        if not rung.options.fp4:
            assert _on_cpu(rung)[0] == pytest.approx(estimate_bytes(rung), rel=0.2), name


@pytest.mark.gpu
def test_the_estimate_holds_on_a_gpu():
    for vocabulary in (256, 20_000):
        shape = Shape(layers=4, width=512, heads=8, context=1024, vocabulary=vocabulary)
        for rung in ladder(Case(shape, 4, Options(), device="cuda")):
            assert rung.peak_bytes == pytest.approx(rung.estimated_bytes, rel=0.25), rung


def test_what_cannot_fit_is_not_tried():
    case = Case(dataclasses.replace(SHAPE, context=1 << 20), 8, Options())
    rung = measure("fp32", case)
    assert rung.peak_bytes is None and rung.estimated_bytes == estimate_bytes(case)
    assert ladder_table(case, [rung]).row_count == 1
