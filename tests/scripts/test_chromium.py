"""Pictures of pages: what is drawn is in them, in both themes; without Chromium it is said what to install."""

import struct

import pytest

from scripts.chromium import find_chromium, screenshot

PAGE = "<style>:root { color-scheme: light dark } html { background: light-dark(#fff, #000) }</style>"


@pytest.mark.skipif(find_chromium() is None, reason="no Chromium on PATH (apt-get install chromium)")
def test_a_picture_has_the_size_that_was_asked_for_and_the_theme(tmp_path):
    (tmp_path / "a.html").write_text(PAGE, "utf-8")
    pictures = []
    for dark in (False, True):
        screenshot(tmp_path / "a.html", tmp_path / "a.png", size=(320, 200), dark=dark)
        pictures.append((tmp_path / "a.png").read_bytes())
        assert struct.unpack(">II", pictures[-1][16:24]) == (320, 200)
    assert pictures[0] != pictures[1]


def test_without_chromium_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="apt-get install chromium"):
        screenshot(tmp_path / "a.html", tmp_path / "a.png")
