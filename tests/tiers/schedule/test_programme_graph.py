"""Recorded runs and their replays, with a stand-in for the CUDA graph that copies and checks what a graph would."""

import threading

import pytest
import torch

from tests.tiers.schedule.test_programmes import LEASES, SIZES, begin, run, steady
from tests.tiers.stacks import UNIT, assert_at_rest, content, in_background
from vbrt.errors import TierError
from vbrt.residency.programme import RESIDENT
from vbrt.residency.simulate import Pass
from vbrt.tiers import TierStack
from vbrt.tiers.schedule.programme_graph import RecordedRun, run_to_record


class Graph:
    """Knows the addresses of a run, and its copies."""

    def __init__(self, stack: TierStack, run) -> None:
        slots = stack.levels[0].slots
        self.reads = [
            [
                (slots[a.key].view if a.slot == RESIDENT else run.ring.buffers[a.slot].tensor, a.key)
                for a in step.accesses
            ]
            for step in run.programme.steps
        ]
        self.copies = [[] for _ in run.programme.steps]

    def replay(self) -> None:
        for reads, copies in zip(self.reads, self.copies, strict=True):
            for memory, key in reads:
                assert torch.equal(memory[: SIZES[key] * UNIT], content(key, SIZES[key])), key
            for copy in copies:
                copy.start()


def recorded(stack: TierStack, monkeypatch, events: bool = False) -> tuple[RecordedRun, Graph]:
    """Record the pass that begins; nothing is copied meanwhile, as under a capture. `events`: the graph has some that
    copies outside of it can wait for."""
    found = run_to_record(stack, "decode")
    recording, graph = RecordedRun(stack, found), Graph(stack, found)
    recording.begin()
    with monkeypatch.context() as patch:
        patch.setattr(found.ring, "start", lambda copies, counted: graph.copies[found.at].extend(copies))
        patch.setattr(found.ring.link, "freed", lambda: f"freed by {found.at}" if events else None)
        for keys in LEASES:
            with stack.lease(keys):
                pass
        recording.end(completed=True)
    return recording, graph


def passes(stack: TierStack) -> tuple[int, int]:
    counts = stack.phases()["decode"]
    return counts.passes, counts.hits + counts.misses


@pytest.mark.parametrize("events", [False, True])
def test_replays_count_as_passes_and_find_their_pages_whatever_came_between(events, monkeypatch):
    stack = steady()
    recording, graph = recorded(stack, monkeypatch, events)
    for turn in range(12):
        before = passes(stack)
        assert recording.replay(graph, "decode"), recording.ended
        assert turn == 0 or [b - a for a, b in zip(before, passes(stack), strict=True)] == [1, len(LEASES)]
        if turn % 4 == 1:
            begin(stack)
            assert run(stack, LEASES) == len(LEASES)  # the same ring serves eager passes
        if turn % 4 == 2:
            begin(stack, "prompt")
            run(stack, LEASES)
        if turn % 4 == 3:
            begin(stack)
            run(stack, LEASES[:5])  # ends early
    assert_at_rest(stack)
    stack.close()
    assert not recording.replay(graph, "decode") and "closed" in recording.ended


def test_the_first_copies_of_the_next_pass_start_behind_a_replay(monkeypatch):
    """The host prepares the next pass meanwhile: of a step of 10 ms it may be 2."""
    stack = steady()
    recording, graph = recorded(stack, monkeypatch)
    run = stack.ledger.running
    head = [(load.key, load.slot) for load in run.programme.head]
    moved = [sum(stack.pages[key].bytes_moved.values()) for key, _ in head]
    for turn in range(1, 4):
        assert recording.replay(graph, "decode")
        assert head and all(run.ring.keys[slot] == key for key, slot in head)
        now = [sum(stack.pages[key].bytes_moved.values()) for key, _ in head]
        whole = [SIZES[key] * UNIT * turn for key, _ in head]
        assert [b - a for a, b in zip(moved, now, strict=True)] == whole  # once a pass
    stack.close()


def test_a_graph_does_not_end_with_copies_for_the_next_pass(monkeypatch):
    """What comes after the graph, such as sampling, waits for its end."""
    stack = steady()
    _, whole = recorded(stack, monkeypatch)
    recording, graph = recorded(stack, monkeypatch, events=True)
    ring, after = stack.ledger.running.ring, []
    monkeypatch.setattr(ring.link, "after", after.append)
    assert recording.replay(graph, "decode")
    last = max(at for at, reads in enumerate(graph.reads) for memory, _ in reads if any(
        memory.data_ptr() == buffer.tensor.data_ptr() for buffer in ring.buffers))  # fmt: skip
    assert not any(graph.copies[last:]) and any(whole.copies[last:])
    assert after and int(after[-1].split()[-1]) >= last
    stack.close()


@pytest.mark.parametrize("room", [8, 11, 20, sum(SIZES.values())])
def test_a_budget_ends_a_recording(room, monkeypatch):
    stack = steady()
    recording, graph = recorded(stack, monkeypatch)
    assert recording.replay(graph, "decode")
    stack.set_budget("gpu", room * UNIT)
    assert not recording.replay(graph, "decode")
    assert recording.ended
    run(stack, [Pass("decode"), *LEASES] * 3)
    assert_at_rest(stack)
    stack.close()


def test_an_order_of_other_pages_that_stay_ends_a_recording(monkeypatch):
    stack = steady()
    recording, graph = recorded(stack, monkeypatch)
    run(stack, [Pass("decode"), *LEASES, ("page4",), ("page5",)] * 4)
    assert not recording.replay(graph, "decode")
    stack.close()


def test_a_replay_waits_for_other_threads_and_refuses_its_own_lease(monkeypatch):
    stack = steady()
    recording, graph = recorded(stack, monkeypatch)
    assert recording.replay(graph, "decode")
    leased, done = threading.Event(), threading.Event()
    streamed = next(at for at, reads in enumerate(graph.reads) if reads[0][1] not in stack.levels[0].slots)

    def hold() -> None:
        begin(stack)
        run(stack, LEASES[:streamed])
        with stack.lease(LEASES[streamed]):
            leased.set()
            assert done.wait(30)

    with in_background(hold):
        assert leased.wait(30)
        threading.Timer(0.05, done.set).start()
        assert recording.replay(graph, "decode")
        assert done.is_set()
    begin(stack)
    run(stack, LEASES[:streamed])
    with stack.lease(LEASES[streamed]), pytest.raises(TierError, match="this thread has leased it"):
        recording.replay(graph, "decode")
    assert recording.replay(graph, "decode")
    stack.close()


def test_a_pass_that_is_not_whole_is_no_recording():
    stack = steady()
    recording = RecordedRun(stack, run_to_record(stack, "decode"))
    recording.begin()
    run(stack, LEASES[:4])
    with pytest.raises(TierError, match="8 leases are missing"):
        recording.end(completed=True)
    stack.close()


def test_a_phase_that_never_ran_cannot_be_recorded():
    stack = steady()
    with pytest.raises(TierError, match="verify: none has run yet"):
        run_to_record(stack, "verify")
    stack.close()
