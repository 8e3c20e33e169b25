"""Files that are read ahead of their use: in which order, how far, and that it is advice only."""

import pytest

from vbrt.host import file_prefetch
from vbrt.host.file_prefetch import ReadAhead, Span

MIB = 1 << 20


@pytest.fixture
def pieces(monkeypatch):
    """What is handed to the threads, in its order: (name, first byte, bytes)."""
    given = []
    monkeypatch.setattr(
        file_prefetch.Crew, "give", lambda crew, work, piece: given.append((piece.name, piece.begin, piece.nbytes))
    )
    monkeypatch.setattr(file_prefetch, "_window_bytes", lambda: 16 * MIB)
    return given


def spans(tmp_path, *sizes):
    return [Span(f"w{n}", tmp_path / "file", 1000 * n, size * MIB) for n, size in enumerate(sizes)]


def test_files_are_read_in_pieces_up_to_a_window_ahead(pieces, tmp_path):
    with ReadAhead(spans(tmp_path, 4, 10, 20)) as ahead:
        assert pieces == [
            ("w0", 0, 4 * MIB),
            ("w1", 1000, 8 * MIB),
            ("w1", 1000 + 8 * MIB, 2 * MIB),
            ("w2", 2000, 8 * MIB),
        ]
        ahead.used("w0", 4 * MIB)
        assert len(pieces) == 4  # 22 MiB asked for, 4 used, 16 ahead
        ahead.used("w1", 10 * MIB)
        assert pieces[4:] == [("w2", 2000 + 8 * MIB, 8 * MIB)]


def test_tensors_that_lie_behind_each_other_are_read_together(pieces, tmp_path):
    sizes, at, file = (3, 700, 2 * MIB, 5), 0, []
    for number, nbytes in enumerate(sizes):
        file.append(Span(f"w{number}", tmp_path / "file", at, nbytes))
        at += nbytes + (9 if number == 2 else 0)
    with ReadAhead(file):
        assert pieces == [("w0", 0, 2 * MIB + 703), ("w3", at - 5, 5)]


def test_what_was_used_before_its_turn_is_not_read_any_more(pieces, tmp_path):
    with ReadAhead(spans(tmp_path, 16, 16, 16, 16)) as ahead:
        ahead.used("w2", 16 * MIB)
        assert [name for name, *_ in pieces] == ["w0", "w0", "w3", "w3"]


def test_a_tensor_of_another_name_counts_behind_the_last(pieces, tmp_path):
    with ReadAhead(spans(tmp_path, 16, 16, 16)) as ahead:
        ahead.used("of a pattern", 8 * MIB)
        assert [name for name, *_ in pieces] == ["w0", "w0", "w1"]
        ahead.used("w0", 4 * MIB)  # an earlier one takes nothing back
        assert len(pieces) == 3


def test_files_that_cannot_be_read_are_left_to_who_uses_them(tmp_path):
    (tmp_path / "short").write_bytes(b"1234")
    with ReadAhead([Span("gone", tmp_path / "gone", 0, MIB), Span("short", tmp_path / "short", 0, MIB)]) as ahead:
        ahead.used("gone", MIB)


def test_bytes_of_the_last_piece_are_read_and_not_more(monkeypatch, tmp_path):
    (tmp_path / "file").write_bytes(bytes(700_000))
    read = []
    monkeypatch.setattr(file_prefetch, "read_into", lambda fd, views, at: read.append((sum(map(len, views)), at)))
    file_prefetch._read(Span("w", tmp_path / "file", 100, 600_001))
    assert read == [(600_001, 100)]
