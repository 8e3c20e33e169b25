"""Every test runs offline, on two threads, from a seed of its own, and skips what needs a GPU where there is none."""

import gc
import importlib.util
import os
import zlib
from collections.abc import Iterator

# before anything imports the libraries that read them
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads warn about every fork
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of compiling processes would import torch, too
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # what the CPU can, its compiler can: found out by compiling
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin take the core that another worker needs
os.environ["VBRT_PROGRESS"] = "0"  # what is slow on a busy machine says nothing of its own on stderr
os.environ.pop("COLUMNS", None)  # the width of what is printed, which pytest-xdist sets

import pytest
import torch

pytest_plugins = ["tests.cost"]

torch.set_num_threads(2)

if importlib.util.find_spec("hypothesis"):  # absent on machines that bring their own Python
    from hypothesis import settings

    # timing is not what property tests test; CI draws the same examples every time
    settings.register_profile("vbrt", deadline=None, derandomize="CI" in os.environ, print_blob=True)
    settings.load_profile("vbrt")


_MOST_OBJECTS = 100_000  # a collection of as many takes 20 ms
_file = None


def _freeze_what_earlier_files_left(item: pytest.Item) -> None:
    """Keep modules, items and caches out of garbage collections, which tests ask for: each takes a second otherwise."""
    global _file
    if item.path != _file and len(gc.get_objects(generation=2)) > _MOST_OBJECTS:
        gc.collect()
        gc.freeze()
    _file = item.path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--capability", metavar="8.6", help="take every GPU for one of this compute capability when kernels are chosen"
    )


def pytest_configure(config: pytest.Config) -> None:
    if given := config.getoption("--capability"):
        from vbrt.kernels.cuda import devices

        devices.taken_for(tuple(map(int, given.split("."))))


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or extensions report at exit what they take for leaks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        for item in items:
            if item.get_closest_marker("alone"):
                item.add_marker(pytest.mark.skip(reason="needs the GPUs for itself: run it without -n"))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _freeze_what_earlier_files_left(item)
    torch.manual_seed(zlib.crc32(item.nodeid.encode()))


@pytest.fixture
def capability(request: pytest.FixtureRequest) -> Iterator[tuple[int, int] | None]:
    """The compute capability that GPUs are taken for: the parameter, or None: their own, or the run's option."""
    from vbrt.kernels.cuda import devices

    before = dict(devices._CAPABILITIES)
    if request.param is not None:
        if torch.cuda.get_device_capability()[0] < 9 <= request.param[0]:
            pytest.skip("a launch that depends on another needs sm_90")
        devices.taken_for(request.param)
    yield request.param
    devices.taken_for(None)
    devices._CAPABILITIES.update(before)


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a test writes has to outlive the machine; disks take their time to be sure."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def registers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registries of formats and kernels that are restored after the test."""
    from vbrt import formats
    from vbrt.kernels import registry

    monkeypatch.setattr(registry, "_REGISTRY", {op: dict(offered) for op, offered in registry._REGISTRY.items()})
    monkeypatch.setattr(formats, "_INSTANCES", dict(formats._INSTANCES))
    monkeypatch.setattr("vbrt.blocks.frozen_page._KERNELS", {})
    before = set(formats.FORMATS)
    yield
    for name in formats.FORMATS.keys() - before:
        del formats.FORMATS[name]


@pytest.fixture
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiled kernels, for tests that compare bits with torch's own layers on the decoded weight."""
    from vbrt.kernels import registry

    for op, offered in list(registry._REGISTRY.items()):
        plain = {key: entry for key, entry in offered.items() if key[0] != "compiled"}
        monkeypatch.setitem(registry._REGISTRY, op, plain)
    monkeypatch.setattr("vbrt.blocks.frozen_page._KERNELS", {})
    monkeypatch.setattr(
        "vbrt.layers.weights.kernel_selection.kernel_refusal", lambda *args, **kwargs: None
    )  # nothing to announce: it is on purpose
