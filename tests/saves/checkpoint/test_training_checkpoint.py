"""vbrt.load of a dense checkpoint: encoded as wrap would, renamed as transformers does, mapped where it stays."""

import copy
import os
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import vbrt
from tests import forked
from tests.models import TOKENS, config, gpt2, llama, mlp
from tests.saves.cases import files, logits, on_meta, settings, tied_llama
from vbrt.errors import CheckpointError, FormatError
from vbrt.host.mapped_weights import page_out
from vbrt.saves.files.safetensors_file import TensorFile


@pytest.mark.sample(4)
@pytest.mark.parametrize("make", [llama, gpt2, tied_llama])
@pytest.mark.parametrize("shards", ["10GB", "30KB"])
def test_a_dense_checkpoint_is_encoded_as_wrap_would(tmp_path, make, shards):
    dense = make(dtype=torch.bfloat16)
    dense.save_pretrained(tmp_path, max_shard_size=shards)
    assert ("model.safetensors.index.json" in files(tmp_path)) is (shards == "30KB")
    vb = vbrt.load(tmp_path, on_meta(make, dtype=torch.bfloat16), settings("nvfp4", "exact"))
    assert all(layer.materialized and layer.handle.spec.fine for layer in vb.registry.values()) and vb.registry
    want = copy.deepcopy(dense)
    for name, buffer in vb.module.named_buffers():
        assert not buffer.is_meta
        want.get_buffer(name).data = buffer  # llama(dtype=bf16) has cast inv_freq, from_config has not
    assert torch.equal(logits(vb), logits(want))
    vb.save(tmp_path / "saved")
    assert torch.equal(logits(vbrt.load(tmp_path / "saved", on_meta(make))), logits(want))


def test_a_meta_model_of_a_config_gets_its_rotary_frequencies(tmp_path):
    from transformers import AutoModelForCausalLM

    dense = llama(dtype=torch.bfloat16)
    dense.save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(reference.config).eval()
    vb = vbrt.load(tmp_path, model, settings("dense"))
    assert torch.equal(vb.module.model.rotary_emb.inv_freq, reference.model.rotary_emb.inv_freq)
    assert torch.equal(logits(vb), logits(reference))
    assert torch.equal(vb.generate(TOKENS, max_new_tokens=4), reference.generate(TOKENS, max_new_tokens=4))


def mixtral(**given):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "vocab_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 12,
        **given,
    }
    return MixtralForCausalLM(MixtralConfig(**sizes)).eval()


@pytest.mark.parametrize("shards", ["10GB", "60KB"])
def test_a_checkpoint_that_transformers_renames_and_merges_loads_as_from_pretrained_does(tmp_path, shards):
    from transformers import AutoModelForCausalLM

    mixtral().save_pretrained(tmp_path, max_shard_size=shards)
    names = [name for path in tmp_path.glob("*.safetensors") for name in load_file(path)]
    assert any("block_sparse_moe.experts" in name for name in names)  # not the model's names
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    vb = vbrt.load(tmp_path, on_meta(mixtral), settings("dense"))
    assert vb.registry and torch.equal(logits(vb), logits(reference))
    for name, parameter in reference.named_parameters():
        assert torch.equal(vb.state_dict()[name], parameter), name


def test_a_checkpoint_of_the_base_model_and_one_with_legacy_names_load(tmp_path):
    from transformers import BertConfig, BertForMaskedLM

    def bert():
        torch.manual_seed(0)
        return BertForMaskedLM(
            BertConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=64, num_attention_heads=4)
        ).eval()

    state = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor.clone()
        for name, tensor in bert().state_dict().items()
        if name != "cls.predictions.decoder.weight"
    }
    assert any(name.endswith("gamma") for name in state)
    save_file(state, tmp_path / "model.safetensors")
    vb = vbrt.load(tmp_path, on_meta(bert), settings("dense"))
    assert torch.equal(logits(vb), logits(bert()))


