"""Pictures of what people see: committed, small, shown on a page, and drawn from what is printed."""

import pytest

from scripts import screenshots
from scripts.docs import foreign
from tests.docs.pages import PAGES


def test_pictures_are_small_load_nothing_and_are_shown_on_a_page():
    pages = "".join(path.read_text("utf-8") for path in PAGES.values())
    made = sorted(screenshots.FOLDER.iterdir())
    assert [path.stem for path in made] == sorted(screenshots.PICTURES)
    for path in made:
        assert path.stat().st_size <= screenshots.MAX_BYTES and f"screenshots/{path.name}" in pages
        assert path.suffix == ".png" or (
            "url(" not in (svg := path.read_text("utf-8")).replace("url(#", "") and not foreign(svg)
        )


def test_a_text_becomes_a_picture_without_fonts_of_other_hosts():
    svg = screenshots.as_svg("gpu ▓▓░ 1.2 GiB", "vbrt plan")
    drawn = screenshots.without_fonts(svg)
    assert "https://" in svg.split("<style>")[1] and "https://" not in drawn.split("<style>")[1]
    assert "vbrt&#160;plan" in drawn and "▓▓░" in drawn


def test_the_plan_is_drawn_from_the_command(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(screenshots, "FOLDER", tmp_path)
    screenshots.plan()
    assert "mlp.experts" in (tmp_path / "plan.svg").read_text("utf-8")
