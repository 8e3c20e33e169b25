"""The file of known gaps excuses the refusal that it names and nothing else."""

from types import SimpleNamespace

import pytest

from tests.neighbours.gaps import FILE, Gap, apply, read_gaps

GAP = Gap("newest", "test_short.py::test_x", "decoded one token at a time", "no cache can be cut")


def report(outcome, text="", when="call"):
    return SimpleNamespace(
        when=when, outcome=outcome, longreprtext=text, passed=outcome == "passed", skipped=outcome == "skipped"
    )


@pytest.mark.parametrize(
    ("gap", "made", "outcome"),
    [
        (GAP, report("failed", "UserWarning: decoded one token at a time"), "skipped"),
        (GAP, report("failed", "KeyError: 'cache'"), "failed"),
        (GAP, report("failed", "decoded one token at a time", when="setup"), "failed"),
        (GAP, report("passed"), "failed"),
        (GAP, report("passed", when="teardown"), "passed"),
        (None, report("failed", "decoded one token at a time"), "failed"),
        (None, report("passed"), "passed"),
    ],
)
def test_a_gap_excuses_its_own_refusal(gap, made, outcome):
    apply(gap, made)
    assert made.outcome == outcome


def test_gaps_are_read_by_environment_and_name_a_refusal(tmp_path):
    file = tmp_path / "gaps.toml"
    text = '[[gap]]\nenvironment = "gpus"\ntest = "a"\nrefusal = "{}"\nwhy = "old"\n'
    file.write_text(text.format("says so"))
    assert read_gaps("newest", file) == {} and read_gaps("gpus", file) == {"a": Gap("gpus", "a", "says so", "old")}
    file.write_text(text.format(""))
    with pytest.raises(ValueError, match="the words of a refusal"):
        read_gaps("gpus", file)


def test_the_committed_file_is_readable():
    assert FILE.is_file()
    read_gaps("")
