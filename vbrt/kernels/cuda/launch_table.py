"""Launch table: kernel configurations by shape and GPU, looked up, never searched in a call.

`choose` selects the kernel for 4-bit weights in tile order by number of tokens, with its configuration; `launch_for` is
the table of the small-batch kernels. Entries were measured on the family's chip (see benchmarks/results); GPUs without
entries use those of sm_90, which need nothing that an older or newer chip lacks.

Legend: a row tile is 16 outputs, a column 128 inputs, a pair two columns.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

__all__ = [
    "PERSISTENT_ROWS",
    "PERSISTENT_WARPS",
    "RULES",
    "WIDE",
    "Choice",
    "Gpu",
    "GroupedLaunch",
    "Launch",
    "Matmul",
    "MmaLaunch",
    "PersistentLaunch",
    "RowsLaunch",
    "Rule",
    "TokenLaunch",
    "WideLaunch",
    "are_few",
    "choices",
    "choose",
    "codes_for",
    "fused_limit",
    "grouped_for",
    "grouped_mma_for",
    "grouped_mma_pays",
    "grouped_mma_tokens",
    "grouped_sizes",
    "grouped_stages",
    "has_rules",
    "launch_for",
    "pairs_are_alone",
    "persistent_tiles",
    "rates_of",
    "rows_for",
    "token_for",
    "turned_for",
    "wide_for",
]


class Gpu(NamedTuple):
    """GPU properties that estimates depend on; the defaults are an H200's, with which they were fitted.

    Attributes:
        major: of the compute capability, whose kernels are chosen.
        processors: number of multiprocessors.
        shared_bytes: shared memory per multiprocessor.
        most_shared_bytes: of one program.
        bytes_us: memory bandwidth, bytes per microsecond.
        clock_mhz: of the multiprocessors, under load.
        mma: bf16 multiplications with fp32 sums per clock and multiprocessor that `mma.sync` reaches.
        matmul: the same of the vendor's matmul.
        minor: of the compute capability; rules are keyed by both.
    """

    major: int
    processors: int
    shared_bytes: int = 228 << 10
    most_shared_bytes: int = 227 << 10
    bytes_us: float = 3.87e6
    clock_mhz: float = 1755
    mma: float = 1000
    matmul: float = 2048
    minor: int = 0

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability (major, minor)."""
        return self.major, self.minor


class Launch(NamedTuple):
    """Small-batch kernel: `row_tiles` per program, whose `k_warps` split the columns.

    prefetch: load the next tile before using this one. carry_pointers: increment pointers from column to column instead
    of recomputing them, where the shape allows it.
    """

    row_tiles: int
    k_warps: int
    prefetch: bool
    carry_pointers: bool = False


class WideLaunch(NamedTuple):
    """Kernel for many tokens on sm_90: `tokens` and 16 * `warps` rows per program.

    splits: split-K factor. ring: columns in shared memory.
    """

    tokens: int
    warps: int
    splits: int
    ring: int

    @property
    def reduces_itself(self) -> bool:
        """True if the producing programs reduce the split-K partials themselves, without another launch."""
        return 1 < self.splits <= _OWN_REDUCTION_TOKENS // self.tokens


class MmaLaunch(NamedTuple):
    """Kernel for many tokens with `mma.sync`: `tokens` and 16 * `row_tiles` * `warps` rows per program.

    splits: split-K factor. ring: columns in shared memory.
    """

    tokens: int
    warps: int
    row_tiles: int = 1
    splits: int = 1
    ring: int = 3

    def shared_bytes(self, words: int) -> int:
        """Shared memory of a program, for tiles of this many words."""
        return self.ring * (256 * self.tokens + 4 * words * self.row_tiles * self.warps)


class PersistentLaunch(NamedTuple):
    """Persistent kernel, for the most tokens on sm_90: tiles of 128 rows by `tokens` of the result.

    cut: tiles that all programs share along K (stream-K). programs: their number; 0: as many as can run. ordered: a
    launch before it permutes the activations into the tiles' column order, so that codes are decoded in place.
    """

    cut: int
    tokens: int = 256
    programs: int = 0
    ordered: bool = False


class RowsLaunch(NamedTuple):
    """MoE kernel for few tokens: `row_tiles` of a matrix and 8 * `groups` pairs per program."""

    row_tiles: int
    groups: int
    k_warps: int


