"""The order of the layers: a file imports only from rows above its own, or from the left of its own line.

No two files import each other, and no two have one name without a reason.
"""

import ast
import functools
import importlib
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "vbrt"

# (row, units in order): docs/design.md has the table and what each is for. A unit is a file or folder of vbrt/; a file
# belongs to the longest unit that its name begins with, and a folder's own `__init__` may be a unit, too
LINES = (
    (0, ("errors", "host", "config", "residency", "report", "libraries")),
    (1, ("formats",)),
    (2, ("kernels", "kernels.cuda", "kernels.step", "kernels.cpu", "kernels.entries", "kernels.__init__")),
    (2, ("tiers.protocols", "tiers.storage", "tiers.stack", "tiers.schedule", "tiers")),
    (
        3,
        (
            "blocks",
            *("layers.weights", "layers", "layers.modules", "layers.experts", "layers.__init__"),
            *("training.qat", "training.full", "training.activations", "training"),
        ),
    ),
    (
        4,
        (
            "model",
            *("estimation.memory", "estimation.advice", "estimation.precision", "estimation"),
            *("saves.files", "saves.common", "saves.saved", "saves.published", "saves.load", "saves.convert"),
            *("saves.checkpoint", "saves"),
            *("generation.static", "generation.kv", "generation.fusion", "generation.capture"),
            *("generation.speculation", "generation"),
            "distributed",
            "wrapper",
        ),
    ),
    (5, ("integrations", "cli", "__main__")),
)
#: pure Python, importable without torch
PURE = ("errors", "config", "residency", "report")
ROW = {unit: row for row, units in LINES for unit in units}
LINE = {unit: units for _, units in LINES for unit in units}
LAST_ROW = 5
# files of one name, by what makes that a pair; any other two get names that say what is inside
SHARED_NAMES = {
    # a command, and the function or the record that it prints
    "advise": {"cli.advise", "estimation.advice.advise"},
    "convert": {"cli.convert", "saves.convert.convert"},
    "estimate": {"cli.estimate", "estimation.memory.estimate"},
    "plan": {"cli.plan", "residency.plan"},
    "stats": {"cli.stats", "report.stats"},
    # an op: its reference, and its kernels for each device
    "encode": {"kernels.cpu.encode", "kernels.cuda.e2m1.encode"},
    "experts": {"kernels.experts", "kernels.cpu.experts"},
    "step": {"kernels.step", "kernels.cpu.step"},
    "update": {"kernels.update", "kernels.cpu.update"},
    # a layer, and its op for each device and family of formats
    "linear": {
        "layers.modules.linear",
        "kernels.cpu.linear",
        *(f"kernels.cuda.{family}.linear" for family in ("e2m1", "plain", "table", "trellis", "whole")),
    },
    # device code of that op for families of formats
    "linear_gluon": {f"kernels.cuda.{family}.linear_gluon" for family in ("table", "trellis", "whole")},
    "decode_triton": {f"kernels.cuda.{family}.decode_triton" for family in ("table", "trellis", "whole")},
    # the order of codes in memory that a device's kernels read
    "tiles": {"kernels.cpu.tiles", "kernels.cuda.e2m1.tiles"},
}
#: how device code is named, which is imported where Triton is at hand
DEVICE = ("_gluon", "_triton")
BY_NAME = ("import_module", "__import__")

# not every machine has these; a module that needs one is checked where it is there
OPTIONAL = {"accelerate", "diffusers", "huggingface_hub", "peft", "transformers", "triton", "vllm"}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
FILES.pop("vbrt")  # the front door: imports everything, lazily


def unit_of(module: str) -> str:
    """`vbrt.formats.nf4` -> `formats`; `vbrt.tiers.stack.slots` -> `tiers.stack`; the package itself -> ``."""
    name = module.removeprefix("vbrt").lstrip(".")
    if f"{name}.__init__" in ROW:
        return f"{name}.__init__"
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in ROW), parts[0])


@functools.cache
def parsed(source: str) -> list[ast.AST]:
    """The nodes of a file, which each rule looks at."""
    return list(ast.walk(ast.parse(source)))


def sources() -> dict[str, str]:
    """Module -> its text."""
    return {module: path.read_text("utf-8") for module, path in FILES.items()}