def test_a_conversion_that_cannot_be_done_is_refused_by_the_names_of_tensor_and_operations(tmp_path):
    mixtral().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    good = load_file(path)
    name = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    save_file({**good, name: torch.zeros(3, 5)}, path)
    with pytest.raises(
        CheckpointError,
        match=r"1\.mlp\.experts\.gate_up_proj is made by transformers of 24 tensors "
        r"\(.*\.0\.w1\.weight, .*\) by MergeModulelist, Concatenate, which",
    ):
        vbrt.load(tmp_path, on_meta(mixtral))
    save_file({key: tensor for key, tensor in good.items() if key != name}, path)
    with pytest.raises(CheckpointError, match="gate_up_proj"):
        vbrt.load(tmp_path, on_meta(mixtral))
    save_file(good | {"model.layers.1.mlp.gate.weight": torch.zeros(12, 64)}, path)
    with pytest.raises(CheckpointError, match=r"are both model\.layers\.1\.mlp\.gate\.weight"):
        vbrt.load(tmp_path, on_meta(mixtral))


def test_a_tensor_that_two_shards_have_is_refused(tmp_path):
    state = mlp().state_dict()
    for name in ("a", "b"):
        save_file(state, tmp_path / f"{name}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"0.weight": "a.safetensors", "2.weight": "b.safetensors"}}'
    )
    with pytest.raises(CheckpointError, match=r"0\.(bias|weight) is in a\.safetensors and in b\.safetensors"):
        vbrt.load(tmp_path, mlp())


def test_a_single_file_will_do_and_its_dtype_counts(tmp_path):
    save_file(mlp(dtype=torch.bfloat16).state_dict(), tmp_path / "step-100.safetensors")
    vb = vbrt.load(tmp_path / "step-100.safetensors", on_meta(mlp), config("exact"))
    x = torch.randn(2, 64).bfloat16()
    assert torch.equal(logits(vb, x), logits(mlp(dtype=torch.bfloat16), x))


class Lookup(nn.Module):
    """An embedding of 2 MiB, which is kept, and a layer that is swapped."""

    def __init__(self):
        super().__init__()
        self.embed, self.up = nn.Embedding(8192, 64), nn.Linear(64, 64)

    def forward(self, ids):
        return self.up(self.embed(ids))


def test_large_weights_of_a_checkpoint_that_are_kept_stay_mapped_from_its_file(tmp_path):
    file = tmp_path / "model.safetensors"
    model, ids = Lookup(), torch.arange(0, 8192, 17)
    save_file(model.state_dict(), file)
    expected = model(ids)
    vb = vbrt.load(tmp_path, on_meta(Lookup).eval(), settings("dense"))
    storages = {name: p.untyped_storage() for name, p in vb.module.named_parameters()}
    assert {name: storage.resizable() for name, storage in storages.items()} == {"embed.weight": False, "up.bias": True}
    assert storages["embed.weight"].nbytes() == 8192 * 64 * 4 and page_out(vb.embed.weight) > 0
    assert torch.equal(vb(ids), expected)
    again = copy.deepcopy(vb)
    assert again.embed.weight.untyped_storage().nbytes() == 8192 * 64 * 4
    save_file({"another": torch.zeros(9)}, tmp_path / "new.safetensors")
    os.replace(tmp_path / "new.safetensors", file)
    assert torch.equal(vb(ids), expected)


