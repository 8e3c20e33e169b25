"""The update of halved weights in C: torch's bits; what no bit can show, by itself."""

import dataclasses
import platform
import threading
import time
import weakref

import pytest
import torch

from vbrt.errors import ArgumentError
from vbrt.kernels import resolve, update
from vbrt.kernels.cpu import build
from vbrt.kernels.cpu import update as compiled
from vbrt.kernels.update import BLOCK, Coded, Step

CPU = torch.device("cpu")
#: not for other bits than torch's, which the tests are about: on x86, torch is built alike everywhere
WHY = build.refusal(CPU, "update") or (None if platform.machine() in ("x86_64", "AMD64") else "not an x86 CPU")
built = pytest.mark.skipif(WHY is not None, reason=str(WHY))
TEAM_PART = 16 * update.TILE  # that a thread of a team takes at a time
ADAMW = Step("adam", 3, 1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled=True)
SGD = Step("sgd", 2, 1e-2, 0.9, weight_decay=0.1)
STEPS = {
    "adamw": ADAMW,
    "adamw first, scaled and clipped": dataclasses.replace(ADAMW, number=1, divisor=1000.0, factor=0.3),
    "adamw up, far lerp, no decay": dataclasses.replace(ADAMW, beta1=0.4, weight_decay=0.0, maximize=True),
    "adam": dataclasses.replace(ADAMW, decoupled=False, number=1000),
    "adam, far lerp": dataclasses.replace(ADAMW, decoupled=False, beta1=0.4),
    "sgd": SGD,
    "sgd, first step": dataclasses.replace(SGD, number=1),
    "sgd, nesterov": dataclasses.replace(SGD, nesterov=True, maximize=True),
    "sgd, dampened": dataclasses.replace(SGD, dampening=0.1, weight_decay=0.0),
    "lion": Step("lion", 2, 1e-3, 0.9, 0.99, weight_decay=0.1),
    "lion, up": Step("lion", 2, 1e-3, 0.9, 0.99, maximize=True, factor=0.5),
}


def moments_of(step, count):
    first, second, peak = torch.randn(count), torch.rand(count) * 1e-2, torch.rand(count) * 1e-2
    return {"adam": {"first": first, "second": second, "peak": peak}}.get(step.rule, {"first": first})


def bits(*tensors):
    return [tensor.contiguous().view(torch.uint8) for tensor in tensors]


def flat(moments):
    return [part for m in moments.values() for part in (m if isinstance(m, Coded) else (m,))]


def copied(moments):
    return {name: Coded(*(p.clone() for p in m)) if isinstance(m, Coded) else m.clone() for name, m in moments.items()}


def moments_like(moments):
    """Memory for moments, with other bytes in it."""
    others = copied(moments)
    for part in flat(others):
        part.view(torch.uint8).fill_(0x5A)
    return others


def tied(master, every):
    """Masters of which some lie half way between two bf16 numbers."""
    bits = master.clone().view(torch.int32)
    bits[::every] = bits[::every] & ~0xFFFF | 0x8000
    return bits.view(torch.float32)


def assert_same(step, moments, master, gradient):
    """One step by the C code and by the reference, which is torch's own optimizer, give the same bits; of masters that
    are ties, too; in place, and into memory that holds another weight."""
    results, master = [], tied(master, every=3)
    before = bits(*update.split_master(master), *flat(moments))
    for run in (compiled.update, update.update):
        halves, own = update.split_master(master), copied(moments)
        run(halves, own, gradient, step)(0, master.numel())
        results.append(bits(*halves, *flat(own)))
        halves, own = update.split_master(master), copied(moments)
        out = update.Updated(update.split_master(tied(master.flip(0), every=2)), moments_like(moments))
        run(halves, own, gradient, step, out)(0, master.numel())
        results.append(bits(*out.halves, *flat(out.moments)))
        assert all(map(torch.equal, bits(*halves, *flat(own)), before))
    assert all(torch.equal(*pair) for result in results[1:] for pair in zip(results[0], result, strict=True))


@built
def test_the_compiled_update_serves_this_cpu():
    assert compiled.refusal(CPU) is None


@pytest.mark.sample(11)
@built
@pytest.mark.parametrize("dtype", update.GRADIENTS, ids=str)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_step_has_the_bits_of_torchs_fused_optimizer_at_every_length(step, dtype):
    for count in (*range(1, 20), 1023, 1024, 1025, 4 * 1024 + 7):
        master, gradient = torch.randn(count), torch.randn(count).to(dtype)
        moments = moments_of(step, count)
        assert_same(step, moments, master, gradient)
        assert_same(step, {k: m for k, m in moments.items() if k != "peak"}, master, gradient)
        if step.rule == "sgd":
            assert_same(dataclasses.replace(step, beta1=0.0, nesterov=False), {}, master, gradient)


