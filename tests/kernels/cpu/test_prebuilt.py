"""Libraries of a wheel: found without a compiler, with the bits of those built on the spot; one pool of threads."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

import vbrt
from tests.emulator import arm
from vbrt.kernels.cpu import build, compiler, encode

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
WHY = build.refusal(CPU)
built = pytest.mark.skipif(WHY is not None, reason=str(WHY))
BEST = compiler.suitable()[0]
_EM_AARCH64 = 183
#: prints which libraries compute, whether a second OpenMP came with them, and what a layer gives
PROGRAM = """
import torch, vbrt
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 96)).eval()
x = torch.randn(3, 256)
with vbrt.wrap(model, "fp4", weights={"keep_head": False}) as vb:
    y = vb(x)
    stats = vb.stats()
runtimes = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.rpartition("/")[2]}
bits = y.detach().view(torch.int32).sum(dtype=torch.int64).item()
print(stats.libraries.get("linear"), len(runtimes), bits, vbrt.__file__)
"""


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has loaded nothing, without a compiler; the folder of its package's libraries."""
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(compiler, "FOLDER", tmp_path)
    monkeypatch.setattr(build, "_ORIGINS", {})
    monkeypatch.setattr(encode, "_seen", 0)
    build._build.cache_clear()
    yield tmp_path
    build._build.cache_clear()


def wrapped_output():
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 64)).eval(), torch.randn(1, 64)
    with warnings.catch_warnings(record=True) as caught, vbrt.wrap(model, "fp4", weights={"keep_head": False}) as vb:
        warnings.simplefilter("always")
        return vb(x), vb.stats(), [str(w.message) for w in caught if "CPU" in str(w.message)]


@built
def test_a_library_of_the_package_serves_a_machine_without_a_compiler_and_is_named(fresh, monkeypatch):
    monkeypatch.delenv("CC")
    here, stats, _ = wrapped_output()
    assert stats.libraries == {"linear": f"built here ({BEST.name})"}
    compiler.compile_library(compiler.find_compiler(), "linear", (BEST,), fresh / f"linear.{BEST.name}.so")
    monkeypatch.setenv("CC", "no-such-compiler")
    build._build.cache_clear()
    given, stats, said = wrapped_output()
    assert torch.equal(given, here) and stats.libraries == {"linear": f"prebuilt ({BEST.name})"} and not said
    assert f"C kernels: linear prebuilt ({BEST.name})" in stats.table(verbose=True)
    assert vbrt.Stats.from_dict(stats.to_dict()).libraries == stats.libraries
    assert {layer.kernel for layer in stats.layers.values()} == {"compiled"} and not stats.fallbacks


@built
def test_a_library_that_cannot_be_loaded_is_built_again_and_named_once(fresh, monkeypatch):
    (fresh / f"linear.{BEST.name}.so").write_text("damaged")
    why = build.refusal(CPU)
    assert f"the package's library linear.{BEST.name}.so cannot be loaded" in why and "no C compiler was found" in why
    monkeypatch.delenv("CC")
    build._build.cache_clear()
    _, stats, said = wrapped_output()
    assert len(said) == 1 and "cannot be loaded" in said[0] and "linear was built here instead" in said[0]
    assert stats.libraries == {"linear": f"built here ({BEST.name})"}


def test_a_cpu_that_the_package_has_no_library_for_says_so(fresh, monkeypatch):
    monkeypatch.setattr(compiler, "machine", lambda: "riscv64")
    (fresh / f"linear.{BEST.name}.so").write_text("never read")
    assert build.refusal(CPU).startswith("the package's libraries are for other CPUs than this one (riscv64), and no C")


@built
def test_libraries_name_no_runtime_and_compute_in_torchs_threads(library_for):
    library = library_for("linear", BEST)
    content = Path(library._name).read_bytes()
    assert not any(runtime in content for runtime in (b"libgomp.so", b"libomp.so", b"libiomp"))
    assert all(build._openmp())  # torch's own


