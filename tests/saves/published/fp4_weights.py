"""FP4 weights made by the libraries that publish them, with what each of them decodes them to.

`python -m tests.saves.published.fp4_weights` writes tests/data/published/fp4.safetensors anew. It needs torchao (made
with
0.18.0, on a CPU) and compressed-tensors (0.20.0).
"""

from pathlib import Path

import torch

FILE = Path(__file__).parents[2] / "data/published/fp4.safetensors"
ROWS, COLUMNS = 32, 64
NAMES = ("torchao", "torchao swizzled", "compressed nvfp4", "compressed mxfp4")


def weight():
    return (torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * 0.05).bfloat16()


def of_torchao(name):
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    scale = weight().abs().max().float() / (448 * 6)
    made = NVFP4Tensor.to_nvfp4(weight(), per_tensor_scale=scale, is_swizzled_scales=name.endswith("swizzled"))
    tensors, metadata = flatten_tensor_state_dict({"0.weight": made})
    return {**tensors, "decoded": made.dequantize(torch.bfloat16)}, metadata["0.weight"]


def of_compressed_tensors(name):
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    nvfp4 = name.endswith("nvfp4")
    group, strategy = (16, "tensor_group") if nvfp4 else (32, "group")
    given = {} if nvfp4 else {"scale_dtype": torch.uint8}
    args = QuantizationArgs(num_bits=4, type="float", symmetric=True, strategy=strategy, group_size=group, **given)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    amax, whole = weight().view(ROWS, -1, group).abs().amax(-1).float(), weight().abs().max().float()
    tensors = {"weight": weight(), "weight_scale": torch.exp2(amax.log2().floor() - 2)}
    if nvfp4:
        scale = (448 * 6 / whole).view(1)
        rounded = (amax * scale / 6).to(torch.float8_e4m3fn).float()
        tensors |= {"weight_scale": rounded, "weight_global_scale": scale}
    library = NVFP4PackedCompressor if nvfp4 else MXFP4PackedCompressor
    state = library.compress(tensors, scheme)
    decoded = library.decompress(dict(state), scheme)["weight"]
    return {**{f"0.{field}": tensor for field, tensor in state.items()}, "decoded": decoded}, ""


def main():
    from safetensors.torch import save_file

    tensors, metadata = {}, {}
    for name in NAMES:
        made, metadata[name] = (of_torchao if name.startswith("torchao") else of_compressed_tensors)(name)
        tensors |= {f"{name}/{field}": tensor.contiguous().clone() for field, tensor in made.items()}
    save_file(tensors, FILE, metadata)


if __name__ == "__main__":
    main()
