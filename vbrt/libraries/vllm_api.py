"""vLLM's registry of quantization methods, its linear layers and its routed experts.

| feature | without it |
| --- | --- |
| `QUANTIZATION` | `--quantization vbrt` is refused |
| `EXPERTS` (of transformers) | vLLM's routed experts are refused |
"""

from vbrt.libraries.probe import Feature

__all__ = ["CONFIG", "EXPERTS", "FEATURES", "LINEAR", "METHODS", "MOE", "QUANTIZATION", "RANKS"]

LINEAR = "model_executor.layers.linear"
MOE = "model_executor.layers.fused_moe"
METHODS = "model_executor.layers.quantization"
RANKS = "distributed:get_tensor_model_parallel_world_size"
CONFIG = "config:get_current_vllm_config"
QUANTIZATION = Feature(
    "vllm",
    (
        f"{METHODS}:register_quantization_config(quantization)",
        f"{METHODS}.base_config:QuantizationConfig.get_quant_method(layer, prefix)",
        f"{LINEAR}:LinearBase",
        f"{LINEAR}:UnquantizedLinearMethod.create_weights",
        f"{LINEAR}:UnquantizedLinearMethod.process_weights_after_loading(layer)",
        f"{LINEAR}:UnquantizedLinearMethod.apply(layer, x, bias)",
        f"{MOE}:RoutedExperts",
        f"{MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.create_weights",
        f"{MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.apply(layer, x, topk_weights, topk_ids)",
        RANKS,
        CONFIG,
    ),
    without="`--quantization vbrt` is refused; pip install -U vllm",
)
EXPERTS = Feature(
    "transformers",
    ("models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeExperts(config)", ":Qwen3MoeConfig"),
    without="vLLM's routed experts are refused",
)
FEATURES = (QUANTIZATION, EXPERTS)
