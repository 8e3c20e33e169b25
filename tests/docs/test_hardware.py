"""docs/hardware.md is what its generator makes of the data, and what it says of a GPU or a system has its evidence."""

import json
import tomllib

import pytest

from scripts.hardware_tables import PAGE, SWEEP, known, level_of, matrix, page, sweep_table
from tests.docs.pages import ROOT
from vbrt.estimation.advice.data_sheets import sheets
from vbrt.libraries.versions import TESTED

DATA = known()
ROWS = [row for kind in ("gpu", "other_gpu", "system", "versions") for row in DATA[kind]]


def test_the_page_is_the_one_that_is_generated():
    assert PAGE.read_text("utf-8") == page(), "scripts/bench --tables"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.get("family") or row.get("name") or row["torch"])
def test_what_is_more_than_expected_has_its_evidence(row):
    assert row["known"] in DATA["levels"]
    assert row["known"] in ("expected", "smoke") or row["evidence"]
    assert [path for path in row.get("evidence", ()) if not (ROOT / path).is_file()] == []
    if row["known"] == "measured":
        assert any(path.startswith("benchmarks/results/") for path in row["evidence"])


def test_every_card_with_a_data_sheet_has_a_row_of_its_capability():
    rows = {tuple(map(int, row["capability"].split("."))) for row in DATA["gpu"]}
    assert {sheet.capability for sheet in sheets().values()} == rows


def test_gpus_are_known_no_better_than_their_system():
    heads, _, *rows = matrix(DATA)
    cells = {row.split(" | ")[0]: row.strip("| ").split(" | ")[1:] for row in rows}
    assert heads == "| GPU | Linux, x86-64 | Linux, aarch64 | WSL2 | Windows |"
    assert cells["| H100, H200"] == ["measured", "expected", "expected", "expected"]
    assert cells["| B200"][0] == "compiled" and cells["| RTX 20, T4"][0] == "compiled"


def test_a_gpu_that_is_known_by_compiling_is_in_the_sweep_within_its_limits():
    if not SWEEP.exists():
        pytest.skip("no sweep is committed yet")
    rows = {row["target"]: row for row in json.loads(SWEEP.read_text("utf-8"))["rows"]}
    for gpu in DATA["gpu"]:
        if gpu["known"] in ("compiled", "emulated", "measured"):
            row = rows[f"sm_{gpu['capability'].replace('.', '')}"]
            assert row["compiled"] > 0 and row["max_shared_bytes"] <= row["shared_limit_bytes"]


def test_a_sweep_becomes_a_row_for_each_target():
    resources = {"max_shared_bytes": 50176, "shared_limit_bytes": 101376, "max_registers": 255}
    spills = {"with_stack": 1, "max_stack_bytes": 4, "triton": "3.9.0"}
    row = {"target": "sm_86", "launches": 400, "compiled": 25, "kernels": 36} | resources | spills
    text, _, _, _, line = sweep_table({"rows": [row]})
    assert "by Triton 3.9.0" in text
    assert line == "| sm_86 | 25 of 400 | 36 | 49.0 of 99 KiB | 255 | 1, at most 4 bytes a thread |"


def test_what_is_refused_is_what_the_package_refuses():
    (refused,) = (row for row in DATA["versions"] if row["known"] == "refused")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert refused["python"] == f"below {project['requires-python'].removeprefix('>=')}"
    for library in ("torch", "triton", "transformers"):
        assert refused[library] == f"below {TESTED[library][0]}"
    assert level_of(refused) == "refused, by pip"
