"""`t3`: trellis-coded 3-bit weights in a rotated basis, a scale byte for 64 or 128 columns: 3.13 or 3.06 bits a weight.

Four steps:

1. **Scales of columns**, a byte each: columns are divided by the typical magnitude of their weights, and inputs
   multiplied by it. The rotation spreads a block's error evenly over its columns in these units, so a column's error
   is in proportion to its weights. Inputs that are large meet small weights in trained models, above all behind
   norms and in front of the last product of an MLP, where one input may be a thousand times the others: without this
   step 3 bits had 5.1 to 6.2 times the KL of `nvfp4` on SmolLM2 (docs/accuracy.md has what they have). The magnitude is
   the squared mean of square roots, which a single large weight of a column hardly moves, as the root mean square does.
2. **Rotation.** Columns get signs and a Hadamard transform in blocks of 128 (64 where 128 does not divide K), after
   which any weight is close to Gaussian: Chee et al., "QuIP: 2-Bit Quantization of Large Language Models With
   Guarantees" (2023). A product rotates its input once instead of the weight back.
3. **Scale.** A block's scale follows from its root mean square; nothing is searched.
4. **Trellis.** Weights in units of their scale are coded in tiles of 16 x 16 by a bit-shift trellis with a computed
   codebook: Tseng et al., "QTIP: Quantization with Trellises and Incoherence Processing" (2024). A step of the trellis
   is a pair of adjacent columns. Its 6 new bits and the 8 before them select one of 2^14 pairs of values, so a decoder
   may start at any pair. The path of a tile is closed (tail-biting): no start state is stored.

N(0,1): 17.1 dB; a scalar code of 3 bits has 14.6, the bound is 18.1. The codebook takes a product, a shift and two
logical operations for two weights: a hash of the 14 bits, masked to a sign, two bits of an exponent and three of a
mantissa, twice, and the sum of both, which is nearly Gaussian. Values are whole numbers of 1/64 below 4, exact in bf16,
a scale has five significant bits, a column's four, so everything up to the final rounding to a weight's dtype is exact
in fp32, in any order of summation: all devices decode to the same bits. Encoders differ in ties and in the rounding of
path costs.

**Tile.** Pairs come in the order in which a warp's lanes hold the A operand of `mma.sync.m16n8k16`: lane 4 g + t has
rows g and g + 8, columns 2 t, 2 t + 1 and those 8 further, 24 bits in all. Four tiles that follow each other along K
are 96 words, word j of lane l at 32 j + l: j = 0 holds the lowest byte of the lane's 24 bits of each tile, j = 1 and 2
the upper 16 bits of tiles 0 and 1, 2 and 3. With the preceding lane's lowest byte, that is the 32 bits of all states
of a lane in a tile.

Legend: N rows, K columns, Kp = K padded to 64, T tiles, P = 128 pairs of a tile, S states, G groups, C columns of a
group, H columns of a block.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.formats.block_formats import near_ue4m4, power_of_two_scale, ue4m4_values
from vbrt.formats.error_feedback import group_factors
from vbrt.formats.format import Format, check_weight, padded
from vbrt.formats.page import PageLayout, build_layout

__all__ = ["PAIRS", "STATES", "T3", "TILE", "WARM", "block_of", "codebook", "rotate", "rotate_input", "trellis_path"]

#: rows, and columns, of a tile
TILE = 16
#: steps of a tile's trellis
PAIRS = TILE * TILE // 2
#: steps before and after a tile's first pair that settle where its path is closed
WARM = 32
_STATE_BITS, _NEW_BITS = 14, 6
STATES = 1 << _STATE_BITS
_MEMORY = STATES >> _NEW_BITS  # states that differ in the bits that the next step keeps
_COLUMNS = 64  # of four tiles
# the codebook: a multiplicative hash, and the fields of bf16 that are taken from it, in both halves of a word
_FACTOR, _ADDEND, _SHIFT = 0x9E3779B1, 64248484, 5
_FIELDS, _ONE = 0x81F081F0, 0x3F803F80
_SCALE = 1.07  # of a block: times its root mean square by the codebook's; the best on N(0,1)
_CHUNK_STATES = {"cpu": 1 << 17, "gpu": 1 << 26}  # path costs at a time
_CHUNK_WEIGHTS = {"cpu": 1 << 20, "gpu": 1 << 24}  # rotated at a time


class T3(Format):
    """Fields: codes int32 [ceil(N/16), Kp/64 * 96], scales uint8 [N, Kp/H], columns uint8 [Kp], tensor_scale fp32 [1].

    Range: the tensor scale, a power of two, follows the largest scale of a block. Blocks more than 2^15 below it fade
    to zero. A decoded weight beyond the dtype's largest finite number is that number.
    """

    code_dtype = "int32"

    def layout(self, shape: tuple[int, int], dtype: torch.dtype) -> PageLayout:
        """See `Format.layout`."""
        n, kp = shape[0], padded(shape[1], _COLUMNS)
        codes = ("codes", "int32", (-(-n // TILE), kp * 3 // 2))
        scales = ("scales", "uint8", (n, kp // block_of(shape[1])))
        columns, unit = ("columns", "uint8", (kp,)), ("tensor_scale", "float32", (1,))
        return build_layout(self.name, "coarse", [codes, scales, columns, unit])

    @torch.no_grad()
    def encode(self, w_NK: Tensor, squares: Tensor | None = None) -> dict[str, Tensor]:
        """See `Format.encode`. `squares` is ignored: the rotation spreads an error over all inputs of a block."""
        amax = check_weight(w_NK, self.name)
        with torch.autocast(w_NK.device.type, enabled=False):
            coarse = self._scaled(w_NK, amax)
            rows = _rows_at_a_time(w_NK)
            parts = zip(w_NK.split(rows), coarse["scales"].split(rows), strict=True)
            codes = [self._nearest(w_RK, {**coarse, "scales": scale_RB}) for w_RK, scale_RB in parts]
        return {"codes": torch.cat(codes), **coarse}

    def _scaled(self, w_NK: Tensor, amax: float) -> dict[str, Tensor]:
        """Fields except codes."""
        unit = power_of_two_scale(amax)  # exact, and keeps squares of any weight finite
        parts, block = w_NK.split(_rows_at_a_time(w_NK)), block_of(w_NK.shape[1])
        root_K = sum((w_RK.float() * (1 / unit)).abs_().sqrt_().sum(0) for w_RK in parts)
        columns = {"columns": _column_bytes(root_K.square())}
        blocks = [
            self._turned(w_RK.float() * (1 / unit), columns).view(len(w_RK), -1, block).square().mean(2).sqrt()
            for w_RK in parts
        ]
        scale_NB = torch.cat(blocks).mul_(_SCALE / _codebook_rms())
        tensor_scale = power_of_two_scale(scale_NB.max().item() * unit)
        byte_NB = near_ue4m4(scale_NB * (unit / tensor_scale)).clamp_(0, 255).to(torch.uint8)
        return {"scales": byte_NB, **columns, "tensor_scale": byte_NB.new_full((1,), tensor_scale, dtype=torch.float32)}

    def _turned(self, w_RK: Tensor, coarse: dict[str, Tensor]) -> Tensor:
        """Some rows fp32 in units of their columns' scales, rotated, [R, Kp]."""
        return rotate(w_RK / column_values(coarse["columns"])[: w_RK.shape[1]])

    def _nearest(self, w_RK: Tensor, coarse: dict[str, Tensor]) -> Tensor:
        """Codes of some rows, from a multiple of 16 on."""
        x_TP2 = _tiles_of(self._in_units(w_RK, coarse))
        return _pack(self.path(x_TP2), -(-len(w_RK) // TILE))

    def _in_units(self, w_RK: Tensor, coarse: dict[str, Tensor]) -> Tensor:
        """Rotated weight [R, Kp] in units of its blocks' scales; 0 where they are 0."""
        x_RK, scale_RK = self._turned(w_RK.float(), coarse), self.block_scales(coarse, w_RK.shape[1])
        return x_RK.div_(scale_RK.masked_fill(scale_RK == 0, torch.inf))

    def path(self, x_TP2: Tensor) -> Tensor:
        """States of the closed paths with the least squared error, see `trellis_path`; encoders in C override it."""
        return trellis_path(x_TP2)

    def block_scales(self, coarse: dict[str, Tensor], k: int) -> Tensor:
        """Scale of each rotated column, fp32 [N, Kp]."""
        byte_NB = coarse["scales"]
        scale_NB = ue4m4_values(byte_NB.device).index_select(0, byte_NB.reshape(-1).int()).view(byte_NB.shape)
        return (scale_NB * coarse["tensor_scale"]).repeat_interleave(block_of(k), 1)

    @torch.no_grad()
    def decode(self, tensors: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """See `Format.decode`: rounded once, from the exact weight."""
        (n, k), limit = shape, min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
        rows = _rows_at_a_time(tensors["scales"], k)
        parts = zip(tensors["codes"].split(rows // TILE), tensors["scales"].split(rows), strict=True)
        with torch.autocast(tensors["codes"].device.type, enabled=False):
            decoded = [
                # values first: sums of whole numbers, exact; a block's scale is common to all its columns
                rotate(self.rotated_values(codes)[: len(scale_RB)], back=True)
                .mul_(self.block_scales({**tensors, "scales": scale_RB}, k))
                .mul_(column_values(tensors["columns"]))[:, :k]
                .clamp_(-limit, limit)
                .to(dtype)
                for codes, scale_RB in parts
            ]
        return torch.cat(decoded) if decoded else torch.empty(n, k, dtype=dtype, device=tensors["codes"].device)

    def rotated_weight(self, tensors: dict[str, Tensor], shape: tuple[int, int]) -> Tensor:
        """The weight before its rotation back, exact in fp32 [N, Kp]: x @ w.T is `rotate_input`(x, columns) @ its T."""
        return self.rotated_values(tensors["codes"])[: shape[0]].mul_(self.block_scales(tensors, shape[1]))

    def rotated_values(self, codes: Tensor) -> Tensor:
        """Values of the rotated weight in units of its scales, fp32 [16 * rows of tiles, Kp]."""
        state_TP = _unpack(codes)
        value_TP2 = codebook(codes.device).index_select(0, state_TP.reshape(-1)).view(-1, PAIRS, 2)
        return _rows_of(value_TP2, len(codes))

    @torch.no_grad()
    def with_feedback(self, w_NK: Tensor, coarse: dict[str, Tensor], moments_GCC: Tensor) -> dict[str, Tensor]:
        """See `error_feedback.compensated`: a tile's errors are compensated by the tiles behind it in its group.

        LDLQ in blocks of 16 columns, as in QTIP, section 3.2. A group of 16 rows keeps the nearest codes if they have
        the smaller output error.
        """
        k, group = w_NK.shape[1], padded(moments_GCC.shape[1], _COLUMNS)
        moments_GCC = F.pad(moments_GCC.float(), (0, group - moments_GCC.shape[1]) * 2)
        column_GC = F.pad(column_values(coarse["columns"]), (0, len(moments_GCC) * group - padded(k, _COLUMNS)))
        column_GC = column_GC.view(-1, group)
        moments_GCC = moments_GCC * column_GC.unsqueeze(1) * column_GC.unsqueeze(2)
        # the input is scaled and rotated as the weight is back, in both dimensions of its moments
        turned = rotate(rotate(moments_GCC, of=k).mT.contiguous(), of=k)
        factors = group_factors(turned / turned.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-30).view(-1, 1, 1))
        steps = [_tile_factor(factors, first) for first in range(0, group, TILE)]
        rows = _rows_at_a_time(w_NK)
        parts = zip(w_NK.split(rows), coarse["codes"].split(rows // TILE), coarse["scales"].split(rows), strict=True)
        codes = []
        with torch.autocast(w_NK.device.type, enabled=False):
            for w_RK, codes_R, scale_RB in parts:
                own = {**coarse, "codes": codes_R, "scales": scale_RB}
                codes.append(self._compensated(w_RK, own, turned, steps))
        return {**coarse, "codes": torch.cat(codes)}

    def _compensated(self, w_RK: Tensor, coarse: dict[str, Tensor], moments_GCC: Tensor, steps: list[Tensor]) -> Tensor:
        (groups, group, _), high, kp = moments_GCC.shape, -(-len(w_RK) // TILE), padded(w_RK.shape[1], _COLUMNS)
        missing = (0, groups * group - kp, 0, high * TILE - len(w_RK))
        scale_RK = F.pad(self.block_scales(coarse, w_RK.shape[1]), missing)
        divisor_RK = scale_RK.masked_fill(scale_RK == 0, torch.inf)
        x_RK = F.pad(self._turned(w_RK.float(), coarse), missing)
        x_GRC, scale_GRC, divisor_GRC = (
            t.view(-1, groups, group).transpose(0, 1) for t in (x_RK, scale_RK, divisor_RK)
        )
        rest_GRC, states = x_GRC.clone(), []
        table = codebook(w_RK.device)
        for at, factor in enumerate(steps):
            columns = slice(at * TILE, (at + 1) * TILE)
            tile = (rest_GRC[:, :, columns] / divisor_GRC[:, :, columns]).reshape(-1, TILE)
            state_TP = self.path(_tiles_of(tile))
            states.append(state_TP.view(groups, high, PAIRS))
            value = _rows_of(table[state_TP.long()], len(state_TP)).view(groups, -1, TILE)
            lost = rest_GRC[:, :, columns] - value * scale_GRC[:, :, columns]
            rest_GRC[:, :, columns.stop :] -= lost @ factor
        state_RTP = torch.stack(states, 2).permute(1, 0, 2, 3).reshape(high, -1, PAIRS)[:, : kp // TILE]
        ours, nearest = _pack(state_RTP.reshape(-1, PAIRS), high), coarse["codes"]
        losses = []
        for codes in (ours, nearest):
            value_RK = F.pad(self.rotated_values(codes), (0, groups * group - kp))
            error = x_GRC - (value_RK * scale_RK).view(-1, groups, group).transpose(0, 1)
            losses.append(((error @ moments_GCC) * error).view(groups, high, -1).sum(2).t())
        better = torch.lt(*losses).repeat_interleave(group // _COLUMNS, 1)[:, : kp // _COLUMNS]
        return torch.where(better.repeat_interleave(6 * TILE, 1), ours, nearest)


def block_of(k: int) -> int:
    """Columns of a block: of a transform, and of a scale."""
    return 128 if padded(k, _COLUMNS) % 128 == 0 else _COLUMNS


def _rows_at_a_time(rows: Tensor, k: int | None = None) -> int:
    weights = _CHUNK_WEIGHTS["cpu" if rows.is_cpu else "gpu"]
    return max(1, weights // padded(k or rows.shape[1], _COLUMNS) // TILE) * TILE


# -- scales of columns ------------------------------------------------------------------------------------------------


def column_values(byte_K: Tensor) -> Tensor:
    """Scale of each column before the rotation, fp32 [Kp], with four significant bits."""
    return ue4m4_values(byte_K.device).index_select(0, byte_K.int())


def _column_bytes(size_K: Tensor) -> Tensor:
    """uint8 [Kp] of typical magnitudes of each column's weights, in any unit: 1 for their geometric mean."""
    mean = size_K[size_K > 0].log().mean().exp() if size_K.any() else 1.0
    byte_K = near_ue4m4(size_K / mean).add_(1) & ~1  # the lowest bit is 0, so that decoded weights are exact
    return F.pad(byte_K.clamp_(2, 254), (0, -len(size_K) % _COLUMNS), value=2).to(torch.uint8)


# -- rotation ---------------------------------------------------------------------------------------------------------


def rotate(x_RK: Tensor, *, back: bool = False, of: int | None = None) -> Tensor:
    """Rotate the columns of a weight, or inputs, fp32 [..., K] -> [..., Kp]; back: from [..., Kp].

    Signs and a Hadamard transform in blocks of H columns, times 1/8, back 8/H: powers of two, so that whole numbers
    stay exact. of: K, where x has a part of the columns.
    """
    block = block_of(of or x_RK.shape[-1])
    matrix_HH = _rotation(block, x_RK.device)
    matrix_HH = matrix_HH.t() * (8 / block) if back else matrix_HH / 8
    x = F.pad(x_RK, (0, -x_RK.shape[-1] % _COLUMNS))
    return (x.reshape(-1, block) @ matrix_HH).view(x.shape)


def rotate_input(x: Tensor, columns: Tensor) -> Tensor:
    """Scale and rotate inputs [..., K] for a product with the rotated weight, fp32 [..., Kp]: 8/H in place of 1/8."""
    return rotate(x.float() * column_values(columns)[: x.shape[-1]]).mul_(64 / block_of(x.shape[-1]))


@lru_cache(maxsize=16)
def _rotation(block: int, device: torch.device) -> Tensor:
    """Signs and Hadamard matrix in one, fp32 [H, H] of 1 and -1: x @ it."""
    hadamard = torch.ones(1, 1, dtype=torch.float32, device=device)
    while len(hadamard) < block:
        hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)))
    # a bit of a hash of the column (the finalizer of MurmurHash3): the same on each device and version of torch
    hashed = torch.arange(1, block + 1, dtype=torch.int64, device=device)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = ((hashed ^ (hashed >> shift)) * factor) & 0xFFFFFFFF
    sign = 1 - 2 * ((hashed ^ (hashed >> 16)) & 1)
    return sign.float().unsqueeze(1) * hadamard


# -- trellis ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def codebook(device: torch.device) -> Tensor:
    """Values of each state's pair of columns, fp32 [S, 2], exact in bf16."""
    state_S = torch.arange(STATES, dtype=torch.int64, device=device)
    hashed_S = (state_S * _FACTOR + _ADDEND) & 0xFFFFFFFF
    value_S2 = torch.zeros(STATES, 2, dtype=torch.float32, device=device)
    for word_S in (hashed_S, (hashed_S << _SHIFT) & 0xFFFFFFFF):
        word_S = (word_S & _FIELDS) ^ _ONE
        bits_S2 = torch.stack((word_S & 0xFFFF, word_S >> 16), 1) << 16
        bits_S2 = torch.where(bits_S2 >= 1 << 31, bits_S2 - (1 << 32), bits_S2)
        value_S2 += bits_S2.to(torch.int32).view(torch.float32)
    return value_S2


@lru_cache(maxsize=1)
def _codebook_rms() -> float:
    return codebook(torch.device("cpu")).square().mean().sqrt().item()


def trellis_path(x_TP2: Tensor, warm: int = WARM) -> Tensor:
    """States [T, P] int32 of closed paths with little squared error to pairs of weights in units of their scales.

    Viterbi's algorithm, twice, as in QTIP, section 3.3: around a tile's first pair, to choose where the path is closed,
    then along the tile with that start and end.
    """
    size = max(1, _CHUNK_STATES["cpu" if x_TP2.is_cpu else "gpu"] // STATES)
    return torch.cat([_closed_path(part, warm) for part in x_TP2.split(size)])


def _closed_path(x_TP2: Tensor, warm: int) -> Tensor:
    (count, pairs, _), table = x_TP2.shape, codebook(x_TP2.device)
    turned, norm_S = table.t() * -2, table.square().sum(1)
    around = [*range(pairs - warm, pairs), *range(warm)]
    cost_TM = x_TP2.new_zeros(count, _MEMORY)
    cost_TM, back = _forward(x_TP2, around, cost_TM, turned, norm_S)
    memory_T = cost_TM.argmin(1)
    for back_TM in reversed(back[warm:]):
        memory_T, _ = _preceding(memory_T, back_TM)
    closed_T = memory_T
    cost_TM = torch.full_like(cost_TM, 1e30).scatter_(1, closed_T.unsqueeze(1), 0.0)
    _, back = _forward(x_TP2, range(pairs), cost_TM, turned, norm_S)
    memory_T, states = closed_T, []
    for back_TM in reversed(back):
        memory_T, state_T = _preceding(memory_T, back_TM)
        states.append(state_T)
    return torch.stack(states[::-1], 1).to(torch.int32)


def _forward(
    x_TP2: Tensor, steps: "range | list[int]", cost_TM: Tensor, turned: Tensor, norm_S: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Costs of the best paths by their last 8 bits, and the bits before those for each step."""
    back = []
    for step in steps:
        error_TS = torch.addmm(norm_S, x_TP2[:, step], turned)
        error_TS.view(-1, _MEMORY, STATES // _MEMORY).add_(cost_TM.unsqueeze(2))
        cost_TM, from_TM = error_TS.view(-1, STATES // _MEMORY, _MEMORY).min(1)
        back.append(from_TM.to(torch.uint8))
    return cost_TM, back


def _preceding(memory_T: Tensor, back_TM: Tensor) -> tuple[Tensor, Tensor]:
    """The last bits before a step, and the step's state, on the best paths to some last bits."""
    state_T = back_TM.gather(1, memory_T.unsqueeze(1)).squeeze(1).long() * _MEMORY + memory_T
    return state_T >> _NEW_BITS, state_T


def _tile_factor(factors_GCC: Tensor, first: int) -> Tensor:
    """How the errors of a tile's columns [G, 16] are distributed to the columns behind them."""
    own, later = slice(first, first + TILE), slice(first + TILE, None)
    return torch.linalg.solve_triangular(factors_GCC[:, own, own], factors_GCC[:, own, later], upper=True).float()


# -- order of tiles, and bits -----------------------------------------------------------------------------------------


def _tiles_of(x_RK: Tensor) -> Tensor:
    """Tiles [T, P, 2] of rows [R, columns], in order of rows of tiles, pairs in a warp's order."""
    x = F.pad(x_RK, (0, 0, 0, -len(x_RK) % TILE))
    x = x.view(len(x) // TILE, 2, 8, x.shape[1] // TILE, 2, 4, 2)  # row: r g, column: tile c t e
    return x.permute(0, 3, 2, 5, 4, 1, 6).reshape(-1, PAIRS, 2)


def _rows_of(value_TP2: Tensor, high: int) -> Tensor:
    """Inverse of `_tiles_of`: [16 * high, columns]."""
    value = value_TP2.view(high, -1, 8, 4, 2, 2, 2)  # row of tiles, tile, g t c r e
    return value.permute(0, 5, 2, 1, 4, 3, 6).reshape(high * TILE, -1)


def _pack(state_TP: Tensor, high: int) -> Tensor:
    """Codes int32 [high, Kp/64 * 96] of states, in the module's order of words."""
    new_TL4 = (state_TP & ((1 << _NEW_BITS) - 1)).view(-1, 32, 4).long()
    own = (((new_TL4[..., 0] << 6 | new_TL4[..., 1]) << 6 | new_TL4[..., 2]) << 6 | new_TL4[..., 3]).view(-1, 4, 32)
    low, top = own & 0xFF, own >> 8
    words = [sum(low[:, tile] << 8 * tile for tile in range(4)), *(top[:, i] | top[:, i + 1] << 16 for i in (0, 2))]
    word = torch.stack(words, 1)  # [groups of tiles, 3, 32]
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32).view(high, -1)


def _unpack(codes: Tensor) -> Tensor:
    """States int64 [T, P] of codes."""
    word = codes.reshape(-1, 3, 32).long() & 0xFFFFFFFF
    low = torch.stack([word[:, 0] >> 8 * tile & 0xFF for tile in range(4)], 1)
    top = torch.stack([word[:, 1 + tile // 2] >> 16 * (tile % 2) & 0xFFFF for tile in range(4)], 1)
    window = low.roll(1, 2) << 24 | top << 8 | low  # [groups of tiles, 4, 32]
    state = torch.stack([window >> shift & (STATES - 1) for shift in (18, 12, 6, 0)], -1)
    return state.view(-1, PAIRS)
