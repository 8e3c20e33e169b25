"""Checkpoints in the layouts that others publish: logits are those of the decoded weights, bit for bit."""

import json
import warnings
from itertools import pairwise

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import vbrt
from tests.saves.published import fp4_weights, published_models
from tests.saves.published.published_files import LAYOUTS, bitsandbytes, compressed_mxfp4, publish
from vbrt.config import FORMATS
from vbrt.errors import CheckpointError
from vbrt.layers.experts import ExpertsHandle, expert_encoding
from vbrt.saves.files.safetensors_file import TensorFile
from vbrt.saves.load.sources import describe
from vbrt.saves.published import published_checkpoint

transformers = pytest.importorskip("transformers")
QUIET = {"weights": {"min_parameters": 0}, "tiers": {"gpu": {"enabled": False}}, "compute": {"backend": "reference"}}
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"vocab_size": 64, "num_hidden_layers": 1}


def llama(meta=False, **sizes):
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        return transformers.LlamaForCausalLM._from_config(
            transformers.LlamaConfig(**{**SIZES, **sizes}), dtype=torch.bfloat16
        ).eval()


@torch.no_grad()
def logits(model):
    return model(torch.arange(8).view(1, 8)).logits


def loaded(directory, model, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return vbrt.load(directory, model, *args, **QUIET)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "decoded"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_checkpoint_gives_the_logits_of_its_decoded_weights(tmp_path, layout, fused, monkeypatch):
    """Where no kernel computes with the planes, weights are decoded once."""
    if not fused and not LAYOUTS[layout][2]:
        pytest.skip("it is decoded in any case")
    monkeypatch.setattr(published_checkpoint, "fused_on", lambda format: {"cpu"} if fused else set())
    model = llama()
    model.load_state_dict(publish(tmp_path, model, layout))
    vb = loaded(tmp_path, llama(meta=True))
    assert torch.equal(logits(vb), logits(model))
    formats, kept = {swap.format for swap in vb.plan.swaps}, LAYOUTS[layout][2] if fused else ""
    assert formats == ({kept} if kept else {"nvfp4"}), "of what is decoded: exact"
    assert any(("bit for bit" if kept else "decoded") in note for note in vb.plan.notes)
    assert fused or any("has no fused kernels" in line for line in vb.stats().fallbacks)
    vb.close()


def test_it_is_said_where_a_format_has_no_fused_kernels(monkeypatch):
    found = [name for name, record in FORMATS.items() if record.kernels != "trellis"]  # which no file has
    assert not any(map(published_checkpoint.without_kernels, found)), "published ones have them everywhere"
    for devices, said in ({"cpu"}, "no fused kernels on GPUs"), ({"cuda"}, "no fused kernels on CPUs"):
        monkeypatch.setattr(published_checkpoint, "fused_on", lambda format, devices=devices: devices)
        assert published_checkpoint.without_kernels("floatzeros64-float16") == said


@pytest.mark.filterwarnings("ignore:this model is in training mode")
def test_a_checkpoint_keeps_its_bits_unless_another_format_is_asked_for(tmp_path):
    model = llama()
    model.load_state_dict(publish(tmp_path, model, "awq"))
    (tmp_path / "tiers.toml").write_text('[tiers.cpu]\nbudget = "1GiB"\n')
    down = {"weights": {"formats": {"*down_proj": "mxint8"}, "min_parameters": 0}}
    kept = (None, "exact", "dense", {"tiers": QUIET["tiers"]}, str(tmp_path / "tiers.toml"))
    for config in kept:
        with vbrt.load(tmp_path, llama(meta=True), config, **QUIET) as vb:
            formats = {swap.format for swap in vb.plan.swaps if swap.name != "lm_head"}
            assert formats == {"zeros32-bfloat16"}, config
            assert vb.lossless and torch.equal(logits(vb), logits(model))
    with pytest.warns(UserWarning, match=r"7 layers: decoded and held as nvfp4: AWQ, rounded again .* by 8\.1%"):
        vb = vbrt.load(tmp_path, llama(meta=True), "fp4", **QUIET)
    assert {swap.format for swap in vb.plan.swaps} == {"nvfp4"} and not vb.lossless
    assert any("AWQ, rounded again" in line for line in vb.stats().fallbacks)
    vb.close()
    with pytest.warns(UserWarning, match="1 layers: decoded and held as mxint8"):
        vb = vbrt.load(tmp_path, llama(meta=True), **{**QUIET, **down})
    assert {swap.name.split(".")[-1]: swap.format for swap in vb.plan.swaps}["down_proj"] == "mxint8"
    assert sum(swap.format == "zeros32-bfloat16" for swap in vb.plan.swaps) == 6
    vb.close()


def test_what_a_checkpoint_left_dense_stays_dense(tmp_path):
    model = llama()
    model.load_state_dict(publish(tmp_path, model, "modelopt", names=lambda name: "mlp" in name))
    vb = loaded(tmp_path, llama(meta=True), "fp4")
    formats = {swap.name.split(".")[3]: swap.format for swap in vb.plan.swaps}
    assert formats == {"self_attn": "dense", "mlp": "nvfp4"}
    assert torch.equal(logits(vb), logits(model))
    assert "4 layers: not quantized in the checkpoint: held dense" in vb.plan.notes
    vb.close()


def mixtral(meta=False):
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    with torch.device("meta" if meta else "cpu"):
        return transformers.MixtralForCausalLM(config).bfloat16().eval()


def test_experts_that_transformers_saved_one_by_one_are_read_one_by_one(tmp_path, monkeypatch):
    model = mixtral()
    model.save_pretrained(tmp_path)
    read, handed = [], []
    monkeypatch.setattr(
        TensorFile, "read", lambda self, name, plain=TensorFile.read: read.append(name) or plain(self, name)
    )
    store = ExpertsHandle.store
    monkeypatch.setattr(
        ExpertsHandle, "store", lambda self, planes: store(self, (handed.append(len(read)) or p for p in planes))
    )
    monkeypatch.setitem(expert_encoding._STEP_BYTES, "cpu", 1)
    vb = loaded(tmp_path, mixtral(meta=True), "exact")
    assert torch.equal(logits(vb), logits(model))
    assert [after - before for before, after in pairwise(handed)] == [3, 3, 0], (
        "three matrices an expert, the next one ahead"
    )
    vb.close()


def test_experts_packed_one_by_one_become_one_page_each(tmp_path):
    model = mixtral()
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    model.save_pretrained(plain)
    tensors, decoded = {}, load_file(plain / "model.safetensors")
    for name, value in decoded.items():
        if ".experts." not in name:
            tensors[name] = value
            continue
        made = compressed_mxfp4(value)
        tensors |= {name.removesuffix(".weight") + suffix: tensor for suffix, tensor in made.tensors.items()}
        decoded[name] = made.decoded
    packed.mkdir()
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    save_file(decoded, plain / "model.safetensors", {"format": "pt"})
    vb, dense = loaded(packed, mixtral(meta=True)), loaded(plain, mixtral(meta=True), "dense")
    assert [swap.format for swap in vb.plan.routed] == ["mxfp4"]
    assert torch.equal(logits(vb), logits(dense))
    for each in (vb, dense):
        each.close()


def test_stacked_experts_of_gpt_oss_keep_their_blocks(tmp_path):
    config = transformers.GptOssConfig(**SIZES, head_dim=32, num_local_experts=4, num_experts_per_tok=2)
    with torch.device("meta"):
        model = transformers.GptOssForCausalLM(config).bfloat16().eval()
    generator, tensors, decoded = torch.Generator().manual_seed(0), {}, {}
    for name, like in model.state_dict().items():
        value = (torch.randn(like.shape, generator=generator) * 0.05).bfloat16()
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = value
            continue
        made = [compressed_mxfp4(matrix.t().contiguous()) for matrix in value]
        packed, scales = (torch.stack([each.tensors[k] for each in made]) for k in (".weight_packed", ".weight_scale"))
        tensors |= {f"{name}_blocks": packed.unflatten(-1, (-1, 16)), f"{name}_scales": scales}
        decoded[name] = torch.stack([each.decoded.t() for each in made])
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    vb = loaded(tmp_path, model)
    assert [swap.format for swap in vb.plan.routed] == ["mxfp4"]
    state = vb.state_dict()
    assert len(decoded) == 2
    assert all(torch.equal(state[name], value) for name, value in decoded.items())
    vb.close()


def test_blocks_of_bitsandbytes_that_go_on_in_the_next_row_are_decoded(tmp_path):
    w = (torch.randn(64, 72, generator=torch.Generator().manual_seed(0)) * 0.05).bfloat16()
    made = bitsandbytes(w)
    save_file({f"0{suffix}": tensor for suffix, tensor in made.tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(72, 64, bias=False))
    with pytest.warns(UserWarning, match="decoded and held as nvfp4\\+exact"):
        vb = vbrt.load(tmp_path, model, **{**QUIET, "weights": {"min_parameters": 0, "keep_head": False}})
    assert torch.equal(vb.unwrap()[0].weight, made.decoded)


def damaged(path, layout, change, name):
    """Publish a Llama, and change its file's tensors by `change(tensors, name)`."""
    publish(path, llama(), layout)
    file = path / "model.safetensors"
    tensors = load_file(file)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    change(tensors, name)
    save_file(tensors, file, metadata)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, name: t.pop(f"{name}.weight_scale_2"), "weight_scale"),
        (lambda t, name: t.update({f"{name}.weight_scale": t[f"{name}.weight_scale"][:-1].clone()}), "scales"),
        (lambda t, name: t.update({f"{name}.weight_scale_2": torch.tensor(float("nan"))}), "global scale"),
        (lambda t, name: t.update({f"{name}.weight": t[f"{name}.weight"][:-1].clone()}), "fit"),
    ],
)
def test_damaged_parts_of_a_weight_are_refused_by_name(tmp_path, change, message):
    damaged(tmp_path, "modelopt", change, "model.layers.0.mlp.gate_proj")
    model = llama(meta=True)
    before = dict(model.named_parameters())
    with pytest.raises(CheckpointError, match=f"gate_proj.*{message}|{message}.*gate_proj"):
        loaded(tmp_path, model)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, base: t.pop(f"{base}.zero"), r"no layout that vbrt reads.*gate_proj\.W_q"),
        (lambda t, base: t.update({f"{base}.W_q": t[f"{base}.W_q"][:-1].clone()}), r"gate_proj\.W_q.*hqq: W_q"),
        (lambda t, base: t[f"{base}.zero"].fill_(float("nan")), r"gate_proj\.W_q.*zeros hold NaN or Inf"),
        (lambda t, base: t[f"{base}.group_size"].fill_(48), r"gate_proj\.W_q.*group_size 48 of a weight"),
        (lambda t, base: t[f"{base}.packing"].fill_(0xFF), r"gate_proj\.W_q.*can't decode byte 0xff"),
        (lambda t, base: t[f"{base}.packing"].fill_(65), r"gate_proj\.W_q.*packing 'AAAAAAA'; expected one of 8bit"),
        (lambda t, base: t[f"{base}.shape"].fill_(-64), r"gate_proj\.W_q.*a weight \(-64, -64\)"),
    ],
)
def test_damaged_parts_of_an_hqq_weight_are_refused_by_name(tmp_path, change, message):
    damaged(tmp_path, "hqq", change, "model.layers.0.mlp.gate_proj")
    with pytest.raises(CheckpointError, match=message):
        loaded(tmp_path, llama(meta=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, base: t.pop(f"{base}scale"), r"no layout that vbrt reads.*Int4Tensor.*gate_proj\._weight_qdata"),
        (
            lambda t, base: t.pop(f"{base}zero_point"),
            r"no layout that vbrt reads.*Int4Tensor.*gate_proj\._weight_qdata",
        ),
        (lambda t, base: t[f"{base}scale"].fill_(float("inf")), "gate_proj.*block scales hold NaN or Inf"),
        (lambda t, base: t[f"{base}zero_point"].fill_(float("nan")), "gate_proj.*block middles hold NaN or Inf"),
        (
            lambda t, base: t.update({f"{base}scale": t[f"{base}scale"][:1].clone()}),
            r"gate_proj.*zero point torch.bfloat16 \(2, 64\); expected floats \(1, 64\)",
        ),
        (
            lambda t, base: t.update({f"{base}scale": t[f"{base}scale"].repeat(2, 1)[:3].clone()}),
            "gate_proj.*3 groups in rows of 64; expected whole groups",
        ),
        (lambda t, base: t.update({f"{base}act_pre_scale": torch.ones(64)}), r"gate_proj\._weight_act_pre_scale"),
    ],
)
def test_damaged_parts_of_a_torchao_int4_weight_are_refused_by_name(tmp_path, change, message):
    damaged(tmp_path, "torchao int4", change, "model.layers.0.mlp.gate_proj._weight_")
    with pytest.raises(CheckpointError, match=message):
        loaded(tmp_path, llama(meta=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, base: t.pop(f"{base}scale_and_zero"), r"no layout that.*TilePackedTo4d.*gate_proj\._weight_qdata"),
        (lambda t, base: t.pop(f"{base}qdata"), r"no layout that.*TilePackedTo4d.*gate_proj\._weight_scale_and_zero"),
        (lambda t, base: t[f"{base}scale_and_zero"].fill_(float("inf")), "gate_proj.*block scales hold NaN or Inf"),
        (
            lambda t, base: t.update({f"{base}scale_and_zero": t[f"{base}scale_and_zero"][1:].clone()}),
            r"gate_proj.*scale_and_zero \(31, 64, 2\); expected those of a weight \(64, 64\) in groups of 32",
        ),
        (
            lambda t, base: t.update({f"{base}qdata": t[f"{base}qdata"][1:].clone()}),
            r"gate_proj.*tiles \(7, 8, 32, 4\); expected those of one matrix",
        ),
        (
            lambda t, base: t.update({f"{base}qdata": t[f"{base}qdata"][:, :, 16:].clone()}),
            r"gate_proj.*expected int32 .N/8, K/.16 I., 32, I/2. of I 2, 4 or 8",
        ),
        (lambda t, base: t.update({f"{base}act_pre_scale": torch.ones(64)}), r"gate_proj\._weight_act_pre_scale"),
    ],
)
def test_damaged_tiles_of_a_torchao_int4_weight_are_refused_by_name(tmp_path, change, message):
    damaged(tmp_path, "torchao int4 in tiles", change, "model.layers.0.mlp.gate_proj._weight_")
    with pytest.raises(CheckpointError, match=message):
        loaded(tmp_path, llama(meta=True))


