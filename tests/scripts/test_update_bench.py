"""scripts/update_bench.py, on few parameters, and the table of what it writes."""

import json
import sys

from scripts import update_bench
from scripts.update_tables import update_table


def test_a_result_has_every_rule_and_becomes_a_table(tmp_path, monkeypatch, capsys):
    out = tmp_path / "update.json"
    words = ["update_bench", "--parameters", "70000", "--threads", "1", "2", "--times", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    update_bench.main()
    assert "AdamW, 8-bit moments" in capsys.readouterr().out
    figures = json.loads(out.read_text())["threads"]
    assert list(figures) == ["1", "2"] and all(one["bytes_s"] > 0 for of in figures.values() for one in of.values())
    table = update_table(out)
    assert sum(line.startswith("| Lion |") for line in table) == 1
