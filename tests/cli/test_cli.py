"""The command line around its commands: version and usage, interrupts, pipes, a command of one file."""

import json
import signal
import subprocess
import sys
import textwrap

import pytest

import vbrt
from tests.cli.cases import errors, some_stats
from vbrt.cli import main as cli
from vbrt.cli.options import add_command

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


def test_without_transformers_it_says_what_to_install(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("vbrt.integrations.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert cli.main(["plan", "x"]) == 2
    assert "pip install 'vbrt[hf]'" in errors(capsys)


def test_an_interrupt_is_130_and_no_traceback(llama, monkeypatch, capsys):
    import vbrt.wrapper.wrapper

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(vbrt.wrapper.wrapper.VBModelWrapper, "materialize", interrupted)
    assert cli.main(["run", str(llama), "hello"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "vbrt: interrupted"


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
    process = subprocess.Popen(
        [sys.executable, "-c", code, "run", str(llama), "the sea", "--config", str(file), "--max-new-tokens", "90000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.read(7) == "the sea"
        assert list((tmp_path / "pages").iterdir())
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=50)
    finally:
        process.kill()
    assert process.returncode == 130
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
