"""Hosted products: a test plays the device, and writes posts into a mailbox in plain memory."""

import gc
import os
import signal
import threading
import time
import traceback
import weakref

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
from vbrt.kernels.cpu.hosted import ANSWER, ENTRY_BITS, GAVE_UP, NOTHING, POST, HostedPart, HostedTeam, X, new_team
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

    def __init__(self, nbytes=1 << 14):
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
            time.sleep(0)  # lets other threads have Python's lock
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


def up(part, x, **options):
    """The product as the layer of one expert."""
    bias = None if part.bias is None else part.bias[None]
    return experts_up(
        x, torch.zeros(len(x), 1, dtype=torch.int64), part.pages(), part="weight", bias_EN=bias, **options
    )


def small(team, device, k=160, tokens=1, dtype=torch.bfloat16, rows=(48,)):
    """A mailbox with one entry."""
    box = team.attach(device.memory)
    parts, _ = parts_of("nvfp4", rows, k, tokens, dtype)
    return box, parts, team.entry(box, parts, tokens, dtype)


@matrix(
    format=("nvfp4", "mxfp4", "nf4", "quantile", "mxint8", "affine32-float16", "signed64-float16", "superblock32"),
    threads=(1, 3),
)
@torch.no_grad()
def test_products_have_the_bits_of_an_expert_whatever_the_threads(format, threads):
    for part, x, y in check_products(format, threads):
        assert torch.equal(y, up(part, x))


def check_products(format, threads):
    """Products are as close as the dtype allows; returns (part, x, y) of each."""
    team, made = HostedTeam(threads), []
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for tokens in (1, 3):
            device = Device()
            box = team.attach(device.memory)
            parts, weights = parts_of(format, (96, 33, 2), 160, tokens, dtype)
            entry, x = team.entry(box, parts, tokens, dtype), torch.randn(tokens, 160, dtype=dtype)
            team.expect(box, 1)
            device.ask(entry, x)
            for part, w_NK in zip(parts, weights, strict=True):
                bias, y = None if part.bias is None else part.bias.double(), device.y(part, x)
                assert error(y, F.linear(x.double(), w_NK.double(), bias)) <= BOUND[dtype]
                made.append((part, x, y))
            assert (team.served(box), team.failed(box)) == (1, 0)
            team.detach(box)
    team.stop()
    return made


@torch.no_grad()
def test_parts_of_several_formats_and_widths_share_one_x_and_may_round_it():
    device, team, x = Device(), HostedTeam(2), torch.randn(1, 250).bfloat16()
    box = team.attach(device.memory)
    names = ("nvfp4", "mxint8", "mxfp4", "mxfp4", "superblock32", "affine32-float16", "zeros64-bfloat16", "nf4")
    parts = [part_of(name, (40, 250), 1024 * at)[0] for at, name in enumerate(names, 1)]
    for rounded in (False, True):
        entry = team.entry(box, parts, 1, torch.bfloat16, rounded=rounded)
        team.expect(box, 1)
        device.ask(entry, x)
        for part in parts:
            assert torch.equal(device.y(part, x), up(part, x, rounded=rounded))


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


def test_a_post_is_answered_once_and_numbers_may_skip():
    device, team = Device(), HostedTeam(2)
    box, (part,), entry = small(team, device)
    for number in (1, 7, 1 << 40):
        device.number, x = number - 1, torch.randn(1, 160).bfloat16()
        team.expect(box, 1)  # each: numbers that were skipped count as posts
        device.ask(entry, x)
        assert torch.equal(device.y(part, x), up(part, x))
    time.sleep(0.02)
    assert (team.served(box), team.failed(box)) == (3, 0)
    device.number = 0  # a device that counts anew
    team.expect(box, 1)
    device.ask(entry, x)
    assert team.served(box) == 4


def test_posts_without_a_product_are_answered_so_that_no_device_waits():
    device, team = Device(), HostedTeam(2)
    box, _, entry = small(team, device)
    team.expect(box, 4)
    for unknown in (entry + 1, NOTHING - 1):
        device.post(unknown)
        assert device.wait() == -device.number
    team.forget(box, entry)
    team.forget(box, entry)
    device.post(entry)
    assert device.wait() == -device.number
    parts, _ = parts_of("nvfp4", (48,), 160, 1, torch.bfloat16)
    assert team.entry(box, parts, 1, torch.bfloat16) != entry  # which may still be posted
    assert (team.served(box), team.failed(box)) == (0, 3)


def test_an_entry_is_forgotten_after_the_posts_that_were_announced():
    device, team = Device(), HostedTeam(2)
    box, (part,), entry = small(team, device)
    x = torch.randn(1, 160).bfloat16()
    for turn in (1, 2):
        team.expect(box, 1)
        launch = threading.Timer(0.05, device.post, (entry, x))
        launch.start()
        team.settle(box, lambda: False)
        assert device.number == turn
    team.forget(box, entry)
    assert device.wait() == 2 and torch.equal(device.y(part, x), up(part, x))
    team.settle(box, lambda: False)  # nothing is announced
    team.expect(box, 1)
    asked = []
    team.settle(box, lambda: asked.append(None) or len(asked) == 3)  # it was never launched
    assert len(asked) == 3
    team.detach(box)
    team.settle(box, lambda: False)