def test_writing_into_a_mapped_weight_leaves_the_file_as_it_is(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(Lookup().state_dict(), file)
    content = file.read_bytes()
    vb = vbrt.load(tmp_path, on_meta(Lookup).eval(), settings("dense"))
    with torch.no_grad():
        vb.embed.weight.zero_()
    assert not vb.embed.weight.any() and file.read_bytes() == content


def test_an_embedding_at_an_odd_offset_or_in_a_file_that_was_cut_short_is_not_mapped(tmp_path):
    file, state = tmp_path / "model.safetensors", Lookup().state_dict()
    save_file(state, file)
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    head, rest = content[8 : 8 + length], content[8 + length :]
    file.write_bytes((length + 1).to_bytes(8, "little") + head + b" " + rest)
    odd = vbrt.load(tmp_path, on_meta(Lookup).eval(), settings("dense"))
    assert torch.equal(odd.embed.weight, state["embed.weight"]) and odd.embed.weight.untyped_storage().resizable()
    save_file(state, file)
    source = TensorFile(file)
    os.truncate(file, 4096)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: embed\.weight cannot be mapped: truncated"):
        source.map("embed.weight")


ANONYMOUS = """
import re, sys, torch, vbrt
from torch import nn
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
with torch.device("meta"):
    model = nn.ModuleDict({"embed": nn.Embedding(1 << 18, 64), "up": nn.Linear(64, 64)})
vbrt.wrap(nn.Sequential(nn.Linear(64, 64))).materialize()  # imports and thread pools
before = anonymous()
vb = vbrt.load(sys.argv[1], model)
print(anonymous() - before)
"""


def test_a_loaded_checkpoint_takes_no_memory_for_what_stays_mapped(tmp_path):
    state = {"embed.weight": torch.zeros(1 << 18, 64), "up.weight": torch.ones(64, 64), "up.bias": torch.ones(64)}
    save_file(state, tmp_path / "model.safetensors")  # 64 MiB
    done = forked.run(ANONYMOUS, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 16 << 20


def test_a_nan_in_a_checkpoint_is_named_and_the_model_is_as_it_was(tmp_path):
    bad = mlp()
    bad[4].weight.data[0, 0] = float("nan")
    save_file(bad.state_dict(), tmp_path / "model.safetensors")
    model = mlp()
    before = [(type(m), dict(m._parameters)) for m in model.modules()]
    with pytest.raises(FormatError, match=r"4: .*1 NaN"):
        vbrt.load(tmp_path, model, config("nvfp4"))
    assert [(type(m), dict(m._parameters)) for m in model.modules()] == before
    x = torch.randn(2, 64)
    assert torch.equal(logits(model, x), logits(mlp(), x)) and not model._forward_pre_hooks


PEAK = """
import sys, torch, vbrt
from torch import nn
from tests.models import config
def build(width, depth):
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(depth))).eval()
def mib(what):
    return int(next(line for line in open("/proc/self/status") if line.startswith(what)).split()[1]) / 1024
def peak(work):
    open("/proc/self/clear_refs", "w").write("5")
    before = mib("VmRSS:")
    out = work()
    return mib("VmHWM:") - before, out
small, large, saved = sys.argv[1:]
vbrt.load(small, build(1024, 2), config("nvfp4")).save(saved)
vbrt.load(saved, build(1024, 2)).close()
grown, vb = peak(lambda: vbrt.load(large, build(1024, 24), config("nvfp4")))
saving, _ = peak(lambda: vb.save(saved))
pages = vb.plan.page_bytes / 2**20
vb.close()
del vb
again, vb = peak(lambda: vbrt.load(saved, build(1024, 24)))
print(grown, saving, again, pages)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_dense_model_is_never_in_memory(tmp_path):
    layer = 1024 * 1024 * 2 / 2**20
    for name, depth in (("small", 2), ("large", 24)):  # 48 MiB in bf16
        (tmp_path / name).mkdir()
        weights = {f"{i}.weight": torch.randn(1024, 1024).bfloat16() for i in range(depth)}
        save_file(weights, tmp_path / name / "model.safetensors")
    done = forked.run(PEAK, *(str(tmp_path / name) for name in ("small", "large", "saved")))
    assert done.returncode == 0, done.stderr
    encoding, saving, loading, pages = map(float, done.stdout.split())
    print(f"MiB: encode {encoding:.1f}, save {saving:.1f}, load {loading:.1f}; pages {pages:.1f}, dense {24 * layer}")
    assert encoding < pages + 10 * layer and loading < pages + 5 * layer and saving < 3 * layer
