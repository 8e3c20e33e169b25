"""Tested ranges: written down once, and files that name versions agree with them."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import vbrt
from tests.models import mlp
from vbrt.libraries import versions
from vbrt.report.stats import Stats

packaging = pytest.importorskip("packaging.requirements")
from packaging.utils import canonicalize_name  # noqa: E402 - needs it
from packaging.version import Version  # noqa: E402

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
LISTED = [*PROJECT["dependencies"], *(r for extra in PROJECT["optional-dependencies"].values() for r in extra)]
HERE = [r for r in map(packaging.Requirement, LISTED) if r.marker is None or r.marker.evaluate()]
DIRECT = {canonicalize_name(r.name): r for r in HERE if r.name != "vbrt"}


def pins(name):
    lines = (ROOT / "constraints" / name).read_text("utf-8").splitlines()
    return {canonicalize_name(n): v for n, _, v in (line.partition("==") for line in lines if not line.startswith("#"))}


def minor(version):
    return ".".join(map(str, Version(version).release[:2]))


@pytest.fixture
def installed(monkeypatch):
    """A function that has libraries installed in the lowest versions, and those that are given in others, imported."""

    def install(**given):
        found = {name: lowest for name, (lowest, _) in versions.TESTED.items()} | given
        monkeypatch.setattr(importlib.metadata, "version", found.__getitem__)
        for name in given:
            monkeypatch.setitem(sys.modules, name, sys.modules.get(name, sys))
        versions._newer.cache_clear()

    yield install
    versions._newer.cache_clear()


@pytest.mark.parametrize(
    ("version", "tested"),
    [("3.6.0", True), ("3.9.1+git", True), ("3.5.1", False), ("3.10.0", False), ("4.0", False), ("unknown", False)],
)
def test_versions_are_compared_as_numbers(version, tested):
    assert versions.is_tested("triton", version) is tested


def test_an_older_version_is_told_what_it_takes_and_another_what_was_tested():
    lowest, newest = versions.TESTED["transformers"]
    assert versions.wanted("transformers", "4.57.6") == f"vbrt needs transformers {lowest} or newer"
    assert versions.wanted("transformers", "99.0") == f"vbrt was tested with transformers {lowest} to {newest}"


def test_what_is_newer_is_a_line_in_stats_and_nothing_else_is(installed):
    with vbrt.wrap(mlp(), "dense") as vb:
        installed(torch="2.13.9")
        assert vb.stats().untested == ()
        installed(torch="99.1.0+cu130")
        stats = vb.stats()
        assert stats.untested == (
            f"torch 99.1.0+cu130 is newer than the newest tested ({versions.TESTED['torch'][1]})",
        )
        assert f"note: {stats.untested[0]}" in str(stats) and not any(
            "newer than" in reason for reason in stats.fallbacks
        )
        assert Stats.from_dict(stats.to_dict()).untested == stats.untested
        older = stats.to_dict()
        del older["untested"]
        assert Stats.from_dict(older).untested == ()


def test_libraries_that_nothing_has_imported_are_not_in_stats(installed, monkeypatch):
    installed(peft="99.0")
    assert len(versions.newer_than_tested(loaded=True)) == 1
    monkeypatch.delitem(sys.modules, "peft")
    assert versions.newer_than_tested(loaded=True) == () and len(versions.newer_than_tested()) == 1


def test_version_prints_the_version_and_what_is_newer_on_stderr(tmp_path):
    (tmp_path / "gguf-99.0.dist-info").mkdir()
    (tmp_path / "gguf-99.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: gguf\nVersion: 99.0\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from vbrt.cli.main import main; main(['--version'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"vbrt {vbrt.__version__}\n")
    newest = versions.TESTED["gguf"][1]
    assert f"vbrt: note: gguf 99.0 is newer than the newest tested ({newest})\n" in done.stderr


# -- files that name versions -----------------------------------------------------------------------------------------


def test_what_is_installed_for_tests_is_the_newest_tested():
    tested = pins("tested.txt")
    newest = {name: minor(tested[name]) for name in versions.TESTED if name != "torch"}
    assert newest == {name: newest for name, (_, newest) in versions.TESTED.items() if name != "torch"}
    assert versions.is_tested("torch", tested["torch"])  # a newer one has the short suite alone, in scripts/newest


def test_every_dependency_has_a_version_that_its_bound_allows():
    tested = pins("tested.txt")
    for name, requirement in DIRECT.items():
        assert requirement.specifier.contains(tested[name]), name


def test_lower_bounds_are_the_lowest_tested_and_there_are_no_upper_ones():
    for name, (lowest, _) in versions.TESTED.items():
        (bound,) = DIRECT[name].specifier
        assert bound.operator == ">=" and minor(bound.version) == lowest, name
    assert {one.operator for requirement in DIRECT.values() for one in requirement.specifier} == {">="}


def test_dependencies_of_dependencies_have_versions_too():
    tested = pins("tested.txt")
    if any(importlib.metadata.version(name) != tested[name] for name in ("transformers", "accelerate", "peft")):
        pytest.skip("other versions than those of constraints/tested.txt are installed")
    found, left = set(), set(DIRECT)
    while left:
        name = left.pop()
        found.add(name)
        if name == "torch":  # its own libraries for CUDA
            continue
        for text in importlib.metadata.requires(name) or ():
            needed = packaging.Requirement(text)
            other = canonicalize_name(needed.name)
            if other not in found and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
                left.add(other)
    assert found - tested.keys() == set()


def test_versions_of_the_figures_machines_are_tested_ones():
    assert all(versions.is_tested(name, version) for name, version in pins("gpus.txt").items())


def test_a_page_names_the_versions():
    text = (ROOT / "docs" / "index.md").read_text("utf-8")
    for name, ends in versions.TESTED.items():
        lowest, newest = map(re.escape, ends)
        assert re.search(rf"\| {name} \| {lowest}(\.\d+)? \| {newest} \|", text, re.IGNORECASE), name
