"""Host memory: aligned, mapped, page-locked, and what the heap gives back."""

import mmap
import os
import re
import weakref
from pathlib import Path

import pytest
import torch

from vbrt.host import accelerator
from vbrt.host.host_memory import PinError, aligned, bytes_view, map_memory, pin, trim_heap

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_kib():
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"AnonHugePages:\s+(\d+)", rollup)[1])


def test_kernels_without_huge_pages_do(monkeypatch):
    class Mapping(mmap.mmap):
        def madvise(self, *args):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Mapping)
    assert map_memory(4 << 20).numel() == 4 << 20


@pytest.mark.skipif(not HUGE.exists() or "[never]" in HUGE.read_text(), reason="this system has no huge pages")
def test_memory_for_pages_is_in_huge_pages_but_for_what_is_left_of_one():
    before = huge_kib()
    memory = map_memory((8 << 20) + 4096)
    assert memory.data_ptr() % (2 << 20) == 0
    memory.fill_(1)
    assert before < huge_kib() <= before + (8 << 10)


def test_a_fork_has_its_own_pages_and_shares_what_a_gpu_copies_from():
    own, shared = map_memory(4 << 20), map_memory(4 << 20, shared=True)
    if (child := os.fork()) == 0:
        for memory in (own, shared):  # no torch: its threads are the parent's
            bytes_view(memory)[0] = 1
        os._exit(0)
    os.waitpid(child, 0)
    assert own[0] == 0 and shared[0] == 1


def test_bytes_view_shares_the_tensors_memory():
    values = torch.arange(4, dtype=torch.int32)
    view = bytes_view(values)
    assert len(view) == 16 and not view.readonly
    view[4] = 9
    assert values.tolist() == [0, 9, 2, 3]


def test_bytes_view_keeps_its_tensor():
    values = torch.arange(4, dtype=torch.int32)
    there, view = weakref.ref(values), bytes_view(values)
    del values
    assert there() is not None and view[8] == 2
    del view
    assert there() is None


@pytest.mark.parametrize("nbytes", [1, 4096, 10_000])
def test_aligned_memory_is_where_direct_io_can_read(nbytes):
    memory = aligned(nbytes)
    assert memory.shape == (nbytes,) and memory.dtype is torch.uint8 and memory.data_ptr() % 4096 == 0


def test_memory_that_cannot_be_page_locked_is_refused(monkeypatch):
    class Refusing:
        def cudaHostRegister(self, address, nbytes, flags):
            return 2

        cudaHostUnregister = None

    monkeypatch.setattr(accelerator, "cudart", Refusing)
    with pytest.raises(PinError, match="CUDA error 2"):
        pin(map_memory(4096), object())


def test_the_heap_can_be_trimmed_anywhere():
    trim_heap()
