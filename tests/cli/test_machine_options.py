"""Another machine's GPU on the command line: by name, or by its rates."""

import argparse
import json

import pytest

from tests.cli.cases import errors
from vbrt.cli import main as cli
from vbrt.cli.machine_options import add_machine, sizes_of, speed_of
from vbrt.config.budgets import CONTEXT_BYTES
from vbrt.errors import VBError
from vbrt.estimation.advice.data_sheets import named_sheet
from vbrt.estimation.advice.machine_rates import Rates, keep_rates


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    add_machine(parser)
    return parser.parse_args(arguments)


def test_a_gpu_by_name_has_memory_and_speed():
    args = parsed("--gpu", "RTX 3060", "--ram", "16GiB")
    assert sizes_of(args)["--gpu-memory"] == named_sheet("RTX 3060").free_bytes + CONTEXT_BYTES
    assert speed_of(args).rates().memory_gb_s == 360 and speed_of(args).link_gb_s == 25
    args = parsed("--gpu", "RTX 3060", "--gpu-memory", "8GiB", "--link", "6 GB/s")
    assert sizes_of(args)["--gpu-memory"] == 8 << 30
    rates = speed_of(args).rates()
    assert (rates.link_gb_s, rates.tflops, rates.source) == (6, 25.5, "data sheet, link as given")


def test_rates_have_units():
    given = speed_of(parsed("--link", "12", "--memory", "1.8TB/s", "--tflops", "2PFLOPS")).rates()
    assert given == Rates("a GPU", 12.0, 1800.0, 2000.0, source="as given")
    assert speed_of(parsed("--link", "800MB/s")).link_gb_s == pytest.approx(0.8)
    assert not speed_of(parsed("--gpu-memory", "8GiB")) and speed_of(parsed()).rates() is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--link 12Gb/s", "--link 12Gb/s: expected gigabytes a second, such as 50, 50GB/s"),
        ("--memory 0", "--memory 0: expected gigabytes a second"),
        ("--memory=-3", "--memory -3: expected gigabytes a second"),
        ("--tflops 25TB/s", "--tflops 25TB/s: expected 10^12 operations a second"),
        ("--gpu Voodoo", "no data sheet of a GPU 'Voodoo'"),
    ],
)
def test_what_is_no_rate_is_refused(arguments, says):
    with pytest.raises(VBError) as error:
        speed_of(parsed(*arguments.split()))
    assert says in str(error.value)


def test_a_rate_alone_is_asked_for_the_others_unless_the_machine_was_measured(monkeypatch):
    some = speed_of(parsed("--link", "12"))
    with pytest.raises(VBError, match=r"--link: the speed of a GPU is .*; add --memory and --tflops, or name a GPU"):
        some.rates()
    kept = Rates("Some GPU", 20.0, 500.0, 60.0, source="measured here")
    monkeypatch.setattr("vbrt.estimation.advice.machine_rates.device_name", lambda: "Some GPU")
    keep_rates(kept)
    rates = some.rates()
    assert (rates.link_gb_s, rates.memory_gb_s, rates.source) == (12.0, 500.0, "measured here, link as given")


def test_estimate_predicts_a_step_of_a_gpu_that_is_not_here(config_json, capsys):
    pytest.importorskip("transformers")
    config_json.write_text(json.dumps(json.loads(config_json.read_text()) | {"num_hidden_layers": 4}))
    arguments = ["estimate", str(config_json), "--context", "64", "--gpu", "RTX 3060", "--ram", "16GiB"]
    assert cli.main(arguments) == 0
    assert "predicted by the rates of RTX 3060 (data sheet), not measured." in capsys.readouterr().out
    assert cli.main([*arguments, "--memory", "36GB/s", "--json"]) == 0
    slow = json.loads(capsys.readouterr().out)["predicted"]
    assert slow["bound"] == "device" and slow["rates"]["source"] == "data sheet, memory as given"


def test_rates_that_a_command_does_not_use_are_refused(capsys):
    assert cli.main(["plan", "M", "--tflops", "50"]) == 2
    assert "--tflops: applies to the ways over several GPUs; expected --ranks N" in errors(capsys)
    assert cli.main(["estimate", "M", "--link", "50", "--ranks", "2"]) == 2
    assert "--link with --ranks: times over several GPUs are those of vbrt plan --ranks" in errors(capsys)
