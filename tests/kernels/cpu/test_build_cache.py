"""C kernels that are kept for the processes that come after."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vbrt.kernels.cpu import build, build_cache, compiler

CPU = torch.device("cpu")
SOURCE = "reading"  # the one that is built fastest
BEST = compiler.suitable()[0]
pytestmark = pytest.mark.skipif(build.refusal(CPU, SOURCE) is not None, reason=str(build.refusal(CPU, SOURCE)))


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """What has been compiled since, with an empty folder of kept libraries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "FOLDER", tmp_path / "no wheel")
    monkeypatch.setattr(build, "_ORIGINS", {})
    calls, own = [], compiler.compile_library
    monkeypatch.setattr(compiler, "compile_library", lambda *args: calls.append(args[1]) or own(*args))
    yield calls
    build._build.cache_clear()


def anew():
    """The library, as a process finds it that has loaded nothing."""
    build._build.cache_clear()
    return build.library(SOURCE)


def the_file():
    (path,) = build_cache.folder().iterdir()
    return path


def test_the_next_process_loads_what_this_one_has_built(compiled):
    anew()
    assert compiled == [SOURCE]
    one, two = anew(), anew()
    assert compiled == [SOURCE] and one._handle != two._handle
    assert build.libraries() == {SOURCE: f"built here ({BEST.name})"}
    assert the_file().stat().st_mode & 0o777 == 0o600 and build_cache.folder().stat().st_mode & 0o777 == 0o700


def _cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _empty(path):
    path.write_bytes(b"")


def _open(path):
    path.chmod(0o666)


def _link(path):
    path.rename(path.with_suffix(".other"))
    path.symlink_to(path.with_suffix(".other"))


def _rename(path):
    path.with_suffix(".other").write_bytes(path.read_bytes())
    name = build_cache.identity(["cc", "-DOTHER"], SOURCE, BEST)
    data = build_cache.fetch(name, SOURCE, BEST)
    assert data is None
    path.rename(build_cache._path(name, SOURCE, BEST))
    assert build_cache.fetch(name, SOURCE, BEST) is None


def test_a_file_that_is_not_as_it_was_kept_is_built_again(compiled):
    anew()
    name = build_cache.identity(compiler.find_compiler(), SOURCE, BEST)
    library = build_cache.fetch(name, SOURCE, BEST)
    for damage in (_cut, _flip, _empty, _open, _link, _rename):
        build_cache.keep(name, SOURCE, BEST, library)
        assert build_cache.fetch(name, SOURCE, BEST) == library
        damage(build_cache._path(name, SOURCE, BEST))
        assert build_cache.fetch(name, SOURCE, BEST) is None, damage
    anew()
    assert compiled == [SOURCE, SOURCE]


def test_what_decides_over_a_library_is_in_its_name(compiled, monkeypatch, tmp_path):
    cc = compiler.find_compiler()
    own = build_cache.identity(cc, SOURCE, BEST)
    others = [build_cache.identity([*cc, "-g0"], SOURCE, BEST), build_cache.identity(cc, "update", BEST)]
    others += [build_cache.identity(cc, SOURCE, each) for each in compiler.INSTRUCTION_SETS if each != BEST]
    with monkeypatch.context() as given:
        given.setenv("CPATH", "/elsewhere")
        others.append(build_cache.identity(cc, SOURCE, BEST))
    with monkeypatch.context() as given:
        for path in compiler.HERE.glob("*.[ch]"):
            (tmp_path / path.name).write_bytes(path.read_bytes() + (b"\n" if path.name == "numbers.h" else b""))
        given.setattr(compiler, "HERE", tmp_path)
        build_cache._sources_digest.cache_clear()
        others.append(build_cache.identity(cc, SOURCE, BEST))
    build_cache._sources_digest.cache_clear()
    assert len({own, *others}) == 1 + len(others) and None not in others
    assert build_cache.identity(cc, SOURCE, compiler._OTHERS[0]) is None  # made for the CPU that compiles
    assert build_cache.identity(["false"], SOURCE, BEST) is None


def test_where_nothing_can_be_kept_each_process_builds_its_own(compiled, tmp_path):
    (tmp_path / "vbrt").write_text("a file")
    anew()
    anew()
    assert compiled == [SOURCE, SOURCE]


def test_several_at_once_leave_one_whole_file_and_old_ones_go(compiled, tmp_path):
    data = os.urandom(1 << 16)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: build_cache.keep("name", SOURCE, BEST, data), range(32)))
    assert build_cache.fetch("name", SOURCE, BEST) == data and the_file().name.endswith(".name.so")
    for index in range(build_cache._KEPT):
        build_cache.keep(f"{index}", SOURCE, BEST, data)
    assert (
        len(list(build_cache.folder().iterdir())) == build_cache._KEPT
        and build_cache.fetch("name", SOURCE, BEST) is None
    )
