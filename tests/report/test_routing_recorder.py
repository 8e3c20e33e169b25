"""Recording of routing: passes, sentinels, layers of other models."""

import pytest

from vbrt.errors import ArgumentError
from vbrt.report.routing_recorder import RoutingRecorder
from vbrt.residency.routing_file import read_routing
from vbrt.residency.routing_trace import Routed, RoutedLayer
from vbrt.residency.simulate import PASS, Pass

LAYERS = (RoutedLayer("a", 4, 2), RoutedLayer("b", 4, 2))


def test_what_layers_note_is_written_in_order(tmp_path):
    recorder = RoutingRecorder(LAYERS, tmp_path / "trace")
    recorder.begin_pass("prompt")
    recorder.note("a", [[3, 1], [2, 3]])
    recorder.note("b", [[0, 1], [1, 0]])
    recorder.begin_pass("decode")
    recorder.begin_pass("decode")
    recorder.note("a", [[4, 2]])  # 4 is a sentinel
    recorder.note("another", [[0]])
    recorder.begin_pass("decode")
    recorder.write()
    routing = read_routing(tmp_path / "trace")
    assert routing.layers == LAYERS
    assert routing.records == (
        Pass("prompt"),
        Routed(0, ((1, 3), (2, 3))),
        Routed(1, ((0, 1), (0, 1))),
        Pass("decode"),
        Routed(0, ((2,),)),
    )


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_recorded(tmp_path, monkeypatch):
    with pytest.raises(ArgumentError, match=r"missing/x: cannot write the routing: No such file.*name a file"):
        RoutingRecorder(LAYERS, tmp_path / "missing" / "x")
    monkeypatch.setenv("HOME", str(tmp_path))
    RoutingRecorder(LAYERS, "~/trace").write()
    assert read_routing("~/trace").layers == LAYERS
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


def test_without_marks_a_pass_begins_when_a_layer_runs_again(tmp_path):
    recorder = RoutingRecorder(LAYERS, tmp_path / "unused")
    for _ in range(2):
        recorder.note("a", [[0, 1]])
        recorder.note("b", [[0, 1]])
    assert [record for record in recorder.routing.records if isinstance(record, Pass)] == [PASS, PASS]
    assert isinstance(recorder.routing.records[3], Pass)


def test_a_recording_of_nothing_is_empty(tmp_path):
    recorder = RoutingRecorder(LAYERS, tmp_path / "unused")
    assert recorder.routing.records == ()
    recorder.begin_pass()
    assert recorder.routing.records == ()