TILES = {"0._weight_qdata": torch.zeros(1, 8, 32, 4, dtype=torch.int32)}
TILES["0._weight_scale_and_zero"] = torch.zeros(16, 8, 2, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "attributes",
    [
        {"shape": [8, 1024]},
        {"shape": [8], "block_size": [1, 64]},
        {"shape": [2, 8, 1024], "block_size": [1, 1, 64]},
        {"shape": [9, 1024], "block_size": [1, 64]},
        {"shape": [8, 1025], "block_size": [1, 64]},
        {"shape": [8, -1], "block_size": [1, 64]},
        {"shape": [8, 1024], "block_size": [2, 64]},
        {"shape": [8, "1024"], "block_size": [1, 64]},
    ],
    ids=str,
)
def test_tiles_of_torchao_are_refused_where_their_metadata_fit_no_matrix(tmp_path, attributes):
    metadata = {"0.weight": json.dumps({"_type": "Int4TilePackedTo4dTensor", "_data": attributes})}
    save_file(TILES, tmp_path / "model.safetensors", metadata)
    with pytest.raises(CheckpointError, match=r"0\._weight_qdata .torchao int4 in tiles.*expected those of one matrix"):
        describe(tmp_path)


@pytest.mark.parametrize("kind", ["Int4OpaqueTensor", "Int4PlainInt32Tensor", "Int4MarlinSparseTensor"])
def test_other_int4_packings_of_torchao_are_refused_by_name(tmp_path, kind):
    data = {"shape": [8, 1024], "block_size": [1, 64]}
    save_file(TILES, tmp_path / "model.safetensors", {"0.weight": json.dumps({"_type": kind, "_data": data})})
    with pytest.raises(CheckpointError, match=rf"{kind}\): 0\._weight_qdata"):
        describe(tmp_path)


