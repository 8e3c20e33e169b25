import dataclasses
import functools
import json
import types

import pytest
import torch

import vbrt
from tests.kernels.cuda.gpu_cases import error, tiled
from vbrt.config import Machine
from vbrt.errors import KernelError, VBError
from vbrt.formats import get_format
from vbrt.kernels.cuda import devices, tuned_configs, tuning, tuning_families
from vbrt.kernels.cuda.e2m1 import linear as e2m1_linear
from vbrt.kernels.cuda.e2m1.tiles import TILES, tile_shape, unpack_tiles
from vbrt.kernels.cuda.launch_table import (
    WIDE,
    Gpu,
    GroupedLaunch,
    Launch,
    Matmul,
    MmaLaunch,
    PersistentLaunch,
    RowsLaunch,
    TokenLaunch,
    WideLaunch,
)
from vbrt.kernels.cuda.tuning import Found
from vbrt.residency.plan_data import Swap
from vbrt.residency.weight_site import WeightSite

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
    tuned_configs.tuned.cache_clear()
    yield tmp_path
    tuned_configs.tuned.cache_clear()


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

    monkeypatch.setattr(tuning, "_timer", lambda case, device: lambda launch: 8.0 if launch == FASTEST else 10.0)


def test_what_is_written_is_read_again(some_gpu, own_cache):
    launches = {("linear", 8, 256, 32): Launch(2, 16, True), ("linear", 64, 256, 32): MmaLaunch(32, 4, 2, 4, 4)}
    launches |= {("linear", 256, 256, 32): WideLaunch(128, 8, 2, 5), ("linear", 512, 256, 32): Matmul()}
    launches |= {
        ("linear", 1024, 256, 32): PersistentLaunch(0, 224, ordered=True),
        ("table", 8, 2, 3): Launch(1, 4, True),
    }
    launches |= {("expert rows", 8, 64, 96, 16, 2): RowsLaunch(1, 2, 8), ("expert blocks", 4096, 64): GroupedLaunch(64)}
    launches[("expert sums", 8, 8, 6)] = TokenLaunch(8, 1, 16, 1)
    assert tuned_configs.write(launches, IDENTITY) == some_gpu
    assert some_gpu.is_relative_to(own_cache) and [p.name for p in some_gpu.parent.iterdir()] == [some_gpu.name]
    assert tuned_configs.tuned(0) == launches


def test_without_a_file_nothing_is_tuned_and_nothing_is_said(some_gpu, recwarn):
    assert tuned_configs.tuned(0) == {} and not recwarn.list


@pytest.mark.parametrize("change", [
    b"", b"{", b"[]", b"\xff\xfe", b"null",
    {"gpu": "Another GPU"}, {"triton": "3.5.0"}, {"kernels": 0}, {"launches": None}, {"launches": [[1, 2]]},
    {"launches": [[["linear", 8, 256, 32], "narrow", [3, 16, True, True]]]},
    {"launches": [[["linear", 8, 256, 32], "narrow", [2, "16", True, True]]]},
    {"launches": [[["linear", 8, 256, 32], "wider", []]]}, {"launches": [[["linear", 8, 256, 32], "mma", [64]]]},
    {"launches": [[["linear", 64, 256, 32], "persistent", [3, 256, 0, False]]]},
])  # fmt: skip
def test_a_damaged_or_foreign_file_is_announced_and_ignored(some_gpu, change):
    some_gpu.parent.mkdir(parents=True)
    if isinstance(change, bytes):
        some_gpu.write_bytes(change)
    else:
        some_gpu.write_text(json.dumps({**IDENTITY, "launches": [], **change}))
    with pytest.warns(UserWarning, match="is ignored"):
        assert tuned_configs.tuned(0) == {}


def test_another_gpu_triton_or_kernel_has_another_file():
    paths = {
        tuned_configs.tuning_path(gpu, version)
        for gpu in ("NVIDIA H200", "NVIDIA L4")
        for version in ("3.6.0", "3.9.0")
    }
    assert len(paths) == 4 and all(path.name.endswith(f"-v{tuned_configs.KERNELS}.json") for path in paths)


