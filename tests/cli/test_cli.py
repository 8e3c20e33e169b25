"""The command line around its commands: version and usage, interrupts, pipes, a command of one file."""

import ast
import atexit
import gc
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest

import vbrt
from tests import forked
from tests.cli.cases import errors, some_stats
from tests.patience import eventually
from vbrt.cli import main as cli
from vbrt.cli import process_start, stats
from vbrt.cli.options import add_command
from vbrt.cli.screen import complain
from vbrt.estimation.advice import machine_rates
from vbrt.estimation.advice.machine_rates import kept_rates

pytest.importorskip("transformers")


def test_version_and_help_need_no_torch():
    code = textwrap.dedent("""
        import sys
        from vbrt.cli.main import main
        try:
            main(["plan", "--help"])
        except SystemExit:
            assert not {"vbrt.cli.chat", "vbrt.cli.estimate", "vbrt.report.stats"} & sys.modules.keys()
        for arguments in (["--version"], ["--help"], ["plan", "--help"], ["run", "--help"], ["stats", "--help"],
                          ["tune", "--help"], ["chat", "--help"], ["convert", "--help"]):
            try:
                main(arguments)
            except SystemExit as end:
                assert end.code == 0
        assert "torch" not in sys.modules and "transformers" not in sys.modules
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"vbrt {vbrt.__version__}\n" in done.stdout and "examples:" in done.stdout


def test_without_a_command_there_is_usage(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main([])
    assert "usage: vbrt" in capsys.readouterr().err


def test_without_transformers_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("vbrt.integrations.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert cli.main(["plan", str(tmp_path)]) == 2
    assert "pip install 'vbrt[hf]'" in errors(capsys)


def test_an_interrupt_is_130_and_no_traceback(llama, monkeypatch, capsys):
    import vbrt.wrapper.wrapper

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(vbrt.wrapper.wrapper.VBModelWrapper, "materialize", interrupted)
    assert cli.main(["run", str(llama), "hello"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "vbrt: interrupted"


@pytest.mark.parametrize(
    ("command", "importing"), [("stats", "vbrt.cli.main"), ("estimate", "vbrt.cli.main"), ("estimate", "torch")]
)
def test_an_interrupt_while_it_imports_ends_it_without_a_traceback(command, importing, tmp_path):
    code = textwrap.dedent(f"""
        import signal, sys
        class Interrupting:
            def find_spec(self, name, path=None, target=None):
                if name == {importing!r}:
                    sys.meta_path.remove(self)
                    signal.raise_signal(signal.SIGINT)
        sys.meta_path.insert(0, Interrupting())
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from vbrt.cli.process_start import program
        sys.argv = ["vbrt", {command!r}, {str(tmp_path)!r}]
        program()
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "vbrt: interrupted\n")


