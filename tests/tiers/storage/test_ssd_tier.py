"""Page files: written once, verified on each read."""

import errno
import json
import os
import subprocess
import warnings
from pathlib import Path

import pytest
import torch

from tests.tiers.pages import CHUNK, PAGE, NamedSsd, file_of, page, read, reserved
from vbrt.errors import TierError
from vbrt.tiers.storage.ssd_tier import HEADER_BYTES

# -- contents ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("io", ["direct", "buffered", "auto"])
@pytest.mark.parametrize("nbytes", [PAGE, CHUNK - PAGE, CHUNK, CHUNK + PAGE, 2 * CHUNK + 3 * PAGE])
def test_what_was_written_is_read(tmp_path, io, nbytes):
    tier = NamedSsd(tmp_path, 1 << 30, io=io)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where the file system refuses O_DIRECT, which is announced
        tier.write("layer", page(nbytes))
        assert torch.equal(read(tier, "layer", nbytes), page(nbytes))
    assert tier.mode in ((io,) if not tier.fallbacks and io != "auto" else ("buffered", "direct"))


@pytest.mark.parametrize("most", [1000, HEADER_BYTES, HEADER_BYTES + 1, 2 * HEADER_BYTES + 5])
def test_a_read_that_comes_in_pieces_is_put_together(tier, monkeypatch, most):
    real = os.preadv

    def short(fd, views, offset, *flags):
        """At most so many bytes, as a signal or a network file system would have it."""
        left, pieces = most, []
        for view in views:
            pieces.append(view[:left])
            left -= len(pieces[-1])
        return real(fd, pieces, offset, *flags)

    tier.write("layer", page())
    monkeypatch.setattr(os, "preadv", short)
    assert torch.equal(read(tier, "layer"), page())


def test_a_write_that_comes_in_pieces_is_put_together(tier, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: real(fd, view[:1000], at))
    tier.write("layer", page())
    assert torch.equal(read(tier, "layer"), page())


def test_a_file_says_what_it_holds(tier):
    tier.write("model.layers.0/q proj#coarse", page(), {"format": "nvfp4"})
    path = file_of(tier, "model.layers.0/q proj#coarse")
    raw = path.read_bytes()
    assert len(raw) == HEADER_BYTES + 3 * PAGE and raw.startswith(b"VBPAGE")
    note = json.loads(raw[32 : HEADER_BYTES - 8].rstrip(b"\0"))
    assert note == {"key": "model.layers.0/q proj#coarse", "layout": {"format": "nvfp4"}}
    assert path.name.endswith("model.layers.0_q_proj_coarse.page") and path.stat().st_mode & 0o077 == 0


def test_long_and_odd_names_make_files_of_their_own(tier):
    keys = ["x" * 5000, "y/" * 300, "ä/../..", "a b", "a_b", ""]
    for seed, key in enumerate(keys):
        tier.write(key, page(seed=seed))
    for seed, key in enumerate(keys):
        assert torch.equal(read(tier, key), page(seed=seed))
        assert file_of(tier, key).parent == tier.directory


def test_a_page_is_synced_before_it_gets_its_name(tier, monkeypatch):
    calls = []
    for name in ("open", "pwrite", "fsync", "replace"):
        real = getattr(os, name)

        def spy(*args, real=real, name=name, **kwargs):
            calls.append((name, str(args[0])))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, spy)
    tier.write("layer", page())
    names = [name for name, _ in calls]
    assert names.index("open") < names.index("pwrite") < names.index("fsync") < names.index("replace")
    assert names[-1] == "replace" and calls[-1][1].endswith(".tmp")
    assert len([name for name in names[names.index("fsync") :] if name == "pwrite"]) == 0


def test_the_budget_counts_headers_and_comes_back_with_drop(tmp_path):
    tier = NamedSsd(tmp_path, 2 * (HEADER_BYTES + PAGE))
    tier.write("a", page(PAGE))
    tier.write("b", page(PAGE))
    assert tier.held_bytes == tier.capacity_bytes == tier.peak_bytes
    assert reserved(tier, HEADER_BYTES + PAGE) is None
    assert sorted(path.name.rsplit("-")[-1] for path in tier.directory.glob("*.*")) == ["a.page", "b.page"]
    tier.drop("a")
    tier.drop("a")
    assert tier.held_bytes == HEADER_BYTES + PAGE
    tier.write("c", page(PAGE))
    assert torch.equal(read(tier, "b", PAGE), page(PAGE))


