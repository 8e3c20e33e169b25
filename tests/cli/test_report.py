"""`vbrt report`: figures of this machine beside predictions, a file to share, and what happens when something fails."""

import json
import platform

import pytest
import torch
import torch.nn.functional as F

from tests.cli.cases import errors
from vbrt.cli import main as cli
from vbrt.config import known_formats
from vbrt.estimation.advice import machine_report
from vbrt.estimation.advice.machine_rates import Rates
from vbrt.estimation.advice.machine_report import Figure, MachineReport, describe_machine, guarded, unmeasured
from vbrt.kernels import registry

CPU = torch.device("cpu")
RATES = Rates("a CPU", 0.0, 20.0, 0.1, source="measured here", fp32_tflops=0.05)


@pytest.fixture
def small(monkeypatch):
    """A CPU, shapes that take milliseconds, and rates that are known."""
    monkeypatch.setattr(machine_report, "measured_device", lambda: CPU)
    monkeypatch.setattr(machine_report, "measure_rates", lambda drive: RATES)
    monkeypatch.setattr(machine_report, "_MATRIX", {"cpu": (64, 128)})
    monkeypatch.setattr(machine_report, "_EXPERTS", {"cpu": 8})
    monkeypatch.setattr(machine_report, "_HIDDEN", 128)
    monkeypatch.setattr(machine_report, "_INNER", 64)
    monkeypatch.setattr(machine_report, "_LONG_S", 0.0)
    monkeypatch.setattr("psutil.getloadavg", lambda: (0.0, 0.0, 0.0))


@pytest.fixture
def short_llama(small, monkeypatch):
    """A model of four tiny layers in place of 32 of 8B."""
    transformers = pytest.importorskip("transformers")
    from vbrt.integrations import token_times

    def llama(layers, device, *, vocabulary):
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=128)
        with torch.device(device):
            return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()

    monkeypatch.setattr(token_times, "llama_8b", llama)
    monkeypatch.setattr(token_times, "measured_device", lambda: CPU)
    monkeypatch.setattr(token_times, "LAYERS", 4)
    monkeypatch.setattr(token_times, "_NEW", 6)
    measured = token_times._token_ms

    def token_ms(vb, device):
        assert measured(vb, device) > 0
        return 2.0 + 3.0 * vb.module.config.num_hidden_layers

    monkeypatch.setattr(token_times, "_token_ms", token_ms)


