"""Probes answer by what is installed, not by versions; parts of other libraries are touched in one file each."""

import ast
import re
import warnings
from pathlib import Path

import pytest

from vbrt.errors import LibraryError
from vbrt.libraries import (
    accelerate_api,
    diffusers_api,
    gguf_api,
    peft_api,
    probe,
    torch_api,
    transformers_api,
    transformers_batching,
)
from vbrt.libraries.probe import Feature, find, losses

VBRT = Path(probe.__file__).parent.parent
THERE, ABSENT = "json.decoder:JSONDecoder.decode(s)", "json.decoder:JSONDecoder.undo"


@pytest.fixture
def nothing_lost(monkeypatch):
    monkeypatch.setattr(probe, "_losses", {})


def feature(*asks):
    return Feature("json", tuple(ask.removeprefix("json.") for ask in asks), without="numbers are words")


def test_a_name_or_a_parameter_that_is_not_there_is_named_with_the_version():
    assert feature(THERE).refusal() == ""
    assert re.fullmatch(r"json \S+ has no json\.decoder\.JSONDecoder\.undo", feature(THERE, ABSENT).refusal())
    assert "JSONDecoder.decode(s, backwards)" in feature("decoder:JSONDecoder.decode(s, backwards)").refusal()
    assert Feature("not_a_package", (":f",), "x").refusal() == "not_a_package is not installed"


def test_what_is_off_is_said_once_and_kept(nothing_lost):
    with pytest.warns(UserWarning, match="undo: numbers are words"):
        assert not feature(ABSENT).is_there()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not feature(ABSENT).is_there() and feature(THERE).is_there()
    assert len(losses()) == 1 and losses()[0].endswith("undo: numbers are words")
    with pytest.raises(LibraryError, match="undo: numbers are words"):
        feature(ABSENT).check()


def all_features():
    for api in (transformers_api, transformers_batching, diffusers_api, peft_api, gguf_api):
        yield from ((feature, ask) for feature in api.FEATURES for ask in feature.asks)


@pytest.mark.parametrize(
    ("feature", "ask"), [pytest.param(f, ask, id=f"{f.library}:{ask.partition('(')[0]}") for f, ask in all_features()]
)
def test_each_part_that_is_taken_away_is_named(feature, ask, monkeypatch):
    pytest.importorskip(feature.library)
    if feature.refusal():
        pytest.skip(feature.refusal())
    path = ask.partition("(")[0]
    owner, _, name = path.rpartition("." if "." in path.partition(":")[2] else ":")
    holder = find(feature.library, owner)
    for base in holder.__mro__ if isinstance(holder, type) else (holder,):
        if name in vars(base):
            monkeypatch.delattr(base, name)
    assert name in feature.refusal()


def private_imports(source):
    """Names of parts of other libraries, below their top level, that code imports or looks up by a string."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and re.search(r"import_module$|modules\.get$", ast.unparse(node.func)):
            found += [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
        elif isinstance(node, ast.Attribute):
            found.append(ast.unparse(node))
    below = re.compile(
        r"(transformers|peft|accelerate|diffusers)\.(?!__)[a-z_]\w*|torch\.(_C|_ops|_functorch|_subclasses)\b.*"
        r"|torch\.utils\._\w+|torch\._inductor.*|triton\.(runtime|backends)\b.*"
    )
    return sorted({name for name in found if isinstance(name, str) and below.fullmatch(name.split("(")[0])})


#: torch's library is opened by its file's path; dynamo hands out what a frame holds nowhere else
ELSEWHERE = {"kernels/cpu/build.py": {"torch._C", "torch._C.__file__"}}


def test_private_parts_are_found_where_they_are():
    source = "import torch\nfrom transformers.cache_utils import Cache\nx = torch._C._is_tracing()\nimport transformers"
    assert private_imports(source) == ["torch._C", "torch._C._is_tracing", "transformers.cache_utils"]


def test_parts_of_other_libraries_are_touched_in_their_files_only():
    found = {}
    for path in sorted(VBRT.rglob("*.py")):
        where = path.relative_to(VBRT).as_posix()
        if not where.startswith("libraries/"):
            found[where] = set(private_imports(path.read_text("utf-8"))) - ELSEWHERE.get(where, set())
    assert {where: parts for where, parts in found.items() if parts} == {}


@pytest.mark.parametrize("name", torch_api.REQUIRED)
def test_a_torch_that_lacks_a_part_is_refused_by_name(name, monkeypatch):
    path = torch_api.REQUIRED[name]
    monkeypatch.setattr(torch_api, "find", lambda library, asked, default=None: default)
    with pytest.raises(LibraryError, match=r"torch \S+ has no torch\."):
        torch_api._required(name, path)


def test_hooks_that_move_weights_are_known_by_their_classes():
    accelerate = pytest.importorskip("accelerate")
    import torch

    model = torch.nn.Linear(2, 2)
    assert accelerate_api.mover_of(model) == "" == diffusers_api.mover_of(model)
    accelerate.hooks.add_hook_to_module(model, accelerate.hooks.AlignDevicesHook(execution_device="cpu"))
    assert accelerate_api.mover_of(model) == "AlignDevicesHook of accelerate"
