"""Weights of a model that vLLM loads, in the tiers: what the plug-in (`vllm.py`) gives vLLM's layers.

Legend: N outputs, K inputs, E experts, H hidden size, I inner size of an expert, T tokens.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from vbrt.errors import ConfigError
from vbrt.libraries.vllm_api import EXPERTS
from vbrt.wrapper.wrap import wrap
from vbrt.wrapper.wrapper import VBModelWrapper

__all__ = ["Weights", "wrapped"]

_WRAPPED: "weakref.WeakSet[VBModelWrapper]" = weakref.WeakSet()


def wrapped() -> list[VBModelWrapper]:
    """Return the weights of the models that vLLM runs in this process, for `stats()` and `set_budget`."""
    return list(_WRAPPED)


class Weights:
    """Holder of the weights of one model, wrapped together when the last layer's have come.

    Args:
        settings: `quantization_config`: "config" is as for `vbrt.wrap`, the preset "fp4" by default.

    Raises:
        ConfigError: the checkpoint holds planes.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        stored = settings.get("stored", "dense")
        if stored != "dense":
            raise ConfigError(
                f'quantization_config: vLLM does not read a checkpoint with stored = "{stored}"; expected a dense '
                "one, which is encoded as it is loaded"
            )
        self._config = settings.get("config")
        self._root, self._missing = nn.Module(), set()
        self._vb: VBModelWrapper | None = None

    def expect(self, name: str) -> None:
        """Take note that a layer's weights will come."""
        self._missing.add(name)

    def hold_linear(self, name: str, weight_NK: Tensor, bias: Tensor | None) -> nn.Module:
        """Take a weight; return a module that multiplies x [..., K] by it, and adds the bias."""
        rows, columns = weight_NK.shape
        linear = nn.Linear(columns, rows, bias=False, device="meta", dtype=weight_NK.dtype)
        linear.weight = _frozen(weight_NK)
        linear.bias = None if bias is None else _frozen(bias)
        return self._held(name, linear)

    def hold_experts(self, name: str, gate_up_EIH: Tensor, down_EHI: Tensor, top_k: int) -> nn.Module:
        """Take the weights of gated experts with silu, [E, 2 I, H] and [E, H, I]; return a module of x [T, H], ids
        and weights [T, k]. Raises LibraryError: transformers lacks such experts."""
        EXPERTS.check()
        experts, hidden, inner = down_EHI.shape
        sizes = {"hidden_size": hidden, "moe_intermediate_size": inner, "num_experts": experts}
        config = EXPERTS.part(":Qwen3MoeConfig")(**sizes, num_experts_per_tok=top_k)
        config._experts_implementation = "grouped_mm"
        with torch.device("meta"):
            module = EXPERTS.part("models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeExperts")(config)
        module.gate_up_proj, module.down_proj = _frozen(gate_up_EIH), _frozen(down_EHI)
        return self._held(name, module)

    def _held(self, name: str, module: nn.Module) -> nn.Module:
        parent, last = self._root, name.rpartition(".")[2]
        for part in name.split(".")[:-1]:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent._modules[part]
        parent.add_module(last, module)
        self._missing.remove(name)
        if not self._missing:
            self._vb = wrap(self._root.eval(), self._config)
            _WRAPPED.add(self._vb)
        return _Placed(parent, last)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.data, requires_grad=False)


class _Placed(nn.Module):
    """Whichever module stands at a place: a plain one, then the layer that has replaced it."""

    def __init__(self, parent: nn.Module, name: str) -> None:
        super().__init__()
        self._place = parent, name  # in a tuple: it is not this module's child

    def forward(self, *args: Tensor) -> Tensor:
        parent, name = self._place
        return parent._modules[name](*args)
