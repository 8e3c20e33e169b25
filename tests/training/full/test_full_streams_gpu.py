"""Mode "full" on a GPU where streams, budgets and threads meet: the same bits as resident, with slow copies too."""

import contextlib
import copy
import itertools
import threading

import pytest
import torch
from torch import nn

import vbrt
from scripts.full_models import DEVICE
from tests.models import qwen3_moe
from tests.tiers.stacks import within
from tests.training.full.full_models import Masters, resident
from tests.training.full.test_full_experts import EXPERTS, gpt_oss
from tests.training.full.test_full_gpu import OnHost, Wide, run
from vbrt.training.full.host_gradients import Outlet

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_fsync")]
MIB = 1 << 20
SLOW = 40_000_000  # cycles of a GPU: about 20 ms


@pytest.fixture
def slow_gradients(monkeypatch):
    """Gradients are still on their way to the host while whatever comes next happens."""
    plain = Outlet._copied

    def copied(self, target, dw):
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(SLOW)
        return plain(self, target, dw)

    if DEVICE == "cuda":
        monkeypatch.setattr(Outlet, "_copied", copied)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


@contextlib.contextmanager
def wide_and_twin(tmp_path):
    """A model of 12 weights of 4 MiB in bf16, which may live in files, and one that trains resident."""
    torch.manual_seed(0)
    model = Wide().to(DEVICE)
    twin = resident(model)
    tiers = {"gpu": {"budget": 20 * MIB}} if DEVICE == "cuda" else {"gpu": {"enabled": False}}
    tiers |= {"cpu": {"budget": 400 * MIB}, "ssd": {"enabled": True, "path": str(tmp_path)}}
    with vbrt.wrap(model, "full", optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), tiers=tiers) as vb:
        yield vb, twin


def assert_same(vb, twin):
    found = vb.state_dict()
    assert [name for name, v in twin.state_dict().items() if not torch.equal(v.cpu(), found[name].cpu())] == []


@pytest.mark.parametrize("within_pass", [False, True])
def test_the_hosts_budget_falls_while_gradients_are_still_being_copied(tmp_path, slow_gradients, within_pass):
    with wide_and_twin(tmp_path) as (vb, twin):
        budgets = itertools.cycle((60 * MIB, 400 * MIB))

        def change(*_):
            vb.set_budget("cpu", next(budgets))

        def work():
            hooks = [layer.register_full_backward_hook(change) for layer in vb.module.ups[::2]]
            found = run(vb, vb.optimizer, 3, 2, within=within_pass)
            [hook.remove() for hook in hooks]
            assert found == run(twin, OnHost(twin, lr=1e-3), 3, 2)

        within(60, work)
        assert_same(vb, twin)


def test_both_budgets_change_from_another_thread_all_the_time(tmp_path):
    with wide_and_twin(tmp_path) as (vb, twin):
        end, changed = threading.Event(), []

        def change():
            choices = itertools.cycle([("cpu", 70), ("gpu", 12), ("cpu", 400), ("gpu", 60), ("cpu", 120), ("gpu", 20)])
            while not end.wait(0.003):
                tier, size = next(choices)
                vb.set_budget(tier, size * MIB)
                changed.append(tier)

        def work():
            thread = threading.Thread(target=change)
            thread.start()
            try:
                found = run(vb, vb.optimizer, 12, 2, within=True)
            finally:
                end.set()
                thread.join()
            assert found == run(twin, OnHost(twin, lr=1e-3), 12, 2)

        within(60, work)
        assert len(changed) > 5
        assert_same(vb, twin)


class Spoken(nn.Module):
    """An output head of the 8B shape."""

    def __init__(self, width: int = 4096, words: int = 128256) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(width, width), nn.Linear(width, words, bias=False)

    def forward(self, x):
        return self.head(self.up(x))


def test_a_head_of_the_8b_shape_is_stepped_in_chunks():
    torch.manual_seed(0)
    sizes = (4096, 128256) if DEVICE == "cuda" else (64, 1000)
    with torch.device(DEVICE):
        model = Spoken(*sizes).to(torch.bfloat16)
    head = copy.deepcopy(model.head)
    by = Masters(head, adamw)
    tiers = {} if DEVICE == "cuda" else {"gpu": {"enabled": False}}
    vb = vbrt.wrap(model, "full", optimizer=adamw, weights={"exclude": ["head"]}, tiers=tiers)
    peaks = []
    for _ in range(3):
        vb(torch.randn(64, sizes[0], device=DEVICE, dtype=torch.bfloat16)).float().square().mean().backward()
        head.weight.grad = vb.module.head.weight.grad.clone()
        by.step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
        vb.step()
        peaks.append(torch.cuda.max_memory_allocated() - before if DEVICE == "cuda" else 0)
        vb.zero_grad()
        assert torch.equal(vb.module.head.weight, head.weight)
    assert peaks[-1] < 400 * MIB  # its master and the master's gradient would take 4.2 GB
    ((_, master),) = by.pairs
    assert torch.equal(vb.unwrap().head.weight, master)


class MastersOnHost:
    """Updates a model in bf16 by fp32 masters: those of named parameters on the CPU, as mode "full" does."""

    def __init__(self, model: nn.Module, names: set[str]) -> None:
        self.masters = {}
        for name, parameter in model.named_parameters():
            where = "cpu" if name in names else DEVICE
            self.masters[name] = parameter, nn.Parameter(parameter.detach().to(where, torch.float32))
        split = [[m for name, (_, m) in self.masters.items() if (name in names) is own] for own in (True, False)]
        self.inner = [adamw(masters) for masters in split]

    def step(self) -> None:
        for parameter, master in self.masters.values():
            master.grad = None if parameter.grad is None else parameter.grad.to(master.device, torch.float32)
        for optimizer in self.inner:
            optimizer.step()
        with torch.no_grad():
            for parameter, master in self.masters.values():
                parameter.copy_(master)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("within_pass", [False, True])
@pytest.mark.parametrize("make", [lambda: qwen3_moe(experts="eager"), gpt_oss], ids=["qwen3", "gpt-oss"])
def test_routed_experts_train_as_with_resident_masters(deterministic, make, within_pass):
    model = make().train().to(DEVICE)
    model.set_attn_implementation("eager")
    twin = copy.deepcopy(model)
    tiers = {"gpu": {"budget": MIB // 4}} if DEVICE == "cuda" else {"gpu": {"enabled": False}}
    vb = vbrt.wrap(model, "full", optimizer=adamw, tiers=tiers, weights={"min_parameters": 0})
    assert f"{EXPERTS}.down_proj" in vb.registry
    by = MastersOnHost(twin, {swap.site.tensor for swap in vb.plan.swaps})
    draw = torch.Generator().manual_seed(2)
    for _ in range(4):
        for last in (False, True):
            ids = torch.randint(128, (1, 4), generator=draw).to(DEVICE)
            expected = twin(input_ids=ids, labels=ids, use_cache=False).loss
            loss = vb(input_ids=ids, labels=ids, use_cache=False).loss
            assert torch.equal(loss, expected)
            expected.backward()
            with vb.stepping() if last and within_pass else contextlib.nullcontext():
                loss.backward()
        by.step()
        if not within_pass:
            vb.step()
        vb.zero_grad()
        twin.zero_grad()
    found = dict(vb.unwrap().named_parameters())
    assert [name for name, (_, m) in by.masters.items() if not torch.equal(found[name].cpu(), m.detach().cpu())] == []