def test_a_report_has_every_part_beside_its_prediction_and_no_name_of_the_machine(short_llama, tmp_path, capsys):
    file = tmp_path / "report.json"
    assert cli.main(["report", "--json", str(file), "--drive", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    found = json.loads(file.read_text())
    figures = {
        part: [f for f in found["figures"] if f["part"] == part] for part in ("rates", "linear", "experts", "token")
    }
    assert [f["name"].rpartition(", ")[0] for f in figures["linear"][:4]] == [
        *("64 x 128, 1 token", "64 x 128, 16 tokens", "64 x 128, 64 tokens", "64 x 128, 512 tokens")
    ]
    for figure in (*figures["linear"], *figures["experts"]):
        assert figure["value"] > 0 and figure["torch"] > 0
        assert figure["ratio"] == pytest.approx(figure["value"] / figure["predicted"])
    resident, streamed = figures["token"]
    assert resident["value"] == pytest.approx(2 + 3 * 4) and resident["ratio"] > 0
    assert "extrapolated from 1 and 2 layers, 3 ms each" in resident["note"]
    assert streamed["value"] is None and "vbrt demo" in streamed["note"]
    assert "drive, read in order" in [f["name"] for f in figures["rates"]]
    for text in (
        "torch/ours",
        "predicted ms",
        "extrapolated from 1 and 2 layers",
        "predicted by the cost model of two Zen 4",
    ):
        assert text in out
    assert {"cpu", "cores", "system", "versions"} <= found["machine"].keys() and "torch" in found["machine"]["versions"]
    assert platform.node() not in file.read_text() and str(tmp_path) not in file.read_text()


def test_layers_that_take_no_time_are_not_extrapolated(short_llama, monkeypatch):
    from vbrt.integrations import token_times

    monkeypatch.setattr(token_times, "_measured", lambda report, layers, *_: {"resident": 5.0})
    report = MachineReport(describe_machine(), rates=RATES)
    figure = token_times._tokens(report)[0]
    assert figure.value is None and figure.note.startswith("not extrapolated, 2 layers took no longer than 1")


def test_a_busy_machine_is_said_to_be_one(small, monkeypatch, capsys):
    monkeypatch.setattr("psutil.getloadavg", lambda: (999.0, 0.0, 0.0))
    assert cli.main(["report", "--quick"]) == 0
    assert "vbrt: note: this machine is busy, 999.0 threads run or wait" in capsys.readouterr().err


def test_a_quick_report_leaves_out_what_takes_long(small, capsys):
    assert cli.main(["report", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "64 x 128, 64 tokens" in out and "16 tokens" not in out and "8B" not in out and "routed" not in out


@pytest.mark.parametrize("ends", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_ctrl_c_leaves_no_file_and_what_runs_out_of_memory_says_so_beside_the_rest(
    ends, small, tmp_path, monkeypatch, capsys
):
    def fails(*_):
        raise ends("GPU 0 has no 8 GiB\nmore about it")

    monkeypatch.setattr(machine_report, "_experts", fails)
    file = tmp_path / "report.json"
    code = (
        cli.main(["report", "--json", str(file)]) if ends is KeyboardInterrupt else _without_tokens(file, monkeypatch)
    )
    told = capsys.readouterr()
    if ends is KeyboardInterrupt:
        assert code == 130 and told.err == "vbrt: interrupted\n" and not list(tmp_path.iterdir())
        return
    assert code == 0 and "routed experts: not measured, out of memory (GPU 0 has no 8 GiB); close other" in told.out
    assert {f["part"] for f in json.loads(file.read_text())["figures"]} == {"rates", "linear", "experts"}


def _without_tokens(file, monkeypatch):
    monkeypatch.setattr("vbrt.cli.report._tokens", lambda report: ())
    return cli.main(["report", "--json", str(file)])


def test_a_part_that_breaks_is_shown_and_the_exit_code_says_so(small, tmp_path, monkeypatch, capsys):
    def breaks(*_):
        raise RuntimeError(f"{tmp_path}/home/someone/ptxas: no such target")

    monkeypatch.setenv("HOME", f"{tmp_path}/home/someone")

    monkeypatch.setattr(machine_report, "_linear", breaks)
    assert cli.main(["report", "--quick", "--json", str(tmp_path / "report.json")]) == 1
    assert "linear layers: failed: RuntimeError: " in capsys.readouterr().out
    text = (tmp_path / "report.json").read_text()
    assert "~/ptxas: no such target" in text and "someone" not in text


def test_host_memory_that_runs_out_is_no_failure():
    def asks():
        torch.empty(1 << 60, dtype=torch.uint8)

    (figure,) = guarded("rates", "rates", asks)
    assert figure.note.startswith("not measured, out of memory (") and not figure.failed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--json nowhere/report.json", "--json nowhere/report.json: cannot be written"),
        ("--drive nowhere", "--drive nowhere: cannot be written"),
    ],
)
def test_files_are_checked_before_anything_is_measured(arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine_report, "describe_machine", lambda: pytest.fail("measures"))
    assert cli.main(["report", *arguments.split()]) == 2
    assert says in errors(capsys) and not list(tmp_path.iterdir())


def test_torchs_experts_compute_what_pages_of_experts_hold():
    weights = {"up": torch.randn(4, 2 * 16, 32), "down": torch.randn(4, 32, 16)}
    x = torch.randn(6, 32)
    ids, shares = machine_report._routing(6, 4, 2, CPU)
    got = machine_report._dense_experts(x, machine_report._groups(ids, shares.float()), weights)
    for t in range(6):
        want = torch.zeros(32)
        for expert, share in zip(ids[t].tolist(), shares[t].float(), strict=True):
            gate, up = (weights["up"][expert] @ x[t]).chunk(2)
            want += share * (weights["down"][expert] @ (F.silu(gate) * up))
        torch.testing.assert_close(got[t], want, rtol=1e-4, atol=1e-4)


def test_what_is_unmeasured_on_a_chip_is_said_once_for_all_formats(monkeypatch):
    kernel = registry.resolve("linear", "auto", CPU, "nvfp4")
    asked = []

    def resolve(op, backend, device, format):
        asked.append(format)
        fields = {f: getattr(kernel, f) for f in ("op", "backend", "run", "devices")}
        return registry.Kernel(**fields, unmeasured=lambda device: "sm_86: unmeasured; `vbrt tune` measures")

    monkeypatch.setattr(machine_report, "kernel_refusal", lambda device: None)
    monkeypatch.setattr(machine_report, "resolve", resolve)
    assert unmeasured(CPU) == ["sm_86: unmeasured; `vbrt tune` measures"]
    assert "nvfp4" in asked and set(asked) <= set(known_formats())
    monkeypatch.setattr(machine_report, "kernel_refusal", lambda device: "sm_75 is older than sm_80")
    assert unmeasured(CPU)[0] == "kernels: sm_75 is older than sm_80; layers are decoded and multiplied in plain torch"


def test_a_gpus_rates_are_beside_its_data_sheet(small, monkeypatch, capsys):
    from vbrt.cli.report import _show
    from vbrt.cli.screen import console_for_stdout
    from vbrt.estimation.advice.data_sheets import find_sheet

    monkeypatch.setattr(machine_report, "link_gb_s", lambda **how: 10.0)
    monkeypatch.setattr(
        machine_report, "measure_rates", lambda drive: Rates("NVIDIA GeForce RTX 3060", 20.0, 300.0, 22.0)
    )
    gpu = {"computes_on": "gpu", "gpu": "NVIDIA GeForce RTX 3060", "capability": [8, 6], "multiprocessors": 28}
    about = describe_machine() | gpu | {"gpu_memory_bytes": 12 << 30, "driver": "580.1"}
    report = MachineReport(about, sheet=find_sheet(about["gpu"]))
    report.figures += machine_report._rates(report, torch.device("cuda"), None)
    by_name = {figure.name: figure for figure in report.figures}
    assert by_name["link, to the GPU, pinned"].ratio == pytest.approx(20 / 25)
    assert by_name["link, to the host, pageable"].predicted is None
    assert by_name["memory of the GPU, read and written"].ratio == pytest.approx(300 / 360)
    report.figures.append(Figure("token", "half streamed", "ms", 50.0, None, 40.0, "cost model of X"))
    _show(console_for_stdout(), report)
    out = capsys.readouterr().out
    assert "NVIDIA GeForce RTX 3060, sm_86, 28 multiprocessors, 12.0 GiB, driver 580.1" in out
    assert "predicted by the data sheet of RTX 3060" in out and "1.25" in out


@pytest.mark.gpu
def test_a_gpu_measures_a_whole_report(tmp_path):
    pytest.importorskip("transformers")
    file = tmp_path / "report.json"
    assert cli.main(["report", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    figures = found["figures"]
    assert [f["name"] for f in figures if f["note"] and f["value"] is None] == []
    assert {"rates", "linear", "experts", "token"} == {f["part"] for f in figures}
    assert any(f["name"].startswith("half streamed") for f in figures) and found["machine"]["driver"]
