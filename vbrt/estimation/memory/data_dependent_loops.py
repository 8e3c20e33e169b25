"""Loops over data-dependent sizes, such as a sparse attention's selection for each query: two rounds stand for all.

On fake tensors `nonzero` returns every element (`live_bytes.py`), so the rounds of such a loop allocate alike.

    for query in range(queries):            # range becomes few_rounds
        visible = torch.nonzero(mask[query])
        ...
        selected[query] = ...               # results go into a tensor; lists of them would be too short
"""

import ast
import functools
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from vbrt.estimation.memory.live_bytes import Meter

__all__ = ["shorten_"]

_FEW = "few_rounds"


def shorten_(model: nn.Module, meter: Meter) -> None:
    """Shorten the loops around `nonzero` in the forwards of a model's modules, in place."""
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        if "forward" not in vars(module) and isinstance(forward, FunctionType) and (code := _shortened(forward)):
            names = forward.__globals__ | {_FEW: functools.partial(_few_rounds, meter)}
            exec(code, names)  # a copy: the class's own forward may run in other threads
            module.forward = MethodType(names[forward.__name__], module)


@functools.cache
def _shortened(forward: FunctionType) -> Any:
    """Return the code of a forward with shortened loops; None if it has none of them."""
    code = forward.__code__
    if not {"nonzero", "range"} <= set(code.co_names) or code.co_freevars:
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except OSError:  # made at run time
        return None
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For) and _is_shortened(node)]
    for loop in loops:
        loop.iter.func = ast.copy_location(ast.Name(_FEW, ast.Load()), loop.iter.func)
    tree.body[0].decorator_list = []
    return compile(tree, code.co_filename, "exec") if loops else None


def _is_shortened(loop: ast.For) -> bool:
    names = {getattr(node, "attr", "") for node in ast.walk(loop)}
    over = isinstance(loop.iter, ast.Call) and getattr(loop.iter.func, "id", "") == "range"
    return over and "nonzero" in names and not names & {"append", "extend"}


def _few_rounds(meter: Meter, *bounds: int) -> Iterator[int]:
    """Yield the first and the last round; the others only if the last leaves more alive than the first."""
    every = range(*bounds)
    yield from every[:1]
    live, work = meter.total, Counter(meter.work)
    yield from every[1:][-1:]
    if meter.total > live:
        yield from every[1:-1]
    else:
        for name, count in (meter.work - work).items():
            meter.work[name] += count * (len(every) - 2)