def test_pickles_are_refused_by_name(tmp_path):
    model = llama()
    model.config.save_pretrained(tmp_path)
    torch.save({}, tmp_path / "qmodel.pt")
    with pytest.raises(CheckpointError, match=r"qmodel\.pt, may run code when it is read: vbrt reads none"):
        vbrt.from_pretrained(tmp_path, **QUIET)


def test_mlx_names_its_groups_under_another_key(tmp_path):
    model = llama()
    model.load_state_dict(publish(tmp_path, model, "mlx"))
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization"] = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with vbrt.from_pretrained(tmp_path, **QUIET) as vb:
        assert torch.equal(logits(vb), logits(model))
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization": {"bits": 8, "group_size": 32}}))
    with pytest.raises(CheckpointError, match=r"MLX weight.*vbrt reads 4 and 8 bits.*has 8 bits in groups of 32"):
        describe(tmp_path)
    for single, fits in (({"bits": 4, "group_size": 32}, True), ({"bits": 2, "group_size": 64}, False)):
        mixed = {"bits": 8, "group_size": 64, "model.layers.0.mlp.up_proj": single, "mode": "affine"}
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization": mixed}))
        if fits:
            assert "affine32-bfloat16" in {kind.becomes for kind in describe(tmp_path).kinds}
        else:
            with pytest.raises(CheckpointError, match="8 bits in groups of 64, 2 bits in groups of 64"):
                describe(tmp_path)