def imported_modules(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, module) for everything that `source` imports from vbrt, for type checkers and in functions, too."""
    for node in parsed(source):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                package = package[: len(package) - node.level + 1]
                base = ".".join([*package, *filter(None, [base])])
            # `from vbrt.kernels import step` imports that file, `from vbrt.kernels import resolve` a name of the folder
            names = [f"{base}.{alias.name}" for alias in node.names]
            targets = [name if name in FILES else base for name in names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in BY_NAME:
            first = node.args[0] if node.args else None
            targets = [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
        else:
            continue
        for target in dict.fromkeys(targets):
            if target == "vbrt" or target.startswith("vbrt."):
                yield node.lineno, target


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """What `source`, as the code of `module`, imports against the order; one line each."""
    own = unit_of(module)
    line = LINE[own]
    found = []
    for lineno, target in imported_modules(source, module, is_package):
        unit = unit_of(target)
        if unit == "":
            allowed = ROW[own] == LAST_ROW  # the front door leads everywhere
        elif unit not in ROW:
            allowed = False
        else:
            left_of_own = unit in line and line.index(unit) <= line.index(own)
            allowed = ROW[unit] < ROW[own] or left_of_own
        if not allowed:
            what = f"{unit} (row {ROW.get(unit, '?')})" if unit else "vbrt itself"
            found.append(f"{module}:{lineno} ({own}, row {ROW[own]}) imports {what}")
    return found


def test_every_file_of_the_package_has_a_row_and_every_row_files():
    units = {unit_of(module) for module in FILES}
    assert units == set(ROW), f"no row in LINES for {sorted(units - set(ROW))}, no files of {sorted(set(ROW) - units)}"


def test_a_file_imports_only_from_rows_above_its_own():
    found = []
    for module, source in sources().items():
        if unit_of(module) in ROW:  # else see the test above
            found += violations(source, module, is_package=FILES[module].name == "__init__.py")
    assert found == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("vbrt.config", "from vbrt.formats import get_format"),
        ("vbrt.config", "from vbrt.residency.plan import Plan"),
        ("vbrt.residency.plan", "from ..report.stats import Stats"),
        ("vbrt.formats.nf4", "import vbrt.kernels.reference"),
        ("vbrt.formats.nf4", "from ..kernels import resolve"),
        ("vbrt.formats.nf4", "def f():\n    from vbrt import layers"),
        ("vbrt.tiers.storage.ssd_tier", "import vbrt.kernels"),
        ("vbrt.kernels.reference", "from vbrt.tiers import gpu"),
        ("vbrt.layers.modules.linear", "import vbrt"),
        (
            "vbrt.layers.modules.linear",
            "from importlib import import_module\nx = import_module('vbrt.wrapper.wrapper')",
        ),
        ("vbrt.layers.modules.linear", "from vbrt.unheard_of import x"),
        ("vbrt.model.planner", "try:\n    from ..wrapper.wrapper import x\nexcept ImportError:\n    x = 1"),
        ("vbrt.formats.nf4", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vbrt.model import planner"),
        ("vbrt.tiers.storage.ssd_tier", "from vbrt.tiers.stack.slots import Slot"),
        ("vbrt.tiers.stack.slots", "from vbrt.tiers import TierStack"),
        ("vbrt.kernels.reference", "from vbrt.kernels import step"),
        ("vbrt.kernels.cuda.devices", "from vbrt.kernels import resolve"),
    ],
)
def test_an_import_against_the_order_is_found(module, source):
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("vbrt.residency.plan", "from vbrt.config import VBConfig\nfrom .errors import VBError\nimport dataclasses"),
        ("vbrt.formats.nf4", "from .base import Format\nfrom vbrt.formats import page"),
        ("vbrt.kernels.cuda.step_ops", "from vbrt.kernels import reference\nfrom vbrt.kernels.step_rules import Part"),
        ("vbrt.kernels.entries", "from vbrt.kernels.cpu import build\nfrom vbrt.kernels import step"),
        ("vbrt.cli.main", "import vbrt\nfrom vbrt import report, wrap"),
        ("vbrt.wrapper.wrapper", "from vbrt.model.planner import make_plan"),
    ],
)
def test_an_import_along_the_order_passes(module, source):
    assert violations(source, module) == []


def cycle_in(imports: Mapping[str, Collection[str]]) -> list[str]:
    """Modules of which each imports the one before it, the first one again at the end; empty if there are none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def imports_of_all() -> dict[str, set[str]]:
    """Module -> the modules of vbrt that it imports, but for itself and the front door."""
    found = {}
    for module, path in FILES.items():
        imported = imported_modules(path.read_text("utf-8"), module, path.name == "__init__.py")
        found[module] = {target for _, target in imported} - {module, "vbrt"}
    return found


def test_no_files_import_each_other():
    """An import for type checkers counts: the files that it ties cannot be read, moved or tested apart."""
    assert cycle_in(imports_of_all()) == []


def test_files_that_import_each_other_are_found():
    assert cycle_in({"a": {"b"}, "b": {"c", "d"}, "c": {"d"}}) == []
    assert set(cycle_in({"a": {"b"}, "b": {"c"}, "c": {"d", "e"}, "d": {"b"}})) == {"b", "c", "d"}


def names_shared(modules: Iterable[str]) -> dict[str, set[str]]:
    """The names that several files have, with the files; `__init__` does not count."""
    by_name: dict[str, set[str]] = {}
    for module in modules:
        by_name.setdefault(module.rpartition(".")[2], set()).add(module.removeprefix("vbrt."))
    return {name: files for name, files in by_name.items() if len(files) > 1}


def test_files_of_one_name_are_pairs_with_a_reason():
    assert names_shared(module for module, path in FILES.items() if path.name != "__init__.py") == SHARED_NAMES


