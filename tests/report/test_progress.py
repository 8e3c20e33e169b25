"""What is shown of work that takes long, on a terminal, in a file."""

import time

import pytest

from tests.models import mlp, wrap, wrap_streamed
from tests.patience import LONG_S, eventually
from vbrt.report import progress
from vbrt.report.progress import Progress, format_seconds


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What takes more than 10 ms is shown, 20 ms apart."""
    monkeypatch.setattr(progress, "_SILENT_S", 0.01)
    monkeypatch.setattr(progress, "_LINE_S", 0.02)
    monkeypatch.setattr(progress, "_BAR_S", 0.01)
    monkeypatch.delenv("VBRT_PROGRESS")


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


def until(seen, capsys, work):
    """Return what stderr has got once it has `seen`, while the work is at a weight that takes long."""
    err, limit = "", time.monotonic() + LONG_S
    while seen not in err:
        assert time.monotonic() < limit, f"{seen!r} is not in {err!r}"
        time.sleep(0.01)
        err += capsys.readouterr().err
    return err


def test_the_estimate_follows_the_latest_work_and_knows_what_an_earlier_run_has_done(monkeypatch):
    work, now, lines = Progress("loading", 1000, unit="weights"), [0.0], []
    monkeypatch.setattr(progress._Painter, "_say", lambda painter, text: lines.append(text))
    monkeypatch.setattr("rich.console.monotonic", lambda: now[0])
    for second in range(5):
        work.done(10)
        work.skip(100)
        now[0] = float(second)
        work._painter.draw(work)
    assert lines[0] == "11 %, 110 of 1000 weights" and lines[-1] == "55 %, 550 of 1000 weights, 45 s left"


def test_times_are_short():
    shown = [format_seconds(s) for s in (0.44, 9.96, 99, 100, 200.4, 3900, 100_000)]
    assert shown == ["0.4 s", "10 s", "99 s", "1 min 40 s", "3 min 20 s", "1 h 05 min", "27 h 47 min"]


def test_off_a_terminal_there_are_lines_with_percent_and_a_last_one_with_the_time(capsys):
    with Progress("loading", 4 << 20) as work:
        work.at("layers.0")
        work.done(1 << 20)
        until("vbrt: loading: 25 %, 1.0 MiB of 4.0 MiB, layers.0\n", capsys, work)
        work.done(1 << 20)
        err = until(" s left, layers.0\n", capsys, work)
        assert err.splitlines()[-1].startswith("vbrt: loading: 50 %, 2.0 MiB of 4.0 MiB, ")
    assert capsys.readouterr().err.startswith("vbrt: loading: 4.0 MiB in ") and "\x1b" not in err


def test_on_a_terminal_there_is_one_bar_with_the_name_which_is_gone_at_the_end(capsys, terminal):
    with Progress("saving", 100, unit="weights") as work:
        work.at("layers.[red].0")
        work.done(42)
        err = until("42%", capsys, work)
        assert "saving" in err and "42/100 weights" in err and "layers.[red].0" in err
        with work.paused():
            print("a result")
    out, err = capsys.readouterr()
    assert out == "a result\n" and err.rstrip().endswith("\x1b[2K") and "\n\n" not in err


def test_nothing_is_shown_of_quick_work_of_work_within_work_or_where_it_is_unwanted(capsys, monkeypatch):
    def slowly(show=None):
        with Progress("inner", 10, show=show):
            time.sleep(0.03)

    slowly(show=False)
    monkeypatch.setenv("VBRT_PROGRESS", "0")
    slowly()
    monkeypatch.delenv("VBRT_PROGRESS")
    with Progress("nothing", 0):
        time.sleep(0.03)
    assert capsys.readouterr().err == ""
    with Progress("outer", 10):
        slowly()
        slowly(show=True)
    assert "inner" not in capsys.readouterr().err
    with Progress("inner", 10) as work:
        until("inner", capsys, work)  # the outer one has ended


def test_an_error_and_an_interrupt_leave_no_thread_and_no_last_line(capsys):
    for error in (KeyboardInterrupt(), ValueError()):
        with pytest.raises(type(error)), Progress("loading", 10) as work:
            until("loading: 0 %", capsys, work)
            raise error
        assert " in " not in capsys.readouterr().err and not work._ticker.running


def test_work_whose_end_was_interrupted_stops_drawing(capsys):
    work = Progress("loading", 10).__enter__()
    until("loading: 0 %", capsys, work)
    ticker = work._ticker
    assert ticker.running
    del work
    eventually(lambda: not ticker.running, "its end")


def test_encoding_saving_loading_and_decoding_show_themselves(tmp_path, capsys, monkeypatch):
    import torch

    import vbrt

    seen = []

    class Seen(Progress):
        def __exit__(self, *error):
            seen.append((self._painter._what, self.finished() == self._painter._total, self._show))
            super().__exit__(*error)

    for module in (
        "vbrt.model.layer_registry",
        "vbrt.saves.saved.save",
        "vbrt.saves.load.load_model",
        "vbrt.tiers.stack.page_homes",
    ):
        monkeypatch.setattr(f"{module}.Progress", Seen)
    vb = wrap(mlp())
    vb.save(tmp_path / "saved")
    vb.unwrap()
    assert seen == [("encoding", True, True), ("saving", True, True), ("decoding", True, True)]
    seen.clear()
    vb = wrap_streamed(mlp(), "dense", tmp_path).materialize()
    vb.set_budget("cpu", "1GiB")
    assert seen[0] == ("encoding", True, True) and ("moving pages", True, True) in seen[1:]
    vb.close()
    seen.clear()
    with torch.device("meta"):
        model = mlp()
    vb = vbrt.load(tmp_path / "saved", model, progress=False)
    assert ("loading", True, False) in seen and all(full for _, full, _ in seen)
