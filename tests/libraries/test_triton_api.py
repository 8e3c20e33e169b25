"""What is private to Triton is there in the installed version, and missing it is announced or refused."""

import hashlib
import inspect
import pathlib
import sysconfig
import types

import pytest

from vbrt.errors import KernelError
from vbrt.libraries import probe, triton_api

triton = pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def announced_anew(monkeypatch):
    monkeypatch.setattr(probe, "_losses", {})


def test_a_compiled_kernel_is_called_as_triton_calls_it():
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler.compiler import CompiledKernel

    names = [*inspect.signature(CudaLauncher.__call__).parameters][1:6]
    assert names == ["gridX", "gridY", "gridZ", "stream", "function"]
    assert isinstance(CompiledKernel.run, property) and "packed_metadata" in inspect.getsource(CompiledKernel.__init__)
    given = []
    compiled = types.SimpleNamespace(run=lambda *args: given.append(args), function="f", packed_metadata="m")
    triton_api.direct_launch(compiled)(3, 2, 7, [16, 32], (5,), (True,))
    assert given == [(3, 2, 1, 7, "f", "m", None, None, None, 16, 32, 5, True)]


def test_what_launches_a_kernel_is_made_once_for_a_signature_and_not_imported(tmp_path, monkeypatch):
    """As Triton 3.6 makes it: the launch finds the file by a hash of the source."""
    from triton import knobs
    from triton.backends.nvidia import driver
    from triton.runtime import build, cache

    made = []

    def compile_c(name, source, folder, *given):
        made.append(pathlib.Path(source).read_text())
        so = pathlib.Path(folder, "made.so")
        so.write_bytes(b"no library")
        return str(so)

    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(
        driver, "make_launcher", lambda constants, signature, meta: f"{signature} {meta}", raising=False
    )
    monkeypatch.setattr(driver, "library_dirs", list)
    monkeypatch.setattr(build, "_build", compile_c)
    one, other = (types.SimpleNamespace(signature={"x": kind}) for kind in ("*bf16", "*fp32"))
    for source in (one, other, one):
        triton_api.make_launcher(types.SimpleNamespace(src=source, metadata=types.SimpleNamespace(tensordesc_meta=[])))
    assert made == ["{'x': '*bf16'} []", "{'x': '*fp32'} []"]
    key = hashlib.sha256((made[0] + build.platform_key()).encode()).hexdigest()
    file = "__triton_launcher" + sysconfig.get_config_var("EXT_SUFFIX")
    assert pathlib.Path(cache.get_cache_manager(key).get_file(file)).read_bytes() == b"no library"
    monkeypatch.setattr(triton, "__version__", "3.7.0")
    triton_api.make_launcher(None)


def test_constants_are_known_by_the_names_of_the_signature():
    @triton.jit
    def kernel(x_ptr, N, BLOCK: triton.language.constexpr, DONE: triton.language.constexpr):
        pass

    assert triton_api.constant_names(kernel) == ("BLOCK", "DONE")
    with pytest.raises(KernelError, match=r"expected a jitted kernel of Triton 3\.6"):
        triton_api.constant_names(lambda: None)


def test_a_name_of_gluon_that_changed_once_more_is_an_error_that_says_which_versions_do():
    module = types.SimpleNamespace(__name__="gluon", second=2)
    assert triton_api.renamed(module, "first", "second") == 2
    with pytest.raises(KernelError, match=r"gluon has no third or fourth; expected Triton 3\.6 to 3\.9"):
        triton_api.renamed(module, "third", "fourth")
