"""vbrt, the Virtual Blackwell runtime: run and train PyTorch models that are larger than the memory they run in.

import vbrt

vb = vbrt.wrap(model)        # or wrap(model, "exact"), wrap(model, "my.toml"), wrap(model, VBConfig(...))
vb(x)                        # or vb.generate(...): everything of the model is reachable
print(vb.stats())            # per-layer hit rates
model = vb.unwrap()          # the dense model back

vb.save("saved")             # planes as they are; vbrt.load("saved", model) fills them back without encoding
"""

import importlib
from typing import TYPE_CHECKING, Any

from vbrt.integrations.register_hooks import register_all

__version__ = "0.1.0"

_NAMES = {
    "blocks": ("FlashAttention", "FusedFP4Linear", "OptimizedTransformerBlock", "gumbel_max_sample", "quantize"),
    "config": ("VBConfig", "load_config"),
    "errors": (
        "ArgumentError",
        "CheckpointError",
        "ConfigError",
        "FormatError",
        "KernelError",
        "LibraryError",
        "NoRoomError",
        "NonfiniteError",
        "TierError",
        "VBError",
        "WrapError",
    ),
    "estimation.advice.advise": ("advise",),
    "estimation.memory.largest_batch": ("fit_batch",),
    "estimation.advice.choices": ("Advice", "Choice"),
    "estimation.memory.estimate": ("estimate",),
    "estimation.precision.choose_precision": ("choose_precision",),
    "estimation.precision.precision_report": ("LayerPrecision", "Precision"),
    "estimation.advice.machine_rates": ("Rates", "data_sheet", "measure_rates"),
    "estimation.memory.estimate_report": ("Estimate",),
    "estimation.memory.task": ("Task",),
    "generation.kv.cache": ("KVCache",),
    "integrations.pretrained": ("from_pretrained",),
    "integrations.transformers_quantizer": ("QuantizationConfig",),
    "kernels.cuda.tuning": ("tune",),
    "kernels.cuda.graph_pass": ("compile_options",),
    "layers": ("VBLinear",),
    "model.planner": ("make_plan",),
    "report.stats": ("Stats",),
    "residency.plan": ("Plan",),
    "residency.routing_trace": ("generate_routing",),
    "residency.routing_file": ("read_routing",),
    "residency.simulate": ("simulate",),
    "saves.checkpoint.training_checkpoint": ("TrainingCheckpoint", "read_checkpoint"),
    "training.full.lion": ("Lion",),
    "wrapper.full_wrapper": ("VBFullWrapper",),
    "wrapper.load": ("load",),
    "wrapper.load_heads": ("load_heads",),
    "wrapper.wrapper_of": ("of",),
    "wrapper.pipeline": ("VBPipelineWrapper",),
    "wrapper.watch_nonfinite": ("watch_nonfinite",),
    "wrapper.wrap": ("wrap",),
    "wrapper.wrapper": ("VBModelWrapper",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:  # `as`: strict type checkers take only these for exported
    from vbrt.blocks import FlashAttention as FlashAttention
    from vbrt.blocks import FusedFP4Linear as FusedFP4Linear
    from vbrt.blocks import OptimizedTransformerBlock as OptimizedTransformerBlock
    from vbrt.blocks import gumbel_max_sample as gumbel_max_sample
    from vbrt.blocks import quantize as quantize
    from vbrt.config import VBConfig as VBConfig
    from vbrt.config import load_config as load_config
    from vbrt.errors import ArgumentError as ArgumentError
    from vbrt.errors import CheckpointError as CheckpointError
    from vbrt.errors import ConfigError as ConfigError
    from vbrt.errors import FormatError as FormatError
    from vbrt.errors import KernelError as KernelError
    from vbrt.errors import LibraryError as LibraryError
    from vbrt.errors import NonfiniteError as NonfiniteError
    from vbrt.errors import NoRoomError as NoRoomError
    from vbrt.errors import TierError as TierError
    from vbrt.errors import VBError as VBError
    from vbrt.errors import WrapError as WrapError
    from vbrt.estimation.advice.advise import advise as advise
    from vbrt.estimation.advice.choices import Advice as Advice
    from vbrt.estimation.advice.choices import Choice as Choice
    from vbrt.estimation.advice.machine_rates import Rates as Rates
    from vbrt.estimation.advice.machine_rates import data_sheet as data_sheet
    from vbrt.estimation.advice.machine_rates import measure_rates as measure_rates
    from vbrt.estimation.memory.estimate import estimate as estimate
    from vbrt.estimation.memory.estimate_report import Estimate as Estimate
    from vbrt.estimation.memory.largest_batch import fit_batch as fit_batch
    from vbrt.estimation.memory.task import Task as Task
    from vbrt.estimation.precision.choose_precision import choose_precision as choose_precision
    from vbrt.estimation.precision.precision_report import LayerPrecision as LayerPrecision
    from vbrt.estimation.precision.precision_report import Precision as Precision
    from vbrt.generation.kv.cache import KVCache as KVCache
    from vbrt.integrations.pretrained import from_pretrained as from_pretrained
    from vbrt.integrations.transformers_quantizer import QuantizationConfig as QuantizationConfig
    from vbrt.kernels.cuda.graph_pass import compile_options as compile_options
    from vbrt.kernels.cuda.tuning import tune as tune
    from vbrt.layers import VBLinear as VBLinear
    from vbrt.model.planner import make_plan as make_plan
    from vbrt.report.stats import Stats as Stats
    from vbrt.residency.plan import Plan as Plan
    from vbrt.residency.routing_file import read_routing as read_routing
    from vbrt.residency.routing_trace import generate_routing as generate_routing
    from vbrt.residency.simulate import simulate as simulate
    from vbrt.saves.checkpoint.training_checkpoint import TrainingCheckpoint as TrainingCheckpoint
    from vbrt.saves.checkpoint.training_checkpoint import read_checkpoint as read_checkpoint
    from vbrt.training.full.lion import Lion as Lion
    from vbrt.wrapper.full_wrapper import VBFullWrapper as VBFullWrapper
    from vbrt.wrapper.load import load as load
    from vbrt.wrapper.load_heads import load_heads as load_heads
    from vbrt.wrapper.pipeline import VBPipelineWrapper as VBPipelineWrapper
    from vbrt.wrapper.watch_nonfinite import watch_nonfinite as watch_nonfinite
    from vbrt.wrapper.wrap import wrap as wrap
    from vbrt.wrapper.wrapper import VBModelWrapper as VBModelWrapper
    from vbrt.wrapper.wrapper_of import of as of


if not TYPE_CHECKING:  # type checkers would take every name for one of the package's

    def __getattr__(name: str) -> Any:
        """Names load on first use, so that config, plan and policy can be imported without torch."""
        if name not in _HOMES:
            raise AttributeError(f"module 'vbrt' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f"vbrt.{_HOMES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


register_all()
