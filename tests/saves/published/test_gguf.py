"""GGUF files: logits are those of what `gguf.dequantize` decodes, bit for bit; 4-bit rows are taken as they are."""

import warnings

import pytest
import torch

import vbrt
from vbrt.errors import CheckpointError, ConfigError
from vbrt.formats.ggml import GGML_PLANES
from vbrt.kernels import kernel_refusal
from vbrt.saves.files.checkpoint_paths import gguf_file
from vbrt.saves.load.sources import describe

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

from tests.saves.published import gguf_files  # noqa: E402 - needs both
from tests.saves.published.gguf_files import Type, model_of, write  # noqa: E402

QUIET = {"weights": {"min_parameters": 0}, "tiers": {"gpu": {"enabled": False}}, "compute": {"backend": "reference"}}


def mixed(*types):
    """Attention in the first type, the rest in the last."""
    return lambda name: Type.F32 if "conv.conv" in name else types[0] if "attn" in name else types[-1]


@torch.no_grad()
def logits(model):
    return model(torch.arange(8).view(1, 8)).logits


def loaded(path, *args, **given):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return vbrt.from_pretrained(path, *args, **QUIET, **given)


def reference(path, model, dtype):
    """The model as transformers itself loads the file, with `gguf.dequantize`, but for sizes that it has no key for."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, config=model.config
    ).eval()


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("architecture", "types", "formats"),
    [
        ("llama", (Type.Q4_0,), {"symmetric32-float16"}),
        ("llama", (Type.Q8_0, Type.F16), {"bytes32-float16", "dense"}),
        ("llama", (Type.BF16,), {"dense"}),
        ("qwen3", (Type.IQ4_NL, Type.Q5_1), {"levels32-float16", "offsetbytes32-float16"}),
        ("qwen3moe", (Type.MXFP4, Type.Q4_0), {"mxfp4", "symmetric32-float16"}),
        ("qwen3moe", (Type.F32, Type.Q8_0), {"dense", "bytes32-float16"}),
        ("gemma2", (Type.Q4_0, Type.F32), {"symmetric32-float16", "dense"}),
        ("lfm2", (Type.Q4_0,), {"symmetric32-float16"}),
        ("lfm2", (Type.Q8_0,), {"bytes32-float16"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_of_the_library_gives_the_logits_of_its_own_decoding(tmp_path, architecture, types, formats):
    path = tmp_path / "model.gguf"
    write(path, model_of(architecture), architecture, mixed(*types))
    vb = loaded(path, "dense", dtype=torch.float32)
    assert torch.equal(logits(vb), logits(reference(path, vb.module, torch.float32)))
    assert {swap.format for swap in vb.plan.swaps} == formats
    vb.close()


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_a_file_of_float32_gives_the_model_that_it_was_made_of(tmp_path, architecture):
    path, model = tmp_path / "model.gguf", model_of(architecture)
    write(path, model, architecture, lambda name: Type.F32)
    vb = loaded(path, "dense")
    assert torch.equal(logits(vb), logits(model))
    vb.close()


#: sizes for types with 256 weights in a block
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "num_hidden_layers": 1}


@pytest.fixture
def unknown(monkeypatch):
    """TQ1_0 as a type that gguf knows and vbrt does not."""
    monkeypatch.delitem(GGML_PLANES, "TQ1_0")


def test_types_of_superblocks_are_taken_or_decoded_by_the_same_rule(tmp_path, unknown):
    path = tmp_path / "model.gguf"
    held = {"attn_q.": Type.IQ4_XS, "attn_k.": Type.Q3_K, "attn_v.": Type.Q4_K, "attn_output.": Type.Q2_K}
    held |= {"ffn_gate.": Type.IQ3_XXS, "ffn_up.": Type.TQ1_0}
    write(
        path,
        model_of("llama", **WIDE),
        "llama",
        lambda name: next((t for part, t in held.items() if part in name), Type.Q5_K),
    )
    vb = loaded(path, dtype=torch.bfloat16)
    assert torch.equal(logits(vb), logits(reference(path, vb.module, torch.bfloat16)))
    found = {swap.name.split(".")[-1]: (swap.format, swap.fine) for swap in vb.plan.swaps}
    assert found["q_proj"] == ("levels32-float32", "none")
    assert found["k_proj"] == ("symmetric16-float32", "none")
    assert found["v_proj"] == ("superblock32", "none")
    assert found["o_proj"] == ("affine16-float32", "none")
    assert found["gate_proj"] == ("levels32-float32", "none")
    assert found["up_proj"] == ("nvfp4", "exact"), "bf16, without a bit lost"
    assert found["down_proj"] == ("superbytes32", "none")
    vb.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixed_file_runs_in_its_own_bits(tmp_path, dtype):
    """Q4_K_M: Q6_K for the values, the down projections and the head."""
    path, six = tmp_path / "model.gguf", ("attn_v.", "ffn_down.", "token_embd", "output.weight")
    write(
        path,
        model_of("llama", **WIDE),
        "llama",
        lambda name: Type.Q6_K if any(part in name for part in six) else Type.Q4_K,
    )
    vb = loaded(path, dtype=dtype)
    assert vb.lossless and torch.equal(logits(vb), logits(reference(path, vb.module, dtype)))
    found = {swap.name.split(".")[-1]: swap.format for swap in vb.plan.swaps}
    assert {name for name, format in found.items() if format == "superbytes16"} >= {"v_proj", "down_proj"}
    assert set(found.values()) == {"superblock32", "superbytes16"}
    kinds = {kind.layout: kind.becomes for kind in describe(path).kinds}
    assert (kinds["GGUF Q4_K"], kinds["GGUF Q6_K"]) == ("superblock32", "superbytes16")
    vb.close()


@pytest.mark.parametrize(
    "types",
    [
        (Type.Q4_K, Type.Q6_K),
        (Type.Q5_K, Type.Q8_0),
        (Type.Q5_1, Type.Q5_0),
        (Type.Q2_K, Type.IQ3_S),
        (Type.IQ2_XS, Type.IQ1_S),
        (Type.TQ2_0, Type.NVFP4),
    ],
)
def test_fused_kernels_compute_what_the_library_decodes(tmp_path, types):
    path = tmp_path / "model.gguf"
    write(path, model_of("llama", **WIDE), "llama", mixed(*types))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        vb = vbrt.from_pretrained(path, **{**QUIET, "compute": {}}, dtype=torch.float32)
    expected = logits(reference(path, vb.module, torch.float32))
    torch.testing.assert_close(logits(vb), expected, rtol=1e-4, atol=5e-4)  # of AVX2, with x in 16 bits; others 1e-4
    kernels = {layer.kernel for layer in vb.stats().layers.values()}
    assert kernels == {"compiled"} or kernel_refusal(torch.device("cpu")), kernels
    vb.close()


def test_what_is_decoded_is_said_once_in_the_plan_and_in_stats(tmp_path, unknown):
    path = tmp_path / "model.gguf"
    write(path, model_of("llama", **WIDE), "llama", mixed(Type.Q4_0, Type.TQ1_0))
    with pytest.warns(UserWarning, match="decoded and held as dense: GGUF TQ1_0") as heard:
        vb = vbrt.from_pretrained(path, **QUIET)
    line = "3 layers: decoded and held as dense: GGUF TQ1_0: no format of vbrt has such blocks"
    assert [str(each.message) for each in heard if "TQ1_0" in str(each.message)] == [f"{path}: {line}"]
    assert line in vb.plan.notes and vb.stats().fallbacks[0] == line
    assert "4 layers: GGUF Q4_0, taken as symmetric32-float16 bit for bit" in vb.plan.notes
    vb.close()


def test_a_file_of_plain_floats_is_a_dense_checkpoint_in_its_own_dtype(tmp_path):
    path = tmp_path / "model.gguf"
    write(path, model_of("llama").bfloat16().float(), "llama", lambda name: Type.BF16)
    vb = loaded(tmp_path)  # a directory with one such file
    assert vb.module.dtype is torch.bfloat16
    assert {swap.format for swap in vb.plan.swaps} == {"nvfp4"}, "the default of dense checkpoints"
    vb.close()
    exact = loaded(path, "exact")
    assert exact.lossless
    assert torch.equal(logits(exact), logits(reference(path, exact.module, torch.bfloat16)))
    exact.close()


def test_a_config_beside_the_file_counts_and_one_of_a_name_alone_does_not(tmp_path):
    path, model = tmp_path / "model.gguf", model_of("qwen3", rope_theta=500.0)
    write(path, model, "qwen3", mixed(Type.Q4_0), tokens=False)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    vb = loaded(path)
    assert vb.module.config.rope_parameters["rope_theta"] == 10000.0, "that of the metadata"
    vb.close()
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(tmp_path)
    vb = loaded(path)
    assert (vb.module.dtype, vb.module.config.rope_parameters["rope_theta"]) == (torch.bfloat16, 500.0)
    vb.close()


def test_load_takes_a_file_and_decodes_to_the_dtypes_of_the_model(tmp_path):
    path, model = tmp_path / "model.gguf", model_of("llama")
    write(path, model, "llama", mixed(Type.Q4_0, Type.Q8_0))
    with torch.device("meta"):
        empty = type(model)._from_config(model.config, dtype=torch.float16).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        vb = vbrt.load(path, empty, **QUIET)
    assert torch.equal(logits(vb), logits(reference(path, vb.module, torch.float16)))
    vb.close()


def test_files_that_are_split_are_read_as_one(tmp_path):
    whole, model = tmp_path / "whole.gguf", model_of("llama")
    write(whole, model, "llama", mixed(Type.Q4_0))
    directory = tmp_path / "split"
    directory.mkdir()
    gguf_files.split(whole, directory, parts=3)
    vb, parts = loaded(whole), loaded(directory)
    assert torch.equal(logits(parts), logits(vb))
    parts.close()
    vb.close()
    (directory / "part-00002-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"part-00002-of-00003\.gguf: cannot be read"):
        loaded(directory)


def test_several_files_in_a_directory_are_named(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"2 GGUF files, such as a\.gguf, b\.gguf; name one"):
        gguf_file(tmp_path)


def test_describe_says_what_weights_are_and_become_from_the_header(tmp_path, unknown):
    path = tmp_path / "model.gguf"
    write(path, model_of("llama", **WIDE), "llama", mixed(Type.Q4_0, Type.TQ1_0))
    said = describe(path)
    kinds = {kind.layout: (kind.becomes, kind.count) for kind in said.kinds}
    assert said.container == "GGUF (llama)"
    assert kinds == {"GGUF TQ1_0": ("decoded", 5), "GGUF Q4_0": ("symmetric32-float16", 4), "GGUF F32": ("dense", 3)}


def test_a_model_of_another_kind_and_a_dtype_for_other_files_are_refused(tmp_path):
    path, model = tmp_path / "model.gguf", model_of("llama")
    write(
        path,
        model,
        "llama",
        mixed(Type.Q4_0),
        more=[("blk.0.ffn_gate_inp.weight", model.lm_head.weight.numpy(force=True))],
    )
    with pytest.raises(CheckpointError, match=r"1 tensors of it \(llama\) do not belong to a Llama.*ffn_gate_inp"):
        loaded(path)
    with pytest.raises(CheckpointError, match=r"names of llama\.cpp, which only transformers translates.*Linear"):
        vbrt.load(path, torch.nn.Linear(4, 4))
    model.save_pretrained(tmp_path / "dense")
    with pytest.raises(ConfigError, match="have dtypes of their own"):
        vbrt.from_pretrained(tmp_path / "dense", dtype=torch.float16)


@pytest.mark.parametrize("tied", [True, False])
def test_heads_and_tables_stay_in_their_own_bits_unless_the_config_speaks_of_them(tmp_path, tied):
    path = tmp_path / "model.gguf"
    write(path, model_of("llama", **WIDE, tie_word_embeddings=tied), "llama", lambda name: Type.Q6_K)
    table, head = "model.embed_tokens", "lm_head"

    def held(config=None, **weights):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            vb = vbrt.from_pretrained(path, config, **{**QUIET, "weights": QUIET["weights"] | weights})
        with vb:
            assert tied == (vb.module.lm_head.weight is vb.module.model.embed_tokens.weight) or not tied
            if not config:
                assert vb.lossless and torch.equal(logits(vb), logits(reference(path, vb.module, torch.float32)))
            return {swap.name: swap.format for swap in vb.plan.swaps if swap.name in (table, head)}

    both = {table: "superbytes16"} if tied else {table: "superbytes16", head: "superbytes16"}
    assert held() == both
    assert held(keep_head=True, embeddings=False) == {}
    assert held(embeddings=False) == ({} if tied else {head: "superbytes16"})
    assert held("fp4") == {}, "it rounds"
