"""Names of the Hub: what is fetched, into which cache, and what is said where that fails. No network: a local server,
and a process of its own for each environment, since huggingface_hub reads it once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import vbrt
from vbrt.errors import VBError

pytest.importorskip("transformers")
from huggingface_hub import constants

from tests.cli.conftest import llama, save_tokenizer  # noqa: F401 - a fixture
from tests.integrations.hub_server import COMMIT, TOKEN, hub_of
from tests.models import TOKENS
from vbrt.cli import main as cli
from vbrt.integrations import hub_models

_ASK = """
import json, sys
from vbrt.errors import VBError
from vbrt.integrations.hub_models import located
for given in json.loads(sys.argv[1]):
    try:
        found = str(located(**given))
    except VBError as error:
        found = f"{type(error).__name__}: {error}"
    print(json.dumps(found))
assert "torch" not in sys.modules or any(":" in given["name"] for given in json.loads(sys.argv[1]))
"""
_WEIGHTS = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def models(llama, tmp_path_factory):  # noqa: F811
    """Repositories: a whole model, and others whose files only their names are read of."""
    root = tmp_path_factory.mktemp("repositories")

    def repository(name, **files):
        for file, content in files.items():
            path = root / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return root / name

    shards = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    return {
        "org/tiny": llama,
        "org/closed": llama,
        "org/gated": llama,
        "org/sharded": repository(
            "sharded",
            **{"config.json": CONFIG, "model.safetensors.index.json": shards, "merges.txt": "", "README.md": "no"},
            **dict.fromkeys(shards["weight_map"].values(), "weights"),
            **{"consolidated.safetensors": "no", "pytorch_model.bin": "no", "onnx/config.json": "no", "code.py": "no"},
        ),
        "org/pickled": repository("pickled", **{"config.json": CONFIG, "pytorch_model.bin": "x", "flax.msgpack": "no"}),
        "org/gguf": repository(
            "gguf",
            **{"a-Q4_K_M.gguf": "x", "a-IQ8_0.gguf": "x", "mmproj-Q8_0.gguf": "no", "config.json": CONFIG},
            **{f"Q8_0/a-Q8_0-0000{part}-of-00002.gguf": "x" for part in (1, 2)},
        ),
        "org/holed": repository(
            "holed",
            **{"config.json": CONFIG, "model.safetensors.index.json": {"weight_map": {"a": "../../org.safetensors"}}},
        ),
        "org/scribbled": repository("scribbled", **{"config.json": CONFIG, "model.safetensors.index.json": "[]"}),
        "org/data": repository("data", **{"train.csv": "x"}),
        "org/large": repository("large", **{"config.json": CONFIG, "model.safetensors": "x"}),
        "org/torn": repository(
            "torn", **{"config.json": CONFIG, "model.safetensors": "x" * 1000, "torn.json": "[]" * 9}
        ),
    }


@pytest.fixture
def hub(models):
    with hub_of(models) as hub:
        hub.private.add("org/closed")
        hub.gated.add("org/gated")
        hub.broken.add("torn.json")
        yield hub


def environment(home: Path, url: str, **more: str) -> dict[str, str]:
    """An environment with the cache at `home`, and none of this one's settings of the Hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    return kept | {"HF_HOME": str(home), "HF_ENDPOINT": url, "HF_HUB_DISABLE_TELEMETRY": "1"} | more


