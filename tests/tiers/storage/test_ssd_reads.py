"""How page files are read: in parts by several threads, ahead of their use, directly or through the page cache."""

import ctypes
import errno
import fcntl
import mmap
import os
import threading
import time
import warnings
from collections import namedtuple

import psutil
import pytest
import torch
import xxhash

from tests.patience import LONG_S, eventually
from tests.tiers.pages import CHUNK, PAGE, NamedSsd, buffer, file_of, page, read
from vbrt.errors import TierError
from vbrt.host.worker_threads import Crew


def test_helpers_read_parts_of_a_page(helped, monkeypatch):
    nbytes = 5 * CHUNK + 3 * PAGE
    helped.write("layer", page(nbytes))
    real, threads, all_here = os.preadv, set(), threading.Barrier(4)

    def preadv(fd, views, offset, *flags):
        if threading.current_thread().name not in threads:
            threads.add(threading.current_thread().name)
            all_here.wait(LONG_S)
        return real(fd, views, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    assert torch.equal(read(helped, "layer", nbytes), page(nbytes))
    assert len(threads) == 4 and threading.current_thread().name in threads


def test_a_small_page_is_read_by_whoever_needs_it_alone(helped, monkeypatch):
    monkeypatch.setattr(Crew, "give", lambda crew, work, *args: pytest.fail("a helper was called"))
    helped.write("layer", page(1 << 20))
    assert torch.equal(read(helped, "layer", 1 << 20), page(1 << 20))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("accident", "where"),
    [
        (OSError(5, "Input/output error"), "helper"),
        (OSError(5, "Input/output error"), "caller"),
        (KeyboardInterrupt(), "caller"),
    ],
)
def test_nobody_writes_into_the_buffer_after_a_read_has_failed(helped, monkeypatch, accident, where):
    nbytes = 20 * CHUNK
    helped.write("layer", page(nbytes))
    real, caller, happened = os.preadv, threading.current_thread(), threading.Event()

    def preadv(fd, views, offset, *flags):
        if offset > 4 * CHUNK:  # more pieces than threads: one comes to whom it happens, while others read
            if (threading.current_thread() is caller) == (where == "caller"):
                happened.set()
                raise accident
            assert happened.wait(LONG_S)
            time.sleep(0.01)
        return real(fd, views, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    out = buffer(nbytes)
    with pytest.raises(KeyboardInterrupt if isinstance(accident, KeyboardInterrupt) else TierError):
        helped.get(helped.rooms["layer"], out, key="layer")
    out.zero_()
    time.sleep(0.05)
    assert not out.any()
    monkeypatch.undo()
    assert torch.equal(read(helped, "layer", nbytes), page(nbytes))


def test_reading_ahead_never_fails(helped):
    helped.write("layer", page())
    helped.read_ahead(helped.rooms["layer"])
    file_of(helped, "layer").unlink()
    helped.read_ahead(helped.rooms["layer"])


def in_page_cache(file) -> bool:
    """Whether the system has any byte of a file in its page cache, by mincore."""
    nbytes = os.fstat(file.fileno()).st_size
    told = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    with mmap.mmap(file.fileno(), nbytes, flags=mmap.MAP_PRIVATE) as mapped:  # not read, so not brought there
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), told) == 0
    return any(place & 1 for place in told)


def test_a_page_that_is_not_in_the_systems_cache_is_not_said_to_be(helped):
    helped.write("layer", page(CHUNK))
    assert helped.is_cached(helped.rooms["layer"])
    with open(file_of(helped, "layer"), "rb") as file:

        def dropped():  # an advice: what is still written, or held by the system's own work, stays
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return not in_page_cache(file)

        eventually(dropped, "a file out of the page cache")
    cached = helped.is_cached(helped.rooms["layer"])
    file_of(helped, "layer").unlink()
    assert not cached and not helped.is_cached(helped.rooms["layer"])


# -- read by whom the tier is given -----------------------------------------------------------------------------------


def read_here(fd, out, offset, segment_bytes):
    """Do what `read_page` of the kernels does."""
    data = os.pread(fd, out.numel(), offset)
    if len(data) < out.numel():
        raise EOFError(f"it ends at byte {offset + len(data)}")
    out.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return b"".join(xxhash.xxh3_64_digest(data[at : at + segment_bytes]) for at in range(0, len(data), segment_bytes))


