"""Experts that threads of their own compute: the bits of one call after the other, whoever comes for them."""

import gc
import threading
import time
import weakref

import pytest
import torch

from tests.kernels.cpu.test_cpu_tiles import GATES, tiled_pages
from tests.matrix import matrix
from vbrt.formats import get_format
from vbrt.formats.joint_planes import join_fields, join_layouts
from vbrt.formats.page import new_page, pack
from vbrt.kernels.cpu import build
from vbrt.kernels.cpu.expert_team import ExpertTeam, HostProduct, team_form
from vbrt.kernels.cpu.experts import experts_down, experts_up
from vbrt.kernels.experts import ExpertPages, Gate

WHY = build.refusal(torch.device("cpu"), "experts")
pytestmark = pytest.mark.skipif(WHY is not None, reason=str(WHY))
EXPERTS = 6


def pages_of(format, shapes):
    """Pages of experts 1, 2 and 4."""
    fmt = get_format(format)
    layout = join_layouts({part: fmt.layout(shape, torch.bfloat16) for part, shape in shapes.items()})
    pages = [None] * EXPERTS
    for expert in (1, 2, 4):
        coarse = {part: fmt.encode(torch.randn(shape)) for part, shape in shapes.items()}
        pages[expert] = pack(join_fields(coarse), layout, new_page(layout))
    return ExpertPages(format, torch.bfloat16, shapes, layout, pages)


def product_of(pages, x, ids, gate, biases=(None, None)):
    """A job on the pages that are there; None where no team can compute it."""
    empty = ExpertPages(pages.format, pages.dtype, pages.shapes, pages.layout, [None] * pages.experts)
    form = team_form(empty, x.dtype, gate)
    there = {expert: page for expert, page in enumerate(pages.pages) if page is not None}
    out = torch.full((ids.numel(), pages.shapes["down"][0]), torch.nan, dtype=x.dtype)
    return None if form is None else HostProduct(form, gate, biases, x, ids, there, out)


def expected(product, pages):
    missing = torch.tensor([page is None for page in pages.pages])
    ids = product.ids.masked_fill((product.ids < 0) | missing[product.ids.clamp(min=0)], -1)
    h_PI = experts_up(product.x, ids, pages, gate=product.gate, bias_EN=product.biases[0])
    return experts_down(h_PI, ids, None, pages, bias_EN=product.biases[1])


@matrix(format=("nvfp4", "mxfp4", "nf4", "quantile", "mxint8", "zeros32-float16"), threads=(1, 3))
@torch.no_grad()
def test_a_team_has_the_bits_of_both_products_one_after_the_other(format, threads):
    gate, n = Gate("silu", limit=3.0), 96
    pages, team = pages_of(format, {"up": (n, 160), "down": (72, 48)}), ExpertTeam(threads)
    biases = torch.randn(EXPERTS, n).bfloat16(), torch.randn(EXPERTS, 72)
    for dtype in (torch.bfloat16, torch.float32):
        for ids in ([[1]], [[4, 2]], [[1, -1], [3, 4], [2, 1]]):
            ids = torch.tensor(ids)
            product = product_of(pages, torch.randn(len(ids), 160, dtype=dtype), ids, gate, biases)
            team.finish(team.post(None, product))
            assert torch.equal(product.out, expected(product, pages))


@matrix(format=("nvfp4", "mxfp4"), gate=tuple(GATES))
@torch.no_grad()
def test_a_team_computes_pages_in_the_order_of_tiles(format, gate):
    gate, n = GATES[gate]
    tiles, *_ = tiled_pages(format, {"up": (n, 160), "down": (33, gate.columns(n))})
    ids = torch.tensor([[3, 1], [1, -1]])
    product = product_of(tiles, torch.randn(2, 160).bfloat16(), ids, gate)
    if product is None:
        pytest.skip("this CPU does not multiply tiles")
    team = ExpertTeam(2)
    team.finish(team.post(None, product))
    assert torch.equal(product.out, expected(product, tiles))


def test_pages_in_the_order_of_tiles_are_refused_where_numbers_have_32_bits():
    tiles, *_ = tiled_pages("nvfp4", {"up": (32, 160), "down": (33, 16)})
    assert product_of(tiles, torch.randn(1, 160), torch.tensor([[1]]), Gate("silu")) is None


@torch.no_grad()
def test_jobs_of_many_threads_are_done_one_after_the_other():
    gate, team = Gate("silu"), ExpertTeam(3)
    pages = pages_of("nvfp4", {"up": (96, 160), "down": (72, 48)})
    ids = torch.tensor([[1, 2, 4]])
    products = [product_of(pages, torch.randn(1, 160).bfloat16(), ids, gate) for _ in range(60)]

    def compute(some):
        for product in some:
            team.finish(team.post(None, product))

    threads = [threading.Thread(target=compute, args=(products[at::3],)) for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(product.out, expected(product, pages)) for product in products)


class Left:
    """Work that nobody comes for."""

    def __init__(self):
        self.ended = threading.Event()

    def end(self):
        self.ended.set()


@torch.no_grad()
def test_a_job_that_nobody_comes_for_is_ended_by_the_team_and_one_that_is_fetched_is_not():
    pages, team = pages_of("nvfp4", {"up": (96, 160), "down": (72, 48)}), ExpertTeam(2)
    left, fetched = Left(), Left()
    product = product_of(pages, torch.randn(1, 160).bfloat16(), torch.tensor([[1, 2]]), Gate("silu"))
    team.post(left, product)
    assert left.ended.wait(30)
    assert torch.equal(product.out, expected(product, pages))
    began = time.monotonic_ns()
    team.finish(team.post(fetched, product))
    assert not fetched.ended.wait(0.1)
    assert began < team.span().done_ns < time.monotonic_ns()


@torch.no_grad()
def test_a_team_that_is_gone_leaves_finished_results_and_no_threads():
    pages, team = pages_of("nvfp4", {"up": (96, 160), "down": (72, 48)}), ExpertTeam(2)
    product = product_of(pages, torch.randn(1, 160).bfloat16(), torch.tensor([[1, 2]]), Gate("silu"))
    team.post(None, product)
    memory, limit = weakref.ref(team._memory), time.monotonic() + 30
    del team
    gc.collect()
    assert torch.equal(product.out, expected(product, pages))
    while memory() is not None and time.monotonic() < limit:  # until its threads have seen it
        time.sleep(0.001)
    assert memory() is None