def test_files_of_one_name_are_found():
    assert names_shared(["vbrt.a.x", "vbrt.b.x", "vbrt.b.y"]) == {"x": {"a.x", "b.x"}}


def hidden_imports(source: str) -> list[int]:
    """Lines of functions that import from vbrt, but for device code, which needs Triton."""
    functions = (node for node in parsed(source) if isinstance(node, ast.FunctionDef))
    imports = {node for function in functions for node in ast.walk(function) if isinstance(node, ast.ImportFrom)}
    return sorted(
        node.lineno
        for node in imports
        if (node.module or "").startswith("vbrt")
        and not any(f"{node.module}.{name.name}".endswith(DEVICE) for name in node.names)
        and not node.module.endswith(DEVICE)
    )


def test_no_import_hides_in_a_function():
    """Commands may: torch takes seconds to import, and what they can refuse before needs none of it."""
    found = {module: hidden_imports(source) for module, source in sources().items()}
    assert {m: lines for m, lines in found.items() if lines and not m.startswith("vbrt.cli.")} == {}


def test_an_import_that_hides_is_found():
    source = (
        "def f():\n    from vbrt.model import planner\ndef g():\n    from vbrt.kernels.cuda.fine.merge_triton import x"
    )
    assert hidden_imports(source) == [2]


def test_pure_rooms_import_without_torch():
    modules = [module for module in FILES if unit_of(module) in PURE]
    program = f"""
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "triton", "numpy", "transformers"):
            raise ImportError(f"{{name}} is blocked: these are pure Python")

sys.meta_path.insert(0, Blocker())
for module in {modules!r}:
    importlib.import_module(module)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent, timeout=120)
    assert done.returncode == 0, done.stderr


def test_all_names_only_things_that_exist():
    for module in ("vbrt", *FILES):
        if module == "vbrt.__main__":  # running it is its purpose
            continue
        try:
            imported = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name in OPTIONAL:
                continue
            raise
        names = getattr(imported, "__all__", None)
        assert names is not None, f"{module} has no __all__"
        assert len(set(names)) == len(names), module
        assert [name for name in names if not hasattr(imported, name)] == [], module


FACTORIES = {
    "arange",
    "as_tensor",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "scalar_tensor",
    "tensor",
    "zeros",
}


def unnamed(source: str) -> list[int]:
    """Lines where a tensor is made without naming both its dtype and its device."""
    calls = (node for node in parsed(source) if isinstance(node, ast.Call))
    made = (
        call
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in FACTORIES
        and ast.unparse(call.func.value) == "torch"
    )
    return [call.lineno for call in made if not {"dtype", "device"} <= {keyword.arg for keyword in call.keywords}]


def test_every_tensor_that_is_made_names_its_dtype_and_device():
    found = {module: unnamed(source) for module, source in sources().items()}
    assert {m: lines for m, lines in found.items() if lines} == {}, "torch.set_default_dtype, torch.device: the user's"


def test_a_tensor_that_takes_the_users_defaults_is_found():
    source = "torch.empty(3, device=d)\ntorch.full((1,), 2.0)\ntorch.zeros(3, dtype=t, device=d)\nx.new_empty(3)"
    assert unnamed(source) == [1, 2]


#: files that name CUDA in code, with the reason; `vbrt.host.accelerator` finds the device for all others
NAMES_CUDA = {
    "vbrt.host.accelerator": "it is the one that says it",
    "vbrt.wrapper.model_proxy": "nn.Module's method of that name",
}


def cuda_named(source: str) -> list[int]:
    """Lines of code that use torch.cuda, `.is_cuda`, `.cuda()` or a device type or device "cuda"."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            named = node.attr in ("is_cuda", "cuda") and ast.unparse(node) not in (
                "torch.backends.cuda",
                "torch.version.cuda",
            )
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [getattr(node, "module", None), *(alias.name for alias in node.names)]
            named = any(f"{module}.".startswith("torch.cuda.") for module in modules)
        else:
            named = (
                isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.split(":")[0] == "cuda"
            )
        if named:
            found.append(node.lineno)
    return sorted(found)


def test_no_file_outside_of_the_cuda_kernels_names_one_vendors_device():
    """Streams, events, memory figures and the device type come from `vbrt.host.accelerator`."""
    files = {module: path for module, path in FILES.items() if not module.startswith("vbrt.kernels.cuda.")}
    found = {module: cuda_named(path.read_text("utf-8")) for module, path in files.items()}
    assert {module for module, lines in found.items() if lines} == set(NAMES_CUDA), found


def test_a_device_of_one_vendor_is_found():
    source = (
        'torch.cuda.Event()\nx.is_cuda\nx.cuda()\ntorch.device("cuda", 0)\nd = "cuda:0"\nimport torch.cuda\n'
        'torch.backends.cuda.matmul\n"a CUDA graph"\nfrom vbrt.kernels.cuda import devices\nstream.cuda_stream'
    )
    assert cuda_named(source) == [1, 2, 3, 4, 5, 6]
