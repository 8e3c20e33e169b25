"""What a captured step computes: the model's own operations, or fewer launches that compute the same."""

from collections.abc import Callable, Sequence

from torch import Tensor

__all__ = ["joined"]

Step = Callable[..., Sequence[Tensor]]


def joined(step: Step, example_inputs: Sequence[Tensor]) -> Step:
    """Return a function that computes what a decode step computes, in fewer launches where that is possible.

    Args:
        step: takes tensors as `example_inputs`, returns tensors. It reads parameters, pages and a static KV cache that
            stay where they are, and writes the cache in place; running it again with the same inputs writes the same.
        example_inputs: the static inputs themselves; a trace must take shapes and dtypes from them only.

    Returns:
        `step` itself where nothing can be joined.
    """
    return step
