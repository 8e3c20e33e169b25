"""Notebooks of some examples, from their cells (`# %%`); outputs are left out.

python3 scripts/notebooks.py     # writes examples/*.ipynb
"""

import json
from pathlib import Path
from typing import Any

__all__ = ["NAMES", "notebook", "path_of"]

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NAMES = ("llm_budget", "smollm2", "lora_trainer")
_CELL, _TEXT = "# %%", "# %% [markdown]"


def path_of(name: str) -> Path:
    """Return where an example's notebook is."""
    return EXAMPLES / f"{name}.ipynb"


def notebook(name: str) -> str:
    """Return an example as a notebook of nbformat 4.5."""
    lines = (EXAMPLES / f"{name}.py").read_text("utf-8").splitlines()
    cells: list[dict[str, Any]] = []
    for line in lines:
        if line in (_CELL, _TEXT):
            kind = "markdown" if line == _TEXT else "code"
            more = {"execution_count": None, "outputs": []} if kind == "code" else {}
            cells.append({"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, **more, "source": []})
        else:
            is_text = cells[-1]["cell_type"] == "markdown"
            cells[-1]["source"].append(line.removeprefix("#").removeprefix(" ") if is_text else line)
    for cell in cells:
        cell["source"] = "\n".join(cell["source"]).strip("\n").splitlines(keepends=True)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for each in NAMES:
        path_of(each).write_text(notebook(each), "utf-8")