@built
def test_numbers_at_the_edges_of_fp32_have_the_same_bits_too():
    edges = torch.tensor([0.0, -0.0, 1e-45, -3e-39, 3.4e38, -3.4e38, 1.0, 65280.0])
    master, gradient, first = (grid.flatten() for grid in torch.meshgrid(edges, edges, edges, indexing="ij"))
    for step in STEPS.values():
        moments = {"first": first, "second": first.abs()} if step.rule == "adam" else {"first": first}
        assert_same(step, moments, master, gradient.bfloat16())


@built
@pytest.mark.parametrize("run", [compiled.update, update.update], ids=["compiled", "reference"])
def test_parts_at_any_address_give_the_bits_of_the_whole(run):
    count, memory = 5 * update.TILE + 3, torch.zeros(1 << 18, dtype=torch.uint8)
    master, gradient = torch.randn(count), torch.randn(count)
    whole, own = update.split_master(master), moments_of(ADAMW, count)
    places = (2, 100_002, 200_001, 210_003)
    odd = update.Halves(
        *(memory[at : at + h.nbytes].view(h.dtype).copy_(h) for at, h in zip(places, whole, strict=True))
    )
    parts = copied(own)
    run(whole, own, gradient, ADAMW)(0, count)
    part = run(odd, parts, gradient, ADAMW)
    for begin, end in ((3 * update.TILE, count), (0, update.TILE), (update.TILE, 3 * update.TILE)):
        part(begin, end)
    assert all(map(torch.equal, bits(*whole, *flat(own)), bits(*odd, *flat(parts))))


@built
def test_a_team_updates_out_of_place_into_unaligned_memory_with_the_bits_of_one_thread():
    count = 3 * TEAM_PART + 77
    master, gradient, own = torch.randn(count), torch.randn(count).bfloat16(), moments_of(ADAMW, count)
    halves = update.split_master(master)
    memory = [torch.zeros(part.nbytes + 1 + part.element_size(), dtype=torch.uint8) for part in (*halves, *flat(own))]
    shifted = [
        place[part.element_size() :][: part.nbytes].view(part.dtype)
        for place, part in zip(memory, (*halves, *flat(own)), strict=True)
    ]
    out = update.Updated(update.Halves(*shifted[:4]), dict(zip(own, shifted[4:], strict=True)))
    team = compiled.UpdateTeam(3)
    compiled.update(halves, own, gradient, ADAMW, out).by_team(team, count)
    team.stop()
    compiled.update(halves, own, gradient, ADAMW)(0, count)
    assert all(map(torch.equal, bits(*halves, *flat(own)), bits(*shifted)))


def test_memory_of_another_layout_is_refused_for_results():
    halves, others = update.split_master(torch.randn(2000)), update.split_master(torch.randn(2001))
    for run in (compiled.update, update.update):
        for out in (update.Updated(others, {}), update.Updated(halves, moments_of(SGD, 2000))):
            with pytest.raises(ArgumentError, match="into memory of another layout"):
                run(halves, {}, torch.randn(2000), SGD, out)


def test_a_split_master_is_whole_again_and_its_high_half_is_torchs():
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (torch.arange(1 << 16)[:, None] << 16 | lower).to(torch.int32).flatten()
    master = bits.view(torch.float32)
    halves, isnan = update.split_master(master), master.isnan()
    again = update.join_master(halves)
    assert torch.equal(again[~isnan].view(torch.int32), bits[~isnan]) and again[isnan].isnan().all()
    assert torch.equal(halves.high[~isnan].view(torch.int16), master[~isnan].bfloat16().view(torch.int16))
    assert halves.high[isnan].isnan().all()


@pytest.mark.parametrize("run", [compiled.update, update.update], ids=["compiled", "reference"])
@pytest.mark.parametrize("step", [ADAMW, SGD, STEPS["lion"]], ids=["adamw", "sgd", "lion"])
def test_an_update_that_ends_in_ties_rounds_them_as_torch_does(run, step):
    if run is compiled.update and WHY is not None:
        pytest.skip(WHY)
    count = 2 * 1024 + 77
    for before in (1, 5000):  # all weights are ties before, and one of each 5,000
        master = tied(torch.randn(count), every=before)
        gradient = tied(torch.randn(count), every=1) - master  # SGD: to another tie, of nearby magnitude
        halves, moments = update.split_master(master), moments_of(step, count)
        moments = {name: torch.zeros(count) for name in moments if name != "peak"}
        still = dataclasses.replace(step, lr=-1.0 if step is SGD else 0.0, weight_decay=0.0)
        run(halves, moments, gradient, still)(0, count)
        after = update.join_master(halves)
        assert torch.equal(after, master + gradient if step is SGD else master)
        assert torch.equal(halves.high, after.bfloat16()) and (after.view(torch.int32) & 0xFFFF == 0x8000).any()
        assert all(map(torch.equal, bits(*halves), bits(*update.split_master(after))))


