"""Weights in 16 levels, made by the libraries that publish them, with what each of them decodes them to.

`python -m tests.formats.published_weights` writes tests/data/published/levels.safetensors anew. It needs bitsandbytes
(made with 0.50.2, on a CPU), gguf (0.19.0), compressed-tensors
(0.20.0) and auto-round (0.16.1).
"""

from pathlib import Path

import torch

FILE = Path(__file__).parents[1] / "data/published/levels.safetensors"
ROWS, COLUMNS = 4, 192
BITSANDBYTES = {  # type, block size, double quantized, dtype, shape
    "nf4-bfloat16": ("nf4", 64, False, torch.bfloat16, (ROWS, COLUMNS)),
    "nf4-nested-float16": ("nf4", 64, True, torch.float16, (90, COLUMNS)),
    "fp4-float32": ("fp4", 64, False, torch.float32, (ROWS, COLUMNS)),
    "fp4-nested-128": ("fp4", 128, True, torch.bfloat16, (ROWS, 2 * COLUMNS)),
    "nf4-across-rows": ("nf4", 64, False, torch.float32, (ROWS, 96)),
}
COMPRESSED = {  # strategy, group, dtype, columns
    "group-32": ("group", 32, torch.bfloat16, COLUMNS),
    "group-64": ("group", 64, torch.float16, COLUMNS),
    "channel": ("channel", None, torch.float16, 180),
    "tensor": ("tensor", None, torch.float32, COLUMNS),
}
GGUF = ("Q4_0", "IQ4_NL")
AUTO_ROUND = {"gptq": "qlinear_torch_zp", "gptq_v2": "qlinear_torch"}  # packing auto_round:auto_gptq; auto_round


def weight(shape, dtype=torch.float32):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.05).to(dtype)


def of_bitsandbytes(name):
    from bitsandbytes import functional

    type, blocksize, nested, dtype, shape = BITSANDBYTES[name]
    packed, state = functional.quantize_4bit(
        weight(shape, dtype), blocksize=blocksize, compress_statistics=nested, quant_type=type
    )
    files = {"weight": packed, **state.as_dict(packed=True)}
    state.shape = (1, packed.numel() * 2)  # 0.50.2 on a CPU counts blocks wrongly where they go on in the next row
    return {**files, "decoded": functional.dequantize_4bit(packed, state).view(shape)}


def of_gguf(name):
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    blocks = quantize(weight((ROWS, COLUMNS)).numpy(), GGMLQuantizationType.Q4_0)
    if name == "IQ4_NL":  # which the library reads only: any codes under the same scales
        codes = np.random.default_rng(0).integers(0, 256, (blocks.size // 18, 16), dtype=np.uint8)
        blocks.reshape(-1, 18)[:, 2:] = codes
    decoded = dequantize(blocks, GGMLQuantizationType[name])
    return {"blocks": torch.from_numpy(blocks), "decoded": torch.from_numpy(decoded)}


def of_compressed_tensors(name):
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    strategy, group, dtype, columns = COMPRESSED[name]
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy=strategy, group_size=group)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    w = weight((ROWS, columns), dtype)
    groups = {"group": w.view(ROWS, -1, group or columns), "channel": w.unsqueeze(1), "tensor": w.view(1, 1, -1)}
    scale = groups[strategy].abs().amax(-1) / 7.5
    scale = scale.view(1) if strategy == "tensor" else scale
    zero = torch.zeros_like(scale, dtype=torch.int8)
    files = {"weight": w, "weight_scale": scale, "weight_zero_point": zero}
    state = PackedQuantizationCompressor.compress(files, scheme)
    return {**state, "decoded": PackedQuantizationCompressor.decompress(dict(state), scheme)["weight"]}


def of_auto_round(name):
    from importlib import import_module

    linear = torch.nn.Linear(64, 32, bias=False, dtype=torch.float16)
    linear.weight.data = weight((32, 64), torch.float16)
    made = import_module(f"auto_round_extension.torch.{AUTO_ROUND[name]}").QuantLinear(4, 32, 64, 32, False)
    made.pack(linear, linear.weight.detach().view(32, -1, 32).abs().amax(-1) / 7.5, 8)
    made.post_init()
    files = {field: getattr(made, field) for field in ("qweight", "qzeros", "scales")}
    return {**files, "decoded": made(torch.eye(64, dtype=torch.float16)).t()}


MAKERS = {
    **{("bitsandbytes", name): of_bitsandbytes for name in BITSANDBYTES},
    **{("gguf", name): of_gguf for name in GGUF},
    **{("auto_round", name): of_auto_round for name in AUTO_ROUND},
    **{("compressed_tensors", name): of_compressed_tensors for name in COMPRESSED},
}


def main():
    from safetensors.torch import save_file

    tensors = {
        f"{library}/{name}/{field}": tensor.contiguous().clone()
        for (library, name), make in MAKERS.items()
        for field, tensor in make(name).items()
    }
    save_file(tensors, FILE)


if __name__ == "__main__":
    main()
