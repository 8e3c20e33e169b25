"""Predicted times of training steps: recorded blocks, updates ahead of the step, autocast's attention."""

from dataclasses import replace

import pytest
from torch import nn

import vbrt
from tests.models import llama_of
from vbrt.config import Machine
from vbrt.estimation.advice.candidates import Asked
from vbrt.estimation.advice.cost_model import default_cost_model
from vbrt.estimation.advice.step_time import Speed, predict
from vbrt.estimation.memory.estimate_report import Estimate
from vbrt.estimation.memory.task import Task

GiB, MiB = 1 << 30, 1 << 20
ON = Machine(8 * GiB, 8 * GiB, 32 * GiB, 32 * GiB)
SLOW_HOST = vbrt.Rates("a GPU beside a slow host", 50.0, 1e6, 1e6, launch_us=1e3, host_gb_s=1e6)
SLOW_UPDATE = vbrt.Rates("a GPU beside slow memory", 1e6, 1.0, 0.1, launch_us=1e-6, host_gb_s=1.0)
LAYERS = 6


@pytest.fixture(scope="module")
def model() -> nn.Module:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    return llama_of(**sizes, num_hidden_layers=LAYERS, vocab_size=256)


@pytest.fixture(scope="module")
def asked(model) -> Asked:
    """Estimates of the model, which share their traces."""
    return Asked(model, ON, SLOW_HOST)


def estimated(asked: Asked, preset: str, task: Task, **changes: dict) -> Estimate:
    return asked.found(task, vbrt.load_config(preset, weights={"min_parameters": 0}, **changes))


def predicted(asked: Asked, found: Estimate, rates: vbrt.Rates = SLOW_HOST) -> Speed:
    return predict(asked.bare(found.task), found, rates)


def speeds(asked: Asked, preset: str, task: Task, **changes: dict) -> tuple[Speed, Speed]:
    """A step beside a slow host with `compute.captures`, and without."""
    found = (estimated(asked, preset, task, compute={"captures": captures}, **changes) for captures in (True, False))
    return tuple(predicted(asked, each) for each in found)


@pytest.mark.parametrize("mode", ["LoRA", "full"])
def test_recorded_blocks_take_the_launches_of_blocks_from_the_host(asked, mode):
    pytest.importorskip("peft")
    task, preset = Task("train", context=64, checkpointing=True), "full"
    if mode == "LoRA":
        task, preset = task.but(lora=4), "fp4"
    recorded, eager = speeds(asked, preset, task)
    assert recorded.bound == eager.bound == "host"
    costs, found = default_cost_model("gpu"), estimated(asked, preset, task)
    blocks, inside = LAYERS * costs.block_launches, found.work["block operators"]
    assert 0.8 * found.work["operators"] < inside < found.work["operators"]
    outside = costs.operator_launches["train"] * (found.work["operators"] - inside)
    assert recorded.host_ms == pytest.approx(blocks + outside)  # a launch takes a millisecond
    assert eager.host_ms >= outside + costs.operator_launches["train"] * inside > recorded.host_ms


def test_blocks_that_keep_their_activations_are_launched_from_the_host(asked):
    recorded, eager = speeds(asked, "full", Task("train", context=64))
    assert recorded.host_ms == eager.host_ms


def test_blocks_that_train_in_4_bits_are_launched_from_the_host(asked):
    recorded, eager = speeds(asked, "fp4", Task("train", context=64, checkpointing=True), mode="train")
    assert recorded.host_ms == eager.host_ms


@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_blocks_that_the_config_recomputes_are_recorded(asked, activations):
    recorded, eager = speeds(asked, "full", Task("train", context=64), training={"activations": activations})
    assert recorded.host_ms < eager.host_ms


def test_advice_traces_the_activations_of_a_config(asked):
    task, ways = Task("train", context=64), ("keep", "recompute")
    kept, recomputed = (estimated(asked, "full", task, training={"activations": way}) for way in ways)
    assert recomputed.work["operators"] > kept.work["operators"]
    assert recomputed.peak_bytes < kept.peak_bytes


@pytest.mark.parametrize("host_gb_s", [0.5, 1.0, 2.0, 8.0])
def test_updates_ahead_run_beside_the_backward_pass_and_others_beside_the_next_forward(asked, host_gb_s):
    rates = replace(SLOW_UPDATE, host_gb_s=host_gb_s)
    task = Task("train", context=64, checkpointing=True)
    every = estimated(asked, "full", task)
    ahead, half, none = (
        predicted(asked, estimated(asked, "full", task, training={"ahead": room}), rates)
        for room in ("auto", every.spare_bytes // 2, 0)
    )
    update, passes = none.update_ms, none.device_ms
    assert update == ahead.update_ms == half.update_ms > 0
    forward = passes / 4  # forward, once more, gradients of inputs and of weights
    assert ahead.ms == pytest.approx(passes + max(0, update - (passes - forward)))
    assert none.ms == pytest.approx(passes + max(0, update - forward))
    assert ahead.ms <= half.ms <= none.ms
    assert (half.ms < none.ms) == (update > forward)


def test_attention_under_autocast_is_counted_in_16_bits(model):
    found = vbrt.estimate(model.float(), Task("train", context=64, mixed=True), None, machine=ON)
    assert found.work["attention bfloat16"] > 0 and "attention float32" not in found.work
