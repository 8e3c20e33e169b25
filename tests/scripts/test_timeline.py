"""scripts/timeline.py on a tiny model: a page and a trace of each part, with the rows that it is for."""

import json
import sys

import pytest

from tests.report.test_chrome_trace import check_trace

pytest.importorskip("transformers")
from scripts import timeline


@pytest.mark.exhaustive
def test_each_part_leaves_a_page_and_a_trace_of_one_recording(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["timeline.py", "--tiny", "--layers", "2", "--out", str(tmp_path)])
    assert timeline.main() == 0
    rows = {}
    for part in timeline.PARTS:
        events = check_trace((tmp_path / f"{part}.json").read_text("utf-8"))
        rows[part] = {event["cat"] for event in events if event["ph"] == "X"}
        data = (tmp_path / f"{part}.html").read_text("utf-8").split('id="data">')[1].split("</script>")[0]
        lanes = {lane["row"]: len(lane["items"]) for lane in json.loads(data)["lanes"]}
        assert lanes["compute"] == sum(event.get("cat") == "compute" for event in events) > 0
    assert "round" in rows["speculation"] and "optimizer" in rows["lora"] and "round" not in rows["decode"]
    assert "lora: " in capsys.readouterr().out
