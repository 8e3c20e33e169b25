"""Formats are tensor functions: whatever device tensors are on, they start nothing of their own on it."""

import ast
from pathlib import Path

import pytest

from vbrt import formats

FILES = sorted(Path(formats.__file__).parent.glob("*.py"))
ROOMS = {"vbrt.errors", "vbrt.config", "vbrt.libraries", "vbrt.formats"}  # that they may import
EFFECTS = {"cuda", "pin_memory", "Event", "Stream", "synchronize", "non_blocking", "record_stream"}


def effects(source: str) -> list[str]:
    """What a file names of streams, events and pinned memory, and what it imports from other rooms."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in EFFECTS:
            found.append(node.attr)
        elif isinstance(node, ast.keyword) and node.arg in EFFECTS:
            found.append(node.arg)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            rooms = (".".join(name.split(".")[:2]) for name in names if name.split(".")[0] == "vbrt")
            found += [room for room in rooms if room not in ROOMS]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_format_has_no_effects_on_devices(path):
    assert effects(path.read_text("utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "torch.cuda.Event()",
        "torch.empty(1, pin_memory=True)",
        "x.to(device, non_blocking=True)",
        "from vbrt.tiers.storage.memory_tiers import pin",
        "import vbrt.host.host_memory",
    ],
)
def test_an_effect_is_found(source):
    assert effects(source)
