"""Which missed experts are computed where they lie: the division by rates, and what becomes resident."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from vbrt.residency.expert_pages import ExpertsPolicy
from vbrt.residency.expert_pool import ONE
from vbrt.residency.miss_policy import Missed, MissRates, computed_experts, host_pays, hosted_counts

PAGE = 1000
missed_experts = st.lists(
    st.builds(Missed, st.integers(0, 63), st.integers(1, 4), st.just(PAGE), st.integers(0, 3 * ONE)),
    max_size=7,
    unique_by=lambda one: one.expert,
)
rates = st.builds(MissRates, st.sampled_from([500, 1000, 4000]), st.sampled_from([250, 1000, 3000]), st.just(0.5))


def _longest(missed, computed, rates):
    link = sum(rates.link_seconds(one.nbytes) for one in missed if one.expert not in computed)
    return max(link, sum(rates.cpu_seconds(one.nbytes, one.pairs) for one in missed if one.expert in computed))


def _equal(count, pairs=1):
    return [Missed(expert, pairs, PAGE) for expert in range(count)]


def test_all_are_computed_where_no_rates_count():
    assert computed_experts(_equal(4), None) == (0, 1, 2, 3)
    assert computed_experts([], MissRates(1, 1)) == ()


def test_link_and_cpu_share_misses_by_their_rates():
    assert len(computed_experts(_equal(8), MissRates(1000, 1000))) == 4
    assert len(computed_experts(_equal(8), MissRates(3000, 1000))) == 2
    assert len(computed_experts(_equal(8), MissRates(1000, 7000))) == 7


def test_nothing_is_computed_where_a_call_takes_longer_than_the_link():
    assert computed_experts(_equal(2), MissRates(1000, 1e9, call_s=3)) == ()
    assert computed_experts(_equal(1), MissRates(1000, 900)) == ()
    assert computed_experts(_equal(4, pairs=4), MissRates(1000, 1000, more=0.5)) == (3,)


def test_the_experts_that_are_worth_most_are_fetched():
    missed = [Missed(expert, 1, PAGE, worth) for expert, worth in enumerate((5, 0, 7, 1))]
    assert computed_experts(missed, MissRates(1000, 1000)) == (1, 3)


@given(missed_experts, rates)
def test_no_other_number_of_computed_experts_is_done_earlier(missed, rates):
    """Of equal experts; where pairs differ, never later than fetching all."""
    got = computed_experts(missed, rates)
    assert _longest(missed, got, rates) <= _longest(missed, (), rates)
    assert got == computed_experts(missed[::-1], rates)
    if len({one.pairs for one in missed}) == 1:
        names = [one.expert for one in missed]
        best = min(_longest(missed, names[:n], rates) for n in range(len(names) + 1))
        assert _longest(missed, got, rates) <= best * (1 + 1e-9)


def test_the_host_decides_where_that_saves_more_than_its_launches_take():
    even = MissRates(1000, 1000, host_s=3)
    assert host_pays(8, PAGE, even) and not host_pays(4, PAGE, even)  # half of the seconds on the link are saved
    assert not host_pays(1.2, 100 * PAGE, even)  # one alone is fetched as fast as it is computed
    assert host_pays(0.5, 100 * PAGE, MissRates(1000, 1200, host_s=3))  # 16.7 s less, each second time


def _policy(slots):
    return ExpertsPolicy(slots * PAGE, prefetch=0)


def _key(expert):
    return f"mlp.experts#coarse.{expert}"


def _lease(policy, hits=(), passed=()):
    """A lease of experts, and of others where they lie; return what is staged behind."""
    for expert in passed:
        policy.passed.note(_key(expert), PAGE)
    for expert in hits:
        assert policy.access(_key(expert), PAGE, {_key(e) for e in hits}) is not None
    return [decision.key for decision in policy.ahead({_key(e) for e in hits})]


def test_a_page_that_was_passed_by_takes_a_free_slot():
    policy = _policy(2)
    assert _lease(policy, passed=[0, 1, 2]) == [_key(0), _key(1)]
    assert policy.access(_key(1), PAGE).prefetched


def test_a_page_that_was_passed_by_evicts_only_what_is_worth_less():
    policy = _policy(2)
    for _ in range(3):
        _lease(policy, hits=[0, 1])
    assert _lease(policy, hits=[0], passed=[5]) == []
    staged = list(itertools.chain.from_iterable(_lease(policy, hits=[0], passed=[5]) for _ in range(6)))
    assert staged[:1] == [_key(5)] and _key(0) in policy.resident() and _key(1) not in policy.resident()
    policy.passed.note(_key(7), PAGE)
    policy.remove(_key(7))
    assert _lease(policy, hits=[0]) == []


def _seconds(missed, hosted, rates, device_s):
    cpu = hosted * PAGE / rates.cpu_bytes_s + rates.call_s if hosted else 0
    return max(1.25 * cpu, (missed - hosted) * PAGE / rates.link_bytes_s + device_s)


@given(rates, st.integers(0, 12), st.sampled_from([0.0, 0.5]))
def test_counts_of_hosted_experts_end_link_and_cpu_together(rates, most, device_s):
    """No other count is done earlier, or as early with fewer, where the CPU's time counts for a quarter more; one more
    miss takes at most one more of either."""
    counts = hosted_counts(most, PAGE, rates, device_s=device_s)
    assert len(counts) == most + 1
    for missed, hosted in enumerate(counts):
        spent = _seconds(missed, hosted, rates, device_s)
        for other in range(missed + 1):
            assert spent < _seconds(missed, other, rates, device_s) or other >= hosted
            assert spent <= _seconds(missed, other, rates, device_s) + 1e-9
    assert all(after - before in (0, 1) for before, after in itertools.pairwise(counts))


def test_all_are_hosted_where_no_rates_count_and_none_by_a_slow_cpu():
    assert hosted_counts(3, PAGE, None) == (0, 1, 2, 3)
    assert hosted_counts(3, PAGE, MissRates(1000, 1)) == (0, 0, 0, 0)
