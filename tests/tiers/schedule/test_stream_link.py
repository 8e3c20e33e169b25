"""The calls that a ring's copies take, with stand-ins for streams, events and the CUDA runtime."""

import pytest
import torch

from vbrt.host import accelerator
from vbrt.tiers.schedule import stream_link


class Stream:
    device, device_index, device_type = torch.device("cuda", 0), 0, 1

    def __init__(self, handle):
        self.cuda_stream = self.stream_id = handle


class Runtime:
    """Notes what it is called with, and gives error codes."""

    def __init__(self):
        self.calls, self.code = [], 0

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, *(arg.value for arg in args)))
            return self.code

        return call


@pytest.fixture
def world(monkeypatch):
    """A runtime, where torch calls go, whether a capture is under way, and which device is the current one."""
    runtime = Runtime()
    runtime.capturing, runtime.device, made = False, 0, []

    class Event:
        def __init__(self):
            made.append(self)
            self.cuda_event = 100 + len(made)

        def record(self, stream):
            runtime.calls.append(("torch records", self.cuda_event))

        def wait(self, stream):
            runtime.calls.append(("torch waits", self.cuda_event))

    monkeypatch.setattr(accelerator, "Event", Event)
    monkeypatch.setattr(accelerator, "current_stream", lambda device: Stream(3))
    monkeypatch.setattr(accelerator, "is_current_stream_capturing", lambda: runtime.capturing)
    names = {"raw_stream": lambda index: 3, "is_capturing": lambda: runtime.capturing}
    names |= {"current_device": lambda: runtime.device, "set_stream": lambda *name: None}
    for name, function in names.items():
        monkeypatch.setattr(stream_link, name, function)
    return runtime


def a_page(link, start):
    link.follows()
    link.wait(1)
    link.computed()
    start()


def test_a_page_takes_five_calls_of_the_runtime_and_torch_makes_them_elsewhere(world):
    link = stream_link.DirectLink(Stream(7), 2, world)
    target, source = torch.zeros(8, dtype=torch.uint8), torch.ones(8, dtype=torch.uint8)
    start = link.copying(1, target, source)
    a_page(link, start)
    world.calls.clear()
    a_page(link, start)
    own, done, copied = 102, 103, (target.data_ptr(), source.data_ptr(), 8, 1, 7)
    wait = ("cudaStreamWaitEvent", 3, own, 0)
    computed = [("cudaEventRecord", done, 3), ("cudaStreamWaitEvent", 7, done, 0)]
    assert world.calls == [wait, *computed, ("cudaMemcpyAsync", *copied), ("cudaEventRecord", own, 7)]
    world.device = 1
    world.calls.clear()
    a_page(link, start)
    assert {name for name, *_ in world.calls} == {"torch records", "torch waits"} and torch.equal(target, source)
    world.device, world.capturing = 0, True
    link.begin_capture()
    world.calls.clear()
    a_page(link, start)
    assert {name for name, *_ in world.calls} == {"torch records", "torch waits"}
    link.end_capture()


def test_an_error_of_the_runtime_is_raised(world, monkeypatch):
    link = stream_link.DirectLink(Stream(7), 1, world)
    world.code = 700
    monkeypatch.setattr(accelerator, "check_error", lambda code: (_ for _ in ()).throw(RuntimeError(code)))
    link.follows()
    with pytest.raises(RuntimeError, match="700"):
        link.computed()
