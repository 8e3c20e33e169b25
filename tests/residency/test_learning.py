"""What `scheduled` learns from passes: changed, short and unmarked ones, and what it stages after them."""

import pytest

from tests.residency.traces import checkpointed, misses_of_pass
from vbrt.residency.scheduled import ScheduledPolicy
from vbrt.residency.simulate import PASS, simulate


def hits_of_last_pass(passes: list[list[str]], room: int, *, prefetch: int = 1) -> int:
    def total(some):
        return simulate("scheduled", [x for p in some for x in [PASS, *p]], room, prefetch=prefetch).hits.total()

    return total(passes) - total(passes[:-1])


FULL = [f"page{i}" for i in range(10)]


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(FULL[:3] + FULL[4:], id="skipped"),
        pytest.param([*FULL[:5], FULL[2], *FULL[5:]], id="repeated"),
        pytest.param(FULL[5:] + FULL[:5], id="reordered"),
        pytest.param([*FULL, "new0", "new1"], id="grown"),
    ],
)
def test_a_changed_order_is_learned_in_one_pass(changed):
    settled = hits_of_last_pass([changed] * 8, 6)
    learning = [FULL] * 5 + [changed] * 2  # one pass to learn it, one to bring the new pins in
    assert hits_of_last_pass([*learning, changed], 6) == settled
    assert settled >= 4


def test_the_learned_pass_is_fetched_ahead_at_once():
    counts = simulate("scheduled", [PASS, *FULL, PASS, *FULL[::-1], PASS, *FULL[::-1]], 6, prefetch=2)
    third = (
        counts.prefetched.total()
        - simulate("scheduled", [PASS, *FULL, PASS, *FULL[::-1]], 6, prefetch=2).prefetched.total()
    )
    misses = counts.misses.total() - simulate("scheduled", [PASS, *FULL, PASS, *FULL[::-1]], 6).misses.total()
    assert third >= misses - 2


@pytest.mark.parametrize("stop", [1, 4, 9])
def test_a_pass_that_stops_early_does_not_replace_the_order(stop):
    settled = hits_of_last_pass([FULL] * 6, 6)
    assert hits_of_last_pass([*[FULL] * 5, FULL[:stop], FULL], 6) >= settled == 4


@pytest.mark.parametrize("stop", [1, 4, 9])
def test_a_pass_that_stops_early_twice_in_a_row_is_the_order_from_then_on(stop):
    """Early exit, layers that are skipped: the part that is used gets all the room."""
    settled = hits_of_last_pass([FULL[:stop]] * 6, 6)
    assert hits_of_last_pass([*[FULL] * 5, *[FULL[:stop]] * 4], 6) == settled
    assert hits_of_last_pass([*[FULL] * 5, *[FULL[:stop]] * 4, *[FULL] * 3], 6) == hits_of_last_pass([FULL] * 6, 6)


def test_passes_that_stop_here_and_there_leave_room_for_the_longest_of_them():
    lengths = [5, 3, 4, 5, 4, 5, 3, 5]
    assert hits_of_last_pass([*[FULL] * 5, *(FULL[:n] for n in lengths)], 6) == 5


def test_interruptions_with_whole_passes_between_them_change_nothing():
    settled = hits_of_last_pass([FULL] * 6, 6)
    assert hits_of_last_pass([*[FULL] * 5, *[FULL[:4], FULL] * 5], 6) >= settled == 4


@pytest.mark.sample(3)
@pytest.mark.parametrize("marked", [1, 2, 7])
@pytest.mark.parametrize("shape", ["once", "first twice", "checkpointed"])
def test_passes_go_on_being_learned_after_their_marks_have_stopped(shape, marked):
    """A model is called, then compiled: its hook marks no pass from then on."""
    one_pass = {"once": FULL, "first twice": [*FULL[:3], FULL[0], *FULL[3:]], "checkpointed": checkpointed(4, 3)}[shape]

    def hits(passes, marks):
        trace = [item for at in range(passes) for item in ([PASS] if at < marks else []) + one_pass]
        return simulate("scheduled", trace, 6).hits.total()

    settled = hits(14, 14) - hits(13, 13)
    assert hits(marked + 9, marked) - hits(marked + 8, marked) == settled > 0
    assert hits(200, marked) - hits(199, marked) == settled


