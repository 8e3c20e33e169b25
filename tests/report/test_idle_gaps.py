"""What waits waited for, and what the rest of the recorded time was."""

import pytest

from vbrt.report.idle_gaps import IDLE, MODEL, WaitParts, gaps, pages_of, shares, wait_parts
from vbrt.report.timeline import COMPUTE, OPTIMIZER, PASS, WAIT, Span, Timeline

LINK, DRIVE = "cpu>gpu", "ssd>cpu"


def waited(*copies, wait=("a#coarse", 100.0, 200.0)):
    (parts,) = wait_parts(Timeline(tuple(sorted((*copies, Span(WAIT, *wait)), key=lambda span: span.start_us))))
    assert sum(parts) == pytest.approx(wait[2] - wait[1])
    return parts


def test_a_wait_is_for_the_link_while_its_own_page_is_copied_and_for_the_host_after():
    assert waited(Span(LINK, "a#coarse", 80, 170, 1)) == WaitParts(0, 70, 30)


def test_a_page_in_a_queue_waits_for_what_moves_before_it():
    assert waited(Span(LINK, "b#coarse", 60, 140, 1), Span(LINK, "a#coarse", 140, 200, 1)) == WaitParts(0, 100, 0)
    assert waited(Span(DRIVE, "b#coarse", 60, 140, 1), Span(LINK, "a#coarse", 150, 200, 1)) == WaitParts(40, 50, 10)


def test_a_page_that_is_read_from_the_drive_and_copied_then_waits_for_both_in_turn():
    assert waited(Span(DRIVE, "a#coarse", 50, 160, 1), Span(LINK, "a#coarse", 160, 195, 1)) == WaitParts(60, 35, 5)


def test_a_wait_in_which_nothing_of_its_own_moves_is_the_hosts_whatever_else_moves():
    assert waited(Span(LINK, "b#coarse", 0, 300, 1)) == WaitParts(0, 0, 100)
    assert waited(Span(LINK, "a#coarse", 0, 90, 1)) == WaitParts(0, 0, 100)


def test_a_lease_of_experts_waits_for_each_of_their_pages():
    name = "e#coarse.0-2,7 + a#fine"
    assert pages_of(name) == ["e#coarse.0", "e#coarse.1", "e#coarse.2", "e#coarse.7", "a#fine"]
    copies = [Span(LINK, "e#coarse.7", 100, 120, 1), Span(LINK, "a#fine", 150, 180, 1)]
    assert waited(*copies, wait=(name, 100.0, 200.0)) == WaitParts(0, 50, 50)


TRAINED = Timeline(
    (
        Span(PASS, "forward", 0, 100),
        Span(WAIT, "a#coarse", 10, 40),
        Span(LINK, "a#coarse", 10, 30, 1),
        Span(COMPUTE, "a#coarse", 40, 70),
        Span(OPTIMIZER, "AdamW, 2 tensors", 120, 150),
        Span(PASS, "forward", 150, 200),
        Span(COMPUTE, "a#coarse", 160, 200),
    )
)


def test_gaps_are_the_rest_of_a_pass_or_between_passes():
    found = [(gap.row, gap.start_us, gap.end_us) for gap in gaps(TRAINED)]
    assert found == [(MODEL, 0, 10), (MODEL, 70, 100), (IDLE, 100, 120), (MODEL, 150, 160)]


def test_shares_sum_to_the_recorded_time_and_compute_comes_first_where_threads_overlap():
    parts = shares(TRAINED, wait_parts(TRAINED), gaps(TRAINED))
    assert parts == {
        COMPUTE: 70, "drive": 0, "link": 20, "host": 10, OPTIMIZER: 30, MODEL: 50, IDLE: 20
    } and sum(parts.values()) == 200  # fmt: skip
    both = Timeline((Span(WAIT, "a#dense", 0, 60), Span(COMPUTE, "b#dense", 20, 100), Span(WAIT, "c#dense", 90, 110)))
    mixed = shares(both, wait_parts(both), gaps(both))
    assert mixed[COMPUTE] == 80 and mixed["host"] == pytest.approx(30) and sum(mixed.values()) == pytest.approx(110)


def test_a_recording_without_spans_has_no_gaps():
    assert gaps(Timeline(())) == [] and set(shares(Timeline(()), [], []).values()) == {0}
