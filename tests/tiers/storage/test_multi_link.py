"""The calls that a page in parts takes, with a stand-in for the CUDA runtime that notes them."""

import ctypes
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from vbrt.host import accelerator
from vbrt.tiers.storage import multi_link

MIB = 1 << 20


class Runtime:
    """Notes copies and events, by stream, and gives events numbers."""

    def __init__(self) -> None:
        self.calls, self.events = [], 0

    def cudaEventCreateWithFlags(self, handle, flags) -> int:
        self.events += 1
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = self.events
        return 0

    def cudaEventDestroy(self, event) -> int:
        return 0

    def cudaMemcpyAsync(self, target, source, nbytes, kind, stream) -> int:
        self.calls.append(("copy", stream.value, target.value, source.value, nbytes.value))
        return 0

    def cudaEventRecord(self, event, stream) -> int:
        self.calls.append(("record", stream.value, event.value))
        return 0

    def cudaStreamWaitEvent(self, stream, event, flags) -> int:
        self.calls.append(("wait", stream.value, event.value))
        return 0


class Stream:
    made = 0

    def __init__(self, device=None) -> None:
        Stream.made += 1
        self.device, self.cuda_stream = device, Stream.made

    def wait_stream(self, other) -> None:
        pass


@pytest.fixture
def three(monkeypatch) -> tuple[multi_link.Lanes, Runtime]:
    """Lanes of three devices, all of them the CPU."""
    monkeypatch.setattr(accelerator, "Stream", Stream)
    monkeypatch.setattr(accelerator, "current_stream", lambda device: Stream(device))
    monkeypatch.setattr(accelerator, "device", lambda device: torch.inference_mode(False))
    cpu, runtime = torch.device("cpu"), Runtime()
    return multi_link.Lanes(runtime, Stream(cpu), [cpu, cpu]), runtime


def page(nbytes: int) -> SimpleNamespace:
    return SimpleNamespace(view=torch.empty(nbytes, dtype=torch.uint8))


def happens_before(calls: list[tuple]) -> dict[int, set[int]]:
    """For each call the calls that must have ended before it: those of its stream, and what that has waited for."""
    before: dict[int, set[int]] = {}
    streams: dict[int, set[int]] = {}
    events: dict[int, set[int]] = {}
    for at, (what, stream, *rest) in enumerate(calls):
        done = streams.setdefault(stream, set())
        if what == "wait":
            done |= events.get(rest[0], set())
        before[at] = set(done)
        if what == "record":
            events[rest[0]] = set(done)
        done.add(at)
    return before


@pytest.mark.parametrize("nbytes", [2 * MIB, 30 * MIB + 4096, 70 * MIB])
def test_parts_cover_a_page_and_no_chunk_is_filled_before_it_was_sent(three, nbytes):
    opened, runtime = three
    source, target = page(nbytes), torch.empty(nbytes, dtype=torch.uint8)
    for _ in range(2):
        opened.copy(opened.parts(target, source))
    before, first = happens_before(runtime.calls), target.data_ptr()
    copies = {at: call for at, call in enumerate(runtime.calls) if call[0] == "copy"}
    into = sorted((to - first, n) for _, _, to, _, n in copies.values() if first <= to < first + nbytes)[::2]
    assert [at for at, _ in into] == [0, *(sum(n for _, n in into[: i + 1]) for i in range(len(into) - 1))]
    assert sum(n for _, n in into) == nbytes
    chunks: dict[int, list[int]] = {}
    for at, (_, _, to, frm, _) in copies.items():
        if not first <= to < first + nbytes:
            chunks.setdefault(to, []).append(at)  # filled
        elif not source.view.data_ptr() <= frm < source.view.data_ptr() + nbytes:
            chunks[frm].append(at)  # sent on
    for uses in chunks.values():
        assert all(earlier in before[later] for earlier, later in pairwise(uses))
    joined = happens_before([*runtime.calls, ("record", opened._joining.cuda_stream, -1)])[len(runtime.calls)]
    assert set(copies) <= joined
