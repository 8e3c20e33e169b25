"""Quantizer for diffusers' `from_pretrained`: encodes parameters into planes one by one.

    config = vbrt.QuantizationConfig("exact", tiers={"gpu": {"budget": "8GiB"}})
    transformer = SD3Transformer2DModel.from_pretrained("path", subfolder="transformer", quantization_config=config)
    vb = vbrt.of(transformer)

For a pipeline: `PipelineQuantizationConfig(quant_mapping={"transformer": config})`. Importing this imports diffusers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vbrt.errors import ConfigError, WrapError
from vbrt.libraries.diffusers_api import DiffusersQuantizer
from vbrt.model.attachment import Attachment
from vbrt.saves.load.fill_while_reading import Filling
from vbrt.saves.saved.embedded_planes import dense_tensors, embedded_tensors, open_embedded
from vbrt.saves.saved.saved_planes import SavedModel
from vbrt.wrapper.wrapper_choice import warn_of_plan
from vbrt.wrapper.wrapper_of import of

__all__ = ["VBDiffusersQuantizer"]


class VBDiffusersQuantizer(DiffusersQuantizer):
    """Encodes a model's weights while diffusers loads it, and attaches it to a runtime. See `DiffusersQuantizer`.

    Args:
        quantization_config: a `vbrt.QuantizationConfig`.
    """

    use_keep_in_fp32_modules = True

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._holds_planes = self.pre_quantized and quantization_config.stored == "planes"
        self.pre_quantized = False  # so that parameters arrive one by one, in the model's own shapes
        self._saved: SavedModel | None = None
        self._filling: Filling | None = None
        self._attachment: Attachment | None = None

    # -- before loading -----------------------------------------------------------------------------------------------

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raise ConfigError for a device map, or for mode = "train"."""
        settings = self.quantization_config.settings
        if device_map is not None:
            raise ConfigError(
                f"device_map={device_map!r}: weights of a wrapped model are not placed by a map, tiers do that: leave "
                'it out and give budgets, tiers={"gpu": {"budget": "6GiB"}, "cpu": {...}, "ssd": {...}}'
            )
        if settings.mode == "train":
            raise ConfigError(
                f'{settings.source}: mode = "train" with from_pretrained of diffusers, which reads into planes; load '
                "the model without quantization_config and wrap it"
            )

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
        """Return the names that the model knows; open a save's planes."""
        if not self._holds_planes:
            return loaded_keys
        self._saved = open_embedded(map(Path, checkpoint_files))
        planes = self._saved.plane_names
        return [name for name in loaded_keys if name not in planes]

    def update_missing_keys(self, model: nn.Module, missing_keys: list[str], prefix: str) -> list[str]:
        """Return the names that are in no file, and in no plane either."""
        return [name for name in missing_keys if not self._of_planes(name)]

    def _of_planes(self, name: str) -> bool:
        return self._saved is not None and self._filling is not None and self._filling.takes(name)

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        self.quantization_config.settle(self._saved)
        self._filling = self.quantization_config.filling(model, self._saved)
        warn_of_plan(self._filling.plan, "from_pretrained", stacklevel=6)

    # -- during loading -----------------------------------------------------------------------------------------------

    @property
    def supports_parallel_loading(self) -> bool:
        """False: weights are encoded one at a time."""
        return False

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a file's tensors without those of planes."""
        if self._saved is None:
            return state_dict
        planes = self._saved.plane_names
        return {name: tensor for name, tensor in state_dict.items() if name not in planes and not self._of_planes(name)}

    def check_if_quantized_param(
        self, model: nn.Module, param_value: torch.Tensor, param_name: str, state_dict: Mapping[str, Any], **kwargs: Any
    ) -> bool:
        """True if a weight goes into pages."""
        return self._filling.takes(param_name)

    def create_quantized_param(
        self, model: nn.Module, param_value: torch.Tensor, param_name: str, *args: Any, **kwargs: Any
    ) -> None:
        """Encode a weight; its parameter stays on the meta device until the layers are swapped."""
        self._filling.take(param_name, param_value)

    # -- after loading ------------------------------------------------------------------------------------------------

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        filling, self._filling = self._filling, None
        try:
            if self._saved is not None:
                for swap in filling.plan.swaps:
                    filling.take(swap.site.tensor, torch.empty(0, dtype=torch.uint8, device="cpu"))
            self._attachment = filling.finish(model)
        except BaseException:
            filling.close()
            raise
        finally:
            self._saved = None

    def _dequantize(self, model: nn.Module) -> nn.Module:
        return of(model).unwrap()

    def get_state_dict_and_metadata(
        self, state_dict: dict[str, Any], safe_serialization: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the content for `save_pretrained`: planes with their manifest, or the dense weights."""
        if self._attachment is None or self._attachment.closed:
            raise WrapError("save_pretrained: the model was closed or unwrapped; dequantize() makes it a plain one")
        if self.quantization_config.stored == "dense" or not safe_serialization:
            self.quantization_config.stored = "dense"
            return dense_tensors(self._attachment), {}
        return embedded_tensors(self._attachment)

    @property
    def is_serializable(self) -> bool:
        """True: see `QuantizationConfig.stored`."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: adapters train on frozen planes."""
        return True

    @property
    def is_compileable(self) -> bool:
        """True."""
        return True
