"""Per-expert reading: reads each expert's matrix alone where transformers would stack them all.

A conversion for checkpoints with separate experts begins with `MergeModulelist(dim=0)`; its further operations treat
each matrix of the stack independently. So the same operations on one expert's tensors give that expert's matrix.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from vbrt.layers.experts.expert_encoding import MatricesOnDemand
from vbrt.libraries.transformers_api import WeightConverter, WeightTransform
from vbrt.saves.common.renaming import merges_experts

__all__ = ["by_expert"]


class _ByExpert(WeightConverter):
    """Converter that hands experts' matrices over as readers, if they go into pages."""

    __slots__ = ()

    def convert(
        self, layer_name: str, model: Any = None, config: Any = None, hf_quantizer: Any = None, loading_info: Any = None
    ):
        """Return the tensors that are not in pages. See `WeightConverter.convert`."""
        filling = getattr(hf_quantizer, "filling", None)
        jobs = self.collected_tensors
        if filling is None or not filling.takes_matrices(layer_name) or not _is_deferred(jobs):
            return super().convert(layer_name, model, config, hf_quantizer, loading_info)
        shape = filling.shape_of(layer_name)
        if {len(per_expert) for per_expert in jobs.values()} != {shape[0]}:
            return super().convert(layer_name, model, config, hf_quantizer, loading_info)
        jobs = dict(jobs)
        self.collected_tensors.clear()
        read = partial(self._matrix, jobs, {"full_layer_name": layer_name, "model": model, "config": config})
        first = read(0)
        matrices = MatricesOnDemand(lambda expert: read(expert).reshape(shape[1:]), shape, first.dtype)
        hf_quantizer.note_use(self.source_patterns[0], [matrices])
        hf_quantizer.put(model, layer_name, matrices, loading_info.missing_keys)
        return {}

    @torch.no_grad()
    def _matrix(self, jobs: dict[str, list[Callable[[], torch.Tensor]]], given: dict[str, Any], expert: int):
        """Read one expert's tensors; return its matrix."""
        found: dict[str, Any] = {pattern: [per_expert[expert]()] for pattern, per_expert in jobs.items()}
        for operation in self.operations:
            found = operation.convert(
                found, source_patterns=self.source_patterns, target_patterns=self.target_patterns, **given
            )
        (made,) = found.values()
        return (made[0] if isinstance(made, list) else made)[0]


def _is_deferred(jobs: dict[str, list]) -> bool:
    return all(callable(job) for per_expert in jobs.values() for job in per_expert)


def by_expert(conversion: WeightTransform) -> WeightTransform:
    """Return a conversion that reads experts one by one, if the given one stacks them; else the same."""
    if type(conversion) is not WeightConverter or len(conversion.target_patterns) != 1:
        return conversion
    if not merges_experts(conversion.operations):
        return conversion
    made = _ByExpert(
        conversion._original_source_patterns,
        conversion._original_target_patterns,
        operations=conversion.operations,
        force_cpu=conversion.force_cpu,
    )
    made.scope_prefix, made.base_model_prefix = conversion.scope_prefix, conversion.base_model_prefix
    return made
