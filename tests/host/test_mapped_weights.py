"""Weights that are mapped from a file leave the resident memory with the dense parameter, and lose nothing."""

import ctypes
import mmap
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.models import wrap
from vbrt.host.mapped_weights import page_out, populate

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="madvise(MADV_PAGEOUT) is Linux's")
MiB = 1 << 20
WIDTH = 1024


def mapped(path: Path, count: int = 1) -> list[torch.Tensor]:
    """`count` weights of 4 MiB in one private mapping of a file, each beginning within a page."""
    numel = 256 + count * WIDTH * WIDTH
    with path.open("wb") as file:
        torch.randn(numel).numpy().tofile(file)
        os.fsync(file.fileno())  # pages that wait to be written to the disk cannot leave
    storage = torch.UntypedStorage.from_file(str(path), False, numel * 4)
    values = torch.empty(0).set_(storage)
    return [part.view(WIDTH, WIDTH) for part in values[256:].split(WIDTH * WIDTH)]


def resident(path: Path) -> int:
    """Bytes of a file's mappings that are in this process's memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            inside = line.endswith(str(path))
        elif inside and first == "Rss:":
            total += int(rest[0]) * 1024
    return total


@pytest.fixture
def disk(tmp_path) -> Path:
    """A directory whose files' pages can leave memory; those of a tmpfs are memory."""
    (probe,) = mapped(tmp_path / "probe")
    start = -(-probe.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    before = float(probe.sum())
    if libc.madvise(start, probe.nbytes - mmap.PAGESIZE, 21) or resident(tmp_path / "probe") > MiB:
        pytest.skip("this system does not take pages of mapped files out of memory (tmpfs, or a kernel before 5.4)")
    assert float(probe.sum()) == before
    return tmp_path


@pytest.mark.parametrize("format", ["dense", "nvfp4"])
def test_a_mapped_weight_leaves_the_resident_memory_when_it_is_encoded(format, disk):
    kept, *weights = mapped(disk / "weights", count=4)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in weights)).eval()
    for layer, weight in zip(model, weights, strict=True):
        layer.weight = nn.Parameter(weight)
    expected = [weight.clone() for weight in weights]
    total = float(kept.sum())
    assert resident(disk / "weights") >= 16 * MiB
    vb = wrap(model, format)
    vb(torch.randn(1, WIDTH))
    assert 4 * MiB - 8192 <= resident(disk / "weights") <= 4.5 * MiB  # the one that is not the model's
    assert float(kept.sum()) == total
    assert all(torch.equal(weight, copy) for weight, copy in zip(weights, expected, strict=True))


def test_pages_that_were_written_to_keep_what_was_written(disk):
    (weight,) = mapped(disk / "weights")
    weight[::7] = 3.0
    expected = weight.clone()
    assert 4 * MiB - 8192 <= page_out(weight) <= 4 * MiB
    assert torch.equal(weight, expected)


def test_what_is_not_mapped_from_a_file_is_left_alone(tmp_path):
    owned = bytearray(4 * WIDTH * WIDTH)
    (weight,) = mapped(tmp_path / "weights")
    shared = torch.randn(WIDTH, WIDTH).share_memory_()
    tiny, strided = weight.flatten()[:512], weight.t()
    for other in (
        torch.randn(WIDTH, WIDTH),
        torch.frombuffer(owned, dtype=torch.float32),
        shared,
        tiny,
        strided,
        torch.empty(WIDTH, WIDTH, device="meta"),
        torch.empty(0),
    ):
        assert page_out(other) == 0


def test_a_mapped_weight_is_mapped_as_a_whole_and_one_on_the_heap_is_left(tmp_path):
    path = tmp_path / "weight"
    path.write_bytes(os.urandom(3 * MiB))
    mapped = torch.from_file(str(path), shared=False, size=3 * MiB, dtype=torch.uint8)[5 : 2 * MiB]
    if populate(mapped):  # Linux 5.14
        assert resident(path) >= 2 * MiB
    assert bytes(mapped.numpy()) == path.read_bytes()[5 : 2 * MiB]
    assert not populate(torch.zeros(3 * MiB, dtype=torch.uint8))