def test_describe_says_what_weights_are_and_become_from_headers(tmp_path):
    publish(tmp_path, llama(), "awq", names=lambda name: "mlp" in name)
    said = describe(tmp_path)
    kinds = {(kind.layout, kind.becomes): kind.count for kind in said.kinds}
    assert (said.method, kinds) == ("awq", {("AWQ", "zeros32-bfloat16"): 3, ("bfloat16", "dense"): 9})
    assert said.nbytes == sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())


def test_quantized_tensors_of_no_known_layout_are_refused(tmp_path):
    publish(tmp_path, llama(), "modelopt")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "a.weight_packed": torch.zeros(2, dtype=torch.int64)}, file)
    with pytest.raises(CheckpointError, match=r"no layout that vbrt reads.*a\.weight_packed"):
        describe(tmp_path)


@pytest.mark.parametrize("name", published_models.MODELS)
def test_models_that_libraries_wrote_compute_with_the_weights_that_they_decode(name):
    directory, (formats, dtype) = published_models.DIRECTORY / name, published_models.MODELS[name]
    vb = vbrt.from_pretrained(directory, **QUIET)
    assert {swap.format for swap in vb.plan.swaps} == formats and len(vb.plan.swaps) == 7
    state = vb.state_dict()
    digests = json.loads((directory / "decoded.json").read_text())
    assert {key: published_models.digest_of(state[key]) for key in digests} == digests
    assert {value.dtype for value in state.values()} == {dtype}
    plain = transformers.LlamaForCausalLM._from_config(vb.module.config, dtype=dtype).eval()
    plain.load_state_dict(state)
    assert torch.equal(logits(vb), logits(plain))
    cast = "5 tensors become torch.float16, the dtype of the config, such as lm_head.weight"
    assert (cast in vb.plan.notes) == (name == "auto-round")
    vb.close()


@pytest.mark.parametrize("name", fp4_weights.NAMES)
def test_weights_of_the_libraries_themselves_decode_as_they_decode_them(tmp_path, name):
    with safe_open(fp4_weights.FILE, "pt") as file:
        tensors = {key.partition("/")[2]: file.get_tensor(key) for key in file.keys() if key.partition("/")[0] == name}
        metadata = {"0.weight": file.metadata()[name]}
    decoded = tensors.pop("decoded")
    save_file(tensors, tmp_path / "model.safetensors", metadata if name.startswith("torchao") else None)
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(fp4_weights.COLUMNS, fp4_weights.ROWS, bias=False)).eval()
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    vb = loaded(tmp_path, model.bfloat16(), {"weights": {"fine": "exact", "keep_head": False}})
    assert [swap.format for swap in vb.plan.swaps] == ["mxfp4" if name.endswith("mxfp4") else "nvfp4"]
    assert not vb.plan.swaps[0].lossless
    assert torch.equal(vb.unwrap()[0].weight, decoded)
