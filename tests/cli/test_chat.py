"""`vbrt chat` and the text of `vbrt run`: turns, templates, commands, Ctrl-C, and the line below the text."""

import io
import json
import os
import re
import signal
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from tests.cli.cases import errors, some_stats
from vbrt.cli import main as cli
from vbrt.cli import token_stream
from vbrt.report.stats import Stats

transformers = pytest.importorskip("transformers")

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def chatty(llama, tmp_path_factory):
    """The Llama with a chat template."""
    directory = tmp_path_factory.mktemp("chatty")
    for file in llama.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def chat(monkeypatch, lines, *command):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    return cli.main(["chat", *map(str, command)])


def dense_reply(directory, text, tokens):
    """What the dense model writes after a text."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_turns_go_through_the_chat_template_and_are_remembered_until_reset(chatty, monkeypatch, capsys):
    lines = ["hello", "/history", "sea", "/reset", "sky", "/stats", "/nonsense", "/exit", "never"]
    options = ["--config", "exact", "--max-new-tokens", "4", "--system", "be brief"]
    assert chat(monkeypatch, lines, chatty, *options) == 0
    out, err = capsys.readouterr()
    head = "<system>be brief<user>hello<assistant>"
    first = dense_reply(chatty, head, 4)
    second = dense_reply(chatty, f"{head}{first}<user>sea<assistant>", 4)
    after = dense_reply(chatty, "<system>be brief<user>sky<assistant>", 4)
    said = f"{first}\nsystem: be brief\nuser: hello\nassistant: {first}\n{second}\n{after}\n"
    assert out.startswith(said) and "14 layers" in out
    assert err.count("4 written") == 3 and "/nonsense: no such command" in err
    assert cli.main(["stats", "--json"]) == 0
    assert Stats.from_dict(json.loads(capsys.readouterr().out)).passes == 12


def test_a_model_without_a_template_continues_the_text_so_far(llama, monkeypatch, capsys):
    assert chat(monkeypatch, ["the sea", "the sky"], llama, "--config", "exact", "--max-new-tokens", "3") == 0
    out, err = capsys.readouterr()
    first = dense_reply(llama, "the sea", 3)
    assert out == f"{first}\n{dense_reply(llama, f'the sea{first}' + chr(10) + 'the sky', 3)}\n"
    assert "has no chat template" in err


def test_run_uses_the_template_or_not_as_asked(chatty, capsys):
    command = ["run", str(chatty), "sea", "--max-new-tokens", "4", "--config", "exact"]
    for more, before in (([], "<user>sea<assistant>"), (["--raw"], "sea")):
        assert cli.main([*command, *more, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["text"] == dense_reply(chatty, before, 4)
    assert cli.main([*command, "--raw"]) == 0
    assert capsys.readouterr().out.startswith(f"sea{dense_reply(chatty, 'sea', 4)}\n")


def test_a_template_that_refuses_is_one_line_of_error(chatty, tmp_path, capsys):
    for file in chatty.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('not like this') }}")
    assert cli.main(["run", str(tmp_path), "sea"]) == 2
    assert "chat template does not take these turns: not like this; --raw" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
def test_planes_that_others_wrote_run_as_they_are(llama, tmp_path, monkeypatch, capsys):
    """`vbrt convert` and `save_pretrained`, without a config; the generation config comes along."""
    import vbrt

    assert cli.main(["convert", str(llama), str(tmp_path / "one"), "--config", "exact"]) == 0
    wrapped = vbrt.QuantizationConfig("exact")
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, quantization_config=wrapped)
    model.save_pretrained(tmp_path / "two")
    transformers.AutoTokenizer.from_pretrained(llama).save_pretrained(tmp_path / "two")
    assert cli.main(["convert", str(tmp_path / "two"), str(tmp_path / "three")]) == 0
    capsys.readouterr()
    for directory in (tmp_path / "one", tmp_path / "two", tmp_path / "three"):
        assert cli.main(["run", str(directory), "the sea", "--max-new-tokens", "6", "--json"]) == 0
        reply = json.loads(capsys.readouterr().out)
        assert reply["text"] == dense_reply(llama, "the sea", 6)
        planes = Stats.from_dict(reply["stats"]).layers["model.layers.0.mlp.up_proj"].plane_bytes
        assert planes.keys() == {"coarse", "fine"}
    budget = ["--set", "tiers.cpu.budget=9MiB"]  # alone, it changes the config of the planes
    for directory in (tmp_path / "one", tmp_path / "two", tmp_path / "three"):
        assert cli.main(["inspect", str(directory), "--json", *budget]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["layout"], found["layers"][0]["becomes"]) == ("planes of vbrt", "nvfp4+exact")
        assert found["config"]["tiers"]["cpu"]["budget"] == "9MiB" and not found["refusal"]
    assert cli.main(["inspect", str(tmp_path / "two")]) == 0
    assert "model.safetensors" in "".join(capsys.readouterr().out.split())  # where its config is, however it is wrapped
    assert cli.main(["run", str(tmp_path / "one"), "the sea", "--config", "nf4"]) == 2
    assert "a save keeps its format" in errors(capsys)


def test_ctrl_c_stops_a_reply_and_the_second_one_ends_the_program(chatty, monkeypatch, capsys):
    lines = iter(["hello", KeyboardInterrupt, "again", KeyboardInterrupt, KeyboardInterrupt, "never"])

    def read(prompt):
        line = next(lines)
        if line is KeyboardInterrupt:
            raise line
        return line

    token = token_stream.Speaker.token

    def interrupted(speaker):
        token(speaker)
        if speaker.tokens == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(token_stream.Speaker, "token", interrupted)
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert cli.main(["chat", str(chatty), "--max-new-tokens", "1000"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    err = capsys.readouterr().err
    assert len(re.findall(r"stopped: \d+ tokens read, [34] written", err)) == 1  # the Ctrl-C after it ended the program
    assert err.splitlines()[-1] == "vbrt: interrupted" and "Traceback" not in err
    assert next(lines) == "again"


def test_on_a_terminal_a_line_below_the_text_says_what_tiers_do_and_is_gone_at_the_end():
    screen = Console(file=io.StringIO(), force_terminal=True, width=60, height=12, highlight=False)
    now = iter(some_stats(layers={}, passes=n) for n in range(1000))
    speaker = token_stream.LiveSpeaker(lambda: next(now), screen, None, "the ")
    text = "sea is calm\nand " + "very " * 150 + "wide"
    with pytest.MonkeyPatch.context() as patch, speaker:
        patch.setattr(token_stream, "_REFRESH_S", 0.0)
        for word in text.split(" "):
            speaker.token()
            speaker.text(word + " ")
        assert "tokens/s · cpu 1.0 MiB of 9.0 MiB" in screen.file.getvalue()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.file.getvalue())
    assert "wide" in shown[shown.rindex("tokens/s") :] and "the sea is calm" in shown


def test_the_line_of_the_tiers_counts_what_happened_since_it_was_last_shown():
    before = some_stats()
    layers = dict(before.layers)
    name = next(iter(layers))
    layers[name] = replace(
        layers[name], hits=layers[name].hits + 3, misses=layers[name].misses + 1, bytes_moved={"ssd>cpu": 2 << 30}
    )
    line = token_stream.tier_line(replace(before, layers=layers), before, 2.0)
    assert line == "cpu 1.0 MiB of 9.0 MiB · hits 75% · ssd>cpu 1.07 GB/s"
