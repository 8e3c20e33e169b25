"""The accelerator of a process: abilities by device type, and models on a plug-in device that is the host's memory.

No XPU, MPS or ROCm device has run this: their modules are those of the installed torch, without a device behind them.
"""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration

from vbrt.config import parse_budget
from vbrt.errors import LibraryError
from vbrt.host import accelerator

CASES = Path(__file__).with_name("pretend_cases.py")


@pytest.fixture
def looked_for(monkeypatch):
    """`vbrt.host.accelerator` as imported with a torch that is built for another device type."""

    def load(kind):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: kind and torch.device(kind))
        spec = importlib.util.spec_from_file_location(f"accelerator_on_{kind}", accelerator.__file__)
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        return found

    return load


def test_a_torch_without_accelerators_answers_as_cuda_does(looked_for):
    found = looked_for(None)
    assert found.TYPE == "cuda" and found.LACKS == {} and found.is_available is torch.cuda.is_available
    assert found.current_stream is torch.cuda.current_stream and found.Event is torch.cuda.Event
    if not torch.cuda.is_available():
        assert found.default_device() == torch.device("cpu")


def test_tensors_and_streams_are_asked_by_torchs_own_attributes_also_in_a_compiled_function(looked_for):
    found, stream = looked_for("cuda"), type("", (), {"cuda_stream": 7, "device_index": 0, "stream_id": 1})
    assert found.stream_key(stream) == 7 and looked_for("xpu").stream_key(stream) == (0, 1)
    on_cpu = torch.zeros(1)
    assert not found.is_device(on_cpu) and not found.on_cuda(on_cpu)
    with torch.device("meta"):
        assert not found.is_device(torch.zeros(1))
    compiled = torch.compile(
        lambda x: x if found.is_device(x) or found.on_cuda(x) else x + 1, backend="eager", fullgraph=True
    )
    assert compiled(on_cpu).item() == 1.0


def test_xpu_has_streams_and_events_but_neither_graphs_nor_registration(looked_for):
    found = looked_for("xpu")
    assert set(found.LACKS) == {"graphs", "registration"} and found.has_streams(torch.device("xpu", 0))
    assert not found.has_streams(torch.device("cpu"))
    assert found.Stream is torch.xpu.Stream and found.mem_get_info is torch.xpu.mem_get_info
    with pytest.raises(LibraryError, match=r"has no torch\.xpu\.CUDAGraph; tiers\.gpu\.enabled = false"):
        found.Graph()


def test_mps_copies_without_streams_and_counts_what_the_system_recommends(looked_for, monkeypatch):
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 100)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 30)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: None)
    found = looked_for("mps")
    assert set(found.LACKS) == {"streams", "graphs", "registration"} and not found.has_streams(torch.device("mps"))
    assert found.mem_get_info() == (70, 100) and found.memory_reserved(0) == 30
    assert found.memory_limit(torch.device("mps")) == 100
    assert found.current_device() == 0 and found.get_device_properties(0).total_memory == 100
    found.synchronize(torch.device("mps"))
    with found.device("mps"):
        assert not found.is_current_stream_capturing()
    with pytest.raises(LibraryError, match=r"no torch\.mps\.max_memory_allocated"):
        found.max_memory_allocated()


def test_a_device_that_cannot_decode_block_scales_is_refused_with_a_warning(looked_for, monkeypatch):
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    found = looked_for("mps")
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: (_ for _ in ()).throw(TypeError("no float8 on mps")))
    with pytest.warns(UserWarning, match="no float8 on mps.; models run on the CPU"):
        assert not found.is_available()
    assert found.default_device() == torch.device("cpu") and "no float8" in found.refusal()


def test_a_gpu_that_shares_the_hosts_memory_computes_only_where_it_is_asked_for(looked_for, monkeypatch):
    found = looked_for("mps")
    assert found.unused() is None and not found.is_used(True)  # it is not there
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    monkeypatch.setattr(found, "refusal", lambda: None)
    assert found.is_used(True) and not found.is_used("auto") and not found.is_used(False)
    assert "tiers.gpu.enabled = true computes on mps" in found.unused("auto")
    assert found.unused(True) is found.unused(False) is None


