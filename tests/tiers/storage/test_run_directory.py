"""Directories of runs: locked, removed by their run or the next one, and nothing else with them."""

import contextlib
import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from tests.tiers.pages import PAGE, NamedSsd, forked, page, read, reserved
from vbrt.errors import TierError
from vbrt.tiers import SsdTier
from vbrt.tiers.storage.ssd_tier import HEADER_BYTES


def test_close_removes_the_run_and_may_come_twice(tmp_path):
    tier = NamedSsd(tmp_path / "deep" / "er", 1 << 30)
    tier.write("layer", page())
    fds = len(os.listdir("/proc/self/fd"))
    tier.close()
    tier.close()
    assert list((tmp_path / "deep" / "er").iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == fds - 3  # the directory, its lock and one in reserve
    with pytest.raises(TierError, match=r"layer: .* is missing; the page is lost"):
        read(tier, "layer")
    with pytest.raises(TierError, match="late: cannot write"):
        tier.write("late", page())


def test_a_tier_that_is_collected_removes_its_run(tmp_path):
    tier = NamedSsd(tmp_path, 1 << 30)
    tier.write("layer", page())
    del tier
    assert list(tmp_path.iterdir()) == []


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks beside threads


def start(root: Path) -> subprocess.Popen:
    """Another process with a run in `root`, that waits."""
    code = f"""
        import sys, time, torch
        from vbrt.tiers import SsdTier
        from vbrt.tiers.protocols.tier import Reservation
        tier = SsdTier({str(root)!r}, 1 << 30)
        held = Reservation()
        tier.reserve(8192, held)
        tier.put(held.room, torch.zeros(4096, dtype=torch.uint8), key="layer")
        print(tier.directory, flush=True)
        sys.stdin.read()
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def killed(root: Path) -> Path:
    """The directory of a run in `root` whose process was killed."""

    def live() -> None:
        tier = NamedSsd(root)
        tier.write("layer", page())
        os.write(ready[1], os.fsencode(tier.directory))
        time.sleep(60)

    ready = os.pipe()
    child = forked(live)
    directory = os.read(ready[0], 1000)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for fd in ready:
        os.close(fd)
    return Path(os.fsdecode(directory))


def test_runs_of_dead_processes_are_removed_at_the_start_and_live_ones_are_not(tmp_path):
    with start(tmp_path) as lives:
        live, dead = Path(lives.stdout.readline().strip()), killed(tmp_path)
        (tmp_path / "run-of-the-user").mkdir()
        (tmp_path / "notes.txt").write_text("not ours")
        assert len(list(dead.iterdir())) == 2  # nobody cleaned up
        own = NamedSsd(tmp_path, 1 << 30)
        assert not dead.exists()
        assert len(list(live.iterdir())) == 2
        own.write("layer", page())
        assert torch.equal(read(own, "layer"), page())
        lives.communicate()  # ends by itself
        assert not live.exists()
        own.close()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "run-of-the-user"]


@pytest.mark.parametrize("at", ["mkdir", "open", "flock"])
def test_a_run_that_another_one_removes_while_it_is_being_made_is_made_again(tmp_path, monkeypatch, at):
    module = {"mkdir": Path, "open": os, "flock": fcntl}[at]
    real = getattr(module, at)
    others = []

    def meanwhile(*args, **kwargs):
        out = real(*args, **kwargs) if at == "mkdir" else None
        if not others:
            others.append(None)  # first: the other run makes these calls too
            others[0] = NamedSsd(tmp_path, 1 << 30)
        return out if at == "mkdir" else real(*args, **kwargs)

    (tmp_path / "run-7-0123abcd").mkdir()  # killed before it had a lock
    monkeypatch.setattr(module, at, meanwhile)
    tier = NamedSsd(tmp_path, 1 << 30)
    assert sorted(tmp_path.iterdir()) == sorted([tier.directory, others[0].directory])
    tier.write("layer", page())
    others[0].write("layer", page(seed=1))
    assert torch.equal(read(tier, "layer"), page()) and torch.equal(read(others[0], "layer"), page(seed=1))


@pytest.mark.parametrize(
    "plant", ["a link to a directory", "a file of the user in a run", "another name", "a FIFO", "a lock that is a link"]
)
def test_nothing_but_the_pages_of_dead_runs_is_ever_removed(tmp_path, plant):
    victim, root = tmp_path / "victim", tmp_path / "root"
    victim.mkdir()
    root.mkdir()
    names = {"lock", "thesis.tex", "1-00001-layer.page", "notes.txt"}
    for name in names:
        (victim / name).write_text("mine")
    run = root / "run-123-0123abcd"
    if plant == "a link to a directory":
        run.symlink_to(victim)
    else:
        run.mkdir()
        (run / "1-00001-dead.page").write_text("a page of a run that was killed")
    if plant == "a file of the user in a run":
        (run / "thesis.tex").symlink_to(victim / "thesis.tex")
        (run / "1-00002-link.page").symlink_to(victim / "notes.txt")
        (run / "folder").symlink_to(victim)
    if plant == "another name":
        run = run.rename(root / "run-mine")
    if plant == "a FIFO":
        os.mkfifo(run / "lock")
    if plant == "a lock that is a link":
        (run / "lock").symlink_to(victim / "lock")
    NamedSsd(root, 1 << 30).close()
    assert {path.name for path in victim.iterdir()} == names
    assert all(path.read_text() == "mine" for path in victim.iterdir())
    left = {path.name for path in run.iterdir()} if not run.is_symlink() else None
    assert (
        left
        == {
            "a link to a directory": None,
            "a file of the user in a run": {"thesis.tex", "folder"},
            "another name": {"1-00001-dead.page"},
            "a FIFO": {"1-00001-dead.page", "lock"},
            "a lock that is a link": {"1-00001-dead.page", "lock"},
        }[plant]
    )


def test_a_directory_that_takes_the_place_of_a_run_is_left_alone(tmp_path):
    tier = NamedSsd(tmp_path / "root", 1 << 30)
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "1-00001-layer.page").write_text("mine")
    (victim / "lock").write_text("mine")
    tier.directory.rename(tmp_path / "moved")
    tier.directory.symlink_to(victim)
    tier.write("layer", page())
    assert torch.equal(read(tier, "layer"), page())
    tier.close()
    assert len(list(victim.iterdir())) == 2 and list((tmp_path / "moved").iterdir()) == []


def test_a_run_without_free_descriptors_is_removed_all_the_same(tmp_path):
    def take_all_and_close() -> None:
        tier = NamedSsd(tmp_path)
        tier.write("layer", page())
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 20,) * 2)
        with contextlib.suppress(OSError):
            while True:
                os.dup(0)
        tier.close()

    assert os.waitpid(forked(take_all_and_close), 0)[1] == 0
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_was_killed_while_it_removed_itself_is_removed_by_the_next(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def die(path, *, dir_fd=None):
        if path == "lock":
            raise Killed
        real(path, dir_fd=dir_fd)

    tier, real = NamedSsd(tmp_path, 1 << 30), os.unlink
    tier.write("layer", page())
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", die)
        with pytest.raises(Killed):
            tier.close()
    assert [path.name for path in tier.directory.iterdir()] == ["lock"]  # removed last
    del tier
    for fd in map(int, os.listdir("/proc/self/fd")):  # a killed process has no open files
        if os.path.realpath(f"/proc/self/fd/{fd}").startswith(str(tmp_path)):
            os.close(fd)
    NamedSsd(tmp_path, 1 << 30).close()
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
    def fail(fd, flags):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(TierError, match="No locks available"):
        NamedSsd(tmp_path, 1 << 30)
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_reads_and_writes_but_removes_nothing_of_its_parents(tmp_path):
    tier = NamedSsd(tmp_path)
    tier.write("parents", page(seed=7))
    tier.write("freed", page(seed=8))

    def use_and_close() -> None:
        tier.after_fork(tier.rooms.values())
        tier.drop("freed")
        tier.write("new", page(seed=9))
        assert torch.equal(read(tier, "parents"), page(seed=7)) and torch.equal(read(tier, "new"), page(seed=9))
        assert tier.held_bytes == 2 * (HEADER_BYTES + 3 * PAGE)
        tier.drop("new")
        tier.close()

    child = forked(use_and_close)
    tier.write("new", page(seed=10))
    assert os.waitpid(child, 0)[1] == 0
    for key, seed in (("parents", 7), ("freed", 8), ("new", 10)):
        assert torch.equal(read(tier, key), page(seed=seed))
    tier.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("before", [False, True], ids=["closed", "interrupted before"])
def test_a_run_is_removed_by_a_process_that_may_open_nothing(before, tmp_path):
    tier = SsdTier(tmp_path, 1 << 30)
    rooms = [reserved(tier, 8192) for _ in range(2)]
    for number, room in enumerate(rooms):
        tier.put(room, torch.zeros(4096, dtype=torch.uint8), key=f"layer{number}")
    tier.free(rooms[0])
    if before:  # a first attempt has taken what was kept for it
        tier._run._held.list_files()
        tier.free(rooms[1])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # also descriptors that are closed now do not help
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.open(os.devnull, os.O_RDONLY)
        tier.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_a_run_that_gets_no_more_descriptors_leaves_no_directory(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/dev/fd")))
    filled = [os.open(os.devnull, os.O_RDONLY)]
    while filled[-1] < highest:  # tests before may have left gaps
        filled.append(os.open(os.devnull, os.O_RDONLY))
    refused = 0
    for free in range(8):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(*filled, highest) + 1 + free, hard))
        try:
            tier = SsdTier(tmp_path, 1 << 30)
        except TierError as error:
            assert "Too many open files" in str(error)
            refused += 1
        else:
            tier.close()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert not list(tmp_path.iterdir()), free
    for descriptor in filled:
        os.close(descriptor)
    assert 2 < refused < 8
