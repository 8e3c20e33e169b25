"""Hosted products: a test plays the device, and writes posts into a mailbox in plain memory."""

import time

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.cpu.test_cpu_experts import BOUND
from tests.kernels.cuda.gpu_cases import error
from tests.matrix import matrix
from vbrt.errors import KernelError
from vbrt.formats import WeightPlanes, get_format
from vbrt.formats.page import new_page, pack
from vbrt.kernels.cpu import build
from vbrt.kernels.cpu.experts import experts_up, takes_tiles
from vbrt.kernels.cpu.hosted import ANSWER, ENTRY_BITS, POST, HostedPart, HostedTeam, X
from vbrt.kernels.cuda.e2m1.tiles import pack_tiles, tile_layout
from vbrt.kernels.experts import Gate
from vbrt.kernels.reference import decode_weight

WHY = build.refusal(torch.device("cpu"), "hosted")
pytestmark = pytest.mark.skipif(WHY is not None, reason=str(WHY))
LIMIT_S = 30  # generous, for a busy machine
RAW = Gate("none", gated=False)


def lines(nbytes):
    return -(-nbytes // 64) * 64


class Device:
    """A mailbox, and the device that posts there."""

    def __init__(self, nbytes=1 << 16):
        room = torch.zeros(nbytes + 64, dtype=torch.uint8)
        self.memory = room[-room.data_ptr() % 64 :][:nbytes]
        self.number = 0

    def word(self, at):
        return self.memory[at : at + 8].view(torch.int64)

    def post(self, entry, x=None):
        """Post without waiting."""
        if x is not None:
            self.memory[X : X + x.nbytes] = x.view(-1).view(torch.uint8)
        self.number += 1
        self.word(POST)[0] = self.number << ENTRY_BITS | entry

    def wait(self):
        """Return the answer to the last post."""
        answer, limit = self.word(ANSWER), time.monotonic() + LIMIT_S
        while abs(answer.item()) != self.number:
            assert time.monotonic() < limit, f"no answer to {self.number}: {answer.item()}"
        return answer.item()

    def ask(self, entry, x):
        self.post(entry, x)
        assert self.wait() == self.number

    def y(self, part, x):
        count = len(x) * part.shape[0]
        return self.memory[part.y : part.y + count * x.dtype.itemsize].view(x.dtype).view(len(x), -1).clone()


def part_of(format, shape, y, *, bias=None, tiles=False):
    """A part, and the weight that its page has."""
    fmt = get_format(format)
    coarse = fmt.encode(torch.randn(shape))
    layout = tile_layout(format, shape) if tiles else fmt.layout(shape, torch.bfloat16)
    fields = pack_tiles(format, coarse, shape) if tiles else coarse
    w_NK = decode_weight(WeightPlanes(format, shape, torch.float32, coarse))
    return HostedPart(format, torch.bfloat16, shape, layout, pack(fields, layout, new_page(layout)), bias, y), w_NK


def parts_of(format, rows, k, tokens, dtype, *, tiles=False):
    """Parts of one x, with and without a bias, one behind the other in a mailbox."""
    made, y = [], lines(X + tokens * k * dtype.itemsize)
    for at, n in enumerate(rows):
        made.append(part_of(format, (n, k), y, bias=torch.randn(n).to(dtype) if at % 2 else None, tiles=tiles))
        y += lines(tokens * n * dtype.itemsize)
    return [part for part, _ in made], [w_NK for _, w_NK in made]


def up(part, x):
    """The product as the layer of one expert."""
    bias = None if part.bias is None else part.bias[None]
    return experts_up(x, torch.zeros(len(x), 1, dtype=torch.int64), part.pages(), part="weight", bias_EN=bias)


def small(team, device, k=160, tokens=1, dtype=torch.bfloat16, rows=(48,)):
    """A mailbox with one entry."""
    box = team.attach(device.memory)
    parts, _ = parts_of("nvfp4", rows, k, tokens, dtype)
    return box, parts, team.entry(box, parts, tokens, dtype)


@matrix(format=("nvfp4", "mxfp4", "nf4", "quantile", "mxint8"), threads=(1, 3))
@torch.no_grad()
def test_products_have_the_bits_of_an_expert_whatever_the_threads(format, threads):
    team = HostedTeam(threads)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for tokens in (1, 3):
            device = Device()
            box = team.attach(device.memory)
            parts, weights = parts_of(format, (96, 33, 2), 160, tokens, dtype)
            entry, x = team.entry(box, parts, tokens, dtype), torch.randn(tokens, 160, dtype=dtype)
            team.expect(box, 1)
            device.ask(entry, x)
            for part, w_NK in zip(parts, weights, strict=True):
                bias = None if part.bias is None else part.bias.double()
                assert torch.equal(device.y(part, x), up(part, x))
                assert error(device.y(part, x), F.linear(x.double(), w_NK.double(), bias)) <= BOUND[dtype]
            assert (team.served(box), team.failed(box)) == (1, 0)
            team.detach(box)
    team.stop()


@matrix(format=("nvfp4", "mxfp4"))
@torch.no_grad()
def test_pages_in_the_order_of_tiles_are_computed_as_they_lie(format):
    parts, weights = parts_of(format, (96, 33), 160, 2, torch.bfloat16, tiles=True)
    device, team, x = Device(), HostedTeam(2), torch.randn(2, 160).bfloat16()
    box = team.attach(device.memory)
    if not takes_tiles(parts[0].pages(), torch.bfloat16, RAW):
        with pytest.raises(KernelError, match="tile order"):
            team.entry(box, parts, 2, torch.bfloat16)
        return
    entry = team.entry(box, parts, 2, torch.bfloat16)
    team.expect(box, 1)
    device.ask(entry, x)
    for part, w_NK in zip(parts, weights, strict=True):
        bias = None if part.bias is None else part.bias.double()
        assert torch.equal(device.y(part, x), up(part, x))
        assert error(device.y(part, x), F.linear(x.double(), w_NK.double(), bias)) <= BOUND[torch.bfloat16]
    with pytest.raises(KernelError, match="tile order"):
        team.entry(box, parts, 1, torch.float32)