def test_marks_that_come_back_after_a_while_are_marks_again():
    trace = ([PASS, *FULL] + FULL * 9) * 4
    changed = [item for _ in range(4) for item in (PASS, *FULL, FULL[0], FULL[5])]
    settled = simulate("scheduled", changed * 3, 6).hits.total() - simulate("scheduled", changed * 2, 6).hits.total()
    before = simulate("scheduled", [*trace, *changed * 2], 6).hits.total()
    assert simulate("scheduled", [*trace, *changed * 3], 6).hits.total() - before == settled


def test_a_marked_pass_may_repeat_itself():
    """An inner model that is called three times in each pass, and a head behind it."""
    one_pass = [*FULL * 3, "head"]
    policy = ScheduledPolicy(6, prefetch=2)
    for _ in range(3):
        misses_of_pass(policy, one_pass)
    policy.begin_pass()
    assert policy._course.order.keys == tuple(one_pass)


def test_after_a_pass_that_stopped_early_the_next_one_is_fetched_ahead_from_its_start():
    policy = ScheduledPolicy(6, prefetch=2)
    for keys in [FULL] * 3 + [FULL[:5]]:
        policy.begin_pass()
        for key in keys:
            policy.access(key, 1, busy=(key,))
            policy.ahead(busy=(key,))
    policy.begin_pass()
    policy.access(FULL[0], 1, busy=(FULL[0],))
    ahead = {decision.key for decision in policy.ahead(busy=(FULL[0],))}
    streamed = [key for key in FULL[1:] if key not in policy.resident() or key in ahead]
    assert ahead and ahead <= set(streamed[:2])


def test_no_page_is_given_up_for_one_that_is_needed_later():
    policy = ScheduledPolicy(3, prefetch=2)
    for keys in [FULL] * 3 + [FULL[:1]]:
        policy.begin_pass()
        for key in keys:
            policy.access(key, 1, busy=(key,))
            policy.ahead(busy=(key,))
    assert set(policy.resident()) == set(FULL[:3])
    assert policy.access(FULL[0], 1).hit  # repeated: what was staged ahead is still what comes next
    assert policy.ahead(busy=FULL[:1]) == [] and set(policy.resident()) == set(FULL[:3])


def test_pages_fetched_ahead_for_places_that_were_skipped_still_count_as_prefetched():
    policy = ScheduledPolicy(5, prefetch=2)
    for _ in range(3):
        policy.begin_pass()
        for key in FULL:
            policy.access(key, 1, busy=(key,))
            policy.ahead(busy=(key,))
    staged = list(policy._pages.fresh)
    assert len(staged) == 2
    policy.begin_pass()
    far = FULL[FULL.index(staged[-1]) + 1]
    policy.access(far, 1, busy=(far,))  # jumps over both
    for key in staged:
        if key in policy.resident():
            decision = policy.access(key, 1)
            assert decision.prefetched and not decision.hit


def test_an_unmarked_pass_without_a_recurring_start_stays_bounded():
    policy = ScheduledPolicy(2)
    policy.access("first", 1)
    for turn in range(20_000):
        policy.access("ab"[turn % 2], 1)
    assert len(policy._record.keys) < 5_000
    policy = ScheduledPolicy(2)
    for turn in range(3_000):
        policy.begin_pass()
        policy.access(f"generation{turn}", 1)
        policy.ahead()
        policy.remove(f"generation{turn}")
    assert len(policy._sizes) < 10 and len(policy._gone) < 10
