"""Which test files a change touches: the first that .ci/run tries."""

import subprocess

import pytest

from scripts import touched

SOURCES = {
    "vbrt/__init__.py": "from vbrt.tiers.stack import Stack",
    "vbrt/tiers/__init__.py": "",
    "vbrt/tiers/ssd.py": "",
    "vbrt/tiers/stack.py": "from vbrt.tiers import ssd",
    "vbrt/kernels/cuda/e2m1/linear.py": "",
    "scripts/storm.py": "import vbrt.tiers.stack",
    "tests/conftest.py": "",
    "tests/docs/test_examples.py": "",
    "tests/tiers/test_ssd.py": "from vbrt.tiers.ssd import Disk",
    "tests/kernels/cuda/test_linear.py": "",
    "tests/kernels/test_reference.py": "",
    "tests/config/test_config.py": "import vbrt",
    "tests/model/test_planner.py": "from vbrt.tiers.stack import Stack",
    "tests/scripts/test_storm.py": "COMMAND = ['scripts/storm.py']",
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("README.md", {}),
        ("tests/config/test_config.py", {"tests/config/test_config.py": "edited"}),
        ("configs/fp4.toml", {"tests/config/test_config.py": "configs/fp4.toml is edited"}),
        ("examples/moe.py", {"tests/docs/test_examples.py": "examples/moe.py is edited"}),
        ("docs/howto/lora.md", {"tests/docs/test_examples.py": "docs/howto/lora.md is edited"}),
        (
            "vbrt/kernels/cuda/e2m1/linear.py",
            {"tests/kernels/cuda/test_linear.py": "vbrt/kernels/cuda/e2m1/linear.py is edited"},
        ),
        (
            "vbrt/tiers/ssd.py",
            {
                "tests/tiers/test_ssd.py": "vbrt/tiers/ssd.py is edited",
                "tests/model/test_planner.py": "imports vbrt/tiers/stack.py",
                "tests/scripts/test_storm.py": "imports scripts/storm.py",
            },
        ),
    ],
)
def test_a_change_touches_its_room_and_what_imports_it_nearest_first(changed, expected):
    found = touched.touched([changed], SOURCES)
    assert found == expected and list(found) == list(expected)


def test_what_every_test_uses_touches_all():
    assert set(touched.touched(["tests/conftest.py"], SOURCES)) == {path for path in SOURCES if "/test_" in path}


def test_others_come_by_turns_each_once():
    found = touched.touched(["vbrt/tiers/ssd.py"], SOURCES)
    orders = [touched.others(found, SOURCES, commit) for commit in "abc"]
    tests = {path for path in SOURCES if "/test_" in path}
    assert all(sorted(order) == sorted(tests - found.keys()) for order in orders)
    assert len({tuple(order) for order in orders}) > 1


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """Make a repository of two commits on main, and look at a clone of it."""

    def git(*arguments, cwd):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.run(
            ["git", *identity, *arguments], cwd=cwd, check=True, capture_output=True, text=True
        ).stdout

    origin = tmp_path / "origin"
    origin.mkdir()
    git("init", "-q", "-b", "main", cwd=origin)
    commits = []
    for number in range(2):
        git("commit", "-q", "--allow-empty", "-m", f"{number}", cwd=origin)
        commits.append(git("rev-parse", "HEAD", cwd=origin).strip())

    def make(*options, branch=False):
        git("clone", "-q", *options, f"file://{origin}", str(tmp_path / "clone"), cwd=tmp_path)
        monkeypatch.setattr(touched, "ROOT", tmp_path / "clone")
        if branch:
            git("commit", "-q", "--allow-empty", "-m", "more", cwd=tmp_path / "clone")
        return tmp_path / "clone"

    return make, commits, origin


def test_main_is_compared_with_the_commit_before_in_a_shallow_clone_too(clone):
    make, commits, _ = clone
    make("--depth=1")
    assert touched.find_base() == (commits[0], "the commit before HEAD")


def test_other_commits_are_compared_with_where_they_left_main(clone):
    make, commits, _ = clone
    make(branch=True)
    assert touched.find_base() == (commits[1], "where HEAD left origin/main")


def test_a_clone_of_one_commit_that_cannot_fetch_has_every_file_touched(clone, monkeypatch, capsys):
    make, _, origin = clone
    make("--depth=1")
    origin.rename(origin.with_name("gone"))
    monkeypatch.setattr(touched, "read_sources", lambda: SOURCES)
    touched.main([])
    said = capsys.readouterr()
    assert said.err == "touched: this clone has one commit and cannot fetch another: every test file counts\n"
    assert len(said.out.splitlines()) == 7
