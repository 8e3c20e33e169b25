"""Launch configurations of `fp4_linear`, chosen ahead of time so that no first call searches for one.

R row tiles a warp, WK warps along K, PREFETCH: the next tile is read before this one is used, CARRY: pointers are moved
on and not computed anew, see `fp4_gluon.sums_of_products`.
Entries were measured on the family's chip (see benchmarks/results); the default is the sm_90 table, which asks for
nothing that an older or newer chip lacks.
"""

import functools
from typing import NamedTuple

__all__ = [
    "DEFAULT",
    "FAMILIES",
    "PERSISTENT_ROWS",
    "PERSISTENT_TOKENS",
    "PERSISTENT_WARPS",
    "WIDE",
    "Launch",
    "Rule",
    "Wide",
    "cut_tiles",
    "fused_limit",
    "launch_for",
    "persistent_tiles",
    "persists",
    "wide_for",
]


class Launch(NamedTuple):
    R: int
    WK: int
    PREFETCH: bool
    CARRY: bool = False


class Wide(NamedTuple):
    """`fp4_wgmma`: TOKENS and 16 * WARPS rows a program, K in SPLITS, a RING of columns in shared memory."""

    TOKENS: int
    WARPS: int
    SPLITS: int
    RING: int

    @property
    def meets(self) -> bool:
        """Whether partial results are few enough to be added up fastest by a program that made some of them."""
        return 1 < self.SPLITS <= _MEET_TOKENS // self.TOKENS


class Rule(NamedTuple):
    """Holds up to `tokens` tokens, `row_tiles` tiles of 16 rows and `columns` tiles of 128 columns (None: any)."""

    tokens: int
    row_tiles: int | None
    columns: int | None
    launch: Launch


_SM90 = (
    Rule(8, 264, 48, Launch(2, 16, True)),  # one program a multiprocessor, for which its registers have room
    Rule(8, 512, 48, Launch(1, 8, True)),
    Rule(8, 512, None, Launch(1, 16, True)),
    Rule(8, 1280, 48, Launch(1, 4, True)),
    Rule(8, 1280, None, Launch(1, 8, True)),
    Rule(8, None, None, Launch(2, 4, False)),
    Rule(16, 264, None, Launch(2, 16, True)),
    Rule(16, 512, None, Launch(2, 8, True)),
    Rule(16, 1056, None, Launch(2, 4, True, True)),  # up to here all programs stand beside each other
    Rule(16, 1584, None, Launch(4, 4, True, True)),  # as here
    Rule(16, None, None, Launch(4, 4, False)),
    Rule(32, 512, None, Launch(2, 8, True)),
    Rule(32, None, None, Launch(4, 4, True)),
    Rule(64, None, None, Launch(2, 4, True)),
)

#: compute capability major -> rules, the first that holds applies
FAMILIES: dict[int, tuple[Rule, ...]] = {9: _SM90}
DEFAULT = _SM90

#: compute capability major -> (fewest, most) tokens of the kernel with `warpgroup_mma`, which only sm_90 has
WIDE: dict[int, tuple[int, int]] = {9: (17, 512)}
#: fewest tokens of rows of so many columns of tiles and more, by the same kernel, where it has few programs that split
#: them or, with sixteen warps, one for most multiprocessors
_WIDE_LONG, _LONG, _FEW_ROWS, _MANY_ROWS = 9, 64, 512, (1584, 2112)
#: TOKENS -> columns that fit in shared memory beside each other, eight warps
_RINGS = {16: (8, 7, 6), 32: (8, 7, 6), 64: (8, 7, 6), 128: (5, 4)}
_PROCESSORS = 132
#: of all splits together, up to which programs meet; on an H200 with 256 that took 9 % longer than one more launch
_MEET_TOKENS = 128

#: of a tile of `fp4_persistent`, and of one of its warpgroups
PERSISTENT_ROWS, PERSISTENT_TOKENS, PERSISTENT_WARPS = 128, 256, 4
#: from here on decoding costs next to nothing beside the vendor's matmul, and that was the faster by 1 to 2 %
_PERSISTENT_MOST = 4096
#: what a launch takes beside its tiles and, on top, with tiles that are cut, in times of a tile's two columns (2.3 us)
_LAUNCH_PAIRS, _CUT_PAIRS = 2.5, 5
#: of activations that stay in the second-level cache while programs read different columns of them
_CUT_BYTES = 48 << 20
#: the others in the same unit: `fp4_wgmma` for two columns of a program with eight or sixteen warps, and per launch
_WIDE_PAIRS, _WIDE_LAUNCH_PAIRS = {8: 0.7, 16: 1.25}, 1.5
#: the vendor's matmul as a multiple of the tiles' share, and the tokens that decoding takes as long as
_MATMUL_PAIRS, _DECODE_TOKENS = 1.16, 232


def fused_limit(major: int) -> int:
    """The largest number of tokens for which a fused kernel is used; above it, decode and the vendor's matmul."""
    narrow = max(rule.tokens for rule in FAMILIES.get(major, DEFAULT))
    return max(narrow, WIDE[major][1]) if major in WIDE else narrow


