"""Merge of coded fine planes in C: every bit, for each instruction set that this CPU has."""

import dataclasses

import pytest
import torch

from tests.kernels.cpu.test_cpu_linear import bits, built, exact_case
from vbrt.errors import FormatError
from vbrt.formats import code_fine, get_format
from vbrt.formats.fine_coding import CODED
from vbrt.kernels.cpu import compiler
from vbrt.kernels.cpu import linear as cpu_linear

SETS = {each.name: each for each in compiler.served(compiler.machine(), compiler.cpu_features())}
SHAPES = ((1, 1), (7, 50), (33, 100), (3, 9999), (1000, 33), (4100, 3), (130, 4112))


def coded_case(name, shape):
    planes, w = exact_case(name, shape, torch.bfloat16)
    return dataclasses.replace(planes, fine=code_fine(w, planes.coarse, get_format(name))), w


@pytest.fixture(params=[None, "avx2", "x86-64"])
def instructions(request, use_library, library_for):
    """The linear kernels built for an instruction set; None: this CPU's own."""
    if request.param is not None:
        if request.param not in SETS:
            pytest.skip(f"this CPU has no {request.param}")
        use_library("linear", library_for("linear", SETS[request.param]))
    return request.param


@pytest.mark.sample(16)
@built
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", cpu_linear.FORMATS)
def test_a_coded_plane_gives_every_bit_of_the_weight_back(name, shape, instructions, monkeypatch):
    planes, w = coded_case(name, shape)
    assert torch.equal(bits(cpu_linear.decode_weight(planes)), bits(w))
    for threads in (1, 3, 8):  # each begins somewhere in the stream
        monkeypatch.setattr(cpu_linear, "_threads", lambda work, threads=threads: threads)
        assert torch.equal(bits(cpu_linear.decode_weight(planes)), bits(w))
        assert torch.equal(bits(cpu_linear.decode_turned(planes)), bits(w.t()))


@built
@pytest.mark.parametrize("name", ["nvfp4", "nf4"])
def test_a_coded_plane_that_does_not_fit_its_symbols_is_refused(name, instructions):
    """A save by somebody else may hold anything under its right digest."""
    planes, _ = coded_case(name, (40, 704))
    fine = planes.fine
    wrong = {
        "extra": (fine["extra"][:-16], fine["extra"][:32], torch.cat((fine["extra"], fine["extra"][:16]))),
        "escapes": (fine["escapes"][:-1], fine["escapes"][:0], torch.cat((fine["escapes"], fine["escapes"][:1]))),
        "starts": (fine["starts"][:-1], fine["starts"] + 1, fine["starts"] - 1, fine["starts"] + (1 << 30)),
        "fours": (fine["fours"][:-1], fine["fours"] & 0, fine["fours"] | 0xFF),
        "pairs": (fine["pairs"][:, 4:].contiguous(),),
        CODED: (fine[CODED] | 0x1FFF, fine[CODED][:, :8].contiguous()),
    }
    for field, tensors in wrong.items():
        for tensor in tensors:
            damaged = dataclasses.replace(planes, fine=fine | {field: tensor})
            with pytest.raises(FormatError, match=r"fine plane: .* the pages are damaged"):
                cpu_linear.decode_weight(damaged)
