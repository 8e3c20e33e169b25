"""Which tests run by default, and what they may cost in CPU time.

`exhaustive` marks long matrices, sweeps and storms; the default run has a short sample of each, `--all` has everything.
`sample(n)` marks a parametrized test of which the default run has `n` cells, and the others are exhaustive.
`--budget` (a whole run of scripts/test) fails if the suite, or one test, takes more CPU time than it may. CPU time, of
the process and of the children it has waited for, hardly depends on what else the machine does; limits grow on slower
machines. The first test that needs them pays for imports and for what a module shares.
"""

import resource
import time
from collections import Counter
from collections.abc import Iterator

import pytest

SUITE_S = 1300.0  # all tests together; starting Python and collecting come on top, once for each worker
TEST_S = 22.0
_WORK_S = 0.085  # what `_work` takes on the machine for which the limits are
_SHOWN = 12

_STARTED = pytest.StashKey[float]()
_BEGUN = time.monotonic()


def cpu_s() -> float:
    """Return the CPU seconds that this process and its ended children have taken."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _work() -> float:
    """Return the CPU seconds that some fixed work takes here."""
    start = time.process_time()
    sum(i * i for i in range(1_500_000))
    return time.process_time() - start


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("vbrt")
    group.addoption("--all", action="store_true", help="run what is marked exhaustive, too")
    group.addoption("--budget", action="store_true", help="fail if the tests, or one of them, cost too much CPU time")
    group.addoption("--until", type=float, metavar="S", help="skip the tests that would start later than S seconds on")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(config.option.budget), "vbrt-costs")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is exhaustive, unless it is asked for: by --all, by -m exhaustive, or by its name."""
    _mark_beside_samples(items)
    if config.option.all or "exhaustive" in config.option.markexpr:
        return
    named = tuple(arg for arg in config.args if "::" in arg)
    left_out = {item for item in items if item.get_closest_marker("exhaustive") and not item.nodeid.endswith(named)}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _mark_beside_samples(items: list[pytest.Item]) -> None:
    """Mark exhaustive what `sample` leaves out of each test; cells for GPUs, which few machines have, are all kept."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") and not any(map(item.get_closest_marker, ("exhaustive", "gpu"))):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cells in tests.values():
        (count,) = cells[0].get_closest_marker("sample").args
        values = [[(name, id(value)) for name, value in cell.callspec.params.items()] for cell in cells]
        for left_out in _beside_sample(values, count):
            cells[left_out].add_marker(pytest.mark.exhaustive)


def _beside_sample(cells: list[list[tuple[str, int]]], count: int) -> list[int]:
    """Return which cells, each of its values, are not among `count` that meet values as evenly as can be."""
    left, met = list(range(len(cells))), Counter[tuple[str, int]]()
    for _ in range(min(count, len(cells))):
        chosen = min(left, key=lambda cell: sum(met[value] for value in cells[cell]))
        met.update(cells[chosen])
        left.remove(chosen)
    return left


def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.option.until
    if until is not None and time.monotonic() - _BEGUN > until:
        pytest.skip(f"not begun within {until:.0f} s")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[_STARTED] = cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    if call.when == "teardown":
        item.user_properties.append(("cpu_s", cpu_s() - item.stash[_STARTED]))
    return (yield)


class Costs:
    """Add up what tests cost, those of all workers, and judge it at the end."""

    def __init__(self, limits: bool) -> None:
        self.limits, self.cost_s, self.exempt, self.slowness = limits, {}, set(), [_work()] if limits else []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.cost_s[report.nodeid] = dict(report.user_properties).get("cpu_s", 0.0)
            if "exhaustive" in report.keywords:
                self.exempt.add(report.nodeid)

    def problems(self) -> list[str]:
        """Name what costs too much."""
        slowness = max(1.0, max(self.slowness) / _WORK_S)
        judged = {test: cost for test, cost in self.cost_s.items() if test not in self.exempt}
        total, suite, each = sum(judged.values()), SUITE_S * slowness, TEST_S * slowness
        found = [f"{test} takes {cost:.1f} s of CPU time, and a test {each:.1f} s at most: make it smaller, or mark it "
                 "exhaustive beside a short sample" for test, cost in judged.items() if cost > each]  # fmt: skip
        if total > suite:
            found.append(f"the tests take {total:.0f} s of CPU time, and have {suite:.0f} s: see the slowest above")
        return found

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.limits and not hasattr(session.config, "workerinput"):
            self.slowness.append(_work())
            if self.problems():
                session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.limits:
            return
        terminalreporter.section(f"CPU time: {sum(self.cost_s.values()):.0f} s in {len(self.cost_s)} tests; slowest")
        for test, cost in sorted(self.cost_s.items(), key=lambda pair: -pair[1])[:_SHOWN]:
            terminalreporter.line(f"{cost:6.1f} s  {test}")
        for problem in self.problems():
            terminalreporter.line(f"error: {problem}", red=True)
