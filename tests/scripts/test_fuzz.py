"""A short cut of scripts/fuzz: damaged and hostile files are refused by name, or load what was saved."""

from pathlib import Path

import pytest

from scripts import fuzz
from tests import forked

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("count", ["50", pytest.param("5000", marks=pytest.mark.exhaustive)])
def test_damaged_and_hostile_files_are_refused_by_name_or_load_what_was_saved(count):
    """In a process of its own, for its address space is bounded; other inputs than those of the script by default."""
    code = "import sys\nfrom scripts import fuzz\nsys.exit(fuzz.main())"
    done = forked.run(code, "--count", count, "--seed", "1", timeout_s=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" inputs, 0 wrong\n") and done.stdout.count("refused") >= 9


@pytest.mark.parametrize(
    ("load", "outcome"),
    [(lambda: "saved", "same"), (lambda: "else", "WRONG: another value"), (lambda: {}["x"], "WRONG: KeyError: 'x'")],
)
def test_what_may_not_be_is_told_from_what_may(tmp_path, load, outcome):
    part = fuzz.Part("any", tmp_path, lambda: None, iter(()), load, "saved", lambda what: what == "sealed")
    assert fuzz.outcome(part, "bit 1") == outcome
    assert fuzz.outcome(part, "sealed") == ("loads" if outcome.endswith("value") else outcome)


@pytest.mark.parametrize(("message", "outcome"), [("{}: damaged", "refused"), ("damaged", "WRONG: does not name")])
def test_a_refusal_must_name_the_file(tmp_path, message, outcome):
    def load():
        raise fuzz.VBError(message.format(tmp_path))

    part = fuzz.Part("any", tmp_path, lambda: None, iter(()), load, "saved")
    assert fuzz.outcome(part, "bit 1").startswith(outcome)