def case_of(family, tokens, **changes):
    """The first search of a family for a plan of every kind of layer that has one."""
    plan = plan_of((512, 1024), **changes)
    return next(case for case in tuning.cases(plan, tokens=[tokens]) if case.family == family)


def test_only_what_beats_the_table_by_more_than_noise_replaces_it(fake_gpu):
    case, other = case_of("linear", 1), Launch(4, 16, False)
    found = tuning._fastest(case, lambda launch: 9.8 if launch == other else 10.0)
    assert found == Found(case, case.table, 10.0, case.table, 10.0)
    found = tuning._fastest(case, lambda launch: 9.0 if launch == other else 10.0)
    assert found == Found(case, case.table, 10.0, other, 9.0)


def test_what_cannot_be_tuned_is_refused(monkeypatch):
    plan = plan_of((64, 64))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KernelError, match="sm_80"):
        vbrt.tune(plan)
    for tokens in ((1, 4097), (0,), ()):
        with pytest.raises(KernelError, match="from 1 to 4096"):
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
    {"weights": {"format": "dense"}}, {"weights": {"fine": "exact"}}, {"mode": "train"},
])  # fmt: skip
def test_a_plan_without_layers_for_the_kernel_is_refused(some_gpu, fake_gpu, changes):
    with pytest.raises(KernelError, match="no layer of this plan"):
        vbrt.tune(plan_of((512, 1024), **changes))
    assert not some_gpu.exists()


def test_each_shape_and_number_of_tokens_is_timed_once(fake_gpu):
    plan = plan_of((512, 1024), (1024, 512), (512, 1024))
    found = [(case.n, case.k, case.tokens, case.key) for case in tuning.cases(plan, tokens=(16, 1, 16, 12))]
    assert found == [(512, 1024, 16, ("linear", 16, 32, 8)), (512, 1024, 1, ("linear", 8, 32, 8)),
                     (1024, 512, 16, ("linear", 16, 64, 4)), (1024, 512, 1, ("linear", 8, 64, 4))]  # fmt: skip


@pytest.mark.parametrize(
    ("capability", "tokens", "kinds"),
    [
        ((9, 0), 1, {Launch}),
        ((9, 0), 256, {WideLaunch, PersistentLaunch, Matmul}),
        ((8, 6), 16, {Launch}),
        ((8, 6), 256, {MmaLaunch, Matmul}),
    ],
)
def test_candidates_are_launches_of_the_gpu_that_a_file_may_contain(fake_gpu, monkeypatch, capability, tokens, kinds):
    monkeypatch.setattr(devices, "capability", lambda index: capability)
    monkeypatch.setattr(devices, "gpu", lambda index: Gpu(capability[0], 28, 100 << 10, 99 << 10, minor=capability[1]))
    case = case_of("linear", tokens)
    assert {type(launch) for launch in case.candidates} <= kinds and len(case.candidates) >= 4
    assert {type(launch) for launch in case.candidates} & kinds
    for launch in (case.table, *case.candidates):
        if type(launch) is not PersistentLaunch or not launch.cut:
            name = tuned_configs._NAMES[type(launch)]
            assert tuned_configs._launch(name, list(launch)) == launch