def test_a_buffer_of_another_size_is_refused(tier):
    tier.write("layer", page())
    with pytest.raises(TierError, match="layer: the page has 12288 bytes, the buffer 4096"):
        read(tier, "layer", PAGE)


# -- damage -----------------------------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << (at % 8)
    path.write_bytes(raw)


def damage_payload(path, other):
    flip(path, HEADER_BYTES + 7777)


def damage_last_byte(path, other):
    flip(path, HEADER_BYTES + 3 * PAGE - 1)


def damage_magic(path, other):
    flip(path, 0)


def damage_header_padding(path, other):
    flip(path, HEADER_BYTES // 2)


def damage_header_digest(path, other):
    flip(path, HEADER_BYTES - 1)


def truncate(path, other):
    os.truncate(path, HEADER_BYTES + PAGE)


def truncate_unaligned(path, other):
    os.truncate(path, HEADER_BYTES + PAGE + 17)


def truncate_in_header(path, other):
    os.truncate(path, 100)


def empty(path, other):
    os.truncate(path, 0)


def grow(path, other):
    os.truncate(path, HEADER_BYTES + 5 * PAGE)


def remove(path, other):
    path.unlink()


def swap(path, other):
    path.write_bytes(other.read_bytes())


def become_a_directory(path, other):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_payload, "does not hold the bytes that were written"),
        (damage_last_byte, "does not hold the bytes that were written"),
        (damage_magic, "its header is damaged"),
        (damage_header_padding, "its header is damaged"),
        (damage_header_digest, "its header is damaged"),
        (truncate, "truncated"),
        (truncate_unaligned, "truncated"),
        (truncate_in_header, "truncated"),
        (empty, "truncated"),
        (grow, "has grown"),
        (remove, "is missing"),
        (swap, "holds another page"),
        (become_a_directory, "a directory; expected a regular file"),
    ],
)
def test_damage_is_an_error_that_names_layer_and_file(tmp_path, damage, says, io):
    tier = NamedSsd(tmp_path, 1 << 30, io=io)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tier.write("layers.0#coarse", page(seed=1))
        tier.write("layers.1#coarse", page(seed=2))
        path = file_of(tier, "layers.0#coarse")
        good = path.read_bytes()
        assert torch.equal(read(tier, "layers.0#coarse"), page(seed=1))
        damage(path, file_of(tier, "layers.1#coarse"))
        fds = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            with pytest.raises(TierError) as caught:
                read(tier, "layers.0#coarse")
            assert str(caught.value).startswith("layers.0#coarse: ")
            assert str(path) in str(caught.value) and says in str(caught.value)
        assert len(os.listdir("/proc/self/fd")) == fds
        assert torch.equal(read(tier, "layers.1#coarse"), page(seed=2))  # the others are fine
        if path.is_dir():
            path.rmdir()
        path.write_bytes(good)
        assert torch.equal(read(tier, "layers.0#coarse"), page(seed=1))  # and this one is, once it is repaired
    tier.close()


def test_a_file_of_another_version_says_so(tier):
    import xxhash

    tier.write("layer", page())
    path = file_of(tier, "layer")
    raw = bytearray(path.read_bytes())
    raw[8] = 9
    raw[HEADER_BYTES - 8 : HEADER_BYTES] = xxhash.xxh3_64_digest(bytes(raw[: HEADER_BYTES - 8]))
    path.write_bytes(raw)
    with pytest.raises(TierError, match="page-file version 9; this vbrt reads version 2"):
        read(tier, "layer")


def test_a_flipped_bit_is_found_in_every_segment(helped):
    nbytes = 2 * CHUNK
    helped.write("layer", page(nbytes))
    path = file_of(helped, "layer")
    for at in range(7, nbytes, 512 << 10):
        flip(path, HEADER_BYTES + at)
        with pytest.raises(TierError, match="does not hold the bytes"):
            read(helped, "layer", nbytes)
        flip(path, HEADER_BYTES + at)
    assert torch.equal(read(helped, "layer", nbytes), page(nbytes))


