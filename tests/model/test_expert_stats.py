"""Statistics of a mixture of experts, held against what its routers said."""

import copy
from itertools import pairwise

import pytest
import torch

import vbrt
from tests.models import config, qwen3_moe

NAMES = [f"model.layers.{n}.mlp.experts" for n in range(2)]
PROMPT = torch.randint(0, 128, (1, 7), generator=torch.Generator().manual_seed(2))


class Routing:
    """What the routers of a model chose, call by call."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.calls: dict[str, list[torch.Tensor]] = {name: [] for name in NAMES}
        for name in NAMES:
            model.get_submodule(name).register_forward_pre_hook(
                lambda module, args, name=name: self.calls[name].append(args[1].clone())
            )

    def touched(self, name: str) -> list[set[int]]:
        return [set(ids.flatten().tolist()) for ids in self.calls[name]]


@pytest.fixture(params=["nvfp4", "exact"])
def streamed(request, tmp_path):
    """A Qwen3-MoE whose pages live on the ssd, with room for half of them in memory; and what its routers say."""
    model = qwen3_moe()
    settings = config(request.param)
    plan = vbrt.make_plan(model, vbrt.config.load_config(settings))
    settings["tiers"]["cpu"] = {"budget": sum(page.nbytes for swap in plan.swaps for page in swap.pages) // 2}
    settings["tiers"]["ssd"] = {"enabled": True, "path": str(tmp_path / "pages")}
    routing = Routing(model)
    with vbrt.wrap(model, settings) as vb, torch.no_grad():
        yield vb, routing


def test_a_row_of_experts_says_what_the_routers_said(streamed):
    vb, routing = streamed
    vb.generate(PROMPT, max_new_tokens=9, do_sample=False)
    stats = vb.stats()
    for name in NAMES:
        prompt, *tokens = routing.touched(name)
        experts, planes = stats.layers[name].experts, len(stats.layers[name].plane_bytes)
        assert (experts.scans, experts.cached, experts.tokens) == (1, 8, 8) and experts.decides == "host"
        assert experts.touched == sum(map(len, tokens)) and experts.touched_a_token == 2.0
        pairs = list(pairwise(tokens))
        assert experts.compared == sum(len(now) for _, now in pairs)
        assert experts.reused == sum(len(now & before) for before, now in pairs)
        assert stats.layers[name].hits + stats.layers[name].misses == planes * (len(prompt) + experts.touched)
        assert experts.each is None and 0 < experts.resident <= 8
    assert "routed experts" in str(stats)


def test_experts_one_by_one_add_up_to_their_layer(streamed):
    vb, routing = streamed
    vb.generate(PROMPT, max_new_tokens=6, do_sample=False)
    stats = vb.stats(experts=True)
    for name in NAMES:
        each, layer = stats.experts(name), stats.layers[name]
        assert (sum(each.hits), sum(each.misses)) == (layer.hits, layer.misses)
        assert sum(each.bytes_moved) == sum(layer.bytes_moved.values()) > 0
        touched = routing.touched(name)
        last = [max((n for n, of in enumerate(touched, 1) if e in of), default=0) for e in range(8)]
        assert list(each.last) == last and each.passes == len(touched) == 6


def test_a_timeline_counts_the_experts_of_its_own_passes(streamed, tmp_path):
    vb, routing = streamed
    vb(PROMPT)
    before = {name: len(routing.calls[name]) for name in NAMES}
    with vb.timeline(tmp_path / "out.html") as recording:
        vb.generate(PROMPT, max_new_tokens=5, do_sample=False)
    assert [layer.layer for layer in recording.timeline.experts] == NAMES
    for heat in recording.timeline.experts:
        planes = len(vb.stats().layers[heat.layer].plane_bytes)
        touched = routing.touched(heat.layer)[before[heat.layer] :]
        assert list(heat.touches) == [planes * sum(e in of for of in touched) for e in range(8)]
    assert sum(sum(layer.misses) for layer in recording.timeline.experts) > 0
    assert "Routed experts" in (tmp_path / "out.html").read_text("utf-8")
    spans = {span.page for span in recording.timeline.spans if span.layer == NAMES[0]}
    assert any("," in page and page.count(NAMES[0]) <= 2 for page in spans)


def test_weights_that_are_loaded_anew_begin_pages_and_keep_the_counts_of_routing():
    vb = vbrt.wrap(qwen3_moe(), config("nvfp4"))
    with torch.no_grad():
        vb(PROMPT)
        vb.load_state_dict(vb.state_dict())
        vb(PROMPT)
    stats, tally = vb.stats(), vb.stack.pages[f"{NAMES[0]}#coarse.0"].tally
    pages = [page for page in vb.stack.pages.values() if page.tally is tally]
    assert len(pages) == 8 and stats.layers[NAMES[0]].hits == sum(page.hits for page in pages) > 0
    assert stats.layers[NAMES[0]].experts.scans == 2


def test_a_copy_of_the_model_shares_the_counts_of_pages_and_has_its_own_of_routing():
    vb = vbrt.wrap(qwen3_moe(), config("nvfp4"))
    with torch.no_grad():
        vb(PROMPT)
        twin = copy.deepcopy(vb)
        twin(PROMPT)
    one, other = (of.stats().layers[NAMES[0]] for of in (vb, twin))
    assert one.hits == other.hits and (one.experts.scans, other.experts.scans) == (1, 1)


def test_a_timeline_counts_what_is_encoded_inside_and_leaves_out_what_has_left_the_tiers(tmp_path):
    vb = vbrt.wrap(qwen3_moe(), config("nvfp4"))
    with torch.no_grad():
        with vb.timeline(tmp_path / "first.html") as recording:
            vb(PROMPT)
        assert [sum(layer.hits) > 0 for layer in recording.timeline.experts] == [True, True]
        with vb.timeline(tmp_path / "last.html") as recording:
            vb(PROMPT)
            vb.unwrap()
    assert recording.timeline.experts == () and '"experts":[]' in (tmp_path / "last.html").read_text("utf-8")
