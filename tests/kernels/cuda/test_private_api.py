"""What is private to Triton and to torch's compiler is there in the installed versions, and missing it is announced."""

import hashlib
import inspect
import pathlib
import sysconfig
import types

import pytest
import torch

from vbrt.errors import KernelError
from vbrt.kernels.cuda import private_api

triton = pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def announced_anew():
    private_api._announce.cache_clear()
    yield
    private_api._announce.cache_clear()


def test_a_compiled_kernel_is_called_as_triton_calls_it():
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler.compiler import CompiledKernel

    names = [*inspect.signature(CudaLauncher.__call__).parameters][1:6]
    assert names == ["gridX", "gridY", "gridZ", "stream", "function"]
    assert isinstance(CompiledKernel.run, property) and "packed_metadata" in inspect.getsource(CompiledKernel.__init__)
    given = []
    compiled = types.SimpleNamespace(run=lambda *args: given.append(args), function="f", packed_metadata="m")
    private_api.direct_launch(compiled)(3, 2, 7, [16, 32], (5,), (True,))
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
        private_api.make_launcher(types.SimpleNamespace(src=source, metadata=types.SimpleNamespace(tensordesc_meta=[])))
    assert made == ["{'x': '*bf16'} []", "{'x': '*fp32'} []"]
    key = hashlib.sha256((made[0] + build.platform_key()).encode()).hexdigest()
    file = "__triton_launcher" + sysconfig.get_config_var("EXT_SUFFIX")
    assert pathlib.Path(cache.get_cache_manager(key).get_file(file)).read_bytes() == b"no library"
    monkeypatch.setattr(triton, "__version__", "3.7.0")
    private_api.make_launcher(None)


def test_constants_are_known_by_the_names_of_the_signature():
    @triton.jit
    def kernel(x_ptr, N, BLOCK: triton.language.constexpr, DONE: triton.language.constexpr):
        pass

    assert private_api.constant_names(kernel) == ("BLOCK", "DONE")
    with pytest.raises(KernelError, match=r"expected a jitted kernel of Triton 3\.6"):
        private_api.constant_names(lambda: None)


def test_a_name_of_gluon_that_changed_once_more_is_an_error_that_says_which_versions_do():
    module = types.SimpleNamespace(__name__="gluon", second=2)
    assert private_api.renamed(module, "first", "second") == 2
    with pytest.raises(KernelError, match=r"gluon has no third or fourth; expected Triton 3\.6 to 3\.9"):
        private_api.renamed(module, "third", "fourth")


def test_an_inductor_without_what_graph_passes_need_is_an_error_that_says_what_works(monkeypatch):
    from torch._inductor import config, custom_graph_pass

    assert issubclass(private_api.graph_pass_base(), object) and hasattr(config, private_api.PASS_OPTION)
    assert private_api.options_of_mode("default") == {}
    monkeypatch.delattr(custom_graph_pass, "CustomGraphPass")
    with pytest.raises(KernelError, match=r"CustomGraphPass.*expected torch 2\.11 to .*without these options"):
        private_api.graph_pass_base()


def test_an_inductor_that_cannot_be_told_of_an_operator_is_announced(monkeypatch):
    from torch._inductor import lowering

    op = torch.ops.aten.add.Tensor
    monkeypatch.setattr(lowering, "lowerings", {})
    monkeypatch.delattr(lowering, "make_fallback")
    with pytest.warns(UserWarning, match=r"tested with 2\.11 to .*may take minutes"):
        private_api.never_lower(op)


def test_a_guard_without_a_name_is_an_error():
    assert private_api.guards_attribute(types.SimpleNamespace(name="L['self']._vb_page"), "_vb_page")
    assert not private_api.guards_attribute(types.SimpleNamespace(name="L['self']._vb_pages"), "_vb_page")
    with pytest.raises(KernelError, match="has no attribute 'name'"):
        private_api.guards_attribute(types.SimpleNamespace(), "_vb_page")


def test_frames_are_skipped_whatever_the_version_and_where_they_cannot_be_it_is_announced(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert private_api.skip_frames_of(lambda: None)
    monkeypatch.delattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy")
    with pytest.warns(UserWarning, match=r"torch 2\.99\.0: .*set_code_exec_strategy.*tested with 2\.11.*two seconds"):
        assert not private_api.skip_frames_of(lambda: None)


def test_arguments_of_frames_that_changed_are_announced(monkeypatch):
    monkeypatch.setattr(torch._C._dynamo.eval_frame, "_FrameExecStrategy", lambda: None)
    with pytest.warns(UserWarning, match="takes 0 positional arguments but 2 were given.*two seconds"):
        assert not private_api.skip_frames_of(lambda: None)
