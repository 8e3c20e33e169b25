"""Phases: an order for each, one room for all, and what is expected after the end of a pass."""

import pytest

from tests.residency.traces import checkpointed
from vbrt.residency.phases import Phases
from vbrt.residency.scheduled import ScheduledPolicy
from vbrt.residency.simulate import PASS, Pass, simulate

PAGES = [f"page{i}" for i in range(32)]


def passes(*phases: tuple[str, list[str]]) -> list:
    """A trace of passes: each a phase and its pages."""
    return [item for phase, keys in phases for item in (Pass(phase), *keys)]


def unnamed(trace: list) -> list:
    """The same trace without its phases' names."""
    return [PASS if isinstance(item, Pass) else item for item in trace]


def run(policy: ScheduledPolicy, phase: str, keys: list[str]) -> tuple[int, list[str]]:
    """Run a pass; return its hits, and the pages staged in it, in order."""
    policy.begin_pass(phase)
    hits, staged = 0, []
    for key in keys:
        hits += policy.access(key, 1, (key,)).hit
        staged += [decision.key for decision in policy.ahead((key,))]
    return hits, staged


@pytest.mark.parametrize("room", [4, 12, 20, 31, 32])
def test_forward_and_backward_as_phases_hit_what_they_hit_as_one_order(room):
    trace = passes(("forward", PAGES), ("backward", PAGES[::-1])) * 10
    one_order = [item for item in trace if item != Pass("backward")]
    phases, one = simulate("scheduled", trace, room), simulate("scheduled", one_order, room)
    assert phases.hits.total() == one.hits.total() and phases.prefetched.total() == one.prefetched.total()
    assert phases.hits.total() == simulate("lru", trace, room).hits.total()  # which is optimal here


@pytest.mark.parametrize("room", [8, 24, 60])
def test_checkpointed_training_as_phases_hits_no_less_than_as_one_order(room):
    order = checkpointed(16, 7)
    forward, backward = order[: 16 * 7], order[16 * 7 :]
    phases = simulate("scheduled", passes(("forward", forward), ("backward", backward)) * 8, room)
    assert phases.hits.total() >= simulate("scheduled", [PASS, *order] * 8, room).hits.total()


@pytest.mark.parametrize("room", [8, 20])
def test_prompts_and_decode_passes_that_share_an_order_hit_what_one_phase_hits(room):
    trace = passes(("prompt", PAGES), *[("decode", PAGES)] * 9) * 3
    phases, one = simulate("scheduled", trace, room), simulate("scheduled", unnamed(trace), room)
    assert phases.hits == one.hits and phases.prefetched == one.prefetched


@pytest.mark.parametrize("draft", [PAGES[:16], PAGES[::2]], ids=["early exit", "layers skipped"])
@pytest.mark.parametrize("room", [8, 20, 28])
def test_a_draft_and_its_verification_hit_more_as_phases(draft, room):
    trace = passes(*[("draft", draft)] * 4, ("verify", PAGES)) * 12
    phases, one = simulate("scheduled", trace, room), simulate("scheduled", unnamed(trace), room)
    assert phases.hits.total() > 1.03 * max(one.hits.total(), simulate("lru", trace, room).hits.total())
    assert phases.misses.total() - phases.prefetched.total() <= len(PAGES) + 3 * len(draft)  # unforeseen: the first


def test_pages_of_the_draft_are_kept_first():
    policy = ScheduledPolicy(18, prefetch=1)
    for _ in range(4):
        for _ in range(3):
            hits, _ = run(policy, "draft", PAGES[:16])
        run(policy, "verify", PAGES)
    assert hits == 16


def test_what_is_staged_at_the_end_of_a_pass_belongs_to_the_phase_that_follows():
    draft, verify, policy = list("abcd"), list("efgh"), ScheduledPolicy(3, prefetch=2)
    for _ in range(3):
        for _ in range(2):
            run(policy, "draft", draft)
        run(policy, "verify", verify)
    _, staged = run(policy, "draft", draft)
    assert set(staged[-2:]) <= set(draft)  # the second draft
    _, staged = run(policy, "draft", draft)
    assert set(staged[-2:]) <= set(verify)
    _, staged = run(policy, "verify", verify)
    assert set(staged[-2:]) <= set(draft)


