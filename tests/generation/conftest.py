"""Steps are recorded on the CPU, in blocks of 8 tokens."""

import types

import pytest

from tests.generation.fusion.tape_cases import TapeRecorder
from vbrt.generation.fusion.step_graph import Program
from vbrt.generation.fusion.step_rows import RowsProgram


@pytest.fixture
def tapes(monkeypatch):
    """Record steps by tapes; yields the recorders that were made."""
    made: list[TapeRecorder] = []

    def new(device):
        made.append(TapeRecorder())
        return made[-1]

    monkeypatch.setattr("vbrt.generation.generate.recorder_for", new)
    monkeypatch.setattr("vbrt.generation.static.length_buckets.BLOCK", 8)
    return made


class Again:
    """A recorder that runs the step again, which layers on streamed planes may be part of."""

    program, rows, lossless = Program, RowsProgram, True

    def record(self, step, within):
        with within():
            step()
        return types.SimpleNamespace(replay=step)

    def release(self):
        pass


@pytest.fixture
def recorded(monkeypatch):
    """Record steps as themselves."""
    monkeypatch.setattr("vbrt.generation.generate.recorder_for", lambda device: Again())
    monkeypatch.setattr("vbrt.generation.static.length_buckets.BLOCK", 8)