def wide_for(major: int, tokens: int, row_tiles: int, columns: int) -> Wide | None:
    """The configuration of the kernel for many tokens, or None where `launch_for` has one.

    As many splits of K as give every multiprocessor a program, but none shorter than four columns of tiles; the ring
    that runs over the fewest columns behind the last. Of more programs than stand beside each other, each has a small
    ring instead, so that more of them do.
    """
    fewest, most = WIDE.get(major, (1, 0))
    few, many = row_tiles <= _FEW_ROWS, _MANY_ROWS[0] < row_tiles <= _MANY_ROWS[1]
    if columns >= _LONG and (few or many):
        fewest = min(fewest, _WIDE_LONG)
    if not fewest <= tokens <= most:
        return None
    block = min(128, 1 << max(4, (tokens - 1).bit_length()))
    blocks = -(-tokens // block)
    warps = _wide_warps(block, blocks, row_tiles, columns)
    programs = -(-row_tiles // warps) * blocks
    room = _PROCESSORS * (2 if (block, warps) == (32, 4) else 1)  # small enough to stand beside each other
    crowded = block <= 64 and programs > room
    splits = 1
    while splits < 8 and 2 * splits * programs <= room and columns >= 8 * splits:
        splits *= 2
    span = -(-columns // splits)
    ring = min(_RINGS[block], key=lambda size: -span % size)
    if warps == 16 or crowded:
        ring = 6 if block == 16 else 4
    return Wide(block, warps, splits, ring)


@functools.lru_cache(maxsize=1024)  # each call with more than a few tokens asks
def persists(major: int, tokens: int, n: int, columns: int) -> bool:
    """Whether `fp4_persistent` is the fastest for a weight of n rows and `columns` tiles of 128 columns.

    The time that each way takes is estimated, as the times of seven shapes at 128 to 4096 tokens have it.
    """
    if major not in WIDE or not 0 < tokens <= _PERSISTENT_MOST:
        return False
    tiles, pairs = persistent_tiles(tokens, n), -(-columns // 2)
    if cut_tiles(tokens, n, columns, _PROCESSORS):
        own = tiles / _PROCESSORS * pairs + _cut_pairs(tiles, _PROCESSORS)
    else:
        own = -(-tiles // _PROCESSORS) * pairs
    own += _LAUNCH_PAIRS
    wide = wide_for(major, tokens, -(-n // 16), columns)
    if wide is not None:
        programs = -(-n // (16 * wide.WARPS)) * -(-tokens // wide.TOKENS) * wide.SPLITS
        rounds = -(-programs // _PROCESSORS)
        by = _WIDE_PAIRS.get(wide.WARPS, 0)  # the others have few tokens
        return 1.08 * own <= rounds * pairs / wide.SPLITS * by + _WIDE_LAUNCH_PAIRS
    share = (tokens + _DECODE_TOKENS) * n / (_PROCESSORS * PERSISTENT_ROWS * PERSISTENT_TOKENS)
    return tokens > WIDE[major][1] and own <= _MATMUL_PAIRS * share * pairs


def cut_tiles(tokens: int, n: int, columns: int, processors: int) -> int:
    """How many tiles of `fp4_persistent` all programs share along K.

    None where whole tiles leave multiprocessors idle for less time than adding up partial sums takes.
    """
    tiles, pairs = persistent_tiles(tokens, n), -(-columns // 2)
    idle = (-(-tiles // processors) - tiles / processors) * pairs
    if idle < _cut_pairs(tiles, processors) or tokens * columns * 256 > _CUT_BYTES:
        return 0
    return tiles if tiles < 2 * processors else tiles % processors + processors


def persistent_tiles(tokens: int, n: int) -> int:
    """How many tiles of `fp4_persistent` the result [tokens, n] has."""
    return -(-tokens // PERSISTENT_TOKENS) * -(-n // PERSISTENT_ROWS)


def _cut_pairs(tiles: int, processors: int) -> float:
    """More for a tile that more programs share."""
    return _CUT_PAIRS + processors / tiles


def _wide_warps(block: int, blocks: int, row_tiles: int, columns: int) -> int:
    """How many tiles of rows a program takes, one a warp: more read activations less often, fewer fill the GPU."""
    by_four = -(-row_tiles // 4) * blocks
    if block == 16:
        return 8 if row_tiles <= _FEW_ROWS else 16
    if block == 32:
        return 4 if by_four <= 2 * _PROCESSORS and columns < _LONG else 8
    # fewer partial results than by more splits
    few_rows = 4 * _PROCESSORS if block == 64 and columns <= 24 else 2 * _PROCESSORS
    if block > 32 and columns <= 48 and row_tiles <= few_rows and by_four <= _PROCESSORS:
        return 4
    programs = -(-row_tiles // 16) * blocks
    many = (block == 128 and 2 * programs > _PROCESSORS) or (block == 64 and 5 * programs > 4 * _PROCESSORS)
    return 16 if many else 8


def launch_for(major: int, tokens: int, row_tiles: int, columns: int) -> Launch:
    """The configuration for a GPU of compute capability `major`; tokens must not exceed `fused_limit`."""
    for rule in FAMILIES.get(major, DEFAULT):
        fits_rows = rule.row_tiles is None or row_tiles <= rule.row_tiles
        if tokens <= rule.tokens and fits_rows and (rule.columns is None or columns <= rule.columns):
            return rule.launch
    raise ValueError(f"{tokens} tokens; expected at most {fused_limit(major)}")
