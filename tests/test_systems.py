"""Other systems, simulated in a process of their own (`tests/other_systems.py`); no machine with one has run vbrt."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

#: after `system`, the function that simulates one; `tmp`, a directory. Models are wrapped, saved, loaded and trained.
EVERYWHERE = """
    import json, os, sys, threading, warnings
    from tests import other_systems
    getattr(other_systems, system)()
    import torch
    import vbrt
    from tests.models import llama_of
    from vbrt.estimation.advice import machine_rates

    def model():
        torch.manual_seed(0)
        sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        return llama_of("cpu", **sizes, num_attention_heads=4)

    def generated(vb):
        return vb.generate(torch.arange(8)[None], max_new_tokens=4, do_sample=False)

    tiers = {"cpu": {"enabled": True, "budget": "64KiB"}, "ssd": {"enabled": True, "path": tmp, "budget": "1GiB"}}
    tiers["ssd"]["io"] = "direct"
    for preset in ("fp4", "exact"):
        vb = vbrt.wrap(model(), preset, tiers=tiers)
        want = generated(vb)
        said = vb.stats().fallbacks
        assert any("other than Linux, does not have O_DIRECT" in why for why in said), said
        assert vb.stats().tiers["ssd"].home_pages > 0
        vb.save(os.path.join(tmp, preset))
        again = vbrt.load(os.path.join(tmp, preset), model())
        assert torch.equal(generated(again), want)
        again.close()
        vb.close()
        assert sorted(os.listdir(tmp)) == ["exact", "fp4"][preset == "fp4":], os.listdir(tmp)
    ids = torch.arange(8)[None]
    plain = model().bfloat16().requires_grad_(True)
    full = vbrt.wrap(plain, "full", optimizer=torch.optim.AdamW(plain.parameters()))
    before = full(input_ids=ids, labels=ids).loss
    before.backward()
    full.step()
    assert full(input_ids=ids, labels=ids).loss < before
    assert machine_rates._drive_gb_s() > 0
"""
MACOS = """
    from vbrt.host import stats_endpoint
    endpoint = stats_endpoint.Offer(lambda: b"here")
    assert stats_endpoint.ask(os.getpid()) == b"here"
    assert endpoint._socket.getsockname() == str(endpoint.path)  # and no path in /proc
    endpoint.stop()
    print("ran")
"""
WINDOWS = """
    assert any("on Windows vbrt builds no C kernels" in why for why in said), said

    import importlib, pkgutil
    for module in pkgutil.walk_packages(vbrt.__path__, "vbrt."):
        try:
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert error.name in ("diffusers", "vllm"), (module.name, error)

    from pathlib import Path
    from vbrt.host import safe_files, system_calls
    path = Path(tmp) / "file"
    path.write_bytes(bytes(range(256)) * 4096)
    first, second = (safe_files.open_regular(path, os.O_RDWR) for _ in range(2))
    system_calls.lock(first, wait=False)
    try:
        system_calls.lock(second, wait=False)
        sys.exit("two descriptors hold one lock")
    except BlockingIOError:
        pass
    os.close(first)
    system_calls.lock(second, wait=True)
    wrong = []
    def read(at):
        for _ in range(200):
            found = bytearray(512)
            safe_files.read_into(second, [memoryview(found)[:1], memoryview(found)[1:]], at)
            if found != bytes((at + i) % 256 for i in range(512)):
                wrong.append(at)
    threads = [threading.Thread(target=read, args=(37 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    os.close(second)
    with safe_files.alone_in(Path(tmp)):
        assert "lock" not in os.listdir(tmp)

    from vbrt.kernels.cpu import buffer_reuse
    assert buffer_reuse.empty((5 << 20,), torch.float32).fill_(1.0).mean() == 1.0

    from vbrt.cli.main import main
    assert main(["top"]) != 0  # what it says is read from stderr
    os.environ["VBRT_TOP"] = "1"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        vbrt.wrap(model(), "fp4")
    assert any("no Unix sockets on Windows" in str(each.message) for each in caught), caught
    print("ran")
"""


#: imports the libraries, then runs each of these in a fork: system, its code, where it prints
FORKS = """
import os, sys
from tests import other_systems
other_systems.import_libraries()
for at in range(1, len(sys.argv), 3):
    system, code, said = sys.argv[at : at + 3]
    if not (child := os.fork()):
        for fd, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{said}.{name}", os.O_WRONLY | os.O_CREAT), fd)
        exec(code, {"__name__": "__main__"})
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[str, tuple[str, str]]:
    """System -> what it prints on stdout and stderr."""
    pytest.importorskip("transformers")
    folder, given = tmp_path_factory.mktemp("systems"), []
    for system, own in (("macos", MACOS), ("windows", WINDOWS)):
        (folder / system).mkdir()
        head = f"system, tmp = {'become_' + system!r}, {str(folder / system)!r}\n"
        given += [system, "".join(map(textwrap.dedent, (head, EVERYWHERE, own))), str(folder / f"said-{system}")]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", FORKS, *given], capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    return {
        name: tuple((folder / f"said-{name}.{kind}").read_text() for kind in ("out", "err"))
        for name in ("macos", "windows")
    }


def test_on_macos_models_are_wrapped_saved_loaded_and_trained_from_files(said):
    out, err = said["macos"]
    assert out.strip().endswith("ran"), err


def test_on_windows_models_are_wrapped_saved_loaded_and_trained_and_what_cannot_be_names_wsl(said):
    out, err = said["windows"]
    assert out.strip().endswith("ran"), err
    assert "vbrt top: Python has no Unix sockets on Windows; in WSL2 it has" in err
