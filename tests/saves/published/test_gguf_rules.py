"""What recipes do to rows is found from numbered rows, whatever they are made of."""

import pytest
import torch

from vbrt.saves.published.gguf_rules import Recipe, rows_of

SHAPES = {"a": (4, 6), "b": (4, 6)}


def order_of(run, *names, shapes=SHAPES):
    return rows_of(Recipe("w", names, run), shapes)


@pytest.mark.parametrize(
    ("run", "numbers", "transposed"),
    [
        (lambda v: v["a"], [0, 1, 2, 3], False),
        (lambda v: v["a"][[2, 0, 3, 1]], [2, 0, 3, 1], False),
        (lambda v: v["a"].view(2, 2, 6).transpose(0, 1).reshape(4, 6), [0, 2, 1, 3], False),  # knows the length
        (lambda v: v["a"].t(), [0, 1, 2, 3], True),
        (lambda v: torch.cat((v["b"], v["a"])), [4, 5, 6, 7, 0, 1, 2, 3], False),
        (lambda v: torch.stack((v["a"], v["b"]), 1).flatten(0, 1), [0, 4, 1, 5, 2, 6, 3, 7], False),
    ],
)
def test_rows_that_are_moved_whole_are_found(run, numbers, transposed):
    found = order_of(run, *(("a", "b") if len(numbers) == 8 else ("a",)))
    assert (found.numbers.tolist(), found.transposed) == (numbers, transposed)


def test_rows_of_a_stack_are_found_matrix_by_matrix():
    shapes = {"gate": (2, 3, 8), "up": (2, 3, 8)}
    found = order_of(lambda v: torch.cat((v["gate"], v["up"]), dim=1), "gate", "up", shapes=shapes)
    assert found.numbers.tolist() == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]


@pytest.mark.parametrize(
    "run",
    [
        lambda v: v["a"] - 1,
        lambda v: v["a"].flip(1),
        lambda v: v["a"][:, [5, 4, 3, 2, 1, 0]],
        lambda v: v["a"][[0, 0, 1, 2]],
        lambda v: v["a"][:2],
        lambda v: v["a"].float().log(),
        lambda v: torch.cat((v["a"][:, :3], v["a"].roll(1, 0)[:, 3:]), dim=1),
    ],
)
def test_what_is_more_than_a_movement_of_rows_is_none(run):
    assert order_of(run, "a") is None


def test_vectors_and_rows_of_two_lengths_are_none():
    assert order_of(lambda v: v["a"], "a", shapes={"a": (6,)}) is None
    assert order_of(lambda v: v["a"], "a", "b", shapes={"a": (4, 6), "b": (4, 8)}) is None
