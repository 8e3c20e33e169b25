"""Options that every launch names, because Triton's defaults for them change from version to version."""

import ast
import dataclasses
from pathlib import Path

import pytest

import vbrt
from vbrt.libraries import probe, triton_api

triton = pytest.importorskip("triton")
from triton.backends.nvidia import compiler  # noqa: E402 - needs it

PACKAGE = Path(vbrt.__file__).parent


def launches(source):
    """Calls of `kernel[grid](...)`: name of the kernel and the options that are spread into the call."""
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript):
            name = ast.unparse(call.func.value)
            if name.endswith("kernel"):
                yield name, {ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg is None}


def test_every_launch_says_whether_multiplications_are_fused_with_additions():
    options = {f"triton_api.fp_fusion({fused})" for fused in (True, False)}
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}
    found = {file: list(launches(text)) for file, text in texts.items() if "kernel[" in text}
    assert sum(map(len, found.values())) >= 10 and "kernels/cuda/launcher.py" in found
    for file, calls in found.items():
        for name, spread in calls:
            assert spread & options or (file, spread) == ("kernels/cuda/launcher.py", {"options"}), (file, name)


def test_the_option_is_one_that_triton_knows(monkeypatch):
    assert triton_api.fp_fusion(True) == {"enable_fp_fusion": True}
    assert triton_api.fp_fusion(False) == {"enable_fp_fusion": False}

    @dataclasses.dataclass
    class Fewer:
        num_warps: int = 4

    triton_api.fp_fusion.cache_clear()
    monkeypatch.setattr(probe, "_losses", {})  # the process has said nothing
    monkeypatch.setattr(compiler, "CUDAOptions", Fewer)
    with pytest.warns(UserWarning, match="has no option enable_fp_fusion.*may round differently"):
        assert triton_api.fp_fusion(True) == {}
    triton_api.fp_fusion.cache_clear()


@triton.jit
def multiply_add_kernel(x_ptr, y_ptr):
    x = triton.language.load(x_ptr)
    triton.language.store(y_ptr, x * x + x)


@pytest.mark.parametrize("default", ["0", "1"])
def test_what_is_said_counts_and_not_the_default_of_triton(default, monkeypatch):
    """TRITON_DEFAULT_FP_FUSION has Triton 3.9 do as 3.10 does; versions without it take what is said, too."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", default)
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    source = ASTSource(multiply_add_kernel, {"x_ptr": "*fp32", "y_ptr": "*fp32"}, {})
    for fused in (True, False):
        options = dict(triton_api.fp_fusion(fused))
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        assert ("fma.rn.f32" in ptx) == fused
