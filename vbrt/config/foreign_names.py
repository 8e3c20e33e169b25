"""Arguments of other libraries that people type here, each with the line that says the same."""

from collections.abc import Mapping
from typing import Any

from vbrt.config.value_checks import shown

__all__ = ["translation"]

_TIERS = 'the tiers place weights, no map does: gpu_memory="12GB", or budget="6GiB" for the pages alone'
_HALF = 'the fp4 preset is the default: vbrt.wrap(model); "nf4" has the codes of bitsandbytes: vbrt.wrap(model, "nf4")'
_BYTE = 'vbrt.wrap(model, "mxint8") holds weights in 8 bits, vbrt.wrap(model, "exact") loses no bit'
_NO_COUNT = (
    'the budget decides how many layers stay on the GPU: gpu_memory="12GB", or budget="6GiB" for the pages alone'
)
_FOLDER = 'tiers={"ssd": {"enabled": True, "path": %s}}'
_QUANTIZED = (
    'a preset says how weights are held: vbrt.from_pretrained(path, "nf4"); transformers\' own from_pretrained takes '
    'quantization_config=vbrt.QuantizationConfig("nf4")'
)
_DTYPE = "weights keep the dtype of the model or its files: model.to(torch.bfloat16) before vbrt.wrap"

#: argument -> (library, what does the same here; %s stands for the value)
_NAMES = {
    **dict.fromkeys(("device_map", "max_gpu_memory"), ("accelerate", _TIERS)),
    **dict.fromkeys(("offload_folder", "offload_dir"), ("accelerate", _FOLDER)),
    "offload_state_dict": ("accelerate", "leave it out: weights are read one by one"),
    "low_cpu_mem_usage": ("transformers", "leave it out: vbrt.from_pretrained reads weights one by one"),
    "device": (
        "torch",
        'leave it out: the GPU computes where there is one; tiers={"gpu": {"enabled": False}} for the CPU',
    ),
    **dict.fromkeys(("torch_dtype", "compute_dtype"), ("transformers", _DTYPE)),
    "quantization_config": ("transformers", _QUANTIZED),
    **dict.fromkeys(("load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_compute_dtype"), ("bitsandbytes", _HALF)),
    "bnb_4bit_use_double_quant": ("bitsandbytes", _HALF),
    **dict.fromkeys(("load_in_8bit", "llm_int8_threshold"), ("bitsandbytes", _BYTE)),
    "llm_int8_enable_fp32_cpu_offload": ("bitsandbytes", _TIERS),
    **dict.fromkeys(("n_gpu_layers", "gpu_layers", "num_gpu_layers"), ("llama.cpp", _NO_COUNT)),
    **dict.fromkeys(("n_ctx", "max_seq_len"), ("llama.cpp", 'context=%s, with gpu_memory="12GB"')),
    "n_cpu_moe": ("llama.cpp", 'experts={"miss": "auto"}: experts that are not on the GPU may compute on the CPU'),
}


def translation(name: str, value: Any) -> str:
    """Return `of accelerate; here ...` for an argument of another library; "" for other names."""
    if name == "max_memory":
        return f"is an argument of accelerate; here {_budgets(value)}"
    library, line = _NAMES.get(name, ("", ""))
    line = line.replace("%s", shown(value))
    return f"is an argument of {library}; here {line}" if library else ""


def _budgets(value: Any) -> str:
    """Return accelerate's {0: "6GiB", "cpu": "30GiB"} as budgets of tiers."""
    found = dict(value) if isinstance(value, Mapping) else {}
    gpu = next((size for key, size in found.items() if key not in ("cpu", "disk")), "12GB")
    cpu = f', tiers={{"cpu": {{"budget": {shown(found["cpu"])}}}}}' if "cpu" in found else ""
    return f"gpu_memory={shown(gpu)}{cpu}, or budget={shown(gpu)} for the pages alone"
