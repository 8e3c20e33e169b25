import functools
import json

import pytest
import torch

import vbrt
from tests.kernels.cuda.gpu_cases import error, tiled
from vbrt.config import Machine
from vbrt.errors import KernelError, VBError
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.e2m1 import linear as e2m1_linear
from vbrt.kernels.cuda.e2m1 import tuned_configs, tuning
from vbrt.kernels.cuda.e2m1.tuning import Case, Found
from vbrt.kernels.cuda.launch_table import Gpu, Launch

IDENTITY = {"gpu": "Some GPU", "triton": "3.6.0", "kernels": tuned_configs.KERNELS}
FASTEST = Launch(4, 16, False)  # in no table


def plan_of(*shapes, **changes):
    """The plan of linears of shapes (out, in) on a machine with a GPU."""
    layers = [torch.nn.Linear(k, n, bias=False, device="meta", dtype=torch.bfloat16) for n, k in shapes]
    weights = {"keep_head": False, "min_parameters": 1, **changes.pop("weights", {})}
    config = vbrt.load_config("fp4", weights=weights, **changes)
    return vbrt.make_plan(torch.nn.ModuleList(layers), config, Machine(1 << 33, 1 << 33, 1 << 33, 1 << 33, None))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning.tuned.cache_clear()
    yield tmp_path
    tuning.tuned.cache_clear()


@pytest.fixture
def some_gpu(monkeypatch):
    monkeypatch.setattr(tuned_configs, "identity", lambda index: dict(IDENTITY))
    return tuned_configs.tuning_path("Some GPU", "3.6.0")