def test_vendors_are_told_apart_where_torch_says_cuda(monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", None)
    assert [accelerator.vendor(torch.device(kind)) for kind in ("cuda", "xpu", "mps", "cpu")] == [
        *("nvidia", "intel", "apple", "cpu")
    ]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert accelerator.vendor(gpu) == "amd"


# -- models on a plug-in device ---------------------------------------------------------------------------------------


def run_cases(*arguments):
    """What the cases print, in a process of their own."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip(f"torch {torch.__version__} has no plug-in devices in Python")
    done = subprocess.run([sys.executable, CASES, *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def pretended():
    """Results of a Llama and a MoE model."""
    pytest.importorskip("transformers")
    found = run_cases()
    assert found["type"] == found["vendor"] == "pretend"
    return found


@pytest.mark.parametrize("run", ["fp4 resident", "fp4 streamed", "fp4 drive", "exact streamed"])
def test_a_model_on_another_accelerator_computes_what_it_does_on_the_cpu(pretended, run):
    assert pretended[run]["error"] == 0.0 and pretended[run]["same"]


def test_experts_on_another_accelerator_differ_by_the_order_of_sums(pretended):
    assert pretended["experts streamed"]["error"] < 1e-6 and pretended["experts streamed"]["same"]


@pytest.mark.parametrize("run", ["fp4 streamed", "exact streamed", "experts streamed"])
def test_pages_come_over_a_stream_and_kernels_wait_for_them(pretended, run):
    assert pretended[run]["moved"]["cpu>gpu"] > 0
    used, resident = pretended[run]["used"], pretended["fp4 resident"]["used"]
    assert used["streams"] == 1 and used["waits"] > 50 > resident["waits"]


def test_what_the_accelerator_lacks_is_in_stats(pretended):
    told = pretended["fp4 resident"]["fallbacks"]
    for reason in pretended["lacks"].values():
        assert told.count(reason) == 1
    plain = "there are none for pretend devices; 4-bit layers are decoded and multiplied in plain torch"
    assert f"kernels: {plain}" in told
    assert any("page-locked" in reason for reason in pretended["fp4 streamed"]["fallbacks"])


def test_training_on_another_accelerator_follows_the_cpus(pretended):
    cpu, resident = pretended["train"]
    assert resident == pytest.approx(cpu, rel=1e-5) and cpu[-1] < cpu[0]
    cpu, resident, streamed = pretended["full"]  # in bf16
    assert streamed == resident == pytest.approx(cpu, rel=1e-3) and cpu[-1] < cpu[0]


def test_a_share_of_the_accelerator_is_the_budget_that_each_way_of_wrapping_derives(pretended):
    shares = dict(pretended["shares"])
    beside, other, said = shares.pop("beside")
    for share, budget, nbytes, note in shares.values():
        assert share is None and nbytes == parse_budget(budget, where="").amount > 0
        assert note.startswith('gpu_memory = "700MiB" (700.0 MiB): an estimated ') and "16 + 128 tokens" in note
    assert shares["wrap"][2] - beside == pytest.approx(other, rel=0.02)
    assert "other tensors of this process 4.0 MiB" in said
    budgets = [found[2] for found in shares.values()]
    assert max(budgets) < 1.01 * min(budgets)  # an attention of transformers' choice has other temporaries


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("links", "ConfigError.*pretend:1 cannot be one of them"),
        ("peer", "ConfigError.*pretend:1 cannot be one of them"),
        ("devices", "ConfigError.*this process sees 1 GPUs"),
        ("share", r"NoRoomError.*gpu_memory = \"620MiB\"; 620\.0 MiB are too little"),
        ("kernels", "KernelError.*no 'triton' implementation for device 'pretend'"),
        ("full", "WrapError.*cannot move a parameter in place to pretend:0: wrap model.to"),
    ],
)
def test_what_another_accelerator_cannot_is_refused_by_name(pretended, asked, reason):
    assert re.search(reason, pretended["refused"][asked])


def test_pages_are_copied_synchronously_to_a_device_without_streams():
    found = run_cases("without-streams")
    assert found["errors"] == [0.0] * 4 and found["moved"]["cpu>gpu"] > 0
    assert found["counts"] == {"waits": 0, "events": 0, "streams": 0}
    assert "torch.pretend has no streams; copies to the device are synchronous" in found["fallbacks"]
