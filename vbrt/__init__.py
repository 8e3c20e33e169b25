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

if TYPE_CHECKING:
    from vbrt.blocks import FlashAttention, FusedFP4Linear, OptimizedTransformerBlock, gumbel_max_sample, quantize
    from vbrt.config import VBConfig, load_config
    from vbrt.errors import (
        ArgumentError,
        CheckpointError,
        ConfigError,
        FormatError,
        KernelError,
        LibraryError,
        NonfiniteError,
        NoRoomError,
        TierError,
        VBError,
        WrapError,
    )
    from vbrt.estimation.advice.advise import advise
    from vbrt.estimation.advice.choices import Advice, Choice
    from vbrt.estimation.advice.machine_rates import Rates, data_sheet, measure_rates
    from vbrt.estimation.memory.estimate import estimate
    from vbrt.estimation.memory.estimate_report import Estimate
    from vbrt.estimation.memory.largest_batch import fit_batch
    from vbrt.estimation.memory.task import Task
    from vbrt.estimation.precision.choose_precision import choose_precision
    from vbrt.estimation.precision.precision_report import LayerPrecision, Precision
    from vbrt.generation.kv.cache import KVCache
    from vbrt.integrations.pretrained import from_pretrained
    from vbrt.integrations.transformers_quantizer import QuantizationConfig
    from vbrt.kernels.cuda.graph_pass import compile_options
    from vbrt.kernels.cuda.tuning import tune
    from vbrt.layers import VBLinear
    from vbrt.model.planner import make_plan
    from vbrt.report.stats import Stats
    from vbrt.residency.plan import Plan
    from vbrt.residency.routing_file import read_routing
    from vbrt.residency.routing_trace import generate_routing
    from vbrt.residency.simulate import simulate
    from vbrt.saves.checkpoint.training_checkpoint import TrainingCheckpoint, read_checkpoint
    from vbrt.training.full.lion import Lion
    from vbrt.wrapper.full_wrapper import VBFullWrapper
    from vbrt.wrapper.load import load
    from vbrt.wrapper.load_heads import load_heads
    from vbrt.wrapper.pipeline import VBPipelineWrapper
    from vbrt.wrapper.watch_nonfinite import watch_nonfinite
    from vbrt.wrapper.wrap import wrap
    from vbrt.wrapper.wrapper import VBModelWrapper
    from vbrt.wrapper.wrapper_of import of


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
