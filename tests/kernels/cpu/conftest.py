"""The C kernels built for other CPUs than this one."""

import functools
import subprocess

import pytest

from vbrt.kernels.cpu import build


@pytest.fixture(scope="session")
def older_library(tmp_path_factory):
    """Builds a source of the kernels with the compiler flags of another CPU, once."""

    @functools.cache
    def made(source, flags):
        target = tmp_path_factory.mktemp("older") / f"{source}.so"
        options = ["-O3", "-w", "-shared", "-fPIC", *flags]
        command = [*build._compiler(), *options, str(build._HERE / f"{source}.c"), "-lm", "-o", str(target)]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip(f"the compiler does not know {flags}")
        return build._load(target, source)

    return made
