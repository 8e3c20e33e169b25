"""vLLM's methods for layers whose weights a holder owns. Importing this module imports vLLM.

Raises LibraryError: this vLLM lacks a part.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import vllm  # noqa: F401  # absent, an ImportError says so
from torch import Tensor, nn

from vbrt.errors import LibraryError
from vbrt.libraries.vllm_api import CONFIG, LINEAR, METHODS, MOE, QUANTIZATION, RANKS

__all__ = ["Config", "Holder", "register"]

QUANTIZATION.check()


class Holder(Protocol):
    """Owner of the weights of a model that vLLM loads."""

    def expect(self, name: str) -> None:
        """Take note that a layer's weights will come."""

    def hold_linear(self, name: str, weight_NK: Tensor, bias: Tensor | None) -> nn.Module:
        """Take a weight; return a module that multiplies x [..., K] by it, and adds the bias."""

    def hold_experts(self, name: str, gate_up_EIH: Tensor, down_EHI: Tensor, top_k: int) -> nn.Module:
        """Take the weights of gated experts with silu; return a module of x [T, H], ids and weights [T, k]."""


class _Linear(QUANTIZATION.part(f"{LINEAR}:UnquantizedLinearMethod")):
    """Linear layers: their weights are loaded into host memory, and go to the holder."""

    requires_device_loading = False
    supports_pre_processed_weights = False

    def __init__(self, holder: Holder, prefix: str) -> None:
        self._holder, self._prefix = holder, prefix
        holder.expect(prefix)

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        _check_engine()
        with torch.device("cpu"):
            super().create_weights(layer, *args, **kwargs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight, bias = layer._parameters.pop("weight"), getattr(layer, "bias", None)
        bias = None if layer.skip_bias_add else bias
        self._product = self._holder.hold_linear(self._prefix, weight.data, bias)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._product(x)  # with the bias that it was given


class _Experts(QUANTIZATION.part(f"{MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod")):
    """Routed experts, likewise."""

    requires_device_loading = False
    supports_pre_processed_weights = False
    is_monolithic = False

    def __init__(self, holder: Holder, prefix: str, moe: Any) -> None:
        super().__init__(moe)
        self._holder, self._prefix = holder, prefix
        activation = getattr(moe.activation, "value", moe.activation)
        peculiar = {"biases": moe.has_bias, "no gate": not moe.is_act_and_mul, activation: activation != "silu"}
        self._check(peculiar | {"parallel experts": moe.moe_parallel_config.use_ep})
        holder.expect(prefix)

    def _check(self, peculiar: dict[str, bool]) -> None:
        if any(peculiar.values()):
            what = ", ".join(name for name, there in peculiar.items() if there)
            raise LibraryError(
                f"{self._prefix}: experts with {what} are not taken from vLLM; expected gated ones with silu"
            )

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        _check_engine()
        self._check({"weights that are applied to their inputs": layer.apply_router_weight_on_input})
        with torch.device("cpu"):
            super().create_weights(layer, *args, **kwargs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        gate_up, down = (layer._parameters.pop(name).data for name in ("w13_weight", "w2_weight"))
        self._product = self._holder.hold_experts(self._prefix, gate_up, down, self.moe.experts_per_token)

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        return None

    def apply(
        self, layer: nn.Module, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *others: Any, **more: Any
    ) -> Tensor:
        return self._product(x, topk_ids.long(), topk_weights.to(x.dtype))


class Config(QUANTIZATION.part(f"{METHODS}.base_config:QuantizationConfig")):
    """What vLLM makes of `quantization_config`: the methods of one model's layers, which share a holder.

    Attributes:
        name: of the method.
        holder_of: makes the holder of a model with these settings.
    """

    name: str
    holder_of: Callable[[dict[str, Any]], Holder]

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self._holder = type(self).holder_of(settings)

    @classmethod
    def get_name(cls) -> str:
        return cls.name

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 70

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Config":
        return cls(config)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        if isinstance(layer, QUANTIZATION.part(f"{LINEAR}:LinearBase")):
            return _Linear(self._holder, prefix)
        if isinstance(layer, QUANTIZATION.part(f"{MOE}:RoutedExperts")):
            return _Experts(self._holder, prefix, layer.moe_config)
        return None


def register(name: str, holder_of: Callable[[dict[str, Any]], Holder]) -> None:
    """Have vLLM give the weights of models with `quantization=name` to holders."""
    Config.name, Config.holder_of = name, staticmethod(holder_of)
    QUANTIZATION.part(f"{METHODS}:register_quantization_config")(name)(Config)


def _check_engine() -> None:
    """Raise LibraryError: vLLM's engine is set up in a way that weights in the tiers do not follow."""
    ranks = QUANTIZATION.part(RANKS)()
    if ranks > 1:
        raise LibraryError(f"--tensor-parallel-size {ranks} with --quantization {Config.name}; expected 1")
    config = QUANTIZATION.part(CONFIG)()
    if config.device_config.device_type != "cpu" and not config.model_config.enforce_eager:
        raise LibraryError(
            f"--quantization {Config.name}: a CUDA graph of vLLM's would not move pages; expected --enforce-eager"
        )
