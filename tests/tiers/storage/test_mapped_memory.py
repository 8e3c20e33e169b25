"""Pages that processes of one machine share: one copy in memory, verified, gone with the last process."""

import errno
import os
import secrets
import shutil
import signal
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import vbrt
from tests import forked
from tests.models import TOKENS, config, gpt2, mlp, qwen3_moe
from tests.patience import LONG_S
from tests.tiers.pages import PAGE, page, reserved
from vbrt.config import load_config
from vbrt.errors import ConfigError, TierError
from vbrt.formats.page import build_layout
from vbrt.host.host_memory import bytes_view
from vbrt.model.machine_memory import this_machine
from vbrt.tiers import Owner, TierStack
from vbrt.tiers.storage import mapped_memory, memory_tiers
from vbrt.tiers.storage.mapped_memory import MappedTier, mapped_bytes

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not os.access("/dev/shm", os.W_OK), reason="needs a tmpfs of Linux, /dev/shm"
)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory on a tmpfs that is not there yet."""
    path = Path("/dev/shm", f"vbrt-test-{secrets.token_hex(4)}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def shared(tier: MappedTier, content: torch.Tensor, **options: bool) -> torch.Tensor:
    """The memory of a page once it is shared."""
    buffer = reserved(tier, content.numel(), **options)
    buffer.tensor.copy_(content)
    tier.share(buffer, key="a")
    return buffer.tensor


def pages_in(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def on_cpu(place: Path) -> dict[str, dict[str, object]]:
    return {"gpu": {"enabled": False}, "cpu": {"path": str(place)}}


def test_equal_pages_are_one_file_and_a_write_stays_in_its_process(place):
    one, other = MappedTier(place, 1 << 20), MappedTier(place, 1 << 20)
    first, again, third = shared(one, page()), shared(other, page()), shared(other, page(seed=1))
    assert torch.equal(first, page()) and torch.equal(again, page()) and torch.equal(third, page(seed=1))
    assert len(pages_in(place)) == 2 and mapped_bytes(place) == 2 * 3 * PAGE
    assert os.stat(place).st_mode & 0o777 == 0o700
    again[0] += 1
    assert torch.equal(first, page()) and torch.equal(shared(one, page()), page())


def test_what_a_gpu_copies_from_is_pinned_where_it_is_shared(place, monkeypatch):
    pinned = []

    def pin(tensor: torch.Tensor, owner: object) -> weakref.finalize:
        pinned.append(tensor)
        return weakref.finalize(owner, int)

    monkeypatch.setattr(memory_tiers, "pin", pin)
    one, other = MappedTier(place, 1 << 20), MappedTier(place, 1 << 20)
    one.pinned = other.pinned = True
    first, again = (shared(tier, page(), pinned=False) for tier in (one, other))
    assert pinned[0] is first and pinned[1] is again and len(pinned) == 2
    first[0] += 1  # a private mapping would be copied as CUDA pins it
    assert torch.equal(again, first)


def test_the_last_to_leave_removes_the_files_and_mappings_stay(place):
    one, other = MappedTier(place, 1 << 20), MappedTier(place, 1 << 20)
    held = shared(one, page())
    one.close()
    one.close()
    assert pages_in(place)
    other.close()
    assert not pages_in(place) and torch.equal(held, page())


def test_a_forked_child_leaves_the_files_to_its_parent(place):
    tier = MappedTier(place, 1 << 20)
    shared(tier, page())
    child = os.fork()
    if child == 0:
        tier.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0 and pages_in(place)


def test_files_of_a_killed_process_are_removed_by_the_next_one_but_not_anothers(place):
    child = os.fork()
    if child == 0:
        tier = MappedTier(place, 1 << 20)
        shared(tier, page())
        (place / f"{'0' * 32}-4096.page.01234567.tmp").touch()  # killed while it wrote
        (place / "notes.txt").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(pages_in(place)) == 3
    tier = MappedTier(place, 1 << 20)
    assert pages_in(place) == ["notes.txt"] and tier.held_bytes == 0


@pytest.mark.parametrize("damage", [b"x", None])
def test_a_file_with_other_bytes_is_refused(place, damage):
    one, other = MappedTier(place, 1 << 20), MappedTier(place, 1 << 20)
    shared(one, page())
    file = place / pages_in(place)[0]
    file.write_bytes(damage * 3 * PAGE if damage else b"")
    with pytest.raises(TierError, match=r"^a: .*(does not hold the bytes that its name says|cannot be shared in)"):
        shared(other, page())


def test_a_full_tmpfs_is_an_error_that_says_what_to_do(place, monkeypatch):
    def full(fd, data, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(mapped_memory, "write_at", full)
    with pytest.raises(
        TierError, match=r"^a: 12288 bytes cannot be shared .*the disk is full; give that tmpfs a larger"
    ):
        shared(MappedTier(place, 1 << 20), page())
    assert not pages_in(place)


def test_directories_that_others_may_write_or_that_are_not_in_memory_are_refused(place, monkeypatch, tmp_path):
    with pytest.raises(TierError, match=r"^tiers\.cpu\.path = /dev/shm: other users could change the pages"):
        MappedTier(Path("/dev/shm"), 1 << 20)
    (tmp_path / "file").touch()
    with pytest.raises(TierError, match=r"file: .*; expected a directory of your own on a tmpfs"):
        MappedTier(tmp_path / "file", 1 << 20)
    monkeypatch.setattr(mapped_memory, "file_system", lambda fd: "ext4")
    with pytest.raises(TierError, match="it is on ext4, not in memory"):
        MappedTier(place, 1 << 20)


def test_configs_that_write_pages_or_share_them_otherwise_are_refused(place):
    with pytest.raises(ConfigError, match=r'path = ".*" with mode = "train"; .*: leave path out'):
        vbrt.wrap(mlp(), mode="train", tiers=on_cpu(place))
    with pytest.raises(ConfigError, match=r"tiers\.cpu\.path = .*shared = true shares pages already"):
        load_config(tiers={"cpu": {"path": "/dev/shm/x", "shared": True}})


def test_pages_that_are_there_count_as_available_memory(place):
    own, sharing = load_config(tiers={"gpu": {"enabled": False}}), load_config(tiers=on_cpu(place))
    tier = MappedTier(place, 1 << 30)
    shared(tier, page(256 << 20))
    there = this_machine(sharing).cpu_available_bytes - this_machine(own).cpu_available_bytes
    assert abs(there - (256 << 20)) < 200 << 20  # other processes take and free memory meanwhile


@pytest.mark.parametrize(("make", "format"), [(gpt2, "dense"), (gpt2, "nvfp4"), (gpt2, "exact"), (qwen3_moe, "nvfp4")])
def test_a_model_computes_on_shared_pages_what_it_does_on_its_own(place, make, format):
    expected = vbrt.wrap(make(), config(format))(TOKENS).logits
    models = [vbrt.wrap(make(), config(format), tiers=on_cpu(place)) for _ in range(2)]
    assert all(torch.equal(vb(TOKENS).logits, expected) for vb in models)
    stack = models[0].runtime.stack
    contents = {bytes(bytes_view(slot.view)) for slot in stack.levels[0].slots.values()}
    assert len(pages_in(place)) == len(contents) > 1  # pages of equal bytes are one, within a model, too
    assert stack.levels[0].tier.used_bytes == sum(page.nbytes for page in stack.pages.values())
    for vb in models:
        vb.close()
    assert not pages_in(place)


def test_only_pages_that_stay_as_they_are_become_files(place):
    stack = TierStack([MappedTier(place, 1 << 20)])
    layout, owner = build_layout("dense", "dense", [("weight", "uint8", (3 * PAGE,))]), Owner(stack)
    stack.add("cache", layout, "cpu", lambda out: out.copy_(page()), owner)
    assert not pages_in(place)
    stack.add("weight", layout, "cpu", lambda out: out.copy_(page()), owner, frozen=True)
    assert len(pages_in(place)) == 1
    with stack.lease(["cache", "weight"]) as (cache, weight):
        assert torch.equal(cache["weight"], page()) and torch.equal(weight["weight"], page())
    stack.close()


_REPLICA = """
import sys, time
from pathlib import Path
import torch
from torch import nn
import vbrt