def ask(home, url, *given, cwd=None, **more):
    """What `located` finds or refuses for each of these, in a process of its own; and its stderr."""
    asked = [{"name": each} if isinstance(each, str) else each for each in given]
    program = [sys.executable, "-c", _ASK, json.dumps(asked)]
    done = subprocess.run(
        program, env=environment(home, url, **more), cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_a_config_is_fetched_alone_and_the_rest_when_it_is_needed(hub, tmp_path):
    (config, whole, again), _ = ask(tmp_path, hub.url, {"name": "org/tiny", "need": "config"}, "org/tiny", "org/tiny")
    assert Path(config).name == "config.json" and tmp_path in Path(config).parents
    assert whole == again == str(Path(config).parent) and Path(whole).name == COMMIT
    assert [file for _, file in hub.got[:1]] == ["config.json"]
    assert {file for _, file in hub.got} == {"model.safetensors", *_WEIGHTS} and len(hub.got) == 5


@pytest.mark.parametrize(
    ("name", "files"),
    [
        (
            "org/sharded",
            {"config.json", "model.safetensors.index.json", "merges.txt"}
            | {"model-1-of-2.safetensors", "model-2-of-2.safetensors"},
        ),
        ("org/pickled", {"config.json", "pytorch_model.bin"}),
        ("org/gguf:q4_k_m", {"config.json", "a-Q4_K_M.gguf"}),
        ("org/gguf:a-IQ8_0.gguf", {"config.json", "a-IQ8_0.gguf"}),
        ("org/gguf:Q8_0", {"config.json", *(f"Q8_0/a-Q8_0-0000{part}-of-00002.gguf" for part in (1, 2))}),
    ],
)
def test_of_a_repository_only_what_is_read_is_chosen(models, name, files):
    asked = hub_models._parsed(name, None)
    root = models[asked.repo]
    there = [file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file()]
    assert set(hub_models._chosen(there, asked, root.joinpath, "weights")) == files


@pytest.mark.parametrize(
    ("files", "need", "config", "suffice"),
    [
        (["config.json", "model.safetensors"], "headers", {}, True),
        (["config.json", "model.safetensors"], "weights", {}, False),
        (["config.json", "model.safetensors"], "headers", {"quantization_config": {"quant_method": "gptq"}}, False),
        (["config.json", "model.safetensors"], "config", {"quantization_config": {"quant_method": "gptq"}}, True),
        (["config.json", "vbrt.json", "a.safetensors"], "headers", {}, False),
        (["config.json", "pytorch_model.bin"], "headers", {}, False),
        (["a.gguf", "config.json"], "config", {}, True),
    ],
)
def test_headers_suffice_where_nothing_else_is_read(tmp_path, files, need, config, suffice):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert hub_models._headers_suffice(files, need, tmp_path.joinpath) == suffice


def test_names_that_will_not_do_are_refused_with_what_would(hub, tmp_path):
    refused, _ = ask(
        tmp_path,
        hub.url,
        "org/nothing",
        "org/closed",
        "org/gated",
        {"name": "org/tiny", "revision": "v9"},
        {"name": str(tmp_path), "revision": "main"},
        "org/gguf:Q2_K",
        "org/data",
        "org/gguf-none:Q4",
        "org/holed",
        {"name": "org/scribbled", "need": "headers"},
    )
    assert f"org/nothing: no such file or directory here, and no such model at {hub.url}/org/nothing" in refused[0]
    assert "HF_TOKEN" in refused[0] and "HF_TOKEN" in refused[1] and "org/closed: no such" in refused[1]
    assert f"org/gated: access is restricted; accept its terms at {hub.url}/org/gated" in refused[2]
    assert "org/tiny: no revision 'v9'; expected a branch, tag or commit" in refused[3]
    assert "ConfigError" in refused[4] and "revision='main' with a path" in refused[4]
    assert refused[5].endswith(
        "org/gguf: no GGUF file Q2_K; expected org/gguf:FILE or org/gguf:QUANTIZATION, of "
        "Q8_0/a-Q8_0-00001-of-00002.gguf, a-IQ8_0.gguf, a-Q4_K_M.gguf"
    )
    assert "org/data: no config.json among its files" in refused[6]
    assert "org/gguf-none:Q4: no such file or directory here" in refused[7]
    assert "org/holed: its index names ../../org.safetensors, which are missing in the repository" in refused[8]
    assert "org/scribbled: model.safetensors.index.json: damaged: no weight_map" in refused[9]


def test_a_token_and_a_revision_are_used(hub, tmp_path):
    given = {"name": "org/closed", "revision": "v1", "need": "config"}
    (found,), _ = ask(tmp_path, hub.url, given, HF_TOKEN=TOKEN)
    assert found.endswith(f"{COMMIT}/config.json") and hub.got == [("org/closed", "config.json")]


def test_a_download_that_breaks_off_resumes_and_one_that_cannot_fit_does_not_begin(hub, tmp_path):
    hub.sizes["model.safetensors"] = 1 << 60
    (full,), _ = ask(tmp_path, hub.url, "org/large")
    assert full.startswith("VBError: org/large: 1048576.0 TiB to fetch, and") and "HF_HOME" in full
    assert hub.got == []
    del hub.sizes["model.safetensors"]
    (torn,), _ = ask(tmp_path, hub.url, "org/torn")
    assert "org/torn: the download broke off: " in torn and "the same command resumes" in torn
    before = len(hub.got)
    hub.broken.clear()
    (whole,), _ = ask(tmp_path, hub.url, "org/torn")
    assert (Path(whole) / "torn.json").read_text() == "[]" * 9
    assert [file for _, file in hub.got[before:]] == ["torn.json"]


def test_without_the_hub_its_cache_is_used_and_otherwise_the_reason_is_said(hub, tmp_path):
    (path,), _ = ask(tmp_path, hub.url, "org/tiny")
    ask(tmp_path, hub.url, {"name": "org/sharded", "need": "config"})
    asked = ("org/tiny", {"name": "org/tiny", "need": "config"}, "org/tiny:Q4", "org/sharded", "org/other")
    for url, more, why in (
        (hub.url, {"HF_HUB_OFFLINE": "1"}, "the Hub may not be asked (HF_HUB_OFFLINE is set)"),
        ("http://127.0.0.1:9", {}, "http://127.0.0.1:9 does not answer ("),
    ):
        (here, config, no_gguf, partial, unknown), err = ask(tmp_path, url, *asked, **more)
        assert here == path and config == f"{path}/config.json"
        assert ("the copy in the Hub's cache is used" in err) == (not more)
        assert "no GGUF file Q4" in no_gguf and why in no_gguf
        assert "no weights that vbrt reads" in partial and why in partial and "where the Hub can be reached" in partial
        assert why in unknown and "hf download org/other --local-dir other" in unknown


def test_what_is_here_wins_and_needs_no_hub(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert hub_models.located("org/tiny") == "org/tiny"
    (tmp_path / "org" / "tiny" / "x-Q4_0.gguf").touch()
    assert hub_models.located("org/tiny:Q4_0") == Path("org/tiny/x-Q4_0.gguf")
    for path in (Path("org/other"), "./org/other", "a--b/c", "a/b/c", "other", "~/other", "", None):
        assert hub_models.located(path) == path
    with pytest.raises(VBError, match="org/other: no such file or directory; expected a model directory"):
        vbrt.from_pretrained(Path("org/other"))


def test_from_pretrained_takes_a_name_and_equals_the_model_of_the_directory(hub, llama, tmp_path, monkeypatch):  # noqa: F811
    ask(tmp_path, hub.url, "org/tiny")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))  # offline, as all tests are
    kept = {"weights": {"min_parameters": 0}, "tiers": {"gpu": {"enabled": False}}}
    with vbrt.from_pretrained("org/tiny", "exact", **kept) as vb, vbrt.from_pretrained(llama, "exact", **kept) as local:
        assert len(vb.plan.swaps) == len(local.plan.swaps) == 14
        assert vb(TOKENS).logits.equal(local(TOKENS).logits)


