"""The C kernels built for other CPUs than this one."""

import functools

import pytest

from vbrt.kernels.cpu import build, compiler


@pytest.fixture
def use_libraries(monkeypatch):
    """Makes all kernels of the process run `load(source)` for as long as a test runs."""

    def use(load):
        monkeypatch.setattr(build, "_build", lambda source: build._Loaded(load(source), "of a test"))

    return use


@pytest.fixture(scope="session")
def library_for(tmp_path_factory):
    """Builds a source of the kernels for an instruction set, once."""

    @functools.cache
    def made(source, instructions):
        target = tmp_path_factory.mktemp(instructions.name) / f"{source}.so"
        try:
            compiler.compile_library(compiler.find_compiler(), source, (instructions,), target)
        except compiler.CompileError as error:
            pytest.skip(str(error))
        return build._load(target, source)

    return made
