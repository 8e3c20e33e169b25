"""The C kernels built for other CPUs than this one."""

import functools

import pytest

from vbrt.kernels.cpu import build, compiler


@pytest.fixture
def use_library(monkeypatch):
    """Puts a library in the place of a source's own for as long as a test runs."""
    own = build._build

    def use(source, library):
        loaded = build._Loaded(library, "of a test")
        monkeypatch.setattr(build, "_build", lambda wanted: loaded if wanted == source else own(wanted))

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
