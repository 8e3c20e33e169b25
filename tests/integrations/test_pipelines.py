"""Pipelines and models as their libraries make them, wrapped: the same results, bit for bit."""

import copy
import importlib.util

import pytest
import torch

import vbrt

pytest.importorskip("transformers")

ALL = {"weights": {"min_parameters": 0}}


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<unk>", "</s>", "a", "cat", "dog", "of"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", eos_token="</s>", model_max_length=16
    )


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    return LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)).to(torch.bfloat16).eval()


def test_a_pipeline_of_transformers_generates_the_same_text():
    from transformers import TextGenerationPipeline

    pipeline = TextGenerationPipeline(llama(), tokenizer(), device="cpu")
    want = pipeline("a cat", max_new_tokens=4, do_sample=False)
    vb = vbrt.wrap(pipeline, "exact", **ALL)
    assert vb("a cat", max_new_tokens=4, do_sample=False) == want and vb.task == pipeline.task
    assert {name: count.passes for name, count in vb.stats().phases.items()} == {"model/prompt": 1, "model/decode": 3}
    assert vb.unwrap() is pipeline and pipeline("a cat", max_new_tokens=4, do_sample=False) == want


@pytest.mark.filterwarnings("ignore:vbrt.wrap")
def test_sentences_of_a_wrapped_sentence_transformer_are_encoded_alike(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    BertModel(BertConfig(vocab_size=8, **sizes)).to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    model = library.SentenceTransformer(modules=[Transformer(str(tmp_path)), Pooling(64)], device="cpu")
    want = model.encode(["a cat", "dog"], convert_to_tensor=True)
    vb = vbrt.wrap(model, "exact", **ALL)
    assert torch.equal(vb.encode(["a cat", "dog"], convert_to_tensor=True), want) and len(vb.registry) == 13
    assert torch.equal(vb.unwrap().encode(["a cat", "dog"], convert_to_tensor=True), want)


def test_a_model_of_timm_gives_the_same_logits_and_features():
    pytest.importorskip("torchvision")
    timm = pytest.importorskip("timm")

    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, img_size=32, depth=2, num_classes=5)
    model, x = model.to(torch.bfloat16).eval(), torch.randn(2, 3, 32, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        want = model(x), model.forward_features(x)
        vb = vbrt.wrap(model, "exact", **ALL)
        assert all(map(torch.equal, (vb(x), vb.forward_features(x)), want)) and "head" in vb.plan.skipped


# -- diffusers ---------------------------------------------------------------------------------------------------------

needs_diffusers = pytest.mark.skipif(not importlib.util.find_spec("diffusers"), reason="needs diffusers")


def stable_diffusion_3():
    """A pipeline with three text encoders, a transformer and an autoencoder, of random weights."""
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    clip = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    clip = CLIPTextConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0, vocab_size=8, projection_dim=32, **clip)
    t5 = T5Config(vocab_size=8, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    models = {
        "transformer": diffusers.SD3Transformer2DModel(
            sample_size=16, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=4,
            caption_projection_dim=64, joint_attention_dim=64, pooled_projection_dim=64, out_channels=4,
        ),
        "text_encoder": CLIPTextModelWithProjection(clip),
        "text_encoder_2": CLIPTextModelWithProjection(clip),
        "text_encoder_3": T5EncoderModel(t5),
        "vae": diffusers.AutoencoderKL(
            sample_size=16, block_out_channels=(8,), latent_channels=4, norm_num_groups=1, shift_factor=0.06,
            use_quant_conv=False, use_post_quant_conv=False,
        ),
    }  # fmt: skip
    models = {name: model.to(torch.bfloat16).eval() for name, model in models.items()}
    tokenizers = {name: tokenizer() for name in ("tokenizer", "tokenizer_2", "tokenizer_3")}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipeline = diffusers.StableDiffusion3Pipeline(scheduler=scheduler, **models, **tokenizers)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def image(pipeline, steps=3):
    options = {"height": 16, "width": 16, "output_type": "pt", "max_sequence_length": 16, "guidance_scale": 5.0}
    generator = torch.Generator().manual_seed(1)
    return pipeline("a cat of dog", num_inference_steps=steps, generator=generator, **options).images


@needs_diffusers
def test_a_streamed_pipeline_of_diffusers_draws_the_same_image_and_is_saved_as_it_was(tmp_path):
    pipeline = stable_diffusion_3()
    want = image(pipeline)
    tiers = {"cpu": {"budget": 900_000}, "ssd": {"enabled": True, "path": str(tmp_path)}}
    vb = vbrt.wrap(pipeline, "exact", **ALL, tiers=tiers)
    for _ in range(3):
        assert torch.equal(image(vb), want)
    phases = vb.stats().phases
    assert vb.runtime.page_bytes > 900_000 and phases["transformer/step"].passes == 9
    assert phases["text_encoder/prompt-2"].passes == phases["vae/image"].passes == 3
    assert vb.stats().tiers["cpu"].peak_bytes <= 900_000
    vb.save_pretrained(tmp_path / "saved")
    loaded = type(pipeline).from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    loaded.set_progress_bar_config(disable=True)
    assert torch.equal(image(loaded), want)
    for name in ("enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload"):
        with pytest.raises(vbrt.WrapError, match="tiers do that"):
            getattr(vb, name)()
    assert torch.equal(image(vb.unwrap()), want)


@needs_diffusers
def test_lora_of_diffusers_is_loaded_fused_and_unloaded_as_on_the_plain_pipeline():
    peft = pytest.importorskip("peft")
    plain = stable_diffusion_3()
    vb = vbrt.wrap(copy.deepcopy(plain), "exact", **ALL)
    donor = stable_diffusion_3().transformer
    donor.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_k"], init_lora_weights=False))
    state = peft.get_peft_model_state_dict(donor)
    for act in (
        lambda p: p.load_lora_weights({f"transformer.{key}": value for key, value in state.items()}),
        lambda p: p.fuse_lora(components=["transformer"]),
        lambda p: p.unfuse_lora(components=["transformer"]),
        lambda p: p.unload_lora_weights(),
    ):
        act(plain)
        act(vb)
        assert torch.equal(image(vb, 1), image(plain, 1))


@needs_diffusers
def test_from_pretrained_of_diffusers_reads_into_planes_and_reads_them_again(tmp_path):
    import diffusers

    pipeline = stable_diffusion_3()
    want = image(pipeline)
    pipeline.save_pretrained(tmp_path / "dense")
    config = vbrt.QuantizationConfig("exact", **ALL)
    mapping = diffusers.PipelineQuantizationConfig(quant_mapping={"transformer": config})
    options = {"dtype": torch.bfloat16}
    loaded = type(pipeline).from_pretrained(tmp_path / "dense", quantization_config=mapping, **options)
    loaded.set_progress_bar_config(disable=True)
    assert torch.equal(image(loaded), want) and vbrt.of(loaded.transformer).lossless
    for stored in ("planes", "dense"):
        config.stored = stored
        loaded.save_pretrained(tmp_path / stored)
        again = type(pipeline).from_pretrained(tmp_path / stored, **options)
        again.set_progress_bar_config(disable=True)
        assert torch.equal(image(again), want) and vbrt.of(again.transformer).settings.weights.fine == "exact"
    kind, path = type(pipeline.transformer), tmp_path / "dense"
    with pytest.raises(vbrt.ConfigError, match="tiers do that"):
        kind.from_pretrained(path, subfolder="transformer", quantization_config=config, device_map={"": "cpu"})
    vb = vbrt.wrap(loaded, weights=ALL["weights"])  # the other models join the transformer's tiers
    assert torch.equal(image(vb), image(loaded)) and vb.runtime is vbrt.of(loaded.transformer).runtime


@needs_diffusers
def test_several_components_of_one_mapping_share_their_tiers_and_the_others_join_them(tmp_path):
    import diffusers

    pipeline = stable_diffusion_3()
    want = image(pipeline)
    pipeline.save_pretrained(tmp_path)
    names = ("transformer", "text_encoder", "text_encoder_3")
    for runtime in (None, "shared"):
        config = vbrt.QuantizationConfig("exact", **ALL, runtime=runtime)
        mapping = diffusers.PipelineQuantizationConfig(quant_mapping=dict.fromkeys(names, config))
        loaded = type(pipeline).from_pretrained(tmp_path, quantization_config=mapping, dtype=torch.bfloat16)
        loaded.set_progress_bar_config(disable=True)
        assert torch.equal(image(loaded), want)
        runtimes = {vbrt.of(getattr(loaded, name)).runtime for name in names}
        assert len(runtimes) == (3 if runtime is None else 1)
        if runtime is None:
            with pytest.raises(vbrt.WrapError, match='runtime="shared"'):
                vbrt.wrap(loaded, "exact", **ALL)
        else:
            vb = vbrt.wrap(loaded, weights={**ALL["weights"], "format": "nvfp4", "fine": "exact"})
            assert torch.equal(image(vb), want) and vb.runtime in runtimes