class TokenLaunch(NamedTuple):
    """Kernel that sums over a token's experts: `side_by_side` experts at a time share the `k_warps`.

    ahead: tiles that a warp prefetches.
    """

    side_by_side: int
    row_tiles: int
    k_warps: int
    ahead: int = 1


class GroupedLaunch(NamedTuple):
    """MoE kernel for many tokens: pairs of an expert that it takes at a time."""

    block: int


class Matmul(NamedTuple):
    """Decode the weight, then the vendor's matmul: what a search found; `Choice` has None."""


Choice = Launch | WideLaunch | MmaLaunch | PersistentLaunch | None
"""A kernel that multiplies 4-bit weights as they are, or None: decode the weight, then the vendor's matmul."""


class Rule(NamedTuple):
    """Applies up to `tokens` tokens, `row_tiles` row tiles and `columns` columns (None: any)."""

    tokens: int
    row_tiles: int | None
    columns: int | None
    launch: Launch


#: kernel -> compute capability -> rules; the first that applies is used
RULES: dict[str, dict[tuple[int, int], tuple[Rule, ...]]] = {
    # one weight in tile order, or several of one input, concatenated by rows
    "linear": {
        (9, 0): (
            Rule(8, 264, 48, Launch(2, 16, True)),  # one program per multiprocessor, limited by registers
            Rule(8, 512, 48, Launch(1, 8, True)),
            Rule(8, 512, None, Launch(1, 16, True)),
            Rule(8, 1280, 48, Launch(1, 4, True)),
            Rule(8, 1280, None, Launch(1, 8, True)),
            Rule(8, None, None, Launch(2, 4, False)),
            Rule(16, 264, None, Launch(2, 16, True)),
            Rule(16, 512, None, Launch(2, 8, True)),
            Rule(16, 1056, None, Launch(2, 4, True, True)),  # up to here all programs are resident at once
            Rule(16, 1584, None, Launch(4, 4, True, True)),  # as here
            Rule(16, None, None, Launch(4, 4, False)),
            Rule(32, 512, None, Launch(2, 8, True)),
            Rule(32, None, None, Launch(4, 4, True)),
            Rule(64, None, None, Launch(2, 4, True)),
        )
    },
    # two weights in tile order and the product of their results
    "gated": {
        (9, 0): (
            Rule(8, 264, None, Launch(2, 16, True)),
            Rule(8, 480, None, Launch(1, 8, True)),
            Rule(8, 512, None, Launch(2, 8, True)),  # two programs per multiprocessor; with 384 row tiles 20 % slower
            Rule(8, 924, None, Launch(1, 4, True)),
            Rule(8, 1320, None, Launch(2, 4, False)),  # up to here all programs are resident at once, as up to 924
            Rule(8, None, None, Launch(1, 4, True)),
            Rule(16, 264, None, Launch(1, 8, True)),
            Rule(16, 480, None, Launch(1, 8, False)),
            Rule(16, 512, None, Launch(2, 8, False)),
            Rule(16, 792, None, Launch(1, 8, False)),
            Rule(16, 1056, None, Launch(2, 4, False)),  # as here
            Rule(16, 1188, None, Launch(1, 8, False)),
            Rule(16, None, None, Launch(2, 4, False)),
        )
    },
    # rows of 4-bit codes, in blocks of less than 128 columns; up to 2 tokens as many warps as let all programs be
    # resident at once
    "table": {
        (9, 0): (
            Rule(2, 264, None, Launch(1, 16, True)),
            Rule(2, 528, None, Launch(1, 8, True)),
            Rule(2, None, None, Launch(1, 4, True)),
            Rule(16, 528, None, Launch(1, 8, True)),
            Rule(8, None, None, Launch(2, 4, True)),
            Rule(16, None, None, Launch(1, 4, True)),
            Rule(32, 528, None, Launch(2, 8, True)),
            Rule(32, None, None, Launch(2, 4, True)),
        )
    },
    # in blocks of 128
    "table wide": {
        (9, 0): (
            Rule(8, 264, None, Launch(1, 16, True)),
            Rule(8, 528, None, Launch(1, 8, True)),
            Rule(2, None, None, Launch(1, 4, True)),
            Rule(8, None, None, Launch(2, 4, True)),
            Rule(32, 528, None, Launch(2, 8, True)),
            Rule(32, None, None, Launch(4, 4, True)),
        )
    },
}
_MEASURED = (9, 0)  # whose rules others use

