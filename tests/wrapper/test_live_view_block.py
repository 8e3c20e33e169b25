"""`with vb.live():` in this process."""

import os
import sys
import time

import pytest
import torch

from tests.models import mlp, wrap
from tests.patience import LONG_S
from vbrt.errors import ArgumentError, TierError
from vbrt.host import stats_endpoint
from vbrt.wrapper import live_view_block as live


def test_off_a_terminal_there_are_lines_on_stderr_the_last_one_at_the_end(capsys, monkeypatch):
    monkeypatch.setattr(live, "_LINE_S", 0.01)
    vb = wrap(mlp())
    with vb.live(every_s=0.01), torch.no_grad():
        vb(torch.randn(1, 64))
        print("an output")
        out, err = "", ""
        limit = time.monotonic() + LONG_S
        while err.count("\n") < 2:
            assert time.monotonic() < limit, f"no lines come: {err!r}"
            time.sleep(0.01)
            more = capsys.readouterr()
            out, err = out + more.out, err + more.err
    err += capsys.readouterr().err
    assert out == "an output\n" and "\x1b" not in err
    lines = err.splitlines()
    assert len(lines) > 2 and all(line.startswith(f"vbrt: process {os.getpid()} · Sequential") for line in lines)
    assert "passes/s" in lines[-1]


def test_on_a_terminal_there_is_a_frame_and_ctrl_c_leaves_the_cursor(capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stdout, vb = sys.stdout, wrap(mlp())
    live = vb.live(every_s=0.01)
    with pytest.raises(KeyboardInterrupt), live:
        time.sleep(0.05)
        raise KeyboardInterrupt
    out, err = capsys.readouterr()
    assert out == "" and "Sequential · scheduled policy" in err and err.rindex("\x1b[?25h") > err.rindex("\x1b[?25l")
    assert sys.stdout is stdout and not live._ticker.running


def test_offered_it_shows_nothing_and_answers_for_the_block_only(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(stats_endpoint, "directories", lambda: [tmp_path / "offers"])
    vb = wrap(mlp())
    with vb.live(offer=True):
        with vb.live(offer=True):
            pass
        assert b'"Sequential"' in stats_endpoint.ask(os.getpid())
    assert not stats_endpoint.pids() and capsys.readouterr() == ("", "")
    with pytest.raises(ArgumentError, match="live: every_s = 0; expected seconds"):
        vb.live(every_s=0)
    monkeypatch.setattr(stats_endpoint, "directories", lambda: [tmp_path / "missing" / "offers"])
    with pytest.raises(TierError, match="cannot be offered to vbrt top"), vb.live(offer=True):
        pass