def test_every_family_is_searched_where_its_layers_are(fake_gpu, monkeypatch):
    def families(format, tokens, **layer):
        site = WeightSite("experts" if layer else "layer", (2048, 1024))
        parts = (WeightSite("experts", (1024, 1024), "down"),) if layer else ()
        plan = types.SimpleNamespace(
            mode="infer", swaps=[Swap(site, "bfloat16", 0, format, "none", parts=parts, **layer)]
        )
        found = list(tuning_families.cases_of(plan, tokens, 0))
        assert all(case.table in case.candidates for case in found if case.family != "linear")
        return [case.family for case in found]

    assert families("nf4", (1, 16, 64)) == families("levels16-float16", (1, 16, 64)) == ["table"] * 2
    assert families("mxint8", (1, 16, 64)) == ["whole"] * 2
    experts = {"experts": 64, "top_k": 8}
    assert families("nvfp4", (1,), **experts) == ["expert rows", "expert sums"]
    assert families("mxfp4", (64,), **experts) == ["expert rows"] * 2
    assert families("nvfp4", (4096,), **experts) == ["expert blocks"]
    monkeypatch.setattr(devices, "capability", lambda index: (8, 9))
    assert families("nvfp4", (4096,), **experts) == []


def test_launches_of_a_search_are_tried_and_forgotten(some_gpu):
    key = "linear", 8, 32, 8
    with tuned_configs.trying(0, key, FASTEST):
        assert (
            tuned_configs.found(0, "linear", 5, 32, 8) == FASTEST and tuned_configs.found(0, "linear", 9, 32, 8) is None
        )
    assert tuned_configs.found(0, "linear", 5, 32, 8) is None
    tuned_configs.tuned(0)[key] = Launch(1, 4, True)
    with pytest.raises(ZeroDivisionError), tuned_configs.trying(0, key, FASTEST):
        raise ZeroDivisionError
    assert tuned_configs.found(0, "linear", 8, 32, 8) == Launch(1, 4, True)


def test_products_of_many_tokens_take_what_a_search_found(some_gpu, monkeypatch):
    monkeypatch.setattr(devices, "gpu", lambda index: Gpu(8, 28, 100 << 10, 99 << 10, minor=6))
    weight, found = types.SimpleNamespace(tiles=torch.empty(32, 8, 1), n=512, k=1024), MmaLaunch(32, 4, 2, 2, 4)
    table = e2m1_linear._choice(torch.empty(100, 1024, dtype=torch.bfloat16), weight)
    assert table != found
    for launch, taken in ((found, found), (Matmul(), None)):
        with tuned_configs.trying(None, ("linear", 128, 32, 8), launch):
            for tokens in (65, 128):
                assert e2m1_linear._choice(torch.empty(tokens, 1024, dtype=torch.bfloat16), weight) == taken
            assert e2m1_linear._choice(torch.empty(64, 1024, dtype=torch.bfloat16), weight) != found
            assert e2m1_linear._choice(torch.empty(33, 1024, dtype=torch.float32), weight) != found  # three summands
            if launch is found:
                code = e2m1_linear.code_of((512, 1024), torch.bfloat16, 100, torch.device("cuda"))
                assert code == found._replace(splits=2)
    assert e2m1_linear._choice(torch.empty(100, 1024, dtype=torch.bfloat16), weight) == table


def test_each_result_is_reported_once_it_is_kept_and_used(some_gpu, fake_gpu):
    reports = []
    plan = plan_of((512, 1024), (1024, 512))
    path = vbrt.tune(plan, tokens=(1, 16), report=lambda found: reports.append((found, tuned_configs.tuned(0))))
    assert path == some_gpu and len(reports) == 4
    for count, (found, held) in enumerate(reports, start=1):
        assert len(held) == count and held[found.case.key] == found.launch == FASTEST
        assert (found.table_us, found.us) == (10.0, 8.0) and found.table != FASTEST
    assert tuned_configs.tuned(0) == reports[-1][1]
    assert set(tuned_configs.tuned(0)) == {("linear", m, *shape) for m in (8, 16) for shape in ((32, 8), (64, 4))}


def test_an_interrupted_search_keeps_what_it_has_found(some_gpu, fake_gpu):
    def interrupted(found):
        if found.case.n == 1024:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vbrt.tune(plan_of((512, 1024), (1024, 512)), tokens=(1, 16), report=interrupted)
    before = {("linear", 8, 32, 8), ("linear", 16, 32, 8), ("linear", 8, 64, 4)}
    assert set(tuned_configs.tuned(0)) == before
    vbrt.tune(plan_of((2048, 512)), tokens=[5])  # a later search adds to the file
    assert set(tuned_configs.tuned(0)) == before | {("linear", 8, 128, 4)}
    assert [p.name for p in some_gpu.parent.iterdir()] == [some_gpu.name]


