"""`vbrt batch`: the answers of `vbrt run`, many at once, into a file that is gone on with."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.cases import errors
from vbrt.cli import main as cli

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

PROMPTS = ["the sea", "a", "one two three four five six seven eight nine ten", "boats"]


@pytest.fixture
def prompts(tmp_path) -> Path:
    lines = [PROMPTS[0], {"prompt": PROMPTS[1]}, {"id": "ten", "prompt": PROMPTS[2]}]
    lines.append({"messages": [{"role": "user", "content": PROMPTS[3]}]})
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return file


def batch(model: Path, prompts: Path, *more: str) -> int:
    return cli.main(
        ["batch", str(model), str(prompts), str(prompts.with_name("out.jsonl")), "--max-new-tokens", "6", *more]
    )


def answers(prompts: Path) -> dict:
    lines = prompts.with_name("out.jsonl").read_text().splitlines()
    return {answer["id"]: answer for answer in map(json.loads, lines)}


def alone(model: Path, prompt: str, capsys, config: str) -> str:
    capsys.readouterr()
    assert cli.main(["run", str(model), prompt, "--max-new-tokens", "6", "--json", "--config", config]) == 0
    return json.loads(capsys.readouterr().out)["text"]


@pytest.mark.parametrize("model", ["llama", "qwen"])
@pytest.mark.parametrize("config", ["exact", "dense"])
def test_answers_are_those_of_single_runs(model, config, prompts, request, capsys):
    directory = request.getfixturevalue(model)
    assert batch(directory, prompts, "--config", config) == 0
    assert "done: 4 prompts, 24 tokens" in capsys.readouterr().err
    found = answers(prompts)
    assert set(found) == {1, 2, "ten", 4}
    for name, prompt in zip((1, 2, "ten", 4), PROMPTS, strict=True):
        assert found[name]["text"] == alone(directory, prompt, capsys, config)
        assert (found[name]["new_tokens"], found[name]["finish"]) == (6, "length")


@pytest.mark.parametrize("bits", ["8", "4"])
def test_a_cache_in_fewer_bits_answers_all(bits, prompts, llama, monkeypatch, capsys):
    from vbrt.generation.kv.paged_codes import PagedTokens

    plain, read = PagedTokens.read, []
    monkeypatch.setattr(
        PagedTokens, "read", lambda tokens, layer: read.append(tokens._code.bits) or plain(tokens, layer)
    )
    assert batch(llama, prompts, "--kv", bits) == 0
    assert "done: 4 prompts, 24 tokens" in capsys.readouterr().err
    assert set(answers(prompts)) == {1, 2, "ten", 4} and set(read) == {int(bits)}


def test_other_bits_are_refused_before_a_model_is_loaded(prompts, capsys):
    with pytest.raises(SystemExit):
        batch(Path("nowhere"), prompts, "--kv", "5")
    assert "argument --kv: invalid choice: 5" in capsys.readouterr().err


def test_what_is_done_is_kept_when_a_run_is_interrupted_and_the_next_goes_on(llama, prompts, monkeypatch, capsys):
    from vbrt.integrations import batches

    plain = batches.results_of

    def interrupted(manager, count):
        for number, result in enumerate(plain(manager, count)):
            if number == 2:
                raise KeyboardInterrupt
            yield result

    with monkeypatch.context() as patch:
        patch.setattr(batches, "results_of", interrupted)
        assert batch(llama, prompts) == 130
    assert "2 of 4 are in" in capsys.readouterr().err
    before = answers(prompts)
    assert len(before) == 2
    with prompts.with_name("out.jsonl").open("a") as file:
        file.write('{"id": 1, "te')  # a process that was killed
    assert batch(llama, prompts) == 0
    assert "going on: " in (err := capsys.readouterr().err) and "has 2 of 4 answers" in err
    assert set(answers(prompts)) == {1, 2, "ten", 4} and before.items() <= answers(prompts).items()
    assert len(prompts.with_name("out.jsonl").read_text().splitlines()) == 4
    assert batch(Path("nowhere"), prompts) == 0  # no model is loaded any more
    assert "has all 4 answers" in capsys.readouterr().err


def test_a_failed_prompt_is_told_and_tried_again(llama, prompts, monkeypatch, capsys):
    from vbrt.integrations import batches

    plain = batches.results_of

    def failing(manager, count):
        for number, result in enumerate(plain(manager, count)):
            yield result if number else result._replace(tokens=[], error="no room")

    with monkeypatch.context() as patch:
        patch.setattr(batches, "results_of", failing)
        assert batch(llama, prompts) == 1
    assert "1 failed" in capsys.readouterr().err
    assert [answer["error"] for answer in answers(prompts).values() if "error" in answer] == ["no room"]
    assert batch(llama, prompts) == 0
    assert not any("error" in answer for answer in answers(prompts).values())


def test_a_batch_that_stops_as_a_whole_is_an_error_and_what_is_done_stays(llama, prompts, monkeypatch, capsys):
    from vbrt.libraries import transformers_batching

    monkeypatch.setattr(transformers_batching, "_POLL_SECONDS", 0.01)
    api = pytest.importorskip("transformers.generation.continuous_batching.continuous_api")
    step = api.ContinuousBatchingManager._generation_step

    def broken(self):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps > 3:
            raise RuntimeError("the drive is gone")
        return step(self)

    monkeypatch.setattr(api.ContinuousBatchingManager, "_generation_step", broken)
    code = batch(llama, prompts)
    assert code in (1, 2) and "the drive is gone" in capsys.readouterr().err + str(answers(prompts))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", r"prompts\.jsonl: no prompts"),
        ('"a"\n{"prompt": ', r"prompts\.jsonl:2: no JSON"),
        ('{"text": "a"}', r"prompts\.jsonl:1: expected a text"),
        ('{"prompt": "a", "messages": []}', r"prompts\.jsonl:1: expected a text"),
        ('{"prompt": 5}', r'prompts\.jsonl:1: expected a prompt with text, or messages with a "role"'),
        ('""', r"prompts\.jsonl:1: expected a prompt with text"),
        ('{"messages": [{"role": "user"}]}', r"prompts\.jsonl:1: expected a prompt with text"),
        ('{"id": 1.5, "prompt": "a"}', r"prompts\.jsonl:1: the id is 1\.5"),
        ('{"id": 2, "prompt": "a"}\n"b"', r"prompts\.jsonl:2: the id 2 is that of line 1, too"),
    ],
)
def test_wrong_prompts_are_refused_by_their_line_before_a_model_is_loaded(lines, words, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text(lines)
    assert batch(Path("nowhere"), file) == 2
    import re

    assert re.search(words, errors(capsys))
    assert not file.with_name("out.jsonl").exists()


def test_files_that_do_not_belong_together_or_cannot_be_written_are_refused(prompts, tmp_path, capsys):
    prompts.with_name("out.jsonl").write_text('{"id": 77, "text": "a"}\n')
    assert batch(Path("nowhere"), prompts) == 2
    assert "out.jsonl:1: no answer to these prompts" in errors(capsys)
    assert cli.main(["batch", "nowhere", str(prompts), str(tmp_path / "no" / "out.jsonl")]) == 2
    assert "cannot be written" in errors(capsys)
    assert cli.main(["batch", "nowhere", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert "none: cannot be read" in errors(capsys)


def test_a_full_drive_is_named_and_nothing_written_is_lost(llama, prompts, monkeypatch, capsys):
    import vbrt.cli.batch as command

    write, seen = command._write, []

    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

    def full(out, answer, path):
        seen.append(answer)
        write(out if len(seen) == 1 else Full(), answer, path)

    monkeypatch.setattr(command, "_write", full)
    assert batch(llama, prompts) == 2
    assert "the disk is full" in capsys.readouterr().err and len(answers(prompts)) == 1


@pytest.mark.parametrize("kind", ["Mamba", "Bloom"])
def test_a_model_whose_cache_cannot_be_paged_is_refused_by_name(kind, llama, tmp_path, prompts, capsys):
    import transformers

    sizes = {"vocab_size": 280, "hidden_size": 32, "num_hidden_layers": 1}
    sizes |= {"state_size": 4} if kind == "Mamba" else {"n_head": 2}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(tmp_path / kind)
    transformers.AutoTokenizer.from_pretrained(llama).save_pretrained(tmp_path / kind)
    assert batch(tmp_path / kind, prompts, "--config", "dense") == 2
    said = capsys.readouterr().err
    assert f"error: {kind}ForCausalLM" in said and "continuous batching cannot run it" in said


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and limits the size of files")
def test_ten_thousand_prompts_are_answered_once_each_through_kills_and_a_full_drive(llama, tmp_path):
    import resource

    count, prompts, out = 10_000, tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps(f"{number} {'sea ' * (number % 9)}") + "\n" for number in range(count)))
    command = [sys.executable, "-m", "vbrt", "batch", str(llama), str(prompts), str(out), "--max-new-tokens", "2"]

    def begun(config: str) -> subprocess.Popen:
        return subprocess.Popen([*command, "--config", config], stderr=subprocess.PIPE, text=True)

    def lines() -> int:
        return out.read_bytes().count(b"\n") if out.exists() else 0

    def grown(process: subprocess.Popen, until: int) -> int:
        """Wait until so many are answered; return the process's resident bytes."""
        while lines() < until:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * resource.getpagesize()

    process, limit = begun("exact"), 100_000
    grown(process, 100)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))  # bytes: the drive is full then
    assert process.wait(timeout=300) == 2 and "out.jsonl" in process.stderr.read()
    assert 0 < lines() < 2000 and out.stat().st_size <= limit
    for config, until in (("dense", 2500), ("exact", 4000)):  # each from where the one before was killed
        process = begun(config)
        grown(process, until)
        process.kill()
        process.wait()
    process = begun("exact")
    before = grown(process, 5500)
    after = grown(process, count - 200)
    assert process.wait(timeout=300) == 0, process.stderr.read()
    assert after - before < 64 << 20
    ids = [json.loads(line)["id"] for line in out.read_text().splitlines()]
    assert sorted(ids) == list(range(1, count + 1))
