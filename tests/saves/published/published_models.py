"""Tiny models that libraries have quantized and written, with digests of what each library decodes its weights to.

`python -m tests.saves.published.published_models` writes tests/data/published/models anew. It needs bitsandbytes (made
with 0.50.2), auto-round (0.16.1) and hqq (0.2.8.post1), on a CPU.
"""

import json
import shutil
from pathlib import Path

import torch

from vbrt.saves.files.safetensors_file import digest

DIRECTORY = Path(__file__).parents[2] / "data/published/models"
#: directory -> the formats of its planes, and the dtype of the model
MODELS = {
    "bitsandbytes-nf4-nested": ({"levels64-float32", "levels32-float32"}, torch.bfloat16),  # rows of 64, and of 96
    "auto-round": ({"symmetric32-float16"}, torch.float16),
    "hqq": ({"floatzeros64-bfloat16", "floatzeros32-bfloat16"}, torch.bfloat16),  # the same
}


def digest_of(weight):
    """The digest of a weight without the signs of zeros, which a library that multiplies by it loses."""
    return digest((weight + 0).contiguous())


def small(dtype):
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**sizes, vocab_size=32, num_hidden_layers=1, max_position_embeddings=32)
    return transformers.LlamaForCausalLM._from_config(config, dtype=dtype).eval()


def of_bitsandbytes(directory, dense):
    import bitsandbytes
    import transformers

    small(torch.bfloat16).save_pretrained(dense)
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(dense, device_map="cpu", quantization_config=config)
    model.save_pretrained(directory)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, bitsandbytes.nn.Linear4bit)}
    return {f"{name}.weight": _decoded(bitsandbytes, layer.weight) for name, layer in layers.items()}


def _decoded(bitsandbytes, weight):
    """Decode a weight as one row: 0.50.2 on a CPU counts blocks wrongly where they go on in the next row."""
    state, shape = weight.quant_state, weight.quant_state.shape
    state.shape = (1, shape.numel())
    return bitsandbytes.functional.dequantize_4bit(weight.data, state).view(shape)


def of_auto_round(directory, dense):
    import transformers
    from auto_round import AutoRound
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear
    from safetensors.torch import load_file
    from tokenizers import Tokenizer, models

    model = small(torch.float16)
    model.save_pretrained(dense)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    AutoRound(
        transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float16),
        tokenizer,
        bits=4,
        group_size=32,
        iters=0,
        device_map="cpu",
        disable_opt_rtn=True,
    ).quantize_and_save(str(dense / "out"), format="auto_round")
    (written,) = (path.parent for path in (dense / "out").rglob("model.safetensors"))
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(written / name, directory / name)
    tensors, decoded = load_file(directory / "model.safetensors"), {}
    for name in (name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")):
        words, columns = tensors[f"{name}.qweight"].shape
        layer = QuantLinear(4, 32, 8 * words, columns, False)
        layer.load_state_dict({key: tensors[f"{name}.{key}"] for key in ("qweight", "qzeros", "scales")}, strict=False)
        layer.post_init()
        decoded[f"{name}.weight"] = layer(torch.eye(8 * words, dtype=torch.float16)).t()
    return decoded


def of_hqq(directory, dense):
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
    from hqq.models.hf.base import AutoHQQHFModel

    model = small(torch.bfloat16)
    config = BaseQuantizeConfig(nbits=4, group_size=64, axis=1)
    AutoHQQHFModel.quantize_model(model, config, compute_dtype=torch.bfloat16, device="cpu")
    model.config.architectures = [type(model).__name__]
    AutoHQQHFModel.save_to_safetensors(model, str(directory))
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, HQQLinear)}
    return {f"{name}.weight": layer.dequantize() for name, layer in layers.items()}


def main():
    import tempfile

    for name, make in zip(MODELS, (of_bitsandbytes, of_auto_round, of_hqq), strict=True):
        directory = DIRECTORY / name
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as dense:
            decoded = make(directory, Path(dense))
        digests = {key: digest_of(value.to(MODELS[name][1])) for key, value in decoded.items()}
        (directory / "decoded.json").write_text(json.dumps(digests, indent=1))
        (directory / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
