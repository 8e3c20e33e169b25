"""`torch.compiler.disable` without dynamo's import: two seconds that whoever compiles nothing need not wait.

torch's decorator imports torch._dynamo when a class body runs. This one marks a function as torch's own does, and hands
a call to torch's decorator once dynamo is there; until then no frame is compiled, and there is nothing to disable.
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
    """Return a decorator: a compiled graph ends before a call of the function, and the next one begins behind it.

    Args:
        reason: what torch says where it is asked for `fullgraph=True`.
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
        for name, value in marks.items():  # by which dynamo knows what it must not trace into
            setattr(call, f"_torchdynamo_{name}", value)
        return call

    return decorate