def test_a_product_that_the_device_gave_up_is_not_computed():
    device, team = Device(), HostedTeam(1)
    box, _, entry = small(team, device)
    team.expect(box, 2)
    device.word(GAVE_UP)[0] = 1 << ENTRY_BITS | entry
    device.post(entry, torch.zeros(1, 160).bfloat16())
    assert device.wait() == -1
    device.ask(entry, torch.zeros(1, 160).bfloat16())
    assert (team.served(box), team.failed(box)) == (1, 1)


def test_several_mailboxes_are_served_by_one_team():
    devices, team = [Device() for _ in range(4)], HostedTeam(2)
    made = [small(team, device, k=128 + 32 * at) for at, device in enumerate(devices)]
    xs = [torch.randn(1, 128 + 32 * at).bfloat16() for at in range(4)]
    wants = [up(part, x) for (_, (part,), _), x in zip(made, xs, strict=True)]
    for box, _, _ in made:
        team.expect(box, 50)
    for _ in range(50):
        for device, (_, _, entry), x in zip(devices, made, xs, strict=True):
            device.post(entry, x)
        for device, (_, (part,), _), x, want in zip(devices, made, xs, wants, strict=True):
            assert device.wait() == device.number
            assert torch.equal(device.y(part, x), want)
    assert [team.served(box) for box, _, _ in made] == [50] * 4
    team.detach(made[0][0])
    team.expect(made[1][0], 1)
    devices[1].ask(made[1][2], xs[1])


def test_entries_come_and_go_in_a_storm_of_posts():
    device, team, posts = Device(), HostedTeam(3), 2000
    box, (part,), entry = small(team, device)
    x, stop, errors = torch.randn(1, 160).bfloat16(), threading.Event(), []
    want = up(part, x)

    def change():
        other = Device()
        try:
            while not stop.is_set():
                others = team.attach(other.memory)
                team.expect(others, 1)
                other.ask(team.entry(others, [part], 1, torch.bfloat16), x)
                team.forget(box, team.entry(box, [part], 1, torch.bfloat16))
                team.detach(others)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=change)
    thread.start()
    team.expect(box, posts)
    for _ in range(posts):
        device.ask(entry, x)
    stop.set()
    thread.join()
    assert not errors and team.served(box) == posts
    assert torch.equal(device.y(part, x), want)


def cpu_seconds(during):
    began = time.process_time()
    time.sleep(during)
    return time.process_time() - began


def test_threads_sleep_when_nothing_is_expected_and_nap_when_posts_stall():
    device, team = Device(), HostedTeam(2)
    box, (part,), entry = small(team, device)
    x = torch.randn(1, 160).bfloat16()
    for _ in range(3):
        team.expect(box, 2)
        device.ask(entry, x)
        stalled = cpu_seconds(0.3)
        device.ask(entry, x)  # polled for
        time.sleep(0.02)  # they spin for a moment
        assert stalled < 0.3  # two threads that spin would take up to .6, and a busy core's share
        assert cpu_seconds(0.2) < 0.05  # naps would take .15
    assert team.served(box) == 6
    assert torch.equal(device.y(part, x), up(part, x))


@pytest.mark.parametrize("end", ["stop", "detach", "forget"])
def test_a_device_that_waits_is_answered_when_its_team_ends(end):
    device, team = Device(1 << 20), HostedTeam(2)
    box, (part,), entry = small(team, device, k=4096, rows=(4096,))
    x = torch.randn(1, 4096).bfloat16()
    want = up(part, x)
    team.expect(box, 20)
    for _ in range(20):
        device.post(entry, x)
        if _ == 10:
            break
        assert device.wait() == device.number
    {"stop": team.stop, "detach": lambda: team.detach(box), "forget": lambda: team.forget(box, entry)}[end]()
    if device.wait() == device.number:  # computed before
        assert torch.equal(device.y(part, x), want)
    if end == "stop":
        for call in (lambda: team.expect(box, 1), lambda: team.attach(device.memory)):
            with pytest.raises(KernelError, match="stopped"):
                call()
    elif end == "detach":
        with pytest.raises(KernelError, match="detached"):
            team.expect(box, 1)
        box = team.attach(device.memory)  # goes on where it was
        entry = team.entry(box, [part], 1, torch.bfloat16)
        team.expect(box, 1)
        device.ask(entry, x)
        assert torch.equal(device.y(part, x), want)
    team.detach(box)
    team.detach(box)
    team.stop()


@pytest.mark.parametrize("end", ["stop", "detach"])
def test_a_post_that_nobody_expected_is_answered_at_the_end(end):
    device, team = Device(), HostedTeam(1)
    box, _, entry = small(team, device)
    time.sleep(0.1)  # threads sleep
    device.post(entry)
    time.sleep(0.01)
    assert device.word(ANSWER).item() == 0
    {"stop": team.stop, "detach": lambda: team.detach(box)}[end]()
    assert device.word(ANSWER).item() == -1


