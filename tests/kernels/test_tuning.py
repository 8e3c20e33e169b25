import json

import pytest
import torch

import vbrt
from tests.kernels.gpu_cases import error, tiled
from vbrt.errors import KernelError
from vbrt.kernels import fp4_linear, tuning
from vbrt.kernels.launch_table import Launch

IDENTITY = {"gpu": "Some GPU", "triton": "3.6.0", "kernels": tuning.KERNELS}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning.tuned.cache_clear()
    yield tmp_path
    tuning.tuned.cache_clear()


@pytest.fixture
def some_gpu(monkeypatch):
    monkeypatch.setattr(tuning, "_identity", lambda index: dict(IDENTITY))
    return tuning.tuning_path("Some GPU", "3.6.0")


def test_what_is_written_is_read_again(some_gpu, own_cache):
    launches = {(1, 256, 32): Launch(2, 16, True), (2, 896, 32): Launch(1, 4, False)}
    assert tuning._write(launches, IDENTITY) == some_gpu
    assert some_gpu.is_relative_to(own_cache) and [p.name for p in some_gpu.parent.iterdir()] == [some_gpu.name]
    assert tuning.tuned(0) == launches


def test_without_a_file_nothing_is_tuned_and_nothing_is_said(some_gpu, recwarn):
    assert tuning.tuned(0) == {} and not recwarn.list


@pytest.mark.parametrize("change", [
    b"", b"{", b"[]", b"\xff\xfe", b"null",
    {"gpu": "Another GPU"}, {"triton": "3.5.0"}, {"kernels": 0}, {"launches": None}, {"launches": [[1, 2]]},
    {"launches": [[1, 256, 32, 3, 16, True]]}, {"launches": [[1, 256, 32, 2, "16", True]]}, {"launches": [["a"] * 6]},
])  # fmt: skip
def test_a_damaged_or_foreign_file_is_announced_and_ignored(some_gpu, change):
    some_gpu.parent.mkdir(parents=True)
    if isinstance(change, bytes):
        some_gpu.write_bytes(change)
    else:
        some_gpu.write_text(json.dumps({**IDENTITY, "launches": [], **change}))
    with pytest.warns(UserWarning, match="is ignored"):
        assert tuning.tuned(0) == {}


def test_another_gpu_triton_or_kernel_has_another_file():
    paths = {tuning.tuning_path(gpu, version) for gpu in ("NVIDIA H200", "NVIDIA L4") for version in ("3.6.0", "3.9.0")}
    assert len(paths) == 4 and all(path.name.endswith(f"-v{tuning.KERNELS}.json") for path in paths)


def test_only_what_beats_the_table_by_more_than_noise_replaces_it():
    table, other = Launch(1, 8, True), Launch(4, 16, False)
    assert tuning._fastest(table, lambda launch: 9.8 if launch == other else 10.0) == table
    assert tuning._fastest(table, lambda launch: 9.0 if launch == other else 10.0) == other


def test_what_cannot_be_tuned_is_refused(monkeypatch):
    plan = vbrt.make_plan(torch.nn.Linear(64, 64), vbrt.load_config("fp4"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KernelError, match="sm_80"):
        vbrt.tune(plan)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fp4_linear, "major", lambda index: 9)
    with pytest.raises(KernelError, match="from 1 to 16"):
        vbrt.tune(plan, tokens=(1, 64))


@pytest.mark.gpu
def test_tuned_layers_compute_the_same(monkeypatch):
    monkeypatch.setattr(tuning, "CANDIDATES", (Launch(1, 4, True), Launch(2, 8, False)))
    model = torch.nn.Sequential(torch.nn.Linear(1024, 512, bias=False)).to(torch.bfloat16)
    plan = vbrt.make_plan(model, vbrt.load_config("fp4", weights={"keep_head": False, "min_parameters": 1}))
    monkeypatch.setattr(tuning, "_GAIN", 1e9)  # any but the table's
    path = vbrt.tune(plan)
    assert path.exists() and set(tuning.tuned(0)) == {(1, 32, 8), (2, 32, 8)}
    assert set(tuning.tuned(0).values()) <= set(tuning.CANDIDATES)
    planes, weight = tiled("nvfp4", (512, 1024))
    for tokens in (1, 16):
        x = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16)
        assert error(fp4_linear.linear(x, planes), x.double() @ weight.T) < 3e-3
