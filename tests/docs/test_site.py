"""The site: every public name and every key of a config has its place; a page that loads from elsewhere is found."""

import json
import re
import shutil
from collections import Counter

import pytest

import vbrt
from scripts import docs
from scripts.chromium import FLAGS, find_chromium
from scripts.docs import foreign
from scripts.docs_hooks import commands_help
from tests.docs.pages import ROOT
from vbrt.cli.main import COMMANDS
from vbrt.config import VBConfig


def defaults(section, prefix=""):
    """Key -> default, of all keys that a user sets."""
    for name, value in section.items():
        if isinstance(value, dict) and value:  # an empty one is a table of the user's own keys
            yield from defaults(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def test_every_public_name_is_in_the_reference_once():
    pages = "".join(path.read_text("utf-8") for path in (ROOT / "docs" / "reference").glob("*.md"))
    there = Counter(re.findall(r"^::: vbrt\.(\w+)$", pages, re.M))
    assert there == Counter(set(vbrt.__all__) - {"__version__"})


def test_every_key_of_a_config_is_in_the_table_with_its_default():
    page = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \|[^|]*\| (?:`(.*?)`)? ?\|", page, re.M)
    table = {key: json.loads(default) if default else None for key, default in rows}
    assert table == dict(defaults(VBConfig().to_dict()))


def test_the_help_of_every_command_is_on_the_page():
    page = commands_help()
    assert all(f"## vbrt {command}\n" in page for command in COMMANDS)
    assert "--gpu-memory SIZE" in page and "\x1b" not in page


def test_what_a_page_would_load_from_elsewhere_is_found():
    page = (
        '<a href="https://x.org"><script src="https://x.org/a.js"></script><link rel=canonical href="https://x.org/">'
    )
    assert foreign(page) == ["https://x.org/a.js"]
    assert foreign('<img src="plot.svg"><link rel="stylesheet" href="../site.css">') == []
    assert foreign('<link rel="stylesheet" href="//fonts.org/a.css">') == ["//fonts.org/a.css"]


@pytest.mark.parametrize(
    ("text", "theme", "said"),
    [
        ("[home](index.md)", "{name: mkdocs, highlightjs: false}", ""),
        ("[nowhere](b.md)", "{name: mkdocs, highlightjs: false}", "'b.md'"),
        ("[home](index.md)", "mkdocs", "index.html: loads https://"),
    ],
)
def test_a_broken_link_and_what_is_loaded_from_elsewhere_fail(tmp_path, monkeypatch, capsys, text, theme, said):
    pytest.importorskip("mkdocs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(text)
    (tmp_path / "mkdocs.yml").write_text(f"site_name: a\nsite_dir: build/site\nstrict: true\ntheme: {theme}\n")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "SITE", tmp_path / "build" / "site")
    assert docs.main([]) == bool(said)
    assert said in capsys.readouterr().err


def test_the_search_finds_a_page_that_is_opened_as_a_file(tmp_path, monkeypatch):
    pytest.importorskip("material")
    playwright = pytest.importorskip("playwright.sync_api")
    if (chromium := find_chromium()) is None:
        pytest.skip("no Chromium")
    (tmp_path / "docs" / "below").mkdir(parents=True)
    (tmp_path / "docs" / "index.md").write_text("# Home\n\nA page.")
    (tmp_path / "docs" / "below" / "tides.md").write_text("# Tides\n\nThey ebb.")
    shutil.copy(ROOT / "docs" / "iframe-worker.js", tmp_path / "docs")
    config = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert "  - search\n  - offline" in config and "polyfills: [iframe-worker.js]" in config
    (tmp_path / "mkdocs.yml").write_text(
        "site_name: a\nsite_dir: build/site\ntheme: {name: material, font: false}\nplugins: [search, offline]\n"
        "extra: {polyfills: [iframe-worker.js]}\n"
    )
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "SITE", tmp_path / "build" / "site")
    assert docs.main([]) == 0
    with playwright.sync_playwright() as run, run.chromium.launch(executable_path=chromium, args=[*FLAGS]) as browser:
        page = browser.new_page()
        page.goto((docs.SITE / "below" / "tides.html").as_uri())
        page.type(".md-search__input", "ebb", delay=20)
        page.wait_for_selector(".md-search-result__item", timeout=20_000)
        assert page.inner_text(".md-search-result__item").startswith("Tides")
