"""vLLM plug-in, experimental: models that vLLM runs, with their weights in the tiers. Importing it imports vLLM.

    vllm serve DIR --quantization vbrt --enforce-eager

vLLM finds `register` by its entry point `vllm.general_plugins`. Linear layers and gated experts of a dense checkpoint
are loaded into host memory, and wrapped when the last one is there; embeddings, norms, heads and attention stay vLLM's.
Settings are those of `vbrt.QuantizationConfig`, in config.json or in `--hf-overrides`:

    {"quantization_config": {"quant_method": "vbrt", "config": {"tiers": {"gpu": {"budget": "6GiB"}}}}}
"""

from vbrt.integrations.vllm_weights import Weights, wrapped
from vbrt.libraries import vllm_methods

__all__ = ["register", "wrapped"]

_NAME = "vbrt"


def register() -> None:
    """Make `--quantization vbrt` known to vLLM in this process."""
    vllm_methods.register(_NAME, Weights)
