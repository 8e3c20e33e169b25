"""Building the C kernels: by which compiler, when, and what is said where it cannot be done."""

import subprocess
import sys
import tempfile
import warnings

import pytest
import torch

import vbrt
from vbrt.kernels.cpu import build, compiler, encode

CPU = torch.device("cpu")
#: writes its last argument, where that is a path
MAKES_TEXT = "sh -c 'for last do :; done; case $last in /*) echo text > \"$last\"; esac' x"
WHY = build.refusal(CPU)
built = pytest.mark.skipif(WHY is not None, reason=str(WHY))


@pytest.fixture
def cc(monkeypatch):
    """Sets CC, with nothing built; both come back."""

    def use(command):
        monkeypatch.setenv("CC", command)
        build._build.cache_clear()

    yield use
    build._build.cache_clear()


@pytest.mark.parametrize(
    ("command", "reason"),
    [("no-such-compiler", "no C compiler was found (no-such-compiler, which CC names)"),
     ("/tmp", "no C compiler was found (/tmp, which CC names)"),
     ("false", "the C compiler 'false' failed: it made nothing, and ended with 1"),
     ("true", "the C compiler 'true' failed: it made nothing, and ended with 0"),
     ("cat", "the C compiler 'cat' failed: "),
     ("'x", 'CC is "\'x", which is no command (No closing quotation)'),
     ("sh -c 'printf \"\\377\" >&2; exit 1'", "failed: \ufffd"),
     ("sh -c 'sleep 60'", "the C compiler 'sh' took more than 0.2 s"),
     (MAKES_TEXT, "what the C compiler made cannot be loaded: "),
     ("cc --no-such-option", "the C compiler 'cc --no-such-option' failed: ")],
)  # fmt: skip
def test_a_machine_that_cannot_compile_says_so_once_and_takes_the_reference(cc, command, reason, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    cc(command)
    if "sleep" in command:
        monkeypatch.setattr(compiler, "_LIMIT_S", 0.2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).eval()
        with vbrt.wrap(model, "fp4", weights={"keep_head": False}) as vb:
            vb(torch.randn(1, 64))
            stats = vb.stats()
    said = [str(w.message) for w in caught if reason in str(w.message)]
    assert len(said) == 1 and "plain torch" in said[0]
    assert any(reason in line for line in stats.fallbacks)
    assert {layer.kernel for layer in stats.layers.values()} == {"reference"}
    assert not list(tmp_path.iterdir())


@built
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("cc -g0 -DUNUSED='a b'", ["cc", "-g0", "-DUNUSED=a b"]),
        pytest.param("env LC_ALL=C cc", ["env", "LC_ALL=C", "cc"], marks=pytest.mark.exhaustive),
        pytest.param("  ", None, marks=pytest.mark.exhaustive),
    ],
)
def test_a_compiler_may_come_with_arguments(cc, command, words):
    cc(command)
    assert words is None or compiler.find_compiler() == words
    assert build.refusal(CPU) is None


@built
def test_a_machine_that_lets_no_file_be_written_takes_the_reference(cc, monkeypatch):
    cc("cc")
    monkeypatch.setattr(tempfile, "tempdir", "/proc/self")
    assert "/proc/self" in build.refusal(CPU)


def test_who_asks_for_the_reference_needs_no_compiler(cc):
    cc("no-such-compiler")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with vbrt.wrap(model, "fp4", compute={"backend": "reference"}) as vb:
            vb(torch.randn(1, 64))
            assert not vb.stats().fallbacks
    assert build._build.cache_info().misses == 0


@pytest.mark.parametrize(("preset", "builds"), [("fp4", 1), ("exact", 1), ("dense", 0)])
def test_wrapping_compiles_nothing_and_the_first_forward_what_it_needs(cc, preset, builds, monkeypatch):
    cc("no-such-compiler")
    monkeypatch.setattr(encode, "_seen", 0)  # weights are few, then, for what it takes to build their encoders
    monkeypatch.setattr(build, "_ORIGINS", {})
    model = torch.nn.Sequential(torch.nn.Linear(64, 64)).bfloat16().eval()
    with vbrt.wrap(model, preset, weights={"keep_head": False}, tiers={"gpu": {"enabled": False}}) as vb:
        assert build._build.cache_info().misses == 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            vb(torch.randn(1, 64, dtype=torch.bfloat16))
        assert build._build.cache_info().misses == builds


@pytest.mark.exhaustive
def test_importing_the_package_compiles_nothing():
    program = "import vbrt.kernels.cpu.build as c, vbrt.kernels; assert c._build.cache_info().misses == 0"
    subprocess.run([sys.executable, "-c", program], check=True)
