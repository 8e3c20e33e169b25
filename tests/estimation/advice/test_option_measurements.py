"""`vbrt bench`: medians, peaks and refusals, as they are measured."""

import json

import pytest
import torch
from torch import nn

from vbrt.cli import main as cli
from vbrt.estimation.advice import option_measurements
from vbrt.estimation.memory.task import Task

transformers = pytest.importorskip("transformers")


def model() -> nn.Module:
    settings = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, vocab_size=256
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(settings).to(option_measurements.device())


def test_each_kernel_of_attention_is_measured_or_says_why_not():
    rows = {row.case: row for row in option_measurements.attention((64,), heads=2, width=16, times=1)}
    assert set(rows) == {f"{name}, 64 tokens" for name in option_measurements.KERNELS}
    assert rows["math, 64 tokens"].ms > 0 and rows["math, 64 tokens"].peak_bytes >= 64 * 64 * 2 * 2
    for row in rows.values():
        assert (row.ms is None) == bool(row.why), row


def test_memory_options_are_measured_one_after_the_other():
    rows = list(option_measurements.memory(model(), Task("train", 4, 128), times=1))
    peaks = {row.case: row.peak_bytes for row in rows}
    assert next(iter(peaks)) == "as it is" and not any(row.why for row in rows)
    assert peaks["+ checkpointing"] < peaks["as it is"]


def test_a_model_without_checkpointing_is_a_row_that_says_so():
    class Plain(nn.Linear):
        main_input_name = "pixel_values"
        config = type("Config", (), {"image_size": 8, "num_channels": 1})()

        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return super().forward(pixel_values)

    rows = {
        row.case: row
        for row in option_measurements.memory(Plain(8, 8).to(option_measurements.device()), Task("train"), times=1)
    }
    assert "_checkpointing_enable" in rows["+ checkpointing"].why and rows["as it is"].ms > 0


def test_the_command_prints_a_table_json_and_a_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "a.svg"
    arguments = ["bench", "attention", "--lengths", "32", "--heads", "2", "--width", "16", "--times", "1"]
    assert cli.main([*arguments, "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert "math, 32 tokens" in out and "of the first" in out and plot.read_text().lstrip().startswith("<?xml")
    assert cli.main([*arguments, "--json"]) == 0
    assert {row["case"] for row in json.loads(capsys.readouterr().out)} >= {"flash, 32 tokens", "math, 32 tokens"}
    assert cli.main([*arguments, "--plot", str(tmp_path / "no" / "a.svg")]) == 2


@pytest.mark.exhaustive
def test_compiled_passes_are_measured_with_their_cold_start():
    rows = {row.case: row for row in option_measurements.compiling(model(), Task("prefill", 1, 32), times=1)}
    assert rows["forward, torch.compile"].first_s > rows["forward, eager"].first_s
