"""4-bit weights with zero points or offsets, made by the libraries that publish them, and what these decode them to.

`python -m tests.formats.published_offsets` writes tests/data/published/offsets.safetensors anew. It needs
compressed-tensors (made with 0.20.0), auto-round (0.16.1), mlx (0.32.4, on a CPU), and the modules of autoawq (0.2.9)
that pack and unpack; its package does not import with a transformers of today.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

FILE = Path(__file__).parents[1] / "data/published/offsets.safetensors"
ROWS, COLUMNS = 32, 128
COMPRESSED = {  # strategy, group, dtype, columns
    "group-32": ("group", 32, torch.bfloat16, COLUMNS),
    "group-64": ("group", 64, torch.float16, COLUMNS),
    "channel": ("channel", None, torch.float16, 120),
}
AUTO_ROUND = {"gptq": "qlinear_torch_zp", "gptq_v2": "qlinear_torch"}  # packing auto_round:auto_gptq; auto_round
GROUP = 64


def weight(shape, dtype=torch.float32):
    """Rows around other means, so that zero points differ."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=generator) * 0.05 + torch.rand(shape[0], 1, generator=generator) / 20).to(
        dtype
    )


def grid(w, group, lowest):
    """(scales [N, G] fp16, zero points [N, G] from `lowest` to 15) of a weight."""
    grouped = w.float().view(len(w), -1, group)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).half()
    return scales, (-low / scales.float()).round().clamp(lowest, 15)


def of_compressed_tensors(name):
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    strategy, group, dtype, columns = COMPRESSED[name]
    args = QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy=strategy, group_size=group)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    w = weight((ROWS, columns), dtype)
    scale, zero = grid(w, group or columns, 0)
    files = {"weight": w, "weight_scale": scale.to(dtype), "weight_zero_point": (zero - 8).to(torch.int8)}
    state = PackedQuantizationCompressor.compress(files, scheme)
    return {**state, "decoded": PackedQuantizationCompressor.decompress(dict(state), scheme)["weight"]}


def of_auto_round(name):
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.float16)
    linear.weight.data = weight((ROWS, COLUMNS), torch.float16)
    module = import_module(f"auto_round_extension.torch.{AUTO_ROUND[name]}")
    made = module.QuantLinear(4, GROUP, COLUMNS, ROWS, False)
    made.device = torch.device("cpu")  # which 0.16.1 reads where zero points are a tensor, and does not have
    made.pack(linear, *grid(linear.weight.detach(), GROUP, 1))
    made.post_init()
    files = {field: getattr(made, field) for field in ("qweight", "qzeros", "scales")}
    return {**files, "decoded": made(torch.eye(COLUMNS, dtype=torch.float16)).t()}


def of_autoawq(name):
    package = ModuleType("awq")  # without what it imports
    package.__path__ = [str(Path(folder) / "awq") for folder in sys.path]
    sys.modules.setdefault("awq", package)
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.float16)
    linear.weight.data = weight((ROWS, COLUMNS), torch.float16)
    scales, zeros = grid(linear.weight.detach(), GROUP, 0)
    gemm = import_module("awq.modules.linear.gemm").WQLinear_GEMM
    made = gemm.from_linear(linear, 4, GROUP, scales=scales.t().contiguous(), zeros=zeros.t().contiguous())
    files = {field: getattr(made, field) for field in ("qweight", "qzeros", "scales")}
    unpack = import_module("awq.utils.packing_utils").dequantize_gemm
    return {**files, "decoded": unpack(made.qweight, made.qzeros, made.scales, 4, GROUP).t()}


def of_mlx(name):
    import mlx.core as mx
    import numpy as np

    packed, scales, biases = mx.quantize(mx.array(weight((ROWS, COLUMNS)).numpy()), group_size=GROUP, bits=4)
    decoded = mx.dequantize(packed, scales, biases, group_size=GROUP, bits=4)
    files = {"weight": packed, "scales": scales, "biases": biases, "decoded": decoded}
    return {field: torch.from_numpy(np.array(tensor)) for field, tensor in files.items()}


MAKERS = {
    **{("compressed_tensors", name): of_compressed_tensors for name in COMPRESSED},
    **{("auto_round", name): of_auto_round for name in AUTO_ROUND},
    ("autoawq", "gemm"): of_autoawq,
    ("mlx", "float32"): of_mlx,
}


def main():
    from safetensors.torch import save_file

    tensors = {
        f"{library}/{name}/{field}": tensor.detach().contiguous().clone()
        for (library, name), make in MAKERS.items()
        for field, tensor in make(name).items()
    }
    save_file(tensors, FILE)


if __name__ == "__main__":
    main()
