"""Drafts a round: the number that gives the most tokens a second."""

import random

import pytest
import torch

from vbrt.generation.speculation.draft_length import MOST, Pace, expected_tokens
from vbrt.generation.speculation.sampling_noise import Noise


def paced(acceptance, draft_s, base_s, slope_s, rounds=150):
    """The choices of a pace, and the pace, after rounds in which each draft is right with this probability."""
    pace, chosen, generator = Pace(), [], random.Random(5)
    for _ in range(rounds):
        k = pace.choose(100)
        accepted = next((n for n in range(k) if generator.random() > acceptance), k)
        pace.note(k, accepted, min(k, accepted + 1), (k * draft_s, base_s + k * slope_s))
        chosen.append(k)
    return pace, chosen


def best(acceptance, draft_s, base_s, slope_s):
    return max(range(MOST + 1), key=lambda k: expected_tokens(acceptance, k) / (k * (draft_s + slope_s) + base_s))


@pytest.mark.parametrize(
    "case", [(0.9, 0.004, 0.13, 0.0), (0.9, 0.004, 0.13, 0.008), (0.6, 0.015, 0.13, 0.0), (0.95, 0.003, 0.8, 0.001)]
)
def test_the_choice_comes_close_to_the_best_for_what_is_measured(case):
    pace, chosen = paced(*case)
    a, draft_s, base_s, slope_s = case
    rate = [expected_tokens(a, k) / (k * (draft_s + slope_s) + base_s) for k in (chosen[-1], best(*case))]
    assert rate[0] > 0.95 * rate[1]
    assert abs(pace.acceptance - a) < 0.06


def test_drafts_that_cost_as_much_as_they_save_are_left_out_and_tried_again():
    _, chosen = paced(0.5, 0.1, 0.1, 0.1, rounds=250)
    assert chosen[:2] == [16, 8] and chosen.count(0) > 200 and 4 in chosen[10:]


@pytest.mark.parametrize(("plain_s", "drafts"), [(0.002, 4), (0.1, 200)])
def test_recorded_steps_are_timed_by_themselves_and_taken_where_they_are_faster(plain_s, drafts):
    pace, chosen = Pace(tries_plain=True), []
    for _ in range(250):
        chosen.append(pace.choose(100))
        slow = 1.0 if chosen.count(0) <= 3 else plain_s  # which are recorded
        pace.note(chosen[-1], chosen[-1], chosen[-1], (0, slow) if not chosen[-1] else (chosen[-1] * 0.01, 0.02))
    assert chosen[2:8] == [0] * 6 and sum(k > 0 for k in chosen) >= drafts
    assert (chosen.count(0) > 200) == (drafts == 4)


@pytest.mark.parametrize("acceptance", [0.5, 0.8, 0.9, 0.95])
def test_a_call_of_200_tokens_is_about_as_fast_as_with_the_best_fixed_number(acceptance):
    def seconds(pace, seed):
        done, taken, generator = 0, 0.0, random.Random(seed)
        while done < 200:
            k = pace.choose(199 - done)
            accepted = next((n for n in range(k) if generator.random() > acceptance), k)
            times = k * 0.002, 0.125
            pace.note(k, accepted, min(k, accepted + 1), times)
            done, taken = done + accepted + 1, taken + sum(times)
        return taken

    kept = [Pace() for _ in range(30)]
    first, second = (sum(seconds(pace, call + seed) for seed, pace in enumerate(kept)) for call in (0, 100))
    best = min(sum(seconds(Pace(k), seed) for seed in range(30)) for k in (4, 8, 16, 24, MOST))
    assert first < 1.1 * best and second < 1.03 * best


def test_a_fixed_number_is_kept_but_for_the_room():
    pace = Pace(fixed=7)
    assert [pace.choose(room) for room in (100, 5, 0, -1)] == [7, 5, 0, 0]


def test_noise_depends_on_seed_row_and_position_alone():
    scores = torch.zeros(4, 1000)
    drawn = Noise(3).draw(scores, 17)
    assert torch.equal(drawn, Noise(3).draw(scores, 17)) and len(set(drawn.tolist())) > 1
    assert torch.equal(drawn[:2], Noise(3).draw(scores[:2], 17))
    assert not torch.equal(drawn, Noise(3).draw(scores, 18)) and not torch.equal(drawn, Noise(4).draw(scores, 17))
    assert Noise(3).draw(torch.full((1, 5), -torch.inf), 0).tolist() == [-1]