def anonymous():
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in rollup if line.startswith("Anonymous:"))

place, ready, go = sys.argv[1:]
torch.manual_seed(0)
before = anonymous()
vb = vbrt.wrap(nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)), "dense",
               tiers={"gpu": {"enabled": False}, "cpu": {"path": place}})
with torch.no_grad():
    vb(torch.ones(1, 2048))
Path(ready).touch()
while not Path(go).exists():
    time.sleep(0.01)
own, pss = anonymous() - before, 0
for line in Path("/proc/self/smaps").read_text().splitlines():
    if "-" in line.split(maxsplit=1)[0]:
        ours = line.split()[-1].startswith(place)
    elif ours and line.startswith("Pss:"):
        pss += int(line.split()[1]) << 10
print(own, pss)
Path(ready).with_suffix(".read").touch()
while not Path(go).with_suffix(".end").exists():
    time.sleep(0.01)
vb.close()
"""


def test_three_processes_hold_one_copy(place, tmp_path):
    processes, folders = [], [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
        processes.append(forked.start(_REPLICA, str(place), str(folder / "ready"), str(tmp_path / "go"), folder=folder))
    try:
        _await(folders, "ready", processes)
        (tmp_path / "go").touch()
        _await(folders, "ready.read", processes)
    finally:
        (tmp_path / "go").touch()
        (tmp_path / "go.end").touch()
        for process in processes:
            process.join(LONG_S)
    planes = 2 * 2048 * 2048 * 4
    numbers = [tuple(map(int, (folder / "out").read_text().split())) for folder in folders]
    assert abs(sum(pss for _, pss in numbers) - planes) < planes // 50
    assert all(abs(pss - planes // 3) < planes // 50 for _, pss in numbers)
    assert all(own < planes // 2 for own, _ in numbers)  # no copy of its own besides
    assert not pages_in(place)


def _await(folders: list[Path], name: str, processes: list) -> None:
    end = time.monotonic() + LONG_S
    while not all((folder / name).exists() for folder in folders):
        assert time.monotonic() < end and all(process.is_alive() for process in processes), [
            (folder / "err").read_text() for folder in folders
        ]
        time.sleep(0.01)