@pytest.fixture
def fake_gpu(monkeypatch):
    """A device of sm_90 on which `FASTEST` takes 8 µs and any other configuration 10."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(devices, "capability", lambda index: (9, 0))
    monkeypatch.setattr(devices, "gpu", lambda index: Gpu(9, 132))
    monkeypatch.setattr(devices, "_why_unavailable", lambda needs: None)
    monkeypatch.setattr(devices, "refusal", devices.refusal.__wrapped__)

    def us(tokens, launch):
        return 8.0 if launch == FASTEST else 10.0

    monkeypatch.setattr(tuning, "_timer", lambda n, k, format, device: us)


def test_what_is_written_is_read_again(some_gpu, own_cache):
    launches = {(1, 256, 32): Launch(2, 16, True), (2, 896, 32): Launch(1, 4, False)}
    assert tuned_configs.write(launches, IDENTITY) == some_gpu
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
    paths = {
        tuned_configs.tuning_path(gpu, version)
        for gpu in ("NVIDIA H200", "NVIDIA L4")
        for version in ("3.6.0", "3.9.0")
    }
    assert len(paths) == 4 and all(path.name.endswith(f"-v{tuned_configs.KERNELS}.json") for path in paths)


def test_only_what_beats_the_table_by_more_than_noise_replaces_it():
    case, table, other = Case(4096, 4096, "nvfp4", 1), Launch(1, 8, True), Launch(4, 16, False)
    found = tuning._fastest(case, table, lambda launch: 9.8 if launch == other else 10.0)
    assert found == Found(case, table, 10.0, table, 10.0)
    found = tuning._fastest(case, table, lambda launch: 9.0 if launch == other else 10.0)
    assert found == Found(case, table, 10.0, other, 9.0)


def test_what_cannot_be_tuned_is_refused(monkeypatch):
    plan = plan_of((64, 64))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KernelError, match="sm_80"):
        vbrt.tune(plan)
    for tokens in ((1, 64), (0,), ()):
        with pytest.raises(KernelError, match="from 1 to 16"):
            vbrt.tune(plan, tokens=tokens)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in (-1, 2):
        with pytest.raises(KernelError, match=f"device = {device}; expected 0 to 1"):
            vbrt.tune(plan, device=device)
    monkeypatch.setattr(devices, "capability", lambda index: (7, 5))
    monkeypatch.setattr(devices, "_why_unavailable", lambda needs: None)
    monkeypatch.setattr(devices, "refusal", devices.refusal.__wrapped__)
    with pytest.raises(KernelError, match="device 1: sm_75 has no bf16 arithmetic, it takes sm_80"):
        vbrt.tune(plan, device=1)


@pytest.mark.parametrize("changes", [
    {"weights": {"format": "nf4"}}, {"weights": {"fine": "exact"}}, {"mode": "train"},
])  # fmt: skip
def test_a_plan_without_layers_for_the_kernel_is_refused(some_gpu, fake_gpu, changes):
    with pytest.raises(KernelError, match="no layer of this plan"):
        vbrt.tune(plan_of((512, 1024), **changes))
    assert not some_gpu.exists()


def test_each_shape_and_number_of_tokens_is_timed_once_on_the_kernel_that_it_runs_on(fake_gpu):
    plan = plan_of((512, 1024), (1024, 512), (512, 1024), (4096, 14336))
    # at 16 tokens sm_90 multiplies few long rows by the kernel for many
    assert tuning.cases(plan, tokens=(16, 1, 16)) == [
        Case(512, 1024, "nvfp4", 16), Case(512, 1024, "nvfp4", 1), Case(1024, 512, "nvfp4", 16),
        Case(1024, 512, "nvfp4", 1), Case(4096, 14336, "nvfp4", 1)]  # fmt: skip
    with pytest.raises(KernelError, match=r"at \(16,\) tokens"):
        tuning.cases(plan_of((4096, 14336)), tokens=(16,))


def test_each_result_is_reported_once_it_is_kept_and_used(some_gpu, fake_gpu):
    reports = []
    path = vbrt.tune(plan_of((512, 1024), (1024, 512)), report=lambda found: reports.append((found, tuning.tuned(0))))
    assert path == some_gpu and len(reports) == 4
    for count, (found, held) in enumerate(reports, start=1):
        assert len(held) == count and held[found.case.key] == found.launch == FASTEST
        assert (found.table_us, found.us) == (10.0, 8.0) and found.table != FASTEST
    assert tuning.tuned(0) == reports[-1][1]
    assert set(tuning.tuned(0)) == {(groups, *shape) for groups in (1, 2) for shape in ((32, 8), (64, 4))}


def test_an_interrupted_search_keeps_what_it_has_found(some_gpu, fake_gpu):
    def interrupted(found):
        if found.case.n == 1024:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vbrt.tune(plan_of((512, 1024), (1024, 512)), report=interrupted)
    assert set(tuning.tuned(0)) == {(1, 32, 8), (2, 32, 8), (1, 64, 4)}
    vbrt.tune(plan_of((2048, 512)), tokens=[5])  # a later search adds to the file
    assert set(tuning.tuned(0)) == {(1, 32, 8), (2, 32, 8), (1, 64, 4), (1, 128, 4)}
    assert [p.name for p in some_gpu.parent.iterdir()] == [some_gpu.name]


def test_a_folder_that_cannot_be_written_is_refused_before_the_search(some_gpu, fake_gpu, own_cache, monkeypatch):
    (own_cache / "vbrt").touch()
    monkeypatch.setattr(tuning, "_timer", None)
    monkeypatch.setattr(tuning, "tuned", functools.cache(lambda index: {}))  # reading it would be announced, too
    with pytest.raises(VBError, match=r"cannot be written: .*XDG_CACHE_HOME"):
        vbrt.tune(plan_of((512, 1024)))


@pytest.mark.gpu
def test_tuned_layers_compute_the_same(monkeypatch):
    monkeypatch.setattr(tuning, "CANDIDATES", (Launch(1, 4, True), Launch(2, 8, False)))
    model = torch.nn.Sequential(torch.nn.Linear(1024, 512, bias=False)).to(torch.bfloat16)
    plan = vbrt.make_plan(model, vbrt.load_config("fp4", weights={"keep_head": False, "min_parameters": 1}))
    monkeypatch.setattr(tuning, "_GAIN", 1e9)  # any but the table's
    reports = []
    path = vbrt.tune(plan, report=reports.append)
    assert [(found.case.tokens, found.launch) for found in reports] == [
        (1, tuning.tuned(0)[1, 32, 8]),
        (16, tuning.tuned(0)[2, 32, 8]),
    ]
    assert all(found.us > 0 and found.table_us > 0 for found in reports)
    assert path.exists() and set(tuning.tuned(0)) == {(1, 32, 8), (2, 32, 8)}
    assert set(tuning.tuned(0).values()) <= set(tuning.CANDIDATES)
    planes, weight = tiled("nvfp4", (512, 1024))
    for tokens in (1, 16):
        x = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16)
        assert error(e2m1_linear.linear(x, planes), x.double() @ weight.T) < 3e-3
