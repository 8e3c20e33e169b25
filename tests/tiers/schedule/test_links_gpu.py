"""Pages in a neighbour's memory, and over its link, on two CUDA devices of one process."""

import gc

import pytest
import torch
from torch import nn

import vbrt
from vbrt.errors import ConfigError, TierError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it takes two GPUs")]

WIDTH, LAYERS = 2048, 12


class Half(nn.Module):
    """The last WIDTH columns, of a size that stays."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x[..., -WIDTH:], (WIDTH,))


def wrapped(preset: str, share: float, **tiers) -> tuple[vbrt.VBModelWrapper, torch.Tensor, torch.Tensor]:
    """A wrapped model, an input of one token, and what the model gives with all pages on the GPU. Pages of 8 MiB, and
    one of 32 MiB."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        layers = [nn.Linear(WIDTH, WIDTH * (4 if i == 3 else 1), dtype=torch.bfloat16) for i in range(LAYERS)]
    model = nn.Sequential(*(nn.Sequential(layer, Half()) for layer in layers)).eval()
    x = torch.randn(1, 1, WIDTH, device="cuda", dtype=torch.bfloat16)
    settings = {"weights": {"min_parameters": 0, "keep_head": False}, "compute": {"where": "device"}}
    vb = vbrt.wrap(model, preset, tiers=tiers, **settings).materialize()
    with torch.no_grad():
        want = vb(x).clone()
    vb.set_budget("gpu", int(vb.plan.page_bytes * share))
    return vb, x, want


def capture(vb, x) -> tuple[torch.cuda.CUDAGraph, object, torch.Tensor]:
    recording, graph = vb.runtime.recording("decode"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), recording:
        out = vb(x)
    return graph, recording, out


def links(vb) -> set[str]:
    return {link for page in vb.stack.pages.values() for link, nbytes in page.bytes_moved.items() if nbytes}


def eager_then_recorded(vb, x, want) -> None:
    """Passes decided one by one, by a programme, as a graph, and in turns."""
    for turn in range(24):
        assert torch.equal(vb(x), want)
        if turn > 7 and vb.stack.ledger.running is not None:
            break
    assert vb.stack.ledger.running is not None, vb.stack.ledger.programmes.reason
    graph, recording, out = capture(vb, x)
    for turn in range(6):
        out.zero_()
        assert recording.replay(graph), recording.ended
        assert torch.equal(out, want), turn
        if turn % 2:
            assert torch.equal(vb(x), want)
            vb(x.expand(1, 5, WIDTH))
            graph, recording, out = capture(vb, x)


@pytest.mark.parametrize("preset", ["exact", "dense"])
@torch.no_grad()
def test_pages_that_come_in_parts_over_two_links_have_their_bits(preset):
    vb, x, want = wrapped(preset, 0.55, gpu={"links": [0, 1]})
    assert [device.index for device in vb.stack.levels[0].lanes.devices] == [0, 1]
    eager_then_recorded(vb, x, want)
    assert links(vb) == {"cpu>gpu"} and not vb.stats().fallbacks
    vb.close()


@pytest.mark.parametrize("preset", ["exact", "fp4", "dense"])
@torch.no_grad()
def test_pages_in_a_neighbours_memory_have_their_bits(preset):
    vb, x, want = wrapped(preset, 0.6, peer={"enabled": True, "budget": "2GiB"}, cpu={"enabled": False})
    eager_then_recorded(vb, x, want)
    peer = vb.stats().tiers["peer"]
    assert links(vb) == {"peer>gpu"} and 0 < peer.held_bytes <= peer.peak_bytes <= peer.budget_bytes
    assert torch.cuda.memory_allocated(1) >= peer.held_bytes
    vb.set_budget("gpu", 2 * vb.plan.page_bytes)
    assert vb.stack.at_rest and torch.equal(vb(x), want)
    assert vb.stats().tiers["peer"].held_bytes == 0
    vb.close()


@torch.no_grad()
def test_pages_from_a_neighbour_and_over_two_links_in_one_pass():
    page = WIDTH * WIDTH * 2
    vb, x, want = wrapped("dense", 0.65, gpu={"links": "auto"}, peer={"enabled": True, "budget": 4 * page})
    eager_then_recorded(vb, x, want)
    vb.set_budget("peer", 2 * page)
    eager_then_recorded(vb, x, want)
    assert links(vb) == {"peer>gpu", "cpu>gpu"}
    dense = vb.unwrap()
    assert torch.equal(dense(x), want)


@pytest.mark.alone
def test_a_neighbour_without_memory_is_named():
    gc.collect()
    torch.cuda.empty_cache()  # or the tier finds room in what the tests before have left to torch
    free, total = torch.cuda.mem_get_info(1)
    held = [torch.empty(free - (64 << 20), dtype=torch.uint8, device="cuda:1")]
    try:
        with pytest.raises(TierError, match=r"tier peer: cuda:1 has no room .* lower tiers\.peer\.budget"):
            wrapped("dense", 0.6, peer={"enabled": True, "budget": total // 2}, cpu={"enabled": False})
    finally:
        held.clear()  # a failure keeps the frame
        torch.cuda.empty_cache()


def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"tiers\.peer\.devices = \[7\]; cuda:7 .* sees 2 GPUs"):
        wrapped("dense", 0.3, peer={"enabled": True, "devices": [7]})
    with pytest.raises(ConfigError, match=r"tiers\.peer\.devices = \[0\]; .* it is the computing one"):
        wrapped("dense", 0.3, peer={"enabled": True, "devices": [0]})


@torch.no_grad()
def test_layers_over_two_gpus_have_their_bits_and_stream_over_both_links():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 256}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    tokens = torch.arange(1, 20, device="cuda")[None]
    given = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    want, new = model(tokens).logits, model.generate(tokens, **given)
    split = vbrt.wrap(model, "exact", tiers={"gpu": {"devices": [0, 1], "budget": "8MiB"}})
    for _ in range(5):
        assert torch.equal(split(tokens).logits.to("cuda:0"), want)
    assert torch.equal(split.generate(tokens, **given), new)
    for part, index in zip(split.parts, (0, 1), strict=True):
        assert part.attachment.stack.device.index == index
        moved = sum(sum(page.bytes_moved.values()) for page in part.attachment.stack.pages.values())
        assert moved and part.attachment.stats().tiers["gpu"].peak_bytes <= 8 << 20
    assert torch.cuda.current_device() == 0
    assert torch.equal(split.unwrap().to("cuda:0")(tokens).logits, want)
