"""`torch.compiler.disable` without importing dynamo, which takes two seconds.

torch's decorator imports torch._dynamo at decoration. This one sets the marks of torch's own on a function, and
delegates to torch's decorator once dynamo is imported; before that no frame is compiled, so there is nothing to
disable.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from vbrt.libraries.torch_api import skip_frames_of

__all__ = ["uncompiled"]

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(*, reason: str) -> Callable[[F], F]:
    """Return a decorator that makes torch.compile break the graph around calls of the function.

    Args:
        reason: torch's message under `fullgraph=True`.
    """

    def decorate(function: F) -> F:
        @functools.cache
        def disabled() -> Callable[..., Any]:
            return torch.compiler.disable(function, reason=reason)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            run = disabled() if "torch._dynamo" in sys.modules else function
            return run(*args, **kwargs)

        if not skip_frames_of(call):
            return disabled()
        marks = {"disable": True, "disable_msg": reason, "disable_recursive": True}
        marks |= {"orig_callable": function, "wrapper_id": id(call)}
        for name, value in marks.items():  # dynamo's marks of functions not to trace into
            setattr(call, f"_torchdynamo_{name}", value)
        return call

    return decorate