def test_a_team_that_is_gone_keeps_no_page_and_has_no_threads():
    device, team = Device(), HostedTeam(2)
    box, (part,), entry = small(team, device)
    team.expect(box, 1 << 20)
    device.ask(entry, torch.zeros(1, 160).bfloat16())
    memory, page, limit = weakref.ref(team._memory), weakref.ref(part.page), time.monotonic() + LIMIT_S
    del team, box, part
    gc.collect()
    assert page() is None
    while memory() is not None and time.monotonic() < limit:  # until its threads have seen it
        time.sleep(0.001)
    assert memory() is None


def test_forgotten_pages_are_freed():
    device, team = Device(), HostedTeam(1)
    box, (part,), entry = small(team, device)
    page = weakref.ref(part.page)
    del part
    gc.collect()
    assert page() is not None
    team.forget(box, entry)
    gc.collect()
    assert page() is None


def test_a_forked_child_refuses_the_threads_of_its_parent_and_makes_its_own():
    device, team = Device(), HostedTeam(2)
    box, (part,), entry = small(team, device)
    x = torch.randn(1, 160).bfloat16()
    want = up(part, x)
    team.expect(box, 1000)  # they poll
    child = os.fork()
    if not child:
        os._exit(in_a_child(device, team, box, part, entry, x, want))
    limit, ended = time.monotonic() + LIMIT_S, (0, 0)
    while not ended[0] and time.monotonic() < limit:
        time.sleep(0.01)
        ended = os.waitpid(child, os.WNOHANG)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)
    device.ask(entry, x)
    assert torch.equal(device.y(part, x), want)


def in_a_child(device, team, box, part, entry, x, want):
    """Exit code: 0 if the child computes with a team of its own only. No op is large enough for OpenMP's threads, which
    a fork loses."""
    try:
        for call in (lambda: team.expect(box, 1), lambda: team.attach(device.memory)):
            with pytest.raises(KernelError, match="make a team after the fork"):
                call()
        team.forget(box, entry)
        team.detach(box)
        team.stop()
        own, device = HostedTeam(1), Device()
        box = own.attach(device.memory)
        entry = own.entry(box, [part], 1, torch.bfloat16)
        own.expect(box, 1)
        device.ask(entry, x)
        return 0 if torch.equal(device.y(part, x), want) else 2
    except BaseException:  # noqa: BLE001 - the parent sees it
        traceback.print_exc()
        return 1


def test_ctrl_c_leaves_a_team_that_serves(request):
    device, team = Device(), HostedTeam(1)
    box, (part,), entry = small(team, device)
    x = torch.zeros(1, 160).bfloat16()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    request.addfinalizer(gc.enable)
    gc.disable()  # an interrupt of a callback of it would be lost
    with pytest.raises(KeyboardInterrupt):
        for at in range(10_000):
            if at == 100:
                signal.raise_signal(signal.SIGINT)
            team.expect(box, 1)
            team.forget(box, team.entry(box, [part], 1, torch.bfloat16))
    device.ask(entry, x)
    assert torch.equal(device.y(part, x), up(part, x))


def test_what_c_cannot_compute_is_refused_with_what_came():
    device, team = Device(4096), HostedTeam(1)
    box = team.attach(device.memory)
    (part,), _ = parts_of("nvfp4", (48,), 160, 1, torch.bfloat16)
    other, _ = part_of("nvfp4", (48, 128), part.y + 128)

    def entry(*parts, tokens=1, dtype=torch.bfloat16):
        return lambda: team.entry(box, parts, tokens, dtype)

    refused = {
        "K of parts": entry(part, other),
        "0 tokens": entry(part, tokens=0),
        "torch.float64 times nvfp4": entry(part, dtype=torch.float64),
        "fp8": entry(part._replace(format="fp8")),
        "at 512 in a mailbox of 4096 bytes; .* from 832 on": entry(part._replace(y=512), tokens=2),
        "at 4032": entry(part._replace(y=4032)),
        "at 520": entry(part._replace(y=520)),
        "from 608 on": entry(part, part),
        "a page of torch.uint8": entry(part._replace(page=part.page[:-1])),
        "a bias": entry(part._replace(bias=torch.zeros(47))),
        "more than 192 bytes": lambda: team.attach(device.memory[:192]),
        "a multiple of 64$": lambda: team.attach(device.memory[8:]),
    }
    for match, call in refused.items():
        with pytest.raises(KernelError, match=match):
            call()
    boxes = [team.attach(Device(4096).memory) for _ in range(63)]
    with pytest.raises(KernelError, match="too many mailboxes"):
        team.attach(Device(4096).memory)
    team.detach(boxes[5])
    assert team.attach(Device(4096).memory).slot == 6


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (4, 3), (16, 15)])
def test_a_core_is_left_to_the_thread_that_launches(cores, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    assert new_team().threads == threads
