"""The kernel that posts to host threads as it is compiled, run on the CPU beside answers that are there: see `ptx`."""

import pytest
import torch

from tests.emulator.test_ptx import gpu  # noqa: F401  # a fixture
from vbrt.kernels.cpu.hosted import ANSWER, ENTRY_BITS, GAVE_UP, NOTHING, POST, X, places_of
from vbrt.kernels.cuda.mailbox import Outbox

pytest.importorskip("triton.experimental.gluon")

RESULT_AT, ENTRY = 1024, 5


def boxes(answer):
    room = torch.zeros(4096, dtype=torch.uint8)
    room[ANSWER : ANSWER + 8].view(torch.int64)[0] = answer
    room[RESULT_AT:].view(torch.bfloat16).copy_(torch.randn(1536))
    outbox = Outbox(room, (POST, ANSWER, GAVE_UP, X), ENTRY_BITS, torch.device("cpu"))
    outbox.wait_ns = 50
    return room, outbox


def word(room, at):
    return room[at : at + 8].view(torch.int64).item()


@pytest.mark.parametrize("biased", [True, False])
def test_x_is_posted_and_the_answer_is_picked_up(biased, gpu):  # noqa: F811
    room, outbox = boxes(1)
    x, y = torch.randn(2, 160).bfloat16(), torch.empty(2, 304).bfloat16()
    bias = torch.randn(304).bfloat16() if biased else None
    outbox.exchange(x, y, bias, ENTRY, RESULT_AT)
    assert word(room, POST) == 1 << ENTRY_BITS | ENTRY and word(room, GAVE_UP) == 0
    assert torch.equal(room[X : X + x.nbytes].view(torch.bfloat16).view(2, 160), x)
    result = room[RESULT_AT : RESULT_AT + y.nbytes].view(torch.bfloat16).view(2, 304)
    assert torch.equal(y, result if bias is None else (result.float() + bias.float()).bfloat16())
    assert outbox._state.tolist()[:2] == [1, 0]
    assert gpu == ["exchange_kernel"]


@pytest.mark.parametrize("answer", [0, -1], ids=["late", "refused"])
def test_without_an_answer_y_is_nan_and_later_products_do_not_wait(answer, gpu):  # noqa: F811
    room, outbox = boxes(answer)
    x, y = torch.randn(1, 160).bfloat16(), torch.zeros(1, 304).bfloat16()
    outbox.exchange(x, y, None, ENTRY, RESULT_AT)
    assert y.isnan().all() and word(room, GAVE_UP) == 1 << ENTRY_BITS | ENTRY
    assert outbox._state.tolist()[:2] == [1, 1]
    outbox.wait_ns = 1 << 60
    y.zero_()
    outbox.exchange(x, y, None, ENTRY + 1, RESULT_AT)
    assert y.isnan().all() and word(room, POST) == 2 << ENTRY_BITS | ENTRY + 1
    assert word(room, GAVE_UP) == 1 << ENTRY_BITS | ENTRY  # the first one
    outbox.mend()
    room[ANSWER : ANSWER + 8].view(torch.int64)[0] = 3
    outbox.exchange(x, y, None, ENTRY, RESULT_AT)
    assert not y.isnan().any()


IDS = torch.tensor([[3, 0, 7], [5, -1, 9]])
WEIGHTS = torch.rand(2, 3)
KEPT = torch.tensor([[-1, 0, 7], [-1, -1, 9]])


def post(outbox, ids=IDS, kept=KEPT, weights=WEIGHTS):
    x = torch.randn(2, 160).bfloat16()
    places = places_of(2, 3, 160, 72, x.dtype)
    outbox.post(x, ids, kept, weights, ENTRY, (places.ids, places.weights))
    return x, places


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_that_are_not_kept_are_posted_and_what_comes_back_is_added(dtype, gpu):  # noqa: F811
    room, outbox = boxes(1)
    weights = torch.rand(2, 3).to(dtype)
    x, places = post(outbox, weights=weights)
    assert word(room, POST) == 1 << ENTRY_BITS | ENTRY
    assert torch.equal(room[X : X + x.nbytes].view(x.dtype).view(2, 160), x)
    assert room[places.ids : places.ids + 48].view(torch.int64).tolist() == [3, -1, -1, 5, -1, -1]
    assert torch.equal(room[places.weights : places.weights + 24].view(torch.float32), weights.float().flatten())
    more = room[places.y : places.y + 2 * 72 * 4].view(torch.float32).copy_(torch.randn(144)).view(2, 72)
    y = torch.randn(2, 72).bfloat16()
    want = (y.float() + more).bfloat16()
    outbox.add(y, ENTRY, places.y)
    assert torch.equal(y, want) and outbox._state.tolist() == [1, 0, 1] and word(room, GAVE_UP) == 0
    assert gpu == ["post_kernel", "add_kernel"]


def test_where_all_experts_are_kept_nothing_is_posted_and_nobody_waits(gpu):  # noqa: F811
    room, outbox = boxes(0)
    outbox.wait_ns = 1 << 60
    room[X:].fill_(7)
    _, places = post(outbox, kept=IDS)
    assert word(room, POST) == 1 << ENTRY_BITS | NOTHING and bool((room[X:] == 7).all())
    y = torch.randn(2, 72).bfloat16()
    want = y.clone()
    outbox.add(y, ENTRY, places.y)
    assert torch.equal(y, want) and outbox._state.tolist() == [1, 0, 0]


def test_experts_without_an_answer_give_nan_and_later_ones_do_not_wait(gpu):  # noqa: F811
    room, outbox = boxes(0)
    _, places = post(outbox)
    y = torch.zeros(2, 72).bfloat16()
    outbox.add(y, ENTRY, places.y)
    assert y.isnan().all() and word(room, GAVE_UP) == 1 << ENTRY_BITS | ENTRY
    outbox.wait_ns = 1 << 60
    post(outbox)
    y.zero_()
    outbox.add(y, ENTRY, places.y)
    assert y.isnan().all() and outbox._state.tolist() == [2, 1, 1]
