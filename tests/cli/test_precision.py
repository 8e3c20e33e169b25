"""`vbrt precision`: a choice that is printed, written, and taken by other commands."""

import pytest

from vbrt.cli import main as cli
from vbrt.config import VBConfig

pytest.importorskip("transformers")


def test_the_command_writes_a_config_that_fits_the_budget_and_others_take(llama, tmp_path, capsys):
    text, written = tmp_path / "notes.txt", tmp_path / "my.toml"
    text.write_text("the sea is wide and the ship is small " * 8)
    small = ["--set", "weights.min_parameters=0", "--set", "tiers.gpu.enabled=false"]
    arguments = ["precision", str(llama), "--text", str(text), "--length", "16", "--write", str(written), *small]
    assert cli.main([*arguments, "--budget", "20 bits"]) == 0
    out = capsys.readouterr().out
    assert "the given sequences" in out and "lossless, the others nvfp4" in out
    config = VBConfig.from_toml(written)
    assert config.weights.formats and written.read_text().startswith("# ")
    assert cli.main(["plan", str(llama), "--config", str(written)]) == 0
    assert cli.main(arguments) == 2
    assert "no budget: give --budget" in capsys.readouterr().err