def test_a_phase_goes_by_the_order_before_it_until_it_differs():
    policy = ScheduledPolicy(6, prefetch=2)
    run(policy, "prompt", PAGES)
    run(policy, "prompt", PAGES)
    _, staged = run(policy, "decode", PAGES[:8])
    assert len(staged) > 2 and set(staged) <= set(PAGES[:10])
    _, staged = run(policy, "mine", [PAGES[1], *PAGES[20:]])
    assert staged == []
    _, staged = run(policy, "mine", [PAGES[1], *PAGES[20:]])
    assert len(staged) > 5


def test_one_evaluation_between_training_steps_changes_no_division():
    policy, evaluation = ScheduledPolicy(12, prefetch=2), [f"head{i}" for i in range(4)]
    for step in range(12):
        run(policy, "forward", PAGES)
        run(policy, "backward", PAGES[::-1])
        if step == 8:
            before = policy._division
            run(policy, "evaluation", evaluation)
    assert policy._division == before and before.pins <= set(PAGES)


def test_a_pass_of_a_phase_that_stops_early_does_not_replace_its_order():
    policy = ScheduledPolicy(8, prefetch=2)
    for _ in range(5):
        run(policy, "prompt", PAGES[:20])
        run(policy, "decode", PAGES)
    settled = run(policy, "prompt", PAGES[:20])[0]
    run(policy, "decode", PAGES[:7])
    run(policy, "prompt", PAGES[:20])
    run(policy, "decode", PAGES)
    assert run(policy, "prompt", PAGES[:20])[0] == settled
    assert policy._course.phases.orders["decode"].keys == tuple(PAGES)


def test_half_of_the_layers_that_fit_are_kept_as_lru_keeps_them():
    """Early exit: 50 passes over the first 16 of 32 layers, room for 20."""
    full, short = [PASS, *PAGES] * 3, [PASS, *PAGES[:16]] * 50

    def hits(kind, trace):
        return simulate(kind, trace, 20).hits.total()

    reached = hits("scheduled", full + short) - hits("scheduled", full)
    assert reached >= hits("lru", full + short) - hits("lru", full) - 8  # half a pass more to learn it
    late = hits("scheduled", full + short) - hits("scheduled", full + short[: 17 * 3])
    assert late == 47 * 16  # from the fourth on, every access
    named = simulate("scheduled", full + passes(*[("draft", PAGES[:16])] * 50), 20).phases["draft"]
    assert named.misses <= 16 and named.passes == 50


def test_counts_by_phase_add_up():
    trace = passes(("prompt", PAGES), *[("decode", PAGES[:20])] * 3) * 2
    counts = simulate("scheduled", trace, 10)
    assert {phase: of.passes for phase, of in counts.phases.items()} == {"prompt": 2, "decode": 6}
    assert sum(of.hits for of in counts.phases.values()) == counts.hits.total()
    assert sum(of.misses for of in counts.phases.values()) == counts.misses.total()
    assert sum(of.prefetched for of in counts.phases.values()) == counts.prefetched.total()
    assert counts.phases["decode"].hit_rate == counts.phases["decode"].hits / 120


def test_any_number_of_phases_stays_bounded():
    policy = ScheduledPolicy(4)
    for request in range(200):
        run(policy, f"request{request}", [f"own{request}", *PAGES[:6]])
        policy.resize(4 + request % 3)
    phases = policy._course.phases
    assert len(phases.orders) <= 16 and len(phases._after) <= 17 and len(policy._sizes) < 40


def test_a_phase_is_expected_as_often_as_it_ran_last_time():
    phases = Phases()
    for phase in ["draft", "draft", "draft", "verify"] * 2:
        phases.begin(phase)
    expected = []
    for phase in ("draft", "draft", "draft", "verify"):
        phases.begin(phase)
        expected.append(phases.expected())
    assert expected == ["draft", "draft", "verify", "draft"]
