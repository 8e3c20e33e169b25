"""Where the bytes of published planes go on their way into pages."""

import os
import re
import warnings

import pytest
import torch

import vbrt
from tests.saves.published.published_files import LAYOUTS, publish
from tests.saves.published.test_published import llama
from vbrt.errors import CheckpointError
from vbrt.host.worker_threads import Crew
from vbrt.saves.files.read_target import fresh, into
from vbrt.saves.load.sources import open_source
from vbrt.saves.saved.saved_planes import SavedModel
from vbrt.wrapper.load import load_from

pytest.importorskip("transformers")
AS_THEY_ARE = [name for name in LAYOUTS if LAYOUTS[name][2] in ("nvfp4", "mxfp4")]


@pytest.mark.parametrize("layout", ["modelopt", "bitsandbytes"])
def test_what_is_taken_as_it_is_lands_where_it_is_wanted_and_other_planes_on_the_host(tmp_path, layout):
    publish(tmp_path, llama(), layout)
    landed = []

    def fill(nbytes, read):
        landed.append(nbytes)
        return fresh(nbytes, read)

    for weight in open_source(tmp_path)._packed.weights.values():
        there, here = weight.plane(fill=fill), weight.plane()
        assert all(torch.equal(there[field].view(torch.uint8), here[field].view(torch.uint8)) for field in here)
        assert landed == ([there["codes"].nbytes, there["scales"].nbytes] if layout == "modelopt" else [])
        landed.clear()


@pytest.mark.parametrize("nbytes", [0, 5, 5_000])
def test_parts_of_a_tensor_are_filled_by_a_crew(monkeypatch, nbytes):
    monkeypatch.setattr("vbrt.saves.files.read_target._ALONE_BYTES", 1_000)
    monkeypatch.setattr("vbrt.saves.files.read_target._PART_BYTES", 300)
    source, out = (torch.randint(0, 256, (nbytes,), dtype=torch.uint8) for _ in range(2))
    crew = Crew(2)
    into(out, crew)(nbytes, lambda part, at: part.copy_(source[at : at + part.numel()]))
    assert torch.equal(out, source)

    def fail(part, at):
        raise OSError(5, f"at {at}")

    if nbytes:
        with pytest.raises(OSError, match="at "):
            into(out, crew)(nbytes, fail)


@pytest.mark.parametrize(("preset", "straight"), [("fp4", True), ("dense", True), ("exact", False)])
def test_saved_planes_go_from_the_file_into_their_pages(tmp_path, monkeypatch, preset, straight):
    settings = {"tiers": {"gpu": {"enabled": False}}, "weights": {"min_parameters": 0}}
    with vbrt.wrap(llama(), preset, **settings) as vb:
        vb.save(tmp_path)
        wanted = vb.state_dict()
    read = []
    real = SavedModel.read
    monkeypatch.setattr(
        SavedModel, "read", lambda saved, name, fill=fresh: read.append(fill) or real(saved, name, fill)
    )
    with vbrt.load(tmp_path, llama(meta=True), tiers=settings["tiers"]) as vb:
        assert all(torch.equal(value, wanted[name]) for name, value in vb.state_dict().items())
    assert any(fill is not fresh for fill in read) is straight


@pytest.mark.gpu
@pytest.mark.parametrize("budget", ["1GiB", "100KiB"])
@pytest.mark.parametrize("layout", AS_THEY_ARE)
def test_a_gpu_takes_the_bits_of_the_files(tmp_path, monkeypatch, layout, budget):
    monkeypatch.setattr("vbrt.tiers.storage.pinned_staging._CHUNK_BYTES", 1000)  # a weight is several chunks and a rest
    wanted = publish(tmp_path, llama(), layout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {"weights": {"min_parameters": 0}, "tiers": {"gpu": {"budget": budget}}}
        vb = vbrt.load(tmp_path, llama(meta=True), **settings)
    found = vb.state_dict()
    assert all(torch.equal(found[name].cpu(), value) for name, value in wanted.items())
    vb.close()


@pytest.mark.gpu
def test_a_file_that_ends_early_is_an_error_with_its_path_on_a_gpu_too(tmp_path):
    publish(tmp_path, llama(), "modelopt")
    source = open_source(tmp_path)
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    model = llama(meta=True)
    with pytest.raises(CheckpointError, match=f"{re.escape(str(file))}: .* cannot be read: truncated"):
        load_from(source, model, None, runtime=None)
    assert not any(hasattr(module, "handle") for module in model.modules())
