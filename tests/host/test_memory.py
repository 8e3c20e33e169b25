"""Host memory: aligned, mapped, page-locked, and what the heap gives back."""

import mmap

import pytest
import torch

from vbrt.host.memory import PinError, aligned, bytes_view, map_memory, pin, trim_heap


def test_kernels_without_huge_pages_do(monkeypatch):
    class Mapping(mmap.mmap):
        def madvise(self, *args):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Mapping)
    assert map_memory(4 << 20).numel() == 4 << 20


def test_bytes_view_shares_the_tensors_memory():
    values = torch.arange(4, dtype=torch.int32)
    view = bytes_view(values)
    assert len(view) == 16 and not view.readonly
    view[4] = 9
    assert values.tolist() == [0, 9, 2, 3]


@pytest.mark.parametrize("nbytes", [1, 4096, 10_000])
def test_aligned_memory_is_where_direct_io_can_read(nbytes):
    memory = aligned(nbytes)
    assert memory.shape == (nbytes,) and memory.dtype is torch.uint8 and memory.data_ptr() % 4096 == 0


def test_memory_that_cannot_be_page_locked_is_refused(monkeypatch):
    class Refusing:
        def cudaHostRegister(self, address, nbytes, flags):
            return 2

        cudaHostUnregister = None

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    with pytest.raises(PinError, match="CUDA error 2"):
        pin(map_memory(4096), object())


def test_the_heap_can_be_trimmed_anywhere():
    trim_heap()
