"""Other systems, simulated in a process of its own: names that they lack are removed before vbrt is imported."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


def ran(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).resolve().parent.parent,
    )


def test_on_macos_models_are_wrapped_saved_loaded_and_trained(tmp_path):
    pytest.importorskip("transformers")
    done = ran(f"""
        import os, sys
        import torch
        from tests.models import llama_of
        for name in [name for name in dir(os) if name.startswith(("memfd_", "MFD_", "posix_fadvise", "POSIX_FADV"))]:
            delattr(os, name)
        import vbrt
        from vbrt.estimation.advice import machine_rates
        ids = torch.arange(8)[None]
        def model():
            torch.manual_seed(0)
            return llama_of("cpu", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
        for preset in ("fp4", "exact"):
            vb = vbrt.wrap(model(), preset, tiers={{"ssd": {{"path": {str(tmp_path)!r}, "budget": "1GiB"}}}})
            want = vb.generate(ids, max_new_tokens=4, do_sample=False)
            vb.save({str(tmp_path)!r} + "/" + preset)
            again = vbrt.load({str(tmp_path)!r} + "/" + preset, model())
            assert torch.equal(again.generate(ids, max_new_tokens=4, do_sample=False), want)
        plain = model().bfloat16().requires_grad_(True)
        optimizer = torch.optim.AdamW(plain.parameters())
        full = vbrt.wrap(plain, "full", optimizer=optimizer)
        full(input_ids=ids, labels=ids).loss.backward()
        full.step()
        assert machine_rates._drive_gb_s() > 0
        print("ran")
    """)
    assert done.stdout.strip().endswith("ran"), done.stderr


def test_on_windows_the_import_is_refused_and_names_wsl():
    done = ran("""
        import sys
        sys.platform = "win32"
        try:
            import vbrt
        except ImportError as error:
            print(error)
    """)
    assert "install it in WSL2" in done.stdout, done.stderr
