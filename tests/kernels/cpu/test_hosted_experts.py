"""Routed experts asked for through a mailbox: a test plays the device, which names some of them by ids and weights."""

import time
from dataclasses import replace

import pytest
import torch

from tests.kernels.cpu.test_cpu_tiles import GATES, tiled_pages
from tests.kernels.cpu.test_hosted import WHY, Device, cpu_seconds
from tests.kernels.cuda.gpu_cases import error
from tests.matrix import matrix
from vbrt.errors import KernelError
from vbrt.formats import get_format
from vbrt.formats.joint_planes import join_fields, join_layouts
from vbrt.formats.page import new_page, pack
from vbrt.kernels.cpu.experts import experts_down, experts_up, takes_tiles
from vbrt.kernels.cpu.hosted import NOTHING, HostedExperts, HostedTeam
from vbrt.kernels.experts import ExpertPages, Gate

pytestmark = pytest.mark.skipif(WHY is not None, reason=str(WHY))
SHAPES = {"up": (96, 160), "down": (72, 48)}


def pages_of(format, shapes, experts=5):
    """Pages of experts in the order of rows."""
    fmt, pages = get_format(format), []
    layout = join_layouts({part: fmt.layout(shape, torch.bfloat16) for part, shape in shapes.items()})
    for _ in range(experts):
        coarse = {part: fmt.encode(torch.randn(shape)) for part, shape in shapes.items()}
        pages.append(pack(join_fields(coarse), layout, new_page(layout)))
    return ExpertPages(format, torch.bfloat16, shapes, layout, pages)


def posted(device, entry, experts, x, ids, weights):
    """Post experts, and return the answer y."""
    places = experts.places(len(x), x.dtype)
    for at, value in ((places.ids, ids), (places.weights, weights)):
        device.memory[at : at + value.nbytes] = value.contiguous().view(-1).view(torch.uint8)
    device.ask(entry, x)
    n = experts.pages.shapes["down"][0]
    return device.memory[places.y : places.y + 4 * len(x) * n].view(torch.float32).view(len(x), n).clone()


def rows_of(experts, x, ids):
    """The rows of each pair as the ops on pages give them, [T, k, N]."""
    up, down = experts.biases
    h = experts_up(x, ids, experts.pages, gate=experts.gate, bias_EN=up)
    return experts_down(h, ids, None, experts.pages, bias_EN=down).view(*ids.shape, -1)


def check(team, experts, dtype, rows):
    """Answers are weighted sums of the rows that the ops give, in their bits where there is one of weight 1."""
    device, count = Device(1 << 15), experts.pages.experts
    box = team.attach(device.memory)
    team.expect(box, 30)
    for ids in map(torch.tensor, rows):
        x, weights = torch.randn(len(ids), experts.pages.shapes["up"][1]).to(dtype), torch.rand(ids.shape)
        entry = team.experts(box, experts, len(ids), dtype)
        want = rows_of(experts, x, ids)
        got, again = (posted(device, entry, experts, x, ids, weights) for _ in range(2))
        assert error(got, (want.double() * weights[..., None]).sum(1)) < 4e-3
        assert torch.equal(got, again)
        for j in range(ids.shape[1]):
            alone = torch.where(torch.arange(ids.shape[1]) == j, ids, -1)
            got = posted(device, entry, experts, x, alone, torch.ones(ids.shape)).to(dtype)
            there = (ids[:, j] >= 0) & (ids[:, j] < count)
            assert torch.equal(got, want[:, j].masked_fill(~there[:, None], 0))
        team.forget(box, entry)
    team.detach(box)