@built
def test_an_update_out_of_place_from_no_ties_to_ties_and_back_leaves_bits_only_where_there_are_some():
    count = 3 * update.TILE + 64
    ends = tied(torch.randn(count).abs() + 0.5, every=1)
    ends[: update.TILE] = 1.0  # the first tile has none
    decayed = dataclasses.replace(ADAMW, lr=1.0, weight_decay=0.25)
    halves, gradient = update.split_master(ends / 0.75), torch.zeros(count).bfloat16()
    halves.high[2::5], halves.low[2::5] = 1.0, -0x8000  # 0.75 of it is no tie
    assert not halves.tied.any()
    moments, results = {name: torch.zeros(count) for name in ("first", "second")}, []
    for run in (compiled.update, update.update):
        out = update.Updated(update.split_master(tied(torch.randn(count), every=2)), copied(moments))
        assert out.halves.tied.all()
        run(halves, moments, gradient, decayed, out)(0, count)
        results.append(bits(*out.halves, *flat(out.moments)))
    assert all(map(torch.equal, *results)) and results[0][3].tolist() == [0, 1, 1, 1]


def spread(count):
    """Numbers of all magnitudes that are in use, and a block of zeros."""
    moment = torch.randn(count) * torch.logspace(-18, 3, count)
    moment[BLOCK : 2 * BLOCK] = 0.0
    return moment


def test_first_moments_of_8_bits_are_as_close_as_said():
    moment = spread(8 * BLOCK + 9)
    coded = update.encode_first(moment)
    decoded = update.decode_first(coded)
    largest = coded.scales.repeat_interleave(BLOCK)[: moment.numel()]
    near = moment.abs() < 0.01 * largest
    assert ((decoded - moment).abs() <= torch.where(near, 0.0021, 0.0079) * largest).all()
    assert torch.equal(update.encode_first(decoded).codes, coded.codes)


def test_second_moments_of_8_bits_are_as_close_as_said_and_none_becomes_zero():
    moment = spread(8 * BLOCK + 9).square()
    coded = update.encode_second(moment)
    decoded = update.decode_second(coded)
    largest = coded.scales.repeat_interleave(BLOCK)[: moment.numel()].sqrt()
    assert ((decoded.sqrt() - moment.sqrt()).abs() <= 0.00393 * largest).all()
    assert torch.equal(decoded > 0, moment > 0)
    assert torch.equal(update.encode_second(decoded).codes, coded.codes)


@built
@pytest.mark.parametrize("step", [ADAMW, SGD, STEPS["lion"]], ids=["adamw", "sgd", "lion"])
def test_moments_of_8_bits_have_the_same_codes_and_scales(step):
    count = 3 * 1024 + 300
    first, second = spread(count), spread(count).square()
    second[700], first[1500], first[2100] = torch.inf, -torch.nan, 1e-40
    moments = {"first": update.encode_first(first), "second": update.encode_second(second)}
    moments = moments if step.rule == "adam" else {"first": moments["first"]}
    assert_same(step, moments, torch.randn(count), torch.randn(count) * 1e-3)
    assert moments["first"].scales.isnan().sum() == 1


@built
def test_the_norm_of_a_gradient_has_the_bits_of_torchs():
    for count in (*range(1, 20), 1000, 1024 * 5 + 6, 100_003):
        for dtype in update.GRADIENTS:
            gradient = torch.randn(count).to(dtype)
            assert compiled.gradient_norm(gradient) == torch.linalg.vector_norm(gradient.float()).item()
            assert compiled.gradient_norm(gradient, 0.1) == torch.linalg.vector_norm(gradient.float() * 0.1).item()


@built
@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize("inside", [False, True])
def test_sums_of_gradients_have_the_bits_of_torchs(factor, inside):
    for kinds in ((0, 0, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1)):
        held, more, out = (spread(5 * 1024 + 7).to(update.GRADIENTS[kind]) for kind in kinds)
        expected = (held if factor == 1 else held.float() * torch.tensor(factor)).to(out.dtype).add(more)
        out = held if inside and held.dtype is out.dtype else out
        part = compiled.gradient_sum(held, more, out, factor)
        part(2048, out.numel())
        part(0, 2048)
        assert torch.equal(out, expected)