@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_who_is_given_to_read_pages_reads_those_in_the_page_cache_and_only_those(tmp_path, io):
    calls = []

    def read_page(*args):
        calls.append(args)
        return read_here(*args)

    tier = NamedSsd(tmp_path, 1 << 30, io=io, helpers=3, read_page=read_page)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tier.write("layer", page(CHUNK))
        assert torch.equal(read(tier, "layer", CHUNK), page(CHUNK))
        assert len(calls) == (tier.mode == "buffered")
        tier.after_fork(tier.rooms.values())  # whose child has none of the threads
        assert torch.equal(read(tier, "layer", CHUNK), page(CHUNK)) and len(calls) == (tier.mode == "buffered")
    tier.close()


@pytest.mark.parametrize("at", ["header", "page"])
def test_damage_is_found_whoever_reads(tmp_path, at):
    tier = NamedSsd(tmp_path, 1 << 30, io="buffered", read_page=read_here)
    tier.write("layer", page())
    with open(file_of(tier, "layer"), "r+b") as file:
        file.seek(8 if at == "header" else PAGE + 5000)
        file.write(b"!!")
    with pytest.raises(TierError, match=r"layer: .*(header is damaged|does not hold the bytes)"):
        read(tier, "layer")
    tier.close()


# -- direct or buffered -----------------------------------------------------------------------------------------------


Memory = namedtuple("Memory", "available")


@pytest.mark.parametrize(("available", "mode"), [(10, "buffered"), (8, "buffered"), (7, "direct"), (1, "direct")])
def test_auto_reads_directly_when_the_files_exceed_half_of_the_available_memory(tier, monkeypatch, available, mode):
    tier.write("layer", page())
    assert tier.held_bytes == 4 * PAGE
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(available * PAGE))
    assert tier.mode == mode


def test_auto_decides_again_when_pages_are_added(tier, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(10 * PAGE))
    tier.write("a", page())
    assert tier.mode == "buffered"
    tier.write("b", page())
    assert tier.mode == "direct"


def test_auto_reads_directly_for_a_while_after_a_page_that_was_evicted_and_then_fills_the_page_cache(tier, monkeypatch):
    if not hasattr(os, "RWF_NOWAIT") or not os.O_DIRECT:
        pytest.skip("needs Linux")
    evicted, real = [True], os.preadv

    def preadv(fd, views, offset, *flags):
        if flags and evicted[0]:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return real(fd, views, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    tier.write("layer", page())
    modes = []
    for _ in range(40):
        modes.append(tier.mode)
        assert torch.equal(read(tier, "layer"), page())
    if tier.fallbacks:
        pytest.skip(tier.fallbacks[0])
    assert [at for at, mode in enumerate(modes) if mode == "buffered"] == [0, 17, 34]
    evicted[0] = False
    for _ in range(20):
        read(tier, "layer")
    assert tier.mode == "buffered"


def refuse_direct_open(monkeypatch):
    real = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)


def refuse_direct_read(monkeypatch):
    real = os.preadv

    def refuse(fd, views, offset, *flags):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, views, offset, *flags)

    monkeypatch.setattr(os, "preadv", refuse)


@pytest.mark.parametrize("refuse", [refuse_direct_open, refuse_direct_read])
def test_a_file_system_without_direct_io_is_announced_once_and_served(tmp_path, monkeypatch, refuse):
    tier = NamedSsd(tmp_path, 1 << 30, io="direct")
    tier.write("layer", page())
    refuse(monkeypatch)
    with pytest.warns(UserWarning, match="refuses O_DIRECT; reads go through the page cache"):
        assert torch.equal(read(tier, "layer"), page())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(read(tier, "layer"), page())
        tier.write("other", page(seed=1))
        assert torch.equal(read(tier, "other"), page(seed=1))
    assert tier.mode == "buffered" and len(tier.fallbacks) == 1


def test_direct_reads_bypass_the_page_cache_flagged_as_such(tmp_path, monkeypatch):
    tier = NamedSsd(tmp_path, 1 << 30, io="direct")
    tier.write("layer", page())
    flags, real = [], os.open
    monkeypatch.setattr(os, "open", lambda path, f, *args, **more: flags.append(f) or real(path, f, *args, **more))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read(tier, "layer")
    assert flags[0] & os.O_DIRECT


@pytest.mark.parametrize("plant", ["a link", "a FIFO"])
@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_what_is_put_in_the_place_of_a_page_is_refused_and_nothing_waits_for_it(tmp_path, plant, io):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tier = NamedSsd(tmp_path, 1 << 30, io=io)
        tier.write("layer", page())
        path = file_of(tier, "layer")
        path.rename(tmp_path / "moved")
        path.symlink_to(tmp_path / "moved") if plant == "a link" else os.mkfifo(path)
        with pytest.raises(TierError, match=r"layer: cannot read .*layer\.page"):
            read(tier, "layer")
        tier.read_ahead(tier.rooms["layer"])
        tier.close()
