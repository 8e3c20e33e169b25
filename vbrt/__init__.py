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

__version__ = "0.1.0"

_HOMES = {
    "ArgumentError": "errors", "CheckpointError": "errors", "ConfigError": "errors", "FormatError": "errors",
    "KernelError": "errors", "NonfiniteError": "errors", "TierError": "errors", "VBError": "errors",
    "WrapError": "errors", "FlashAttention": "nn", "FusedFP4Linear": "nn", "OptimizedTransformerBlock": "nn",
    "Plan": "plan", "Stats": "stats", "VBConfig": "config", "VBLinear": "nn", "VBModelWrapper": "wrapper",
    "gumbel_max_sample": "nn", "load": "checkpoint", "load_config": "config", "make_plan": "estimate",
    "quantize": "nn", "simulate": "policy", "watch_nonfinite": "watch", "wrap": "wrapper",
}

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from vbrt.checkpoint import load
    from vbrt.config import VBConfig, load_config
    from vbrt.errors import (
        ArgumentError,
        CheckpointError,
        ConfigError,
        FormatError,
        KernelError,
        NonfiniteError,
        TierError,
        VBError,
        WrapError,
    )
    from vbrt.estimate import make_plan
    from vbrt.nn import (
        FlashAttention,
        FusedFP4Linear,
        OptimizedTransformerBlock,
        VBLinear,
        gumbel_max_sample,
        quantize,
    )
    from vbrt.plan import Plan
    from vbrt.policy import simulate
    from vbrt.stats import Stats
    from vbrt.watch import watch_nonfinite
    from vbrt.wrapper import VBModelWrapper, wrap


def __getattr__(name: str) -> Any:
    """Names load on first use, so that config, plan and policy can be imported without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'vbrt' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"vbrt.{_HOMES[name]}"), name)
    return value
