"""Notebooks: committed ones are those that the script makes of the examples, and their code is the examples'."""

import json

import pytest

from scripts.notebooks import EXAMPLES, NAMES, notebook, path_of


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_what_its_example_is(name):
    text = path_of(name).read_text("utf-8")
    assert text == notebook(name), "run scripts/notebooks.py"
    cells = json.loads(text)["cells"]
    assert cells[0]["cell_type"] == "markdown" and cells[0]["source"][0].startswith("# ")
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 1 or name == "smollm2"
    source = (EXAMPLES / f"{name}.py").read_text("utf-8")
    for each in code:
        compile(each, name, "exec")
        assert each in source
    assert all(not cell.get("outputs") for cell in cells)
