"""What the documentation shows in Python runs, piece after piece, as somebody would type it."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("name", ["experts.md"])
@pytest.mark.filterwarnings("ignore:.*not swapped")
def test_the_pieces_of_a_page_run_one_after_the_other(name, tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    pieces = re.findall(r"^```python\n(.*?)^```$", (DOCS / name).read_text("utf-8"), re.M | re.S)
    assert len(pieces) > 3
    scope: dict[str, object] = {}
    for number, piece in enumerate(pieces, 1):
        exec(compile(piece, f"{name}, piece {number}", "exec"), scope)
    assert "routed experts" in capsys.readouterr().out
    assert "Routed experts" in (tmp_path / "run.html").read_text("utf-8")