def test_an_interrupt_of_a_command_that_cleans_up_waits_for_the_end_of_an_import(tmp_path):
    (tmp_path / "stats_of_mine.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nwhole = True\n")
    code = textwrap.dedent(f"""
        import importlib, signal, sys, threading
        import vbrt.cli.stats as stats
        from vbrt.cli.process_start import program
        def command(args):
            try:
                importlib.import_module("stats_of_mine")
                threading.Event().wait(50)
            finally:
                print(sys.modules["stats_of_mine"].whole)
        stats._stats = command
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.path.append({str(tmp_path)!r})
        sys.argv = ["vbrt", "stats"]
        program()
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "True\n", "vbrt: interrupted\n")


def test_an_interrupt_while_it_generates_leaves_no_files(llama, tmp_path):
    file = tmp_path / "tight.toml"
    file.write_text(
        f'[tiers.gpu]\nenabled = false\n[tiers.cpu]\nbudget = "32KiB"\n[tiers.ssd]\nenabled = true\n'
        f'path = "{tmp_path / "pages"}"\n'
    )
    # a shell that starts this test in the background has SIGINT ignored for all that it starts
    code = textwrap.dedent("""
        import signal, sys
        from vbrt.cli.main import main
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(main())
    """)
    arguments = ["run", str(llama), "the sea", "--config", str(file), "--max-new-tokens", "90000"]
    process, out = forked.start(code, *arguments, folder=tmp_path), tmp_path / "out"
    try:
        eventually(lambda: out.exists() and out.read_text().startswith("the sea"), "the text")
        assert list((tmp_path / "pages").iterdir())
        os.kill(process.pid, signal.SIGINT)
        process.join(50)
    finally:
        process.kill()
    assert process.exitcode == 130
    err = (tmp_path / "err").read_text()
    assert err.splitlines()[-1] == "vbrt: interrupted" and "Traceback" not in err
    assert list((tmp_path / "pages").iterdir()) == []


def test_a_closed_pipe_is_no_traceback(tmp_path):
    layers = {f"layer.{n}": layer for n, layer in enumerate(list(some_stats().layers.values()) * 80)}
    (tmp_path / "saved.json").write_text(json.dumps(some_stats(layers=layers).to_dict()))
    command = f'"{sys.executable}" -m vbrt stats "{tmp_path / "saved.json"}" | head -n 1'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1 and done.stderr == ""


def test_a_command_is_one_file_with_add(monkeypatch, capsys):
    class Hello:
        @staticmethod
        def add(commands):
            parser = add_command(
                commands, "hello", lambda args: print(f"hello {args.name}") or 0, help="greet", examples=""
            )
            parser.add_argument("name")

    monkeypatch.setitem(sys.modules, "vbrt.cli.hello", Hello)
    monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, "hello"))
    assert cli.main(["hello", "you"]) == 0
    assert capsys.readouterr().out == "hello you\n"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("plan M --gpu-memory -8GiB", "--gpu-memory -8GiB: expected bytes"),
        ("plan M --host x", "--host x: expected gigabytes a second"),
        ("estimate M --ram 0", "--ram 0: expected bytes"),
        ("estimate M --plot x.txt", "--plot x.txt: ends in '.txt'; expected .svg or .png"),
        ("estimate M --plot no/x.svg", "--plot no/x.svg: cannot be written: No such file"),
        ("estimate M --optimizer SGD --mixed", "--optimizer, --mixed with --task decode: applies to training only"),
        ("advise M --write no/x.toml", "--write no/x.toml: cannot be written: No such file"),
        ("precision M --budget 8GiB --write no/x.toml", "--write no/x.toml: cannot be written: No such file"),
        ("bench attention M", "bench attention takes no model; leave M out"),
        ("bench attention --lengths 0,64", "a length of 0; expected 1 token or more"),
        ("bench memory --lengths 64", "--lengths applies to attention only; expected --context"),
        ("tune M --machine", "tune --machine measures this machine and nothing else; leave M out"),
    ],
)
def test_what_can_be_checked_is_checked_before_a_model_is_read(command, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "--plot" in command:
        pytest.importorskip("matplotlib")
    assert cli.main(command.split()) == 2
    assert says in errors(capsys)
    assert not list(tmp_path.iterdir())


def test_files_that_are_checked_and_not_written_leave_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "nothing", "the sea", "--timeline", "run.html"]) == 2
    assert cli.main(["advise", "nothing", "--write", "my.toml"]) == 2
    (tmp_path / "kept.html").write_text("kept")
    assert cli.main(["run", "nothing", "the sea", "--timeline", "kept.html"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["kept.html"]
    assert (tmp_path / "kept.html").read_text() == "kept"


def test_a_file_of_weights_is_answered_with_its_directory(llama, capsys):
    assert cli.main(["inspect", str(llama / "model.safetensors")]) == 2
    assert "model.safetensors: a file of weights; expected a model directory, a GGUF file" in (said := errors(capsys))
    assert said.endswith(f"e.g. {llama}\n")


def test_a_user_without_a_home_keeps_nothing_and_is_told(monkeypatch, capsys):
    monkeypatch.setattr(pathlib.Path, "home", _nobody)
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    stats.keep_stats(some_stats())
    assert "the stats were not kept" in capsys.readouterr().err
    assert cli.main(["stats"]) == 2
    assert "/dev/null/.local/state/vbrt/last-stats.json: cannot be read" in errors(capsys)
    assert kept_rates() is None


def _nobody():
    raise RuntimeError("Could not determine home directory.")


def test_rates_that_cannot_be_kept_are_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "vbrt").write_text("a file in the way of the folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = machine_rates.Rates("a CPU", 0.0, 50.0, 0.0123, source="measured here")
    monkeypatch.setattr(machine_rates, "measure_rates", lambda: found)
    assert cli.main(["tune", "--machine"]) == 2
    out, err = capsys.readouterr()
    assert "a CPU: memory 50 GB/s\nproducts 0.0123 TFLOP/s" in out and "link" not in out
    assert err.startswith(f"vbrt: error: {tmp_path}/vbrt/machine.json: the rates were not kept: ")


@pytest.mark.parametrize(("command", "brief"), [("estimate", True), ("plan", True), ("run", False)])
def test_brief_commands_collect_no_garbage_and_end_at_once_with_their_exit_code(command, brief, monkeypatch):
    seen = []

    def ends(code: int) -> None:
        seen.append("at once")
        raise SystemExit(code)

    monkeypatch.setattr(sys, "argv", ["vbrt", command])
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.setattr(cli, "main", lambda: seen.append(gc.isenabled()) or 1)
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: seen.append("registered"))
    monkeypatch.setattr(os, "_exit", ends)
    try:
        with pytest.raises(SystemExit) as ended:
            process_start.program()
    finally:
        gc.enable()
    assert ended.value.code == 1
    assert seen == ([False, "registered", "at once"] if brief else [True])


def test_segments_grow_where_nobody_has_said_what_the_allocator_does(tmp_path):
    code = (
        "import os; from vbrt.cli import main, process_start as start; "
        "main.main = lambda: print(dict(os.environ)) or 0; start.program()"
    )
    name, own = "PYTORCH_CUDA_ALLOC_CONF", {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    for environment, found in (
        ({}, "expandable_segments:True"),
        ({name: "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, None),
        ({"LOCAL_RANK": "1"}, None),
    ):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=own | environment)
        assert ast.literal_eval(done.stdout).get(name) == found, done.stderr


def test_estimates_import_nothing_of_the_compiler_but_what_a_trace_does():
    code = """
import sys, vbrt.estimation.memory.estimate, vbrt.estimation.memory.option_savings, vbrt.estimation.advice.step_time
found = {"torch._dynamo", "torch._inductor", "sympy", "scipy", "triton", "transformers"} & sys.modules.keys()
assert not found, found
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_terminal_gets_messages_wrapped_between_words_and_a_pipe_in_one_line(monkeypatch, capsys):
    text = "a budget " * 20 + "tiers.gpu.budget-of-a-name-longer-than-the-terminal=8GiB"
    complain("warning", text)
    assert capsys.readouterr().err == f"vbrt: warning: {text}\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    complain("warning", text)
    lines = capsys.readouterr().err.splitlines()
    assert all(len(line) <= 40 for line in lines[:-1]) and lines[-1] == f"  {text.split()[-1]}"
    assert " ".join(" ".join(lines).split()) == f"vbrt: warning: {text}"


def test_stdout_that_cannot_take_the_result_is_said(tmp_path, monkeypatch, capsys):
    file = tmp_path / "stats.json"
    file.write_text(json.dumps(some_stats().to_dict()))
    with monkeypatch.context() as patch, open("/dev/full", "w", encoding="utf-8") as full:
        patch.setattr(sys, "stdout", full)
        assert cli.main(["stats", str(file)]) == 2
    assert errors(capsys) == "vbrt: error: stdout: the result cannot be written: the disk is full\n"
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    for stdout in (None, ascii_only):  # closed by `>&-`; LANG=C
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stdout)
            assert cli.main(["stats", str(file)]) == 0
    assert b"q_proj ? 3" in ascii_only.buffer.getvalue()
    assert capsys.readouterr() == ("", "")


def test_a_word_that_is_no_command_is_answered_with_the_nearest(capsys):
    assert cli.main(["runn", "x"]) == 2
    assert "'runn' is not a command; did you mean \"run\"?; expected one of advise, batch, bench," in errors(capsys)


WITH_A_MODEL = ("plan", "estimate", "advise", "inspect", "run", "chat", "convert", "precision", "tune")


def test_a_missing_model_is_found_before_torch_is_imported(tmp_path):
    rest = {"run": ["x"], "convert": [str(tmp_path / "out")], "precision": ["--budget", "6 bits"]}
    program = textwrap.dedent("""
        import sys
        from vbrt.cli.main import main
        for line in sys.argv[1:]:
            code = main(line.split("|"))
            print(line.split("|")[0], code, "torch" in sys.modules, "transformers" in sys.modules)
    """)
    lines = ["|".join([command, str(tmp_path / "nothing"), *rest.get(command, [])]) for command in WITH_A_MODEL]
    done = subprocess.run([sys.executable, "-c", program, *lines], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{command} 2 False False" for command in WITH_A_MODEL]
    said = done.stderr.splitlines()
    assert len(said) == len(lines) and all("nothing: no such file or directory; expected" in one for one in said)
