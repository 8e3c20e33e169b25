"""What runs by default, and what fails a run that costs too much: tests/cost.py and tests/matrix.py."""

import pytest

from tests import cost
from tests.matrix import matrix

pytest_plugins = "pytester"

FILE = """
import pytest

def test_short():
    pass

@pytest.mark.exhaustive
def test_long():
    sum(range(3_000_000))
"""


@pytest.fixture
def suite(pytester, monkeypatch):
    """Run pytest on one exhaustive test and one other: (passed, deselected, skipped), the result."""
    pytester.makeini("[pytest]\nmarkers =\n exhaustive: long\n sample: some")
    pytester.makepyfile(FILE)

    def run(*args):
        result = pytester.runpytest_inprocess("-p", "tests.cost", "-p", "no:xdist", "-p", "no:randomly", *args)
        counts = result.parseoutcomes()
        return tuple(counts.get(name, 0) for name in ("passed", "deselected", "skipped")), result

    return run


@pytest.mark.parametrize(
    ("args", "counts"),
    [
        ((), (1, 1, 0)),
        (("--all",), (2, 0, 0)),
        (("-m", "exhaustive"), (1, 1, 0)),
        (("test_what_is_exhaustive_runs_when_it_is_asked_for.py::test_long",), (1, 0, 0)),
        (("--all", "--until=0"), (0, 0, 2)),
    ],
    ids=str,
)
def test_what_is_exhaustive_runs_when_it_is_asked_for(suite, args, counts):
    assert suite(*args)[0] == counts


def test_a_run_that_costs_too_much_fails_and_names_the_test(suite, monkeypatch):
    assert suite("--budget")[1].ret == 0
    monkeypatch.setattr(cost, "TEST_S", 0.0)
    result = suite("--budget", "--all")[1]
    assert result.ret == 1
    result.stdout.fnmatch_lines(["error: *::test_short takes 0.0 s of CPU time, and a test 0.0 s at most*"])
    result.stdout.no_fnmatch_line("error: *test_long*")
    monkeypatch.setattr(cost, "SUITE_S", 0.0)
    monkeypatch.setattr(cost, "TEST_S", 12.0)
    result = suite("--budget")[1]
    assert result.ret == 1
    result.stdout.fnmatch_lines(["error: the tests take 0 s of CPU time, and have 0 s*"])


def test_the_sample_of_a_matrix_meets_each_value_once_at_least():
    cells = matrix(a=[1, 2], b="xyz", c=[None]).args[1]
    assert len(cells) == 6
    assert [cell.values for cell in cells if not cell.marks] == [(1, "x", None), (1, "z", None), (2, "y", None)]
    assert cells[0].id == "1-x-None"


def test_more_turns_of_a_matrix_meet_each_value_beside_others():
    cells = matrix(a=[1, 2], b="xyz", turns=2).args[1]
    assert {cell.values for cell in cells if not cell.marks} == {(a, b) for a in (1, 2) for b in "xyz"}


def test_a_sample_meets_values_evenly_and_the_rest_is_exhaustive(pytester):
    pytester.makeini("[pytest]\nmarkers =\n exhaustive: long\n sample: some")
    pytester.makepyfile("""
        import pytest

        @pytest.mark.sample(3)
        @pytest.mark.parametrize("name", ["a", "b", "c"])
        @pytest.mark.parametrize("flag", [True, False])
        def test_cells(flag, name):
            pass
    """)
    options = ("-p", "tests.cost", "-p", "no:xdist", "-p", "no:randomly", "-v")
    result = pytester.runpytest_inprocess(*options)
    result.stdout.fnmatch_lines(["*test_cells[[]True-a[]]*", "*test_cells[[]True-c[]]*", "*test_cells[[]False-b[]]*"])
    result.assert_outcomes(passed=3, deselected=3)
    pytester.runpytest_inprocess(*options, "--all").assert_outcomes(passed=6)
    pytester.runpytest_inprocess(*options, "-m", "exhaustive").assert_outcomes(passed=3, deselected=3)
