"""Experts that transformers alone does not read from GGUF files: of gpt-oss, and of Mixtral."""

import pytest
import torch

import vbrt

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
from tests.saves.published.gguf_files import Type, model_of, write  # noqa: E402 - needs both

pytestmark = pytest.mark.filterwarnings("ignore")
QUIET = {"weights": {"min_parameters": 0}, "tiers": {"gpu": {"enabled": False}}, "compute": {"backend": "reference"}}


def written(path):
    """Write a gpt-oss as llama.cpp has it; return the model, and what its experts decode to."""
    model = model_of("gpt-oss")
    more = []
    for layer, block in enumerate(model.model.layers):
        experts = block.mlp.experts
        torch.nn.init.normal_(experts.gate_up_proj_bias)
        torch.nn.init.normal_(experts.down_proj_bias)
        parts = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
        for part, places in parts.items():
            rows = experts.gate_up_proj.detach().transpose(1, 2)[:, places].contiguous()
            more.append((f"blk.{layer}.ffn_{part}_exps.weight", rows.numpy()))
            bias = experts.gate_up_proj_bias.detach()[:, places].contiguous()
            more.append((f"blk.{layer}.ffn_{part}_exps.bias", bias.numpy()))
        more.append((f"blk.{layer}.ffn_down_exps.bias", experts.down_proj_bias.detach().numpy()))
    decoded = write(path, model, "gpt-oss", lambda n: Type.MXFP4 if "exps.weight" in n else Type.F32, more=more)
    model.config.architectures = ["GptOssForCausalLM"]
    model.config.save_pretrained(path.parent)
    return model, {name: torch.from_numpy(value) for name, value in decoded.items()}


def test_experts_of_gpt_oss_keep_their_blocks(tmp_path):
    path = tmp_path / "model.gguf"
    model, decoded = written(path)
    state = model.state_dict()
    for layer in (0, 1):
        gate, up, down = (decoded[f"blk.{layer}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
        base = f"model.layers.{layer}.mlp.experts"
        state[f"{base}.gate_up_proj"] = torch.stack((gate, up), 2).flatten(1, 2).transpose(1, 2).contiguous()
        state[f"{base}.down_proj"] = down.transpose(1, 2).contiguous()
    vb = vbrt.from_pretrained(path, "dense", **QUIET)
    assert [swap.format for swap in vb.plan.routed] == ["mxfp4", "mxfp4"]
    mine = vb.state_dict()
    assert all(torch.equal(mine[name], value) for name, value in state.items())
    model.load_state_dict(state)
    with torch.no_grad():
        tokens = torch.arange(8).view(1, 8)
        assert torch.allclose(vb(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-5)
    vb.close()


def test_experts_of_mixtral_are_those_of_a_llama_with_stacks(tmp_path):
    path, model = tmp_path / "model.gguf", model_of("mixtral")
    state, more = model.state_dict(), []
    for layer in (0, 1):
        base = f"model.layers.{layer}.mlp.experts"
        for part, rows in zip(("gate", "up"), state[f"{base}.gate_up_proj"].chunk(2, dim=1), strict=True):
            more.append((f"blk.{layer}.ffn_{part}_exps.weight", rows.contiguous().numpy()))
    decoded = write(path, model, "llama", lambda name: Type.Q4_0 if "exps" in name else Type.F32, more=more)
    for layer in (0, 1):
        gate, up, down = (
            torch.from_numpy(decoded[f"blk.{layer}.ffn_{part}_exps.weight"]) for part in ("gate", "up", "down")
        )
        base = f"model.layers.{layer}.mlp.experts"
        state |= {f"{base}.gate_up_proj": torch.cat((gate, up), 1), f"{base}.down_proj": down}
    model.config.architectures = ["MixtralForCausalLM"]
    model.config.save_pretrained(tmp_path)
    vb = vbrt.from_pretrained(path, "dense", **QUIET)
    assert [swap.format for swap in vb.plan.routed] == ["symmetric32-float16", "symmetric32-float16"]
    mine = vb.state_dict()
    assert all(torch.equal(mine[name], value) for name, value in state.items())
    vb.close()


@pytest.mark.parametrize("down", [Type.Q6_K, Type.Q5_0])
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_experts_of_two_types_are_held_as_they_are(tmp_path, down, backend):
    """Q4_K_M: Q6_K for the down projections of half of the layers."""
    path = tmp_path / "model.gguf"
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2}

    def type_of(name):
        return down if "blk.0.ffn_down_exps" in name else Type.Q4_K if "exps" in name else Type.F32

    decoded = write(path, model_of("qwen3moe", **sizes), "qwen3moe", type_of)
    given = QUIET | {"compute": {"backend": backend}}
    vb = vbrt.from_pretrained(path, dtype=torch.float32, **given)
    first, second = vb.plan.routed
    label = "superblock32 and superbytes16" if down is Type.Q6_K else "superblock32 and bytes32-float16"
    assert [(swap.label, swap.original) for swap in (first, second)] == [(label, True), ("superblock32", True)]
    assert vb.lossless and label in vb.stats().layers[first.name].format
    state = vb.state_dict()
    for layer in (0, 1):
        want = torch.from_numpy(decoded[f"blk.{layer}.ffn_down_exps.weight"])
        assert torch.equal(state[f"model.layers.{layer}.mlp.experts.down_proj"], want)
    dense = vbrt.from_pretrained(path, "dense", dtype=torch.float32, **QUIET).unwrap()
    dense.load_state_dict(state)
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        want, got = dense(tokens).logits, vb(tokens).logits
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)
        assert torch.allclose(vb(tokens[:, :1]).logits, dense(tokens[:, :1]).logits, rtol=1e-4, atol=1e-4)
        vb.save(tmp_path / "saved")
        vb.close()
        with torch.device("meta"):
            empty = type(dense)(dense.config).eval()
        again = vbrt.load(tmp_path / "saved", empty, **given)
        assert [swap.label for swap in again.plan.routed] == [label, "superblock32"]
        assert torch.equal(again(tokens).logits, got)
    again.close()


@pytest.mark.gpu
def test_the_gpu_decides_about_experts_of_two_types(tmp_path):
    path = tmp_path / "model.gguf"
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2}

    def type_of(name):
        return Type.Q6_K if "blk.0.ffn_down_exps" in name else Type.Q4_K if "exps" in name else Type.F32

    write(path, model_of("qwen3moe", **sizes), "qwen3moe", type_of)
    given = {"weights": {"min_parameters": 0}, "dtype": torch.float32, "experts": {"miss": "fetch"}}
    vb = vbrt.from_pretrained(path, **given)
    plan = vb.plan
    vb.close()
    experts = sum(swap.page_bytes for swap in plan.routed)
    budget = plan.page_bytes - experts // 4
    vb = vbrt.from_pretrained(path, **given, tiers={"gpu": {"budget": budget}}, policy={"kind": "experts"})
    tokens = torch.arange(12, device="cuda").view(1, 12)
    whole = vbrt.from_pretrained(path, "dense", **given).unwrap()
    with torch.no_grad():
        want = whole(tokens).logits
        assert (vb(tokens).logits - want).norm() < 1e-4 * want.norm()
    vb.generate(tokens, max_new_tokens=24, do_sample=False)
    stats = vb.stats()
    experts = [layer for name, layer in stats.layers.items() if name.endswith("experts")]
    assert [layer.experts.decides for layer in experts] == ["gpu", "gpu"], stats.fallbacks
    vb.close()