def test_a_folder_that_cannot_be_written_is_refused_before_the_search(some_gpu, fake_gpu, own_cache, monkeypatch):
    (own_cache / "vbrt").touch()
    monkeypatch.setattr(tuning, "_timer", None)
    monkeypatch.setattr(tuned_configs, "tuned", functools.cache(lambda index: {}))  # reading it would be announced, too
    with pytest.raises(VBError, match=r"cannot be written: .*XDG_CACHE_HOME"):
        vbrt.tune(plan_of((512, 1024)))


def searches(tokens, few=2):
    """Of each family on a GPU the first searches, with few candidates."""
    layers = [("nvfp4", (512, 1024)), ("nf4", (512, 1024)), ("mxint8", (512, 1024))]
    swaps = [Swap(WeightSite("layer", shape), "bfloat16", 0, format, "none") for format, shape in layers]
    up, down = WeightSite("experts", (512, 256)), WeightSite("experts", (256, 256), "down")
    swaps.append(Swap(up, "bfloat16", 0, "nvfp4", "none", parts=(down,), experts=16, top_k=4))
    plan = types.SimpleNamespace(mode="infer", swaps=swaps)
    for case in tuning_families.cases_of(plan, tokens, 0):
        yield dataclasses.replace(case, candidates=tuple(c for c in case.candidates if c != case.table)[:few])


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_a_search_multiplies_by_all_levels_and_never_by_nan(format):
    shape, tiles = (64, 256), torch.empty(tile_shape(format, (64, 256)), dtype=torch.int32)
    planes = {TILES: tuning_families.fill_tiles(tiles, format), "tensor_scale": torch.ones(1)}
    weight = get_format(format).decode(unpack_tiles(format, planes, shape), shape, torch.float32)
    assert weight.abs().unique().tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6] and abs(float(weight.mean())) < 0.2


@pytest.mark.gpu
def test_every_launch_that_a_search_tries_computes_the_same():
    """Some twenty compilations, of every family."""
    found = list(searches((1, 64, 512)))
    families = {"linear", "table", "whole", "expert rows", "expert sums"}
    assert {case.family for case in found} >= families
    for case in found:
        with torch.no_grad():
            calls, _ = case.calls()
            want = calls()
            for launch in case.candidates:
                with tuned_configs.trying(0, case.key, launch):
                    got = calls()
                for a, b in zip(got, want, strict=True):
                    torch.testing.assert_close(a.float(), b.float(), rtol=0.02, atol=0.02 * float(b.float().std()))


@pytest.mark.gpu
def test_a_search_on_a_gpu_keeps_what_it_measured(monkeypatch):
    monkeypatch.setattr(tuning, "cases_of", lambda plan, tokens, device: searches(tokens, few=1))
    monkeypatch.setattr(tuning, "_GAIN", 1e9)  # any but the table's
    reports = []
    path = vbrt.tune(plan_of((512, 1024)), tokens=(1, 64), report=reports.append)
    assert [found.case.key for found in reports] == [case.key for case in searches((1, 64), few=1)]
    assert path.exists() and len(reports) >= 6 + (devices.major(0) in WIDE)  # which has expert blocks as well
    assert all(found.us > 0 and found.table_us > 0 for found in reports)
    assert {found.case.key: found.launch for found in reports} == tuned_configs.tuned(0)
    assert all(found.launch in found.case.candidates for found in reports if found.case.candidates)
    planes, weight = tiled("nvfp4", (512, 1024))
    for tokens in (1, 64):
        x = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16)
        assert error(e2m1_linear.linear(x, planes), x.double() @ weight.T) < 3e-3
