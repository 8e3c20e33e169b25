"""What `scripts/gpu_check.py` chooses to time, and how it gives up on a peer; the timings themselves need a GPU."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scripts import gpu_timing

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(module)
    for place in (module, gpu_timing):
        monkeypatch.setattr(place, "CUDA", torch.device("cpu"))
    monkeypatch.setattr(gpu_timing, "ROTATED_BYTES", 0)
    monkeypatch.setattr(module, "side_by_side", lambda *sets: [10.0] * len(sets))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8 << 30, 8 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    return module


# -- what is timed ----------------------------------------------------------------------------------------------------


def test_only_a_whole_run_writes_the_file_that_tables_are_made_of(script, tmp_path):
    assert script.parsed(["--e2e"]).selection == script.WHOLE
    assert script.path_of(tmp_path, script.WHOLE) == tmp_path / "kernels-nvidia-h200.json"
    for arguments in (
        [],
        ["--e2e", "4"],
        ["--tokens", "1"],
        ["--e2e", "--shapes", "64x64"],
        ["--e2e", "--parts", "rows"],
        ["--e2e", "--formats", "nvfp4"],
        ["--e2e", "--peers", "torchao int4 g128"],
    ):
        path = script.path_of(tmp_path, script.parsed(arguments).selection)
        assert path == tmp_path / "subset-kernels-nvidia-h200.json", arguments
    assert "e2e" not in script.parsed([]).selection.parts


def test_lists_are_separated_by_commas_or_spaces(script):
    chosen = script.parsed(
        [
            "--parts",
            "epilogue,rows",
            "--formats",
            "nvfp4",
            "mxfp4",
            "--shapes",
            "4096x14336,64x32",
            "--tokens",
            "1,16",
            "64",
        ]
    ).selection
    assert chosen == script.WHOLE._replace(
        parts=("rows", "epilogue"), formats=("nvfp4", "mxfp4"), tokens=(1, 16, 64), shapes=((4096, 14336), (64, 32))
    )


@pytest.mark.parametrize(("arguments", "named"), [
    (["--parts", "row"], "expected some of rows, dispatch"), (["--formats", "nvfp4,fp3"], "expected some of nvfp4"),
    (["--shapes", "4096"], "invalid list for --shapes value"), (["--tokens", "a"], "invalid list for --tokens value"),
])  # fmt: skip
def test_what_cannot_be_chosen_is_refused(script, arguments, named, capsys):
    with pytest.raises(SystemExit, match="2"):
        script.parsed(arguments)
    assert named in capsys.readouterr().err


def test_a_selection_holds_in_every_part_that_it_names(script, monkeypatch, tmp_path):
    calls = []

    def noted(part):
        def rows(*arguments):
            calls.append((part, *arguments))
            yield {"part": part}

        return rows

    for part in ("linear_rows", "fused_rows", "epilogue_rows", "odd_rows", "peer_rows"):
        monkeypatch.setattr(script, part, noted(part))
    monkeypatch.setattr(script, "machine", dict)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "gpu_check.py",
            "--out",
            str(tmp_path),
            "--parts",
            "rows,epilogue,peers",
            "--formats",
            "nvfp4",
            "--shapes",
            "64x32",
            "--tokens",
            "1,16",
            "--peers",
            "gemlite MXFP4",
        ],
    )
    script.main()
    cases = [(64, 32, 1), (64, 32, 16)]
    assert calls == [
        ("linear_rows", "nvfp4", 64, 32, (1, 16)),
        ("epilogue_rows", ((64, 32),), (1, 16)),
        ("peer_rows", "gemlite MXFP4", cases, script.PEER_SECONDS, {}),
    ]
    [file] = tmp_path.iterdir()
    result = json.loads(file.read_text())
    assert file.name.startswith("subset-") and set(result) == {"only", "rows", "epilogue", "absent", "peers"}
    assert result["only"]["tokens"] == [1, 16]


# -- peers ------------------------------------------------------------------------------------------------------------


class Fake(torch.nn.Module):
    """Fails for 4 tokens, and searches for very long for 64."""

    def forward(self, x):
        if x.shape[0] == 4:
            raise RuntimeError("no configuration\nof any kind")
        while x.shape[0] == 64:
            try:
                signal.raise_signal(signal.SIGALRM)  # as if its time were over
            except Exception:  # noqa: BLE001  # what a search does with a configuration that fails
                pass
        return x


CASES = [(k, 32, m) for k in (64, 32) for m in (1, 4, 16, 64)]


@pytest.fixture
def fake(script, monkeypatch):
    monkeypatch.setitem(script.PEERS, "fake", script.Peer("json", lambda layer: Fake()))
    return script


def test_a_peer_out_of_time_leaves_the_names_of_what_was_not_timed(fake):
    absent = {}
    rows = list(fake.peer_rows("fake", CASES, 900.0, absent))
    assert [(row["k"], row["m"]) for row in rows] == [(64, 1), (64, 16)]
    assert absent == {
        "fake": "64→32 M=4: RuntimeError: no configuration; 64→32 M=64, 32→32 M=1,4,16,64: not timed within 900 s"
    }


def test_a_run_that_is_ended_leaves_each_row_and_says_what_is_missing(fake, monkeypatch):
    monkeypatch.setattr(fake, "machine", dict)
    chosen = fake.WHOLE._replace(parts=("peers",), shapes=((64, 32),), tokens=(1, 16), peers=("fake",))
    told = [json.loads(json.dumps(result)) for result in fake.measured(chosen, peer_seconds=1.0)]
    assert [([row["m"] for row in result["peers"]], sorted(result["absent"])) for result in told] == [
        ([1], ["fake"]), ([1, 16], ["fake"]), ([1, 16], []),
    ]  # fmt: skip
    assert "ended" in told[0]["absent"]["fake"]


def test_a_row_says_how_it_was_tuned_and_what_the_first_call_took(fake, monkeypatch):
    monkeypatch.setitem(fake.PEERS, "fake", fake.Peer("json", lambda layer: Fake(), "its own search"))
    ahead = []
    monkeypatch.setattr(fake, "compile_ahead", lambda name, cases, until: ahead.append((name, cases)))
    absent = {}
    [row] = fake.peer_rows("fake", CASES[:1], 900.0, absent)
    assert row.pop("first_call_s") >= 0 and absent == {} and ahead == [("fake", CASES[:1])]
    assert row == {
        "peer": "fake",
        "k": 64,
        "n": 32,
        "m": 1,
        "bf16_us": 10.0,
        "us": 10.0,
        "ratio": 1.0,
        "tuned": "its own search",
    }


def test_a_peer_that_is_not_installed_is_absent(fake, monkeypatch):
    monkeypatch.setitem(fake.PEERS, "fake", fake.Peer("no_such_package", lambda layer: Fake()))
    absent = {}
    assert list(fake.peer_rows("fake", CASES, 1.0, absent)) == [] and absent == {"fake": "not installed"}


def test_compiling_ahead_takes_a_process_a_case_and_says_how_it_ended(script, monkeypatch, capsys):
    commands = []

    def run(command, *, timeout, **_):
        commands.append(command[2:])
        if command[-1] == "64":
            raise subprocess.TimeoutExpired(command, timeout)
        return SimpleNamespace(returncode=int(command[-1] == "4"), stderr="Traceback\nMemoryError: none left\n")

    monkeypatch.setattr(subprocess, "run", run)
    script.compile_ahead("gemlite MXFP4", CASES[:4], time.perf_counter() + 5)
    assert sorted(commands, key=str) == sorted(
        (["--first-call", "gemlite MXFP4", "64", "32", str(m)] for m in (1, 4, 16, 64)), key=str
    )
    out = capsys.readouterr().out
    assert "64→32 M=1: done" in out and "M=4: failed: MemoryError: none left" in out and "M=64: stopped" in out


def test_a_first_call_is_made_in_a_process_of_its_own(script, monkeypatch):
    called = []
    monkeypatch.setitem(script.PEERS, "fake", script.Peer("json", lambda layer: lambda x: called.append(x.shape)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--first-call", "fake", "64", "32", "16"])
    script.main()
    assert called == [(16, 64)]


@pytest.mark.gpu
def test_a_selection_is_timed_on_a_gpu(tmp_path):
    command = [
        sys.executable,
        str(SCRIPT),
        "--out",
        str(tmp_path),
        "--parts",
        "rows,fused,epilogue,odd",
        "--formats",
        "nvfp4",
        "--shapes",
        "1024x512",
        "--tokens",
        "1,16",
    ]
    subprocess.run(command, check=True)
    [file] = tmp_path.iterdir()
    result = json.loads(file.read_text())
    counts = {part: len(result[part]) for part in ("rows", "fused", "epilogue", "odd")}
    assert counts == {"rows": 2, "fused": 4, "epilogue": 6, "odd": 2} and "dispatch" not in result
    assert all(row["relative_error"] < 3e-3 for row in result["rows"])
