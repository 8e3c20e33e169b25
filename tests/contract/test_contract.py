"""What can be done to a layer, tried on every kind of layer in every way that vbrt holds its weights."""

from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from tests.contract.holdings import FORMATS, Holding, all_holdings, sampled_holdings
from tests.contract.known import KNOWN_FAILURES
from tests.contract.list import OPERATIONS
from tests.contract.operation import Documented, Operation, judge
from tests.contract.table import DOCUMENT, table

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def one_thread():
    """The layers are tiny: a second thread would wait for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sample(operation: Operation, device: str) -> list[Holding]:
    return sampled_holdings(operation.name, operation.sample, device)


def whole(operation: Operation, device: str) -> list[Holding]:
    return all_holdings(device)


CELLS = pytest.mark.parametrize("holdings", [sample, pytest.param(whole, marks=pytest.mark.exhaustive)])


def wrong_cells(operation: Operation, holdings: list[Holding], path: Path) -> list[str]:
    """Return what is not as listed, a line for each way in which it is not."""
    wrong: dict[str, list[str]] = {}
    for number, holding in enumerate(holding for holding in holdings if operation.has_meaning(holding)):
        folder = path / str(number)
        folder.mkdir()
        what = judge(operation, holding, folder)
        if what is not None:
            wrong.setdefault(what, []).append(str(holding))
    return [f"{what} ({len(cells)} cells: {'; '.join(cells[:3])})" for what, cells in wrong.items()]


@pytest.mark.parametrize("name", OPERATIONS)
@CELLS
def test_an_operation_does_to_a_wrapped_model_what_the_list_says(name, holdings, tmp_path):
    wrong = wrong_cells(OPERATIONS[name], holdings(OPERATIONS[name], "cpu"), tmp_path)
    if name in KNOWN_FAILURES:
        assert wrong, f"{name!r} is as listed now: take it off tests/contract/known.py"
    else:
        assert not wrong, "\n".join(wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATIONS)
@CELLS
def test_the_list_holds_on_a_gpu(name, holdings, tmp_path):
    if OPERATIONS[name].only and OPERATIONS[name].only.get("device") == "cpu":
        pytest.skip("of CPUs")
    wrong = wrong_cells(OPERATIONS[name], holdings(OPERATIONS[name], "cuda"), tmp_path)
    assert not wrong or name in KNOWN_FAILURES, "\n".join(wrong)


def test_the_document_is_what_the_list_says():
    assert DOCUMENT.read_text() == table(OPERATIONS), "scripts/contract writes it again"


def test_every_documented_difference_stands_in_the_page_on_wrapping():
    page = " ".join((ROOT / "docs" / "wrapping.md").read_text().split())
    said = [rule.words for op in OPERATIONS.values() for rule in op.rules if isinstance(rule, Documented)]
    assert all(words in page for words in said), [words for words in said if words not in page]


def test_known_failures_name_operations_of_the_list():
    assert not set(KNOWN_FAILURES) - set(OPERATIONS)


def test_a_sample_meets_every_format_in_every_state_and_over_all_operations_every_combination():
    for name in OPERATIONS:
        assert {(h.format, h.state) for h in sampled_holdings(name, None)} == {
            (h.format, h.state) for h in all_holdings()
        }
    met = Counter(h for name in OPERATIONS for h in sampled_holdings(name, None))
    assert set(met) == set(all_holdings()) and {h.format for h in met} == set(FORMATS)
