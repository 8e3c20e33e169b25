"""Launch configurations of `fp4_linear`, chosen ahead of time so that no first call searches for one.

R row tiles a warp, WN and WK warps along rows and along K, PREFETCH: the next tile is read before this one is used.
Entries were measured on the family's chip (see benchmarks/results); the default is the sm_90 table, which asks for
nothing that an older or newer chip lacks.
"""

from typing import NamedTuple

__all__ = ["DEFAULT", "FAMILIES", "Launch", "Rule", "fused_limit", "launch_for"]


class Launch(NamedTuple):
    R: int
    WN: int
    WK: int
    PREFETCH: bool


class Rule(NamedTuple):
    """Holds up to `tokens` tokens, `row_tiles` tiles of 16 rows and `columns` tiles of 128 columns (None: any)."""

    tokens: int
    row_tiles: int | None
    columns: int | None
    launch: Launch


_SM90 = (
    Rule(8, 512, 48, Launch(1, 1, 8, True)),
    Rule(8, 512, None, Launch(1, 1, 16, True)),
    Rule(8, 1280, 48, Launch(1, 1, 4, True)),
    Rule(8, None, None, Launch(1, 1, 8, True)),
    Rule(16, 512, None, Launch(2, 1, 16, True)),
    Rule(16, 1280, None, Launch(1, 1, 4, True)),
    Rule(16, None, None, Launch(4, 1, 4, False)),
    Rule(32, 512, None, Launch(2, 1, 8, True)),
    Rule(32, None, None, Launch(4, 1, 4, True)),
    Rule(64, None, None, Launch(2, 1, 4, True)),
)

#: compute capability major -> rules, the first that holds applies
FAMILIES: dict[int, tuple[Rule, ...]] = {9: _SM90}
DEFAULT = _SM90


def fused_limit(major: int) -> int:
    """The largest number of tokens for which the fused kernel is used; above it, decode and the vendor's matmul."""
    return max(rule.tokens for rule in FAMILIES.get(major, DEFAULT))


def launch_for(major: int, tokens: int, row_tiles: int, columns: int) -> Launch:
    """The configuration for a GPU of compute capability `major`; tokens must not exceed `fused_limit`."""
    for rule in FAMILIES.get(major, DEFAULT):
        fits_rows = rule.row_tiles is None or row_tiles <= rule.row_tiles
        if tokens <= rule.tokens and fits_rows and (rule.columns is None or columns <= rule.columns):
            return rule.launch
    raise ValueError(f"{tokens} tokens; expected at most {fused_limit(major)}")
