"""Known gaps: what constraints/gaps.toml names for the environment that scripts/newest runs is expected to fail so."""

import os
from collections.abc import Iterator

import pytest

from tests.neighbours.gaps import Gap, apply, read_gaps

_ENVIRONMENT = os.environ.get("VBRT_NEIGHBOURS", "")
_GAPS = pytest.StashKey[dict[str, Gap]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_GAPS] = read_gaps(_ENVIRONMENT)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    apply(item.config.stash[_GAPS].get(f"{item.path.name}::{item.name}"), report)
    return report
