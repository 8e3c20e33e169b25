# %% [markdown]
# # A pipeline of diffusers
#
# All models of a pipeline share one budget for each tier. The pipeline here is Stable Diffusion 3 with tiny random
# models, built on the spot, so that it draws noise; take `StableDiffusion3Pipeline.from_pretrained(...)` for images.
#
# Needs `pip install diffusers`.

# %%
import tempfile

import diffusers
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, PreTrainedTokenizerFast, T5Config, T5EncoderModel

import vbrt

words = ["<pad>", "<unk>", "</s>", "a", "cat"]
tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="</s>", model_max_length=16
)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
clip = CLIPTextConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0, vocab_size=8, projection_dim=64, **sizes)
parts = {
    "transformer": diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=1,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        caption_projection_dim=64,
        joint_attention_dim=128,
        pooled_projection_dim=128,
        out_channels=4,
    ),
    "text_encoder": CLIPTextModelWithProjection(clip),
    "text_encoder_2": CLIPTextModelWithProjection(clip),
    "text_encoder_3": T5EncoderModel(T5Config(vocab_size=8, d_model=128, d_kv=16, d_ff=128, num_layers=2, num_heads=4)),
    "vae": diffusers.AutoencoderKL(
        sample_size=16,
        block_out_channels=(8,),
        latent_channels=4,
        norm_num_groups=1,
        shift_factor=0.06,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ),
}
pipeline = diffusers.StableDiffusion3Pipeline(
    scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    tokenizer=tokenizer,
    tokenizer_2=tokenizer,
    tokenizer_3=tokenizer,
    **{name: part.to(torch.bfloat16).eval() for name, part in parts.items()},
)
pipeline.set_progress_bar_config(disable=True)


def draw(pipeline) -> torch.Tensor:
    """Return an image [1, 3, 16, 16]."""
    generator = torch.Generator().manual_seed(1)
    options = {"height": 16, "width": 16, "max_sequence_length": 16, "output_type": "pt"}
    return pipeline("a cat", num_inference_steps=4, generator=generator, **options).images


expected = draw(pipeline)

# %%
tiers = {"gpu": {"enabled": False}, "cpu": {"budget": "768KiB"}, "ssd": {"enabled": True, "path": tempfile.mkdtemp()}}
vb = vbrt.wrap(pipeline, "exact", tiers=tiers)  # tiers={"gpu": {"budget": "8GiB"}} for a real one
assert torch.equal(draw(vb), expected)
for name, phase in vb.stats().phases.items():
    print(f"{name}: {phase.passes} passes")
print(vb.models["transformer"].stats())

# %%
pipeline = vb.unwrap()
assert torch.equal(draw(pipeline), expected)
print("the same image before, within the budget, and after")