class Job:
    """A step of a weight and a sum of its gradient, by a team; and the same in one thread."""

    def __init__(self, count, step=ADAMW):
        master, self.gradient, first = torch.randn(count), torch.randn(count), torch.randn(count)
        moments = {"first": update.encode_first(first), "second": update.encode_second(first.square())}
        moments = moments if step is ADAMW else {"first": first}
        self.count, self.step, self.sum = count, step, torch.ones(count)
        self.halves, self.moments = update.split_master(master), moments
        halves, own, total = update.Halves(*(half.clone() for half in self.halves)), copied(moments), self.sum.clone()
        compiled.update(halves, own, self.gradient, step)(0, count)
        compiled.gradient_sum(total, self.gradient, total, 0.5)(0, count)
        self.expected = bits(*halves, *flat(own), total)

    def run(self, team):
        compiled.update(self.halves, self.moments, self.gradient, self.step).by_team(team, self.count)
        compiled.gradient_sum(self.sum, self.gradient, self.sum, 0.5).by_team(team, self.count)

    def check(self):
        assert all(map(torch.equal, bits(*self.halves, *flat(self.moments), self.sum), self.expected))


@built
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_team_has_the_bits_of_one_thread_at_every_number_of_parts(threads):
    team = compiled.UpdateTeam(threads)
    for parts in (0, 1, 2, 7, 23):
        for rest in (0, 1, 1500):
            job = Job(parts * TEAM_PART + rest, step=SGD if rest else ADAMW)
            job.run(team)
            job.check()
    team.stop()


@built
def test_a_team_returns_when_the_last_number_is_written():
    team, held, more = compiled.UpdateTeam(2), torch.zeros(2 * TEAM_PART + 1), torch.ones(2 * TEAM_PART + 1)
    part, last = compiled.gradient_sum(held, more, held), held[-2:-1].numpy()  # of the second part, which ends last
    for number in range(1, 1000):
        part.by_team(team, held.numel())
        assert last[0] == number
    team.stop()


@built
def test_weights_of_several_callers_are_updated_one_after_the_other_and_after_a_stop_by_the_caller():
    team, jobs = compiled.UpdateTeam(3), [Job(5 * TEAM_PART + at) for at in range(24)]

    def update_all(some):
        for job in some:
            job.run(team)

    callers = [threading.Thread(target=update_all, args=(jobs[at:-1:3],)) for at in range(3)]
    [caller.start() for caller in callers]
    [caller.join() for caller in callers]
    team.stop()
    jobs[-1].run(team)
    [job.check() for job in jobs]


@built
def test_a_team_that_is_gone_leaves_no_threads():
    team, job = compiled.UpdateTeam(3), Job(5 * TEAM_PART)
    job.run(team)
    memory, limit = weakref.ref(team._memory), time.monotonic() + 30
    del team
    while memory() is not None and time.monotonic() < limit:  # until its threads have seen it
        time.sleep(0.001)
    assert memory() is None
    job.check()


@pytest.mark.parametrize("run", [compiled.gradient_sum, update.gradient_sum], ids=["compiled", "reference"])
def test_what_a_sum_cannot_take_is_refused(run):
    one = torch.ones(4)
    for held, more, out in ((one.half(), one, one), (one, one, one.bfloat16()), (one, torch.ones(3), one)):
        with pytest.raises(ArgumentError, match="expected"):
            run(held, more, out)
    with pytest.raises(ArgumentError, match="not contiguous"):
        run(one, torch.ones(8)[::2], one)


@pytest.mark.parametrize("run", [compiled.update, update.update], ids=["compiled", "reference"])
def test_what_an_update_cannot_take_is_refused_before_anything_changes(run):
    halves, moments = update.split_master(torch.ones(4)), moments_of(ADAMW, 4)
    for step, gradient in (
        (Step("adagrad", 1, 0.1), torch.ones(4)),
        (ADAMW, torch.ones(4).half()),
        (ADAMW, torch.ones(3)),
    ):
        with pytest.raises(ArgumentError, match="expected"):
            run(halves, moments, gradient, step)
    with pytest.raises(ArgumentError, match="not contiguous"):
        run(halves, moments, torch.ones(8)[::2], ADAMW)
    assert torch.equal(update.join_master(halves), torch.ones(4))


@built
def test_a_torch_with_other_bits_takes_the_reference(monkeypatch):
    monkeypatch.setattr(update, "_RULES", update._RULES | {"sgd": lambda master, *_: master.add_(1.0)})
    compiled.refusal.cache_clear()
    try:
        assert "not bitwise equal to torch" in compiled.refusal(CPU) and "(sgd)" in compiled.refusal(CPU)
        assert resolve("update", "auto", CPU).backend == "reference"
    finally:
        compiled.refusal.cache_clear()
