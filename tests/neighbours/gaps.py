"""constraints/gaps.toml: tests that fail beside other versions, each with words of the refusal that users read."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["FILE", "Gap", "apply", "read_gaps"]

FILE = Path(__file__).parents[2] / "constraints" / "gaps.toml"
ENVIRONMENTS = ("newest", "gpus", "libraries")


@dataclass(frozen=True)
class Gap:
    """A test, `file::name`, that fails in an environment with words of its refusal."""

    environment: str
    test: str
    refusal: str
    why: str


def read_gaps(environment: str, file: Path = FILE) -> dict[str, Gap]:
    """Return the gaps of an environment by test."""
    gaps = [Gap(**gap) for gap in tomllib.loads(file.read_text("utf-8")).get("gap", ())]
    wrong = [gap for gap in gaps if gap.environment not in ENVIRONMENTS or not gap.refusal or not gap.why]
    if wrong:
        raise ValueError(f"{file}: {wrong}: expected an environment of {ENVIRONMENTS}, the words of a refusal, and why")
    return {gap.test: gap for gap in gaps if gap.environment == environment}


def apply(gap: Gap | None, report: pytest.TestReport) -> None:
    """Turn the failure that a gap names into an expected one, and a pass into a failure."""
    if gap is None or report.when != "call" or report.skipped:
        return
    if report.passed:
        report.outcome, report.longrepr = "failed", f"{FILE.name} names this test for {gap.environment}, and it passes"
    elif gap.refusal in report.longreprtext:
        report.outcome, report.wasxfail = "skipped", gap.why
