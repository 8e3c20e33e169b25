"""Steps are recorded on the CPU, in blocks of 8 tokens."""

import pytest

from tests.generation.tape import TapeRecorder


@pytest.fixture
def tapes(monkeypatch):
    """Record steps by tapes; yields the recorders that were made."""
    made: list[TapeRecorder] = []

    def new(device):
        made.append(TapeRecorder())
        return made[-1]

    monkeypatch.setattr("vbrt.generation.generating.recorder_for", new)
    monkeypatch.setattr("vbrt.generation.spans.BLOCK", 8)
    return made