@pytest.fixture
def hatch_build(monkeypatch):
    """The build backend's hook, which builds two of the sources."""
    pytest.importorskip("hatchling", reason="hatchling builds the wheel")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(compiler, "sources", lambda: ["reading", "tiles"])
    monkeypatch.delenv("CC", raising=False)
    return module


def built_wheel(folder, machine):
    make = "import sys, hatchling.build as b; b.build_wheel(sys.argv[1])"
    environment = {**os.environ, "VBRT_WHEEL_MACHINE": machine}
    subprocess.run(
        [sys.executable, "-c", make, str(folder)], cwd=ROOT, check=True, capture_output=True, env=environment
    )
    (wheel,) = folder.glob("vbrt-*.whl")
    return wheel


@pytest.mark.skipif(shutil.which(arm.COMPILER) is None, reason=f"{arm.COMPILER} is not installed")
def test_libraries_of_an_arm_wheel_are_arm_code_and_the_oldest_glibc_is_in_its_tag(hatch_build, tmp_path):
    libraries, notes = hatch_build.prebuild(compiler, tmp_path, "aarch64")
    assert not notes
    assert {path.name for path in libraries} == {f"{s}.{n}.so" for s in ("reading", "tiles") for n in arm.SETS}
    for path in libraries:
        head = path.read_bytes()[:20]
        assert head[:4] == b"\x7fELF" and int.from_bytes(head[18:20], "little") == _EM_AARCH64
    assert re.fullmatch(r"manylinux_2_\d+_aarch64", hatch_build.platform_tag("aarch64", libraries))


def test_a_wheel_for_another_cpu_names_the_compiler_that_it_wants(hatch_build, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    other = "aarch64" if compiler.machine() == "x86_64" else "x86_64"
    package = f"gcc-{other.replace('_', '-')}-linux-gnu"
    with pytest.raises(compiler.CompileError, match=f"{other}-linux-gnu-gcc was not found.*apt install {package}"):
        hatch_build.prebuild(compiler, tmp_path, other)


def test_a_wheel_for_windows_and_macos_has_no_libraries(tmp_path):
    pytest.importorskip("hatchling", reason="hatchling builds the wheel")
    wheel = built_wheel(tmp_path, "none")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which(arm.COMPILER) is None, reason=f"{arm.COMPILER} is not installed")
def test_a_cross_built_wheel_has_the_tag_and_every_library_of_arm(tmp_path):
    pytest.importorskip("hatchling", reason="hatchling builds the wheel")
    wheel = built_wheel(tmp_path, "aarch64")
    assert re.search(r"-py3-none-manylinux_2_\d+_aarch64\.whl$", wheel.name)
    prebuilt = {Path(name).name for name in zipfile.ZipFile(wheel).namelist() if "/prebuilt/" in name}
    assert prebuilt == {compiler.file_name(s, name) for s in compiler.sources() for name in arm.SETS}


@built
@pytest.mark.exhaustive
def test_a_wheel_computes_without_a_compiler_what_a_checkout_computes(tmp_path):
    pytest.importorskip("hatchling", reason="hatchling builds the wheel")
    wheel = built_wheel(tmp_path, "")
    assert "manylinux_2_" in wheel.name or "linux_" in wheel.name
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    kinds = [each for each in compiler.INSTRUCTION_SETS if each.machine == compiler.machine()]
    files = {path.name for path in (tmp_path / "installed/vbrt/kernels/cpu/prebuilt").iterdir()}
    assert files == {compiler.file_name(s, each.name) for s in compiler.sources() for each in kinds}
    said = []
    for package, path in ((tmp_path / "installed", "/nowhere"), (ROOT, os.environ["PATH"])):
        kept = {key: value for key, value in os.environ.items() if key not in ("CC", "PYTHONPATH", "PATH")}
        environment = {**kept, "PYTHONPATH": str(package), "PATH": path}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        said.append(done.stdout.rsplit(maxsplit=3))
    (wheels, one, sum_, file), (here, also_one, same_sum, _) = said
    assert wheels == f"prebuilt ({BEST.name})" and here == f"built here ({BEST.name})"
    assert (one, sum_) == (also_one, same_sum) and one == "1" and Path(file).is_relative_to(tmp_path)
