"""Buffers of the memory tiers: never above the budget, reused by size, given back."""

import gc
import mmap
import weakref

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers.pages import reserved
from vbrt.errors import TierError
from vbrt.tiers.storage.memory_tiers import MemoryTier

PAGE = 4096
CPU = torch.device("cpu")


def tier(pages: int, **options) -> MemoryTier:
    return MemoryTier("cpu", CPU, pages * PAGE, **options)


def test_a_buffer_has_exactly_the_pages_bytes_and_is_aligned_for_direct_io():
    buffer = reserved(tier(10), 3 * PAGE)
    assert buffer.nbytes == buffer.tensor.numel() == 3 * PAGE
    assert buffer.tensor.dtype is torch.uint8 and buffer.tensor.data_ptr() % PAGE == 0


def test_there_is_no_buffer_beyond_the_budget():
    memory = tier(5)
    first = reserved(memory, 3 * PAGE)
    assert reserved(memory, 3 * PAGE) is None and memory.held_bytes == 3 * PAGE
    assert reserved(memory, 2 * PAGE) is not None and memory.held_bytes == 5 * PAGE
    memory.free(first, reuse=True)
    assert memory.held_bytes == 5 * PAGE and memory.used_bytes == 2 * PAGE


def test_what_is_reserved_for_others_is_not_given_away():
    memory = tier(5)
    assert reserved(memory, 3 * PAGE, reserved_bytes=3 * PAGE) is None
    memory.free(reserved(memory, 3 * PAGE), reuse=True)
    assert reserved(memory, 3 * PAGE, reserved_bytes=3 * PAGE) is None  # a buffer kept for reuse is room, not a gift
    assert reserved(memory, 3 * PAGE, reserved_bytes=2 * PAGE) is not None


def test_a_released_buffer_serves_the_next_page_of_its_size():
    memory = tier(5)
    buffer = reserved(memory, 2 * PAGE)
    memory.free(buffer, reuse=True)
    memory.free(buffer, reuse=True)  # what was interrupted is done again
    assert reserved(memory, 2 * PAGE) is buffer
    assert reserved(memory, 2 * PAGE) is not buffer
    assert memory.held_bytes == memory.used_bytes == memory.peak_bytes == 4 * PAGE


def test_buffers_kept_for_reuse_make_room_for_another_size():
    memory = tier(5)
    memory.free(reserved(memory, 2 * PAGE), reuse=True)
    gone = reserved(memory, 2 * PAGE)
    memory.free(gone, reuse=True)
    gone = weakref.ref(gone)
    assert reserved(memory, 4 * PAGE) is not None
    gc.collect()
    assert gone() is None and memory.held_bytes == 4 * PAGE == memory.peak_bytes


def test_trim_gives_back_what_nobody_uses_and_only_that():
    memory = tier(9)
    buffers = [reserved(memory, n * PAGE) for n in (1, 2, 3)]
    for buffer in buffers[:2]:
        memory.free(buffer, reuse=True)
    memory.trim()
    assert memory.held_bytes == memory.used_bytes == 3 * PAGE
    memory.free(buffers[2], reuse=False)
    assert memory.held_bytes == 0 and memory.peak_bytes == 6 * PAGE


def test_memory_goes_back_to_the_operating_system():
    size, memory = 64 << 20, MemoryTier("cpu", CPU, 1 << 30)
    before = psutil.Process().memory_info().rss
    buffer = reserved(memory, size)
    buffer.tensor.fill_(1)
    assert psutil.Process().memory_info().rss > before + size // 2
    memory.free(buffer, reuse=True)
    del buffer
    memory.trim()
    assert psutil.Process().memory_info().rss < before + size // 2


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9), st.integers(0, 3)), max_size=60), st.integers(1, 9))
def test_held_bytes_never_exceed_the_budget(steps, pages):
    memory, used = tier(pages), []
    alive: weakref.WeakSet = weakref.WeakSet()
    for size, which, action in steps:
        if action < 2:
            buffer = reserved(memory, size * PAGE)
            fits = sum(b.nbytes for b in used) + size * PAGE <= pages * PAGE
            assert (buffer is not None) == fits
            if buffer is not None:
                assert buffer not in used
                used.append(buffer)
                alive.add(buffer)
            del buffer
        elif used:
            memory.free(used.pop(which % len(used)), reuse=action == 2)
        assert memory.used_bytes == sum(b.nbytes for b in used)
        assert sum(b.nbytes for b in alive) == memory.held_bytes <= memory.peak_bytes <= memory.capacity_bytes


def test_memory_that_the_system_refuses_is_an_error_that_says_what_would_do(monkeypatch):
    def refuse(*args):
        raise OSError(12, "Cannot allocate memory")

    memory = tier(5)
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(TierError, match=r"tier cpu: the system refused 8192 bytes.*lower tiers\.cpu\.budget"):
        reserved(memory, 2 * PAGE)
    assert memory.held_bytes == memory.peak_bytes == 0


def test_pinning_is_for_machines_with_cuda():
    assert tier(1, pinned=True).pinned == torch.cuda.is_available()


@pytest.mark.gpu
def test_pinned_buffers_are_page_locked_until_they_are_given_back():
    memory = tier(4, pinned=True)
    buffer = reserved(memory, 2 * PAGE)
    assert buffer.tensor.is_pinned()
    pointer = buffer.tensor.data_ptr()
    memory.free(buffer, reuse=False)
    assert not memory.fallbacks
    assert int(torch.cuda.cudart().cudaHostRegister(pointer, 2 * PAGE, 0)) == 0  # was unregistered
    torch.cuda.cudart().cudaHostUnregister(pointer)


@pytest.mark.gpu
def test_a_gpu_buffer_waits_for_the_kernels_that_had_its_memory_before():
    memory = MemoryTier("gpu", torch.device("cuda", torch.cuda.current_device()), 4 * PAGE)
    buffer = reserved(memory, 2 * PAGE)
    assert buffer.fences and buffer.tensor.is_cuda
    buffer.synchronize()
    assert not buffer.fences


def test_memory_that_is_taken_in_inference_mode_can_be_written_outside_of_it():
    with torch.inference_mode():
        buffer = reserved(MemoryTier("cpu", torch.device("cpu"), 1 << 20), 4096)
    buffer.tensor.fill_(1)
    assert not buffer.tensor.is_inference()
