"""Pages of files, read and hashed by C."""

import os

import pytest
import torch
import xxhash

from tests.matrix import matrix
from vbrt.kernels.cpu import build
from vbrt.kernels.cpu.reading import page_reader, read_page

WHY = build.refusal(torch.device("cpu"), "reading")
built = pytest.mark.skipif(WHY is not None, reason=str(WHY))


@pytest.fixture
def file(tmp_path):
    """A descriptor of 10,000 random bytes."""
    (tmp_path / "file").write_bytes(os.urandom(10_000))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    yield fd
    os.close(fd)


@built
@matrix(nbytes=(241, 1024, 1025, 1088, 2048, 9_000), segment=(512, 1 << 20))
def test_bytes_and_digests_are_those_of_the_library(file, nbytes, segment):
    if 0 < nbytes % segment <= 240:
        pytest.skip("the last segment is too short for the long form")
    out, want = torch.zeros(nbytes, dtype=torch.uint8), os.pread(file, nbytes, 300)
    digests = read_page(file, out, 300, segment)
    assert bytes(out.tolist()) == want
    assert digests == b"".join(xxhash.xxh3_64_digest(want[at : at + segment]) for at in range(0, nbytes, segment))


@built
def test_what_cannot_be_read_says_why(file):
    with pytest.raises(EOFError, match="it ends before byte 10001"):
        read_page(file, torch.empty(9_001, dtype=torch.uint8), 1_000, 4096)
    with pytest.raises(OSError, match="Bad file descriptor"):
        read_page(-1, torch.empty(4096, dtype=torch.uint8), 0, 4096)


def test_who_asks_for_plain_torch_needs_no_compiler():
    assert page_reader("reference") is None