#: compute capability major -> (fewest, most) tokens of the `warpgroup_mma` kernel, which only sm_90 supports
WIDE: dict[int, tuple[int, int]] = {9: (17, 512)}
#: tokens up to which that kernel was always the fastest
_WIDE_ALONE = 64
#: fewest tokens of the same kernel for rows of at least so many columns, where it has few programs, split along K, or,
#: with sixteen warps, one for most multiprocessors
_WIDE_LONG, _LONG, _FEW_ROWS, _MANY_ROWS = 9, 64, 512, (1584, 2112)
#: tokens -> columns that fit in shared memory, with eight warps
_RINGS = {16: (8, 7, 6), 32: (8, 7, 6), 64: (8, 7, 6), 128: (5, 4)}
_PROCESSORS = 132
#: tokens times splits, up to which programs reduce partial sums themselves; on an H200 with 256 that took 9 % longer
#: than another launch
_OWN_REDUCTION_TOKENS = 128
#: compute capability -> bf16 multiplications with fp32 sums per clock and multiprocessor, of the kernel with `mma.sync`
#: and of the vendor's matmul: 9.0 fitted to an H100, others nine tenths of data sheets, half for GeForce cards
_RATES = {
    (8, 0): (920, 920), (8, 6): (460, 460), (8, 7): (460, 460), (8, 9): (460, 460), (9, 0): (1000, 2048),
    (10, 0): (920, 3700), (10, 3): (920, 3700), (12, 0): (460, 460), (12, 1): (460, 460),
}  # fmt: skip
#: kernel with `mma.sync`: its launches, but for splits; tokens beyond which it is faster than `launch_for`'s. On an
#: H100 two more row tiles or 128 tokens were slower
_MMA_LAUNCHES = (
    MmaLaunch(32, 4, 1, 1, 4),
    MmaLaunch(32, 4, 2, 1, 4),
    MmaLaunch(64, 4, 1, 1, 3),
    MmaLaunch(64, 4, 2, 1, 3),
)
_MMA_FEWEST = 16


class _Decoding(NamedTuple):
    """Cost of a kind of codes; of rows of codes fitted to an H200 taken for 8.0, with an RMS error of 6 %.

    Attributes:
        words: of a tile.
        row_tiles: most of a warp of the kernel with `mma.sync`; with two, rows of codes took more than twice as long.
        tile_clocks: of a multiprocessor to decode a tile in that kernel, beyond those of tiles.
        whole_rings: estimates count a program's columns in whole rounds of the ring, as it runs; tiles' were fitted
            without.
        bytes: of memory that decoding for the vendor's matmul takes as long as, per element: an eighth above its own.
        clocks: of a multiprocessor for the same, per element.
    """

    words: int
    row_tiles: int
    tile_clocks: float
    whole_rings: bool
    bytes: float
    clocks: float


_CODES = {
    "tiles": _Decoding(288, 2, 0, False, 2.4, 0),
    "table": _Decoding(256, 1, 101, True, 2.85, 0.21),
    "levels": _Decoding(256, 1, 103, True, 2.9, 0.17),
    "int8": _Decoding(512, 1, 118, True, 3.4, 0.11),
}
#: rows per tile of the persistent kernel, and warps per warpgroup
PERSISTENT_ROWS, PERSISTENT_WARPS = 128, 4
#: beyond, decoding costs little compared with the vendor's matmul, which was faster by 1 to 2 %
_PERSISTENT_MOST = 4096
#: Cost model: the rest are estimates in microseconds, fitted to 3800 launches of 32 shapes on an H200; the RMS error is
#: 6 %.
#: tokens per tile of the persistent kernel -> time of two columns, with activations as they are and in tile order
_PAIR_US = {
    32: (1.2, 1.11),
    64: (1.59, 1.23),
    96: (1.71, 1.65),
    128: (1.85, 1.52),
    160: (2.14, 1.84),
    192: (2.29, 2.08),
    224: (2.8, 2.63),
    256: (2.72, 2.82),
}
#: permuting activations to tile order: per launch, and per token and column
_ORDER_US = (0.5, 1e-4)
#: the same for codes looked up in a table, relative to that
_TABLE_WORK = 1.27
#: the same for gradients, dy @ w, and tiles for which that kernel has too few registers
_TURNED_WORK, _TURNED_NEVER = 1.1, 224
#: bytes of activations that stay in L2 while programs read different columns of them
_CUT_BYTES = 48 << 20
#: wide kernel: time of a column by (tokens, warps) of a program
_WIDE_US = {(64, 4): 0.3, (64, 8): 0.49, (128, 4): 0.46, (128, 8): 0.725, (128, 16): 1.425}
#: the vendor's matmul: candidate tiles (tokens, rows)
_MATMUL_TILES = ((64, 64), (64, 128), (128, 128), (128, 256), (256, 128))


