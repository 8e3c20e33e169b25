"""`vbrt stats`: the table and JSON of the last run, or of a file."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.cases import errors, some_stats
from vbrt.cli import main as cli
from vbrt.cli.stats import keep_stats, stats_path
from vbrt.errors import FormatError
from vbrt.report.stats import Stats

pytest.importorskip("transformers")


def test_stats_survive_json():
    stats = some_stats()
    assert Stats.from_dict(json.loads(json.dumps(stats.to_dict()))) == stats


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d.pop("layers"), "stats.layers is missing"),
        (lambda d: d.update(passes="4"), "stats.passes = '4'; expected a whole number"),
        (lambda d: d.update(passes=True), "stats.passes = True"),
        (lambda d: d.update(tiers=[]), "stats.tiers = []; expected a table"),
        (lambda d: d["tiers"].update(cpu=3), "stats.tiers.cpu is int"),
        (lambda d: d["layers"]["model.layers.0.self_attn.q_proj"].update(materialized=1), "q_proj.materialized = 1"),
        (lambda d: d["layers"]["model.layers.0.self_attn.q_proj"].pop("hits"), "q_proj.hits is missing"),
    ],
)
def test_stats_from_a_damaged_dict_name_what_is_wrong(change, named):
    data = some_stats().to_dict()
    change(data)
    with pytest.raises(FormatError) as error:
        Stats.from_dict(data)
    assert named in str(error.value)


def test_stats_shows_a_given_file_as_table_and_as_json(tmp_path, capsys):
    stats = some_stats()
    for data in (stats.to_dict(), {"text": "...", "stats": stats.to_dict()}):
        (tmp_path / "saved.json").write_text(json.dumps(data))
        assert cli.main(["stats", str(tmp_path / "saved.json")]) == 0
        assert capsys.readouterr().out.rstrip() == stats.table(width=132)
        assert cli.main(["stats", "--each", str(tmp_path / "saved.json")]) == 0
        assert capsys.readouterr().out.rstrip() == stats.table(width=132, each=True)
        assert cli.main(["stats", "--verbose", str(tmp_path / "saved.json")]) == 0
        assert capsys.readouterr().out.rstrip() == stats.table(width=132, verbose=True)
        assert cli.main(["stats", "--json", str(tmp_path / "saved.json")]) == 0
        assert json.loads(capsys.readouterr().out) == stats.to_dict()


def test_stats_without_a_run_says_where_they_come_from(capsys):
    assert cli.main(["stats"]) == 2
    assert "`vbrt run` and `vbrt demo` leave their stats there" in errors(capsys)


@pytest.mark.parametrize(("text", "reason"), [("{", "not valid JSON"), ("[1]", "stats is list"), ("{}", "is missing")])
def test_stats_of_a_damaged_file_is_one_line_of_error(text, reason, tmp_path, capsys):
    (tmp_path / "saved.json").write_text(text)
    assert cli.main(["stats", str(tmp_path / "saved.json")]) == 2
    assert reason in errors(capsys)


def test_a_relative_state_directory_is_ignored(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    assert stats_path() == Path("~/.local/state/vbrt/last-stats.json").expanduser()


def test_stats_that_cannot_be_kept_cost_a_warning(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    keep_stats(some_stats())
    assert f"the stats were not kept: {os.strerror(errno.ENOTDIR)}" in capsys.readouterr().err


def _shown(stats: Stats, width: int) -> list[str]:
    return stats.table(width=width, each=True).splitlines()


def test_the_table_has_one_line_a_layer_at_80_columns_and_says_once_what_is_the_same():
    lines = _shown(some_stats(), 80)
    assert max(map(len, lines)) <= 80
    shared = [
        "vbrt, scheduled policy",
        "4 passes",
        "format nvfp4",
        "home ssd",
        "kernel reference",
        "forwards 4",
        "names begin with model.layers.",
    ]
    assert " ".join(line.strip() for line in lines[:2]) == " · ".join(shared)
    rows = [line for line in lines if "self_attn" in line]
    assert len(rows) == 12
    assert rows[0].split() == "0.self_attn.q_proj 1.0 MiB 0 2 1 66.7 % 1.5".split()


def test_the_table_shows_everything_where_there_is_room():
    layers = dict(some_stats().layers)
    first = next(iter(layers))
    layers[first] = replace(layers[first], format="dense", home="cpu", kernel="triton", forwards=5)
    lines = _shown(some_stats(layers=layers), 140)
    heads = "layer format home kernel size forwards hit prefetched waited hit rate moved wait ms"
    assert lines[1].split() == heads.split()
    assert lines[3].split()[:4] == [first, "dense", "cpu", "triton"]
    assert lines[-1] == "fallback: pinned memory is not there"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 132, 200])
def test_the_table_stays_within_any_width(width):
    assert max(map(len, _shown(some_stats(), width))) <= width


def test_the_table_takes_names_as_they_are():
    layers = {"[/bold].:smile:": next(iter(some_stats().layers.values()))}
    assert any("[/bold].:smile:" in line for line in _shown(some_stats(layers=layers), 132))
    assert "[/bold].:smile:" in str(some_stats(layers=layers))
    assert "0 layers" not in str(some_stats(layers={}))  # no table without layers