def test_an_interrupted_download_says_how_it_goes_on(monkeypatch, capsys):
    def interrupted(*given, **how):
        raise KeyboardInterrupt

    monkeypatch.setattr(hub_models, "located", interrupted)
    assert cli.main(["plan", "org/tiny"]) == 130
    assert capsys.readouterr().err.startswith("vbrt: note: what was fetched is kept; the same command resumes\n")


_COMMANDS = """
import json, sys
from vbrt.cli import main as cli
from vbrt.integrations import hub_headers
hub_headers._FIRST_BYTES, hub_headers._GGUF_FIRST_BYTES = 64, 512  # these files are small
for command in json.loads(sys.argv[1]):
    assert cli.main(command) == 0, command
    print("\\0", end="")
"""


def run_commands(home, url, *commands):
    """stdout of each of these command lines, all in one process."""
    done = subprocess.run(
        [sys.executable, "-c", _COMMANDS, json.dumps(commands)],
        env=environment(home, url, XDG_STATE_HOME=str(home), VBRT_PROGRESS="0"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


def test_commands_take_names_and_fetch_no_more_than_they_read(hub, llama, tmp_path, capsys):  # noqa: F811
    """Headers of dense weights, of a GGUF file, and for a config without a dtype; and a whole model."""
    pytest.importorskip("gguf")
    from tests.saves.published.gguf_files import Type, model_of, write

    (tmp_path / "gguf").mkdir()
    gguf = tmp_path / "gguf" / "tiny-Q8_0.gguf"
    write(gguf, model_of("llama"), "llama", lambda name: Type.Q8_0)
    silent = tmp_path / "silent"
    silent.mkdir()
    config = json.loads((llama / "config.json").read_text())
    (silent / "config.json").write_text(json.dumps({key: config[key] for key in config.keys() - {"dtype"}}))
    (silent / "model.safetensors").symlink_to(llama / "model.safetensors")
    hub.models = hub.models | {"org/tiny-gguf": gguf.parent, "org/silent": silent}
    settings = ["--set", "weights.min_parameters=0", "--set", "tiers.gpu.enabled=false", "--json"]
    commands = [
        ["inspect", "org/tiny", *settings],
        ["inspect", "org/tiny-gguf", *settings],
        ["plan", "org/silent", *settings],
        ["run", "org/tiny", "the sea", "--max-new-tokens", "3", *settings],
    ]
    home = tmp_path / "home"
    said = [json.loads(text) for text in run_commands(home, hub.url, *commands)]
    names = {"org/tiny": llama, "org/tiny-gguf": gguf, "org/silent": silent}
    for command, found in zip(commands, said, strict=True):
        assert cli.main([command[0], str(names[command[1]]), *command[2:]]) == 0
        local = json.loads(capsys.readouterr().out)
        steady = local.keys() - {"stats", "seconds", "machine", "needs", "budgets"}
        assert {key: found[key] for key in steady} == {key: local[key] for key in steady}
    ends: dict[str, int] = {}
    for repo, _, (_, end) in hub.ranges:
        ends[repo] = max(end, ends.get(repo, 0))
    sizes = {
        repo: next(path for path in folder.iterdir() if path.suffix in (".gguf", ".safetensors")).stat().st_size
        for repo, folder in hub.models.items()
        if repo in ends
    }
    assert ends.keys() == names.keys() and all(end < sizes[repo] / 4 for repo, end in ends.items()), (ends, sizes)
    assert len(hub.got) - len(hub.ranges) == 6  # the whole model in five files, and a config
