"""Passes have phases: named by the user, or inferred from the input; counted by `stats()` as `simulate` counts."""

import threading

import pytest
import torch
from torch import nn

import vbrt
from tests.models import mlp
from vbrt.config import load_config
from vbrt.errors import ArgumentError, WrapError
from vbrt.model.planner import make_plan
from vbrt.report.stats import Stats
from vbrt.residency.simulate import Pass, simulate

WIDTH = 64


class Tokens(nn.Module):
    """A model of token ids with a few layers; `stop` leaves early."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)])

    def forward(self, input_ids, mask=None, stop=6):
        x = self.table(input_ids)
        for layer in self.layers[:stop]:
            x = layer(x)
        return x


def streaming(tmp_path, model, *, room: int = 4, **overrides):
    """Wrap with room for some of the layers; the others stream from the ssd."""
    page = make_plan(model, load_config("dense")).swaps[0].pages[0].nbytes
    tiers = {"cpu": {"budget": room * page}, "ssd": {"enabled": True, "path": str(tmp_path)}}
    return vbrt.wrap(model.eval(), "dense", tiers=tiers, **overrides).materialize()


def passes(vb) -> dict[str, int]:
    return {phase: counts.passes for phase, counts in vb.stats().phases.items() if counts.passes}


@torch.no_grad()
def test_prompts_and_decode_passes_are_told_apart_by_their_tokens(tmp_path):
    with streaming(tmp_path, Tokens()) as vb:
        vb(torch.zeros(2, 5, dtype=torch.int64))
        vb(torch.zeros(2, 1, dtype=torch.int64))
        vb(mask=torch.ones(2, 7), input_ids=torch.zeros(2, 1, dtype=torch.int64))
        assert passes(vb) == {"prompt": 1, "decode": 2}


@torch.no_grad()
@pytest.mark.parametrize(
    ("shape", "phase"), [((3, 4, WIDTH), "prompt"), ((3, 1, WIDTH), "decode"), ((WIDTH,), "decode")]
)
def test_hidden_states_count_tokens_in_the_last_dimension_but_one(tmp_path, shape, phase):
    with streaming(tmp_path, nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])) as vb:
        vb(torch.zeros(shape))
        assert passes(vb) == {phase: 1}


def test_backward_is_a_phase_that_begins_with_autograds_first_lease(tmp_path):
    with streaming(tmp_path, Tokens()) as vb:
        ids = torch.zeros(1, 3, dtype=torch.int64)
        for _ in range(3):
            vb(ids).sum().backward()
        assert passes(vb) == {"forward": 3, "backward": 3}
        order = [page for layer in vb.plan.swaps for page in (f"{layer.name}#dense",)]
        trace = [Pass("forward"), *order, Pass("backward"), *order[::-1]] * 3
        ahead = vb.stack.levels[0].policy.prefetch
        assert vb.stats().phases == simulate("scheduled", trace, 4, prefetch=ahead).phases
        with torch.no_grad():
            vb(ids)
        vb(ids)
        assert passes(vb) == {"forward": 4, "backward": 3, "prompt": 1}


@torch.no_grad()
def test_live_counts_of_drafts_and_verifications_are_those_of_the_simulation(tmp_path):
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with streaming(tmp_path, Tokens()) as vb:
        order = [f"{swap.name}#dense" for swap in vb.plan.swaps]
        for _ in range(3):
            with vb.phase("draft"):
                vb(ids, stop=3)
                vb(ids, stop=3)
            with vb.phase("verify"):
                vb(ids)
        trace = ([Pass("draft"), *order[:3]] * 2 + [Pass("verify"), *order]) * 3
        stats = vb.stats()
        assert stats.phases == simulate("scheduled", trace, 4, prefetch=vb.stack.levels[0].policy.prefetch).phases
        assert Stats.from_dict(stats.to_dict()).phases == stats.phases
        assert "phase draft: 6 passes" in str(stats) and "phase verify: 3 passes" in str(stats)


def test_resident_layers_are_counted_by_phase_too():
    with vbrt.wrap(mlp(), "dense").materialize() as vb, torch.no_grad():
        x = torch.zeros(3, 64)
        vb(x)
        for _ in range(4):
            with vb.phase("mine"):
                vb(x)
        phases = vb.stats().phases
        assert phases["mine"].hits == 4 * phases["prompt"].hits > 0
        assert sum(counts.hits for counts in phases.values()) == vb.stats().hits


@torch.no_grad()
def test_the_innermost_block_names_a_pass_in_its_own_thread_and_model_only(tmp_path):
    with streaming(tmp_path, Tokens()) as vb, vbrt.wrap(mlp(), "dense") as other:
        ids = torch.zeros(1, 1, dtype=torch.int64)
        with vb.phase("outer"):
            with vb.phase("inner"):
                vb(ids)
            vb(ids)
            thread = threading.Thread(target=torch.no_grad()(vb), args=(ids,))
            thread.start()
            thread.join()
            other(torch.zeros(1, 64))
        vb(ids)
        assert passes(vb) == {"inner": 1, "outer": 1, "decode": 2}
        assert passes(other) == {"decode": 1}


@torch.no_grad()
def test_a_coarse_draft_leases_coarse_planes_only(tmp_path):
    model = nn.Sequential(*[nn.Linear(128, 128, bias=False, dtype=torch.bfloat16) for _ in range(3)])
    with vbrt.wrap(model, "exact").materialize() as vb:
        x = torch.randn(2, 128, dtype=torch.bfloat16)
        full = vb(x)
        with vb.phase("draft", precision="coarse"):
            draft = vb(x)
        assert not torch.equal(draft, full) and torch.equal(vb(x), full)
        phases = vb.stats().phases
        assert phases["draft"].hits + phases["draft"].misses == 3 and phases["prompt"].hits == 2 * 6


@pytest.mark.parametrize(("name", "options"), [("", {}), (3, {}), ("draft", {"precision": "half"})])
def test_a_phase_without_a_name_or_with_an_unknown_precision_is_refused(name, options):
    with vbrt.wrap(mlp(), "dense") as vb, pytest.raises(ArgumentError, match="expected"), vb.phase(name, **options):
        pass
    with pytest.raises(WrapError, match="phase"):
        vb.phase("draft")


@torch.no_grad()
def test_models_on_one_runtime_have_phases_of_their_own(tmp_path):
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with streaming(tmp_path, Tokens()) as vb:
        other = vbrt.wrap(Tokens().eval(), "dense", runtime=vb.runtime)
        for _ in range(3):
            vb(ids)
            other(ids[:, :1])
        assert passes(vb) == {"prompt": 3} and passes(other) == {"decode": 3}
        assert set(vb.runtime.stats().phases) == {"prompt", f"{other._attachment.prefix}decode"}
        assert len(vb.stack.levels[0].policy._course.phases.orders) == 2
