"""What is free on a machine is divided by its ranks, once, and the plan says so; and ranks are measured together."""

from pathlib import Path

from tests.distributed import budget_cases as cases
from tests.distributed.ranks import Ranks

GIB = 2**30


def test_two_ranks_of_one_machine_take_half_of_what_is_free_each_and_the_plan_says_so(two_ranks: Ranks):
    for r in two_ranks(cases.planned):
        assert abs(r["auto"] - 16 * GIB) < GIB // 100 and r["share"] == int(0.1 * 64 * GIB) // 2
        assert r["again"] == (20 * GIB + r["held"]) * 80 // 100, "what this rank holds already is its own"
        said = "is one of 2 equal shares, for the ranks of this machine (LOCAL_WORLD_SIZE)"
        assert f'tiers.cpu.budget = "auto" {said}' in r["notes"]
        assert f'tiers.cpu.budget = "10%" {said}' in r["share_notes"]


def test_ranks_that_nobody_has_counted_say_where_they_run(two_ranks: Ranks, four_ranks: Ranks):
    for found in two_ranks(cases.machine, places=[("one", ""), ("one", "")]):
        assert (found.ranks_here, found.ranks_on_gpu, found.cpu_available_bytes) == (2, 1, 20 * GIB)
    places = [("one", "a"), ("one", "a"), ("one", "b"), ("two", "a")]
    found = four_ranks(cases.machine, places=places)
    assert [(f.ranks_here, f.ranks_on_gpu) for f in found] == [(3, 2), (3, 2), (3, 1), (1, 1)]
    assert [f.cpu_available_bytes for f in found] == [40 * GIB // 3] * 3 + [40 * GIB]


def test_a_rank_that_does_not_say_where_it_runs_makes_nobody_hang(two_ranks: Ranks):
    found, _ = two_ranks(cases.machine, late=1)
    assert found.ranks_here == 2 and found.ranks_said_by.endswith(
        "rank 1 did not say in 0.2 s where it runs, so it is taken to run here"
    )


def test_ranks_measure_their_sums_gathers_and_neighbours_and_the_first_keeps_it(two_ranks: Ranks, tmp_path: Path):
    for found, kept, other in two_ranks(cases.measured, cache=str(tmp_path)):
        assert kept is not None and kept.ranks == 2 and other is None
        assert (found.backend, found.link_gb_s, found.name) == ("gloo", 0.0, kept.name), "a CPU has no link"
        assert min(found.sum_us, found.sum_gb_s, found.gather_gb_s, found.neighbour_gb_s) > 0
        assert found == kept, "the slowest rank counts, on all of them"
