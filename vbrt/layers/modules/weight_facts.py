"""WeightFacts: device, dtype and shape of a weight in the tiers, for readers that take nothing else of it.

Forwards ask for them, as in `x.to(self.proj.weight.dtype)`, and transformers' n-gram tables of tens of GB for
`self.ngram_embedding.weight.device`. A temporary would decode the whole weight each time. The reader's bytecode tells:
the instruction behind the one that reads the parameter takes one fact and drops the rest. Where there is no such
bytecode (`getattr`, C code, another interpreter) readers get the temporary.
"""

import dis
import functools
from types import CodeType, FrameType
from typing import NamedTuple

import torch

__all__ = ["WeightFacts", "asks_for_facts"]

_READS = "LOAD_ATTR"


class WeightFacts(NamedTuple):
    """Facts about a weight, under the names that a tensor has for them."""

    device: torch.device
    dtype: torch.dtype
    shape: torch.Size


def asks_for_facts(reader: FrameType | None, name: str) -> bool:
    """True if the code that runs in the frame `reader` reads the attribute `name` for one of WeightFacts alone."""
    return reader is not None and _takes_a_fact(reader.f_code, reader.f_lasti, name)


@functools.lru_cache(maxsize=4096)
def _takes_a_fact(code: CodeType, offset: int, name: str) -> bool:
    behind = None
    for at in reversed(list(dis.get_instructions(code))):
        if at.offset <= offset:  # in the caches behind the instruction where CPython calls a property by itself
            reads = (at.opname, at.argval) == (_READS, name)
            return reads and behind is not None and behind.opname == _READS and behind.argval in WeightFacts._fields
        if at.opname != "EXTENDED_ARG":  # the prefix of an instruction in code of more than 256 names
            behind = at
    return False