def test_a_file_that_shrinks_while_it_is_read_is_truncated(tier, monkeypatch):
    tier.write("layer", page(CHUNK + 2 * PAGE))
    real = os.preadv

    def preadv(fd, views, offset, *flags):
        os.truncate(file_of(tier, "layer"), HEADER_BYTES + CHUNK)
        return real(fd, views, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(TierError, match=r"layer: .* is truncated: it ends at byte"):
        read(tier, "layer", CHUNK + 2 * PAGE)


def test_an_io_error_names_layer_and_file(tier, monkeypatch):
    def fail(fd, views, offset, *flags):
        raise OSError(errno.EIO, "Input/output error")

    tier.write("layer", page())
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(TierError, match=r"layer: cannot read .*layer\.page: Input/output error"):
        read(tier, "layer")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (errno.ENOSPC, "the disk is full; free 16384 bytes"),
        (errno.EDQUOT, "the disk is full"),
        (errno.EIO, "Input/output"),
        (errno.EROFS, "Read-only file system"),
    ],
)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_write_that_fails_leaves_nothing_behind(tier, monkeypatch, code, says, after):
    real, calls = os.pwrite, []

    def write(fd, view, at):
        calls.append(fd)
        if len(calls) > after:
            raise OSError(code, os.strerror(code))
        return real(fd, view[:5000], at)

    tier.write("good", page())
    held, fds = tier.held_bytes, len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write)
        with pytest.raises(TierError) as caught:
            tier.write("layers.3#fine", page())
    assert str(caught.value).startswith("layers.3#fine: cannot write ") and says in str(caught.value)
    assert str(tier.directory) in str(caught.value)
    assert tier.held_bytes == held and len(os.listdir("/proc/self/fd")) == fds
    assert [path.name.rsplit("-")[-1] for path in tier.directory.glob("*.*")] == ["good.page"]
    tier.write("layers.3#fine", page(seed=3))  # as soon as there is room
    assert torch.equal(read(tier, "layers.3#fine"), page(seed=3))


@pytest.mark.parametrize("during", ["pwrite", "fsync", "replace"])
def test_an_interrupted_write_leaves_nothing_behind(tier, monkeypatch, during):
    real = getattr(os, during)

    def interrupt(*args, **kwargs):
        real(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, during, interrupt)
        with pytest.raises(KeyboardInterrupt):
            tier.write("layer", page())
    assert list(tier.directory.glob("*.*")) == [] and tier.held_bytes == 0


def test_a_full_disk_is_an_error_and_not_the_end(tmp_path):
    """On a real file system of one MiB, where one can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("needs the right to mount")
    try:
        tier = NamedSsd(disk, 1 << 30, io="buffered")
        tier.write("small", page())
        with pytest.raises(TierError, match=r"big: cannot write .*: the disk is full"):
            tier.write("big", page(4 << 20))
        assert torch.equal(read(tier, "small"), page())
        tier.write("other", page(seed=2))
        assert torch.equal(read(tier, "other"), page(seed=2))
        tier.close()
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("where", ["below a file", "on a read-only file system"])
def test_a_directory_that_cannot_be_written_is_refused_at_the_start(tmp_path, where):
    if where == "below a file":
        (tmp_path / "file").write_text("")
        root = tmp_path / "file" / "pages"
    else:
        root = Path("/proc/vbrt")  # refuses even root
    with pytest.raises(TierError, match=r"tier ssd: cannot write in .*; point tiers\.ssd\.path at"):
        NamedSsd(root, 1 << 30)


def test_a_read_only_directory_is_refused_at_the_start(tmp_path):
    tmp_path.chmod(0o500)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("root may write everywhere")
        with pytest.raises(TierError, match="Permission denied"):
            NamedSsd(tmp_path, 1 << 30)
    finally:
        tmp_path.chmod(0o700)


def test_a_page_whose_file_cannot_be_removed_is_dropped_and_counted(tier, monkeypatch):
    def fail(path, *, dir_fd=None):
        raise OSError(errno.EROFS, "Read-only file system")

    tier.write("a", page())
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail)
        tier.drop("a")
    tier.drop("a")
    assert (
        tier.held_bytes == tier.stuck_bytes == HEADER_BYTES + 3 * PAGE and "Read-only file system" in tier.fallbacks[0]
    )