@matrix(format=("nvfp4", "mxfp4", "nf4", "quantile", "mxint8"), gate=tuple(GATES), threads=(1, 3))
@torch.no_grad()
def test_posted_experts_are_weighted_and_summed(format, gate, threads):
    gate, n = GATES[gate]
    pages = pages_of(format, {"up": (n, 160), "down": (33, gate.columns(n))})
    team = HostedTeam(threads)
    for dtype in (torch.bfloat16, torch.float32):
        for biases in ((None, None), (torch.randn(5, n).to(dtype), torch.randn(5, 33))):
            experts = HostedExperts(pages, gate, biases, 2)
            check(team, experts, dtype, ([[1, 4]], [[-1, 3]], [[1, -1], [3, 1], [9, 2]]))
    team.stop()


@matrix(format=("nvfp4", "mxfp4"), gate=tuple(GATES))
@torch.no_grad()
def test_pages_in_the_order_of_tiles_are_computed_as_they_lie(format, gate):
    gate, n = GATES[gate]
    pages, *_ = tiled_pages(format, {"up": (n, 160), "down": (33, gate.columns(n))}, torch.randn)
    one, other = pages.pages[1], pages.pages[3]
    pages = replace(pages, pages=[one, other, other, one])
    experts = HostedExperts(pages, gate, (None, None), 2)
    team = HostedTeam(2)
    if not takes_tiles(pages, torch.bfloat16, gate):
        with pytest.raises(KernelError, match="tile order"):
            team.experts(team.attach(Device(1 << 15).memory), experts, 1, torch.bfloat16)
        return
    check(team, experts, torch.bfloat16, ([[1, 0]], [[-1, 3]], [[1, -1], [3, 1]]))
    team.stop()


@torch.no_grad()
def test_ids_of_no_expert_give_zeros():
    team, device = HostedTeam(2), Device(1 << 15)
    experts = HostedExperts(pages_of("nvfp4", SHAPES), Gate("silu"), (None, None), 2)
    box = team.attach(device.memory)
    entry, x, weights = team.experts(box, experts, 2, torch.bfloat16), torch.randn(2, 160).bfloat16(), torch.rand(2, 2)
    team.expect(box, 3)
    assert posted(device, entry, experts, x, torch.tensor([[0, 1], [1, 2]]), weights).any()
    assert not posted(device, entry, experts, x, torch.full((2, 2), -1), weights).any()
    assert not posted(device, entry, experts, x, torch.tensor([[0, 1], [-1, 99]]), weights)[1].any()


@torch.no_grad()
def test_a_post_of_nothing_is_counted_and_not_answered():
    """Threads sleep soon after the last one: posts that were replaced unseen are counted, too."""
    team, device = HostedTeam(2), Device(1 << 15)
    experts = HostedExperts(pages_of("nvfp4", SHAPES), Gate("silu"), (None, None), 2)
    box = team.attach(device.memory)
    entry, x = team.experts(box, experts, 1, torch.bfloat16), torch.randn(1, 160).bfloat16()
    team.expect(box, 40)
    for turn in range(10):
        for _ in range(3):
            device.post(NOTHING)
        assert posted(device, entry, experts, x, torch.tensor([[0, 1 + turn % 3]]), torch.ones(1, 2)).any()
    assert (team.served(box), team.failed(box)) == (10, 0)
    time.sleep(0.02)
    assert cpu_seconds(0.2) < 0.05  # naps would take .15


def test_what_c_cannot_compute_is_refused_with_what_came():
    team, device = HostedTeam(1), Device(1 << 15)
    box, pages = team.attach(device.memory), pages_of("nvfp4", SHAPES)
    experts = HostedExperts(pages, Gate("silu"), (None, None), 2)
    for words, wrong, tokens, dtype in (
        (
            "no page; expected",
            experts._replace(pages=replace(pages, pages=[*pages.pages[:-1], None])),
            1,
            torch.bfloat16,
        ),
        (r"a bias \(3, 96\)", experts._replace(biases=(torch.zeros(3, 96), None)), 1, torch.bfloat16),
        ("torch.float64 times nvfp4", experts, 1, torch.float64),
        ("99 tokens in a mailbox of 32768 bytes", experts, 99, torch.bfloat16),
    ):
        with pytest.raises(KernelError, match=words):
            team.experts(box, wrong, tokens, dtype)
