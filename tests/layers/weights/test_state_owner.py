"""The state of weights has one owner: no attribute of it is written from another file."""

import ast
import functools
from pathlib import Path

VBRT = Path(__file__).parents[3] / "vbrt"
OWNERS = {
    "layers/weights/pages_handle.py": "PagesHandle",
    "layers/weights/state.py": "Weight",
    "layers/experts/experts_handle.py": "ExpertsHandle",
    "layers/experts/residency_owner.py": "Deciding",
}
#: counted, or noted, by whoever computes
COUNTERS = {"forwards", "weight_reads", "computed", "tokens", "input_at"}
#: which have weights at hand; elsewhere attributes of other objects have these names
ROOMS = ("layers", "model", "saves", "wrapper", "distributed", "integrations", "estimation", "generation/capture")
NOT_OURS = {"ctx", "guard"}  # autograd's context, a stack's lock


@functools.cache
def state() -> set[str]:
    """The attributes that the owners set on themselves."""
    found = set()
    for path, name in OWNERS.items():
        body = ast.parse((VBRT / path).read_text("utf-8")).body
        owner = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
        found |= {node.attr for node in stores(owner) if ast.unparse(node.value) == "self"}
    return found - COUNTERS


def stores(tree: ast.AST) -> list[ast.Attribute]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store | ast.Del)]


def writes(source: str) -> list[str]:
    """What a file writes of another object's state."""
    found = [node for node in stores(ast.parse(source)) if node.attr in state()]
    return [
        f"{node.lineno}: {ast.unparse(node)}"
        for node in found
        if ast.unparse(node.value).rpartition(".")[2] not in {"self", "cls", *NOT_OURS}
    ]


def test_no_other_file_writes_the_state_of_a_weight():
    files = {path.relative_to(VBRT).as_posix(): path for room in ROOMS for path in sorted((VBRT / room).rglob("*.py"))}
    found = {name: writes(path.read_text("utf-8")) for name, path in files.items() if name not in OWNERS}
    assert len(files) > 100 and {name: lines for name, lines in found.items() if lines} == {}


def test_a_write_is_found():
    assert {"dense", "held", "product", "lent", "trainable", "pages", "ready"} <= state()
    source = "layer.handle.trainable = True\nhandle.forwards += 1\nheir.lent, x = None, 1\nself.dense = ()"
    assert writes(source) == ["1: layer.handle.trainable", "3: heir.lent"]