@functools.lru_cache(maxsize=4096)  # called for each product
def choose(gpu: Gpu, tokens: int, summands: int, n: int, columns: int) -> Choice:
    """Return the kernel for `tokens` tokens, each a sum of that many bf16 summands, and a weight of n rows."""
    rows, row_tiles = tokens * summands, -(-n // 16)
    if gpu.major not in WIDE and rows > _MMA_FEWEST:
        us, launch = min(_mma_times(gpu, tokens, summands, n, columns), key=lambda launch: launch[0])
        return launch if us <= _matmul_us(gpu, tokens, n, columns) else None
    if rows > _WIDE_ALONE and summands == 1 and gpu.major in WIDE:
        return _fastest(gpu, tokens, n, columns)
    if rows > fused_limit(gpu.major):
        return None
    return wide_for(gpu.major, rows, row_tiles, columns) or launch_for("linear", gpu, rows, row_tiles, columns)


def rates_of(capability: tuple[int, int], name: str) -> tuple[float, float]:
    """Return `Gpu.mma` and `Gpu.matmul` of a device; of an unknown capability those of the last known one before it."""
    mma, matmul = _RATES[max((known for known in _RATES if known <= capability), default=(8, 0))]
    return (mma / 2, matmul / 2) if "GeForce" in name else (mma, matmul)


@functools.lru_cache(maxsize=4096)  # called for each fused launch
def launch_for(kernel: str, gpu: Gpu, tokens: int, row_tiles: int, columns: int) -> Launch:
    """Look up a kernel of `RULES`. Raises ValueError for more tokens than its entries allow.

    Rows of rules are for a number of multiprocessors: on others they count in proportion.
    """
    for rule in _rules(kernel, gpu.capability):
        fits_rows = rule.row_tiles is None or row_tiles * _PROCESSORS <= rule.row_tiles * gpu.processors
        if tokens <= rule.tokens and fits_rows and (rule.columns is None or columns <= rule.columns):
            return rule.launch
    raise ValueError(f"{kernel}: {tokens} tokens; expected at most {_most_tokens(kernel, gpu.capability)}")


def has_rules(capability: tuple[int, int]) -> bool:
    """True if launches were measured on a GPU of this compute capability."""
    return capability in RULES["linear"]


def _rules(kernel: str, capability: tuple[int, int]) -> tuple[Rule, ...]:
    return RULES[kernel].get(capability, RULES[kernel][_MEASURED])


def _most_tokens(kernel: str, capability: tuple[int, int]) -> int:
    return max(rule.tokens for rule in _rules(kernel, capability))


@functools.cache
def fused_limit(major: int) -> int:
    """Maximum tokens of fused kernels; beyond, decode and the vendor's matmul."""
    return max(_most_tokens("linear", (major, 0)), WIDE[major][1] if major in WIDE else 0)


def choices(gpu: Gpu, tokens: int, n: int, columns: int) -> tuple[NamedTuple, ...]:
    """Launches for more bf16 tokens than the small-batch kernel's, lowest estimates first.

    Of persistent ones those without cut tiles, which are right for other numbers of tokens, too.
    """
    times: list[tuple[float, NamedTuple]] = [(_matmul_us(gpu, tokens, n, columns), Matmul())]
    if gpu.major not in WIDE:
        times += _mma_times(gpu, tokens, 1, n, columns)
    else:
        measured = wide_for(gpu.major, tokens, -(-n // 16), columns)
        times += [(0.0, measured)] if measured else []
        times += _wide_times(gpu, tokens, n, columns)
        for ordered in (False, True):
            persistent = _persistent_times(gpu, tokens, n, columns, ordered)
            times += ((us, launch) for us, launch in persistent if not launch.cut)
    return tuple(dict.fromkeys(launch for _, launch in sorted(times, key=lambda each: each[0])))


def wide_for(major: int, tokens: int, row_tiles: int, columns: int) -> WideLaunch | None:
    """Return the configuration of the kernel for many tokens; None if `launch_for` has one.

    K is split until every multiprocessor has a program, but no split is shorter than four columns. The ring is the one
    that overshoots the last column by the least. If there are more programs than can be resident, a smaller ring lets
    more of them be.
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
    room = _PROCESSORS * (2 if (block, warps) == (32, 4) else 1)  # small enough for two per multiprocessor
    crowded = block <= 64 and programs > room
    splits = 1
    while splits < 8 and 2 * splits * programs <= room and columns >= 8 * splits:
        splits *= 2
    span = -(-columns // splits)
    ring = min(_RINGS[block], key=lambda size: -span % size)
    if warps == 16 or crowded:
        ring = 6 if block == 16 else 4
    return WideLaunch(block, warps, splits, ring)


def _fastest(gpu: Gpu, tokens: int, n: int, columns: int) -> Choice:
    """Return the launch with the least estimated time for more bf16 tokens than `_WIDE_ALONE`."""
    launches: list[tuple[float, Choice]] = [(_matmul_us(gpu, tokens, n, columns), None)]
    launches += _wide_times(gpu, tokens, n, columns)
    launches += _persistent_times(gpu, tokens, n, columns, False)
    launches += _persistent_times(gpu, tokens, n, columns, True)
    return min(launches, key=lambda launch: launch[0])[1]


@functools.lru_cache(maxsize=4096)
def codes_for(gpu: Gpu, kind: str, tokens: int, n: int, columns: int) -> PersistentLaunch | MmaLaunch | None:
    """Return the fastest launch for rows of codes, a weight of n rows; None if decode and the vendor's matmul are.

    kind: "table" with scales of a byte, "levels" with others, or "int8".
    """
    launches: list[tuple[float, PersistentLaunch | MmaLaunch | None]] = []
    if kind == "table" and gpu.major in WIDE:  # `_TABLE_WORK` was fitted beside the cost of decoding tiles
        launches += _persistent_times(gpu, tokens, n, columns, False, _TABLE_WORK)
        launches += [(_matmul_us(gpu, tokens, n, columns), None)]
    else:
        launches += _mma_times(gpu, tokens, 1, n, columns, kind)
        launches += [(_matmul_us(gpu, tokens, n, columns, kind), None)]
    return min(launches, key=lambda launch: launch[0])[1]


@functools.lru_cache(maxsize=4096)
def turned_for(gpu: Gpu, tokens: int, k: int, columns: int) -> PersistentLaunch | None:
    """Return the fastest launch for dy @ w, a weight of k columns and groups of 128 rows; None if decode and the
    vendor's matmul are."""
    launches: list[tuple[float, PersistentLaunch | None]] = [(_matmul_us(gpu, tokens, k, columns), None)]
    times = _persistent_times(gpu, tokens, k, columns, False, _TURNED_WORK)
    launches += ((us, launch) for us, launch in times if launch.tokens != _TURNED_NEVER)
    return min(launches, key=lambda launch: launch[0])[1]


def _persistent_times(
    gpu: Gpu, tokens: int, n: int, columns: int, ordered: bool, work: float = 1.0
) -> Iterator[tuple[float, PersistentLaunch]]:
    """Yield (microseconds, launch) of the persistent kernel for each tile width.

    work: time of a column relative to the tile-order kernel.
    """
    if gpu.major not in WIDE or not 0 < tokens <= _PERSISTENT_MOST:
        return
    order_us = _ORDER_US[0] + _ORDER_US[1] * tokens * columns if ordered else 0.0
    for block, pair_us in _PAIR_US.items():
        if block >= tokens + 32:
            break
        for us, cut, programs in _cuts(gpu.processors, tokens, n, columns, block, work * pair_us[ordered]):
            yield us + order_us, PersistentLaunch(cut, block, programs, ordered)


def _cuts(
    processors: int, tokens: int, n: int, columns: int, block: int, pair_us: float
) -> Iterator[tuple[float, int, int]]:
    """Yield (microseconds, cut tiles, programs) for tiles of `block` tokens."""
    pairs = -(-columns // 2)
    tiles = persistent_tiles(tokens, n, block)
    rounds, share = -(-tiles // processors), tiles / processors
    yield 1.75 + rounds * (0.74 + 0.0036 * max(0, block - 128) + pairs * pair_us), 0, 0
    if tokens * columns * 256 > _CUT_BYTES:
        return
    parts = min(processors // tiles, pairs)
    if parts > 1:  # each tile by equally many programs
        yield (
            2.75 + 0.0042 * block + parts * (0.22 + 0.0054 * block) + -(-pairs // parts) * pair_us,
            tiles,
            tiles * parts,
        )
    # up to 128 tokens the wide kernel beat tiles with unequal parts
    if 2 * tiles > processors and tiles % processors and (rounds > 1 or tokens > 128):
        sums_us = 4 + 0.025 * block if rounds == 1 else 2.7 + 0.0275 * block + 0.06 * share * pairs
        yield sums_us + share * pairs * pair_us, tiles if rounds <= 2 else tiles % processors + processors, 0


def _wide_times(gpu: Gpu, tokens: int, n: int, columns: int) -> Iterator[tuple[float, WideLaunch]]:
    """Yield (microseconds, launch) of the wide kernel with 64 or 128 tokens per program."""
    if tokens > WIDE[gpu.major][1]:
        return
    for (block, warps), column_us in _WIDE_US.items():
        programs = -(-n // (16 * warps)) * -(-tokens // block)
        for splits in (1, 2) if block == 64 else (1, 2, 4, 8):
            all_run = splits * programs <= gpu.processors
            if not (all_run or (warps == 16 and splits == 1)) or (splits > 1 and columns < 2 * splits):
                break
            span = -(-columns // splits)
            ring = 4 if warps == 16 else min(_RINGS[block], key=lambda size: -span % size)
            launch = WideLaunch(block, warps, splits, ring)
            sums_us = 2.6 if launch.reduces_itself else 0.2 + 2.35e-6 * splits * tokens * n if splits > 1 else 0.0
            rounds = -(-splits * programs // gpu.processors)
            yield 0.9 + rounds * (2.26 + span * column_us) + sums_us, launch


def _mma_times(
    gpu: Gpu, tokens: int, summands: int, n: int, columns: int, kind: str = "tiles"
) -> Iterator[tuple[float, MmaLaunch]]:
    """Yield (microseconds, launch) of the kernel with `mma.sync`; kind: "tiles", or as for `codes_for`.

    A multiprocessor multiplies, and meanwhile reads shared memory in part. One program decodes, reads and multiplies in
    turn; several overlap reads and decoding. The fewer programs it has, the less of what each waits for is hidden.
    """
    rows, k, codes = summands * tokens, 128 * columns, _CODES[kind]
    words = codes.words
    read_us = 1.25 / gpu.bytes_us * (words / 512 * n * k + 2 * rows * (n + k))
    for launch in _MMA_LAUNCHES:
        if launch.row_tiles > codes.row_tiles:
            continue
        tiles = launch.row_tiles * launch.warps
        programs = -(-rows // launch.tokens) * -(-n // (16 * tiles))
        shared = launch.shared_bytes(words)
        if shared > gpu.most_shared_bytes:
            continue
        resident = min(4, gpu.shared_bytes // (shared + 1024))
        multiplied = 2048 * launch.tokens * tiles / gpu.mma
        moved = launch.tokens * (2 * launch.warps + 2) + words / 16 * tiles  # in lines of 128 bytes
        read, decoded = 0.43 * moved, codes.tile_clocks * tiles
        column, alone = multiplied + max(read, decoded), max(546, multiplied + read + decoded)
        for splits in (1, 2, 4, 8):
            if splits > 1 and (programs * splits > 4 * gpu.processors or columns < 4 * splits):
                break
            rounds, rest = divmod(-(-programs * splits // gpu.processors), resident)
            clocks = rounds * max(alone, resident * column) + (max(alone, rest * column) if rest else 0)
            span = -(-columns // splits)
            span += -span % launch.ring if codes.whole_rings else 0
            us = 2 + span * clocks / gpu.clock_mhz + 1.75 * (rounds + (rest > 0))
            if splits * summands > 1:
                us += 2 + 4 * splits * rows * n / gpu.bytes_us
            yield max(us, 2 + read_us), launch._replace(splits=splits)


def _matmul_us(gpu: Gpu, tokens: int, n: int, columns: int, kind: str = "tiles") -> float:
    """Estimated microseconds of decode and the vendor's matmul, assumed to use its best tile; kind as above."""
    k, clock = 128 * columns, 2048 * 1755 / (gpu.matmul * gpu.clock_mhz)
    rounds = ((-(-tokens // m) * -(-n // rows), m * rows) for m, rows in _MATMUL_TILES)
    largest = min(-(-tiles // gpu.processors) * size for tiles, size in rounds)
    math_us = 0.327e-6 * k * (0.83 * largest + 0.17 * tokens * n / gpu.processors) * clock
    bytes_us = 2 / gpu.bytes_us * (n * k + tokens * k + tokens * n)
    codes = _CODES[kind]
    decode_us = n * k * max(codes.bytes / gpu.bytes_us, codes.clocks / (gpu.processors * gpu.clock_mhz))
    return 3.8 + max(math_us, bytes_us) + decode_us


def persistent_tiles(tokens: int, n: int, block: int) -> int:
    """Number of the persistent kernel's tiles, of this many tokens, in the result [tokens, n]."""
    return -(-tokens // block) * -(-n // PERSISTENT_ROWS)


def _wide_warps(block: int, blocks: int, row_tiles: int, columns: int) -> int:
    """Row tiles per program, one per warp: more of them reread activations less, fewer fill the GPU."""
    by_four = -(-row_tiles // 4) * blocks
    if block == 16:
        return 8 if row_tiles <= _FEW_ROWS else 16
    if block == 32:
        return 4 if by_four <= 2 * _PROCESSORS and columns < _LONG else 8
    # fewer partial results than with more splits
    few_rows = 4 * _PROCESSORS if block == 64 and columns <= 24 else 2 * _PROCESSORS
    if block > 32 and columns <= 48 and row_tiles <= few_rows and by_four <= _PROCESSORS:
        return 4
    programs = -(-row_tiles // 16) * blocks
    many = (block == 128 and 2 * programs > _PROCESSORS) or (block == 64 and 5 * programs > 4 * _PROCESSORS)
    return 16 if many else 8


#: mean pairs per expert up to which the MoE kernel for many tokens takes this many at a time; 256 was slower except in
#: one of five cases, by 2 %, and torch's grouped matmul on bf16 weights slower than 128
_GROUPED = ((20, 32), (50, 64))
_GROUPED_MOST = 128
#: pairs at a time -> stages of activations in shared memory
_GROUPED_STAGES = {32: 8, 64: 8, 128: 6}


def grouped_for(pairs: int, experts: int) -> int:
    """Pairs of an expert that the MoE kernel for many tokens takes at a time."""
    return next((block for most, block in _GROUPED if pairs <= most * experts), _GROUPED_MOST)


def grouped_sizes() -> tuple[int, ...]:
    """Pairs that the same kernel may take at a time."""
    return tuple(_GROUPED_STAGES)


def grouped_stages(block: int) -> int:
    """Stages of that kernel's ring of activations."""
    return _GROUPED_STAGES[block]


#: MoE kernel for many tokens with `mma.sync`: mean pairs per expert up to which it takes 32 at a time, and its launches
#: by pairs at a time. On an H200 taken for 8.0, 32 were faster at 128 pairs and 64 at 256, by 7 to 10 %; eight warps
#: were slower but for their ring
_GROUPED_MMA_FEW = 160
_GROUPED_MMA = {32: MmaLaunch(32, 4, 2, 1, 4), 64: MmaLaunch(64, 4, 2, 1, 3)}
#: the ring of 32 at a time that runs fewer columns beyond the last is taken; with six columns one of 3 is 1.3 times as
#: fast as one of 4
_GROUPED_MMA_RINGS = (4, 3)

#: compute capability majors with a grouped matmul in torch that stays on the device; what its scratch memory is worth
_GROUPED_MATMUL, _SCRATCH_WORTH = (9, 10), 2
#: bytes of memory per element that decoding experts and reading them again takes as long as; share of the rate of
#: `Gpu.matmul` that a grouped matmul reached, with what precedes and follows it, and of `Gpu.mma` the kernel with
#: `mma.sync`: the largest of three layers, up to 1024 pairs per expert
_DECODED_BYTES, _GROUPED_REACHED, _GROUPED_MMA_REACHED = 6.3, 0.5, 0.78


def grouped_mma_tokens(gpu: Gpu, pairs: int, experts: int) -> int:
    """Pairs of an expert that the MoE kernel for many tokens with `mma.sync` takes at a time."""
    return 32 if pairs <= _GROUPED_MMA_FEW * experts else 64


def grouped_mma_for(gpu: Gpu, block: int, pairs: int, n: int, columns: int, apart: bool) -> MmaLaunch:
    """Configuration of that kernel for matrices of n rows; apart: a program has rows of both of their halves.

    One row tile instead of two was slower even with two programs per multiprocessor.
    """
    launch = _GROUPED_MMA[block]
    if block == 32:
        launch = launch._replace(ring=min(_GROUPED_MMA_RINGS, key=lambda ring: -columns % ring))
    programs = -(-pairs // block) * -(-n // (16 * launch.row_tiles * launch.warps))
    return launch if apart or programs >= gpu.processors else launch._replace(row_tiles=1)


def grouped_mma_pays(gpu: Gpu, pairs: int, experts: int) -> bool:
    """True if that kernel is to be preferred to decoding and torch's grouped matmul.

    That needs scratch memory, and outside of `_GROUPED_MATMUL` torch reads the number of pairs back to the host.
    """
    if gpu.major not in _GROUPED_MATMUL:
        return True
    mean, clocks_us = pairs / experts, gpu.clock_mhz * gpu.processors  # for each weight of an expert
    decoded_us = _DECODED_BYTES / gpu.bytes_us + mean / (_GROUPED_REACHED * gpu.matmul * clocks_us)
    return mean / (_GROUPED_MMA_REACHED * gpu.mma * clocks_us) <= _SCRATCH_WORTH * decoded_us


#: mean pairs per expert up to which the MoE kernels for few tokens are the fastest: on an H200 18 with short rows, 27
#: with longer ones. Taken for 8.0, they were as fast as the kernel with `mma.sync` at 8 pairs and took 1.2 to 1.4 times
#: as long at 16; where `mma.sync` has half the rate, blocks of 32 pairs that are not full cost more
_FEW_PAIRS, _FEW_PAIRS_MMA, _FULL_RATE = 20, 10, 900
#: maximum pairs of these kernels: each needs a row in fp32
_MOST_FEW_PAIRS = 1 << 14
#: pairs are not sorted by expert up to this share of the number of experts: two rarely share one
_ALONE = 0.25
#: mean pairs per expert up to which programs take 8, then 16 at a time
_ONE_GROUP, _TWO_GROUPS = 6, 12
#: programs up to which eight warps are faster than four; columns up to which two are, and from which eight are
_FEW_PROGRAMS, _SHORT_ROWS, _LONG_ROWS = 512, 8, 64
#: columns per warp from which two row tiles are faster than one
_LONG_SHARE = 10


def are_few(pairs: int, experts: int, gpu: Gpu | None = None) -> bool:
    """True if the MoE kernels for few tokens are the fastest; without a GPU, on any."""
    by_mma = gpu is not None and gpu.major not in WIDE and gpu.mma >= _FULL_RATE
    return pairs <= min((_FEW_PAIRS_MMA if by_mma else _FEW_PAIRS) * experts, _MOST_FEW_PAIRS)


def pairs_are_alone(tokens: int, pairs: int, experts: int) -> bool:
    """True if the MoE kernels for few tokens take each pair separately."""
    return tokens == 1 or pairs <= _ALONE * experts


def rows_for(pairs: int, experts: int, row_tiles: int, columns: int, matrices: int) -> RowsLaunch:
    """Configuration for rows of pairs, with row tiles of one matrix or two per program."""
    mean, rows = pairs / experts, 2 // matrices  # accumulators per program
    groups = 1 if mean <= _ONE_GROUP else 2 if mean <= _TWO_GROUPS or matrices == 1 else 4
    programs = -(-row_tiles // rows) * min(pairs, experts)
    if programs <= _FEW_PROGRAMS:
        return RowsLaunch(rows, groups, 8)
    if columns <= _SHORT_ROWS:
        return RowsLaunch(rows, groups, 2)
    return RowsLaunch(rows, groups, 8 if columns >= _LONG_ROWS and groups == 1 else 4)


def token_for(k: int, columns: int) -> TokenLaunch:
    """Configuration for sums over a token's k experts."""
    side = min(16, 1 << (k - 1).bit_length())
    return TokenLaunch(side, 2, 16, 2) if columns * side >= 16 * _LONG_SHARE else TokenLaunch(side, 1, 16)
