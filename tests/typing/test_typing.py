"""Type checkers on programs of a user: nothing of vbrt's own, and typos in names, keys and values are found.

mypy and pyright are the dependency group `types`; each is skipped where it is absent.
"""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PROGRAM, MISTAKES = HERE / "program.py", HERE / "mistakes.py"
#: other packages' sources, which take time and do not matter to vbrt's own names
_SKIPPED = ("transformers", "diffusers", "peft", "accelerate", "rich", "numpy", "triton", "safetensors")


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, cwd=cwd, timeout=600)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def mypy(folder: Path) -> dict[str, dict[int, str]]:
    """File -> line -> messages."""
    skipped = ",".join(f"{name}.*" for name in _SKIPPED)
    (folder / "mypy.ini").write_text(
        f"[mypy]\nstrict = True\nfollow_imports = silent\nmypy_path = {ROOT}\n"
        f"[mypy-{skipped}]\nfollow_imports = skip\nfollow_imports_for_stubs = True\n"
    )
    said = run("mypy", "--config-file", str(folder / "mypy.ini"), str(PROGRAM), str(MISTAKES), cwd=folder)
    found: dict[str, dict[int, str]] = {PROGRAM.name: {}, MISTAKES.name: {}}
    for path, line, text in re.findall(r"^(.+?):(\d+): (?:error|note): (.*)$", said, re.MULTILINE):
        lines = found[Path(path).name]
        lines[int(line)] = f"{lines.get(int(line), '')}\n{text}"
    return found


def pyright(folder: Path) -> dict[str, dict[int, str]]:
    """File -> line -> messages."""
    settings = {"extraPaths": [str(ROOT)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    said = run("pyright", "--outputjson", "--pythonpath", sys.executable, str(PROGRAM), str(MISTAKES), cwd=folder)
    found: dict[str, dict[int, str]] = {PROGRAM.name: {}, MISTAKES.name: {}}
    for each in json.loads(said)["generalDiagnostics"]:
        lines, line = found[Path(each["file"]).name], each["range"]["start"]["line"] + 1
        lines[line] = f"{lines.get(line, '')}\n{each['message']}"
    return found


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_a_users_program_has_no_error_and_typos_are_found(checker, tmp_path):
    if importlib.util.find_spec(checker.__name__) is None:
        pytest.skip(f"{checker.__name__} is not installed: pip install --group types")
    found = checker(tmp_path)
    assert found[PROGRAM.name] == {}
    lines = MISTAKES.read_text("utf-8").splitlines()
    assert set(found[MISTAKES.name]) == {number for number, line in enumerate(lines, 1) if "  # " in line}
