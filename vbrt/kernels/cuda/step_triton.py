"""Triton kernels of `step_ops`. Importing this needs Triton.

Rounding follows torch's eager kernels: fp32 within an operator, the tensor's dtype in between. For bit-exactness,
products are inline PTX instructions where LLVM would contract a product, its rounding to bf16 and a sum.
"""

import triton
import triton.language as tl

__all__ = ["attend_kernel", "gather_kernel", "norm_kernel", "rotate_kernel", "route_kernel"]


@triton.jit
def _wait_for_launch_before(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def norm_kernel(
    x_ptr,
    other_ptr,
    gain_ptr,
    total_ptr,
    y_ptr,
    eps,
    shift,
    K,
    x_stride,
    other_stride,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    GAIN: tl.constexpr,
    ROUNDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y [M, K] = RMS norm of x, or of total = x + other; rows of y and total are contiguous. Grid (M,)."""
    m = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < K
    if GAIN:
        gain = tl.load(gain_ptr + at, mask=inside, other=0.0).to(tl.float32)  # a parameter: no kernel writes it
    _wait_for_launch_before(DEPENDENT)
    dtype = y_ptr.dtype.element_ty
    v = tl.load(x_ptr + m * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        v = v + tl.load(other_ptr + m * other_stride + at, mask=inside, other=0.0).to(tl.float32)
        total = v.to(dtype)
        tl.store(total_ptr + m * K + at, total, mask=inside)
        v = total.to(tl.float32)
    v = v * tl.rsqrt(tl.sum(v * v, 0) / K + eps)
    if GAIN:
        if ROUNDS:
            v = v.to(dtype).to(tl.float32)
        v = v * (gain + shift)
    tl.store(y_ptr + m * K + at, v.to(dtype), mask=inside)


@triton.jit
def _rounded(v, like):
    return v.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _product(a, b, like):
    """a * b rounded like a torch operator, protected from contraction."""
    product = tl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
    )
    return _rounded(product, like)


@triton.jit
def _copy(source, target, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


@triton.jit
def rotate_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_gain_ptr,
    k_gain_ptr,
    at_ptr,
    q_out_ptr,
    k_out_ptr,
    v_out_ptr,
    q_eps,
    k_eps,
    shift,
    q_heads,
    k_heads,
    S,
    D,
    rest,
    q_b,
    q_h,
    q_s,
    k_b,
    k_h,
    k_s,
    v_b,
    v_h,
    v_s,
    angle_b,
    angle_s,
    qo_b,
    qo_h,
    qo_s,
    ko_b,
    ko_h,
    ko_s,
    vo_b,
    vo_h,
    vo_s,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    NORM: tl.constexpr,
    ROUNDS: tl.constexpr,
    STORE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Rotate the first D columns of a head of queries or keys; with STORE, write keys and values to their cache slots.

    Grid (q_heads + k_heads, plus k_heads with STORE, B * S). BLOCK, REST: at least half of D, and the remaining
    columns; powers of two, or 0.
    """
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    b = token // S
    s = token % S
    half = D // 2
    at = tl.arange(0, BLOCK)
    inside = at < half
    _wait_for_launch_before(DEPENDENT)
    place = s
    if STORE:
        place = tl.load(at_ptr + s).to(tl.int64)
    if head >= q_heads + k_heads:
        h = (head - q_heads - k_heads).to(tl.int64)
        source = v_ptr + b * v_b + h * v_h + s * v_s
        target = v_out_ptr + b * vo_b + h * vo_h + place * vo_s
        tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)
        tl.store(target + half + at, tl.load(source + half + at, mask=inside), mask=inside)
        if REST:
            _copy(source + D, target + D, rest, REST)
    else:
        is_query = head < q_heads
        h = (tl.where(is_query, head, head - q_heads)).to(tl.int64)
        source = tl.where(is_query, q_ptr + b * q_b + h * q_h + s * q_s, k_ptr + b * k_b + h * k_h + s * k_s)
        target = tl.where(
            is_query, q_out_ptr + b * qo_b + h * qo_h + s * qo_s, k_out_ptr + b * ko_b + h * ko_h + place * ko_s
        )
        angle = b * angle_b + s * angle_s + at
        cos1 = tl.load(cos_ptr + angle, mask=inside, other=0.0).to(tl.float32)
        cos2 = tl.load(cos_ptr + angle + half, mask=inside, other=0.0).to(tl.float32)
        sin1 = tl.load(sin_ptr + angle, mask=inside, other=0.0).to(tl.float32)
        sin2 = tl.load(sin_ptr + angle + half, mask=inside, other=0.0).to(tl.float32)
        x1 = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(source + half + at, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            gain_ptr = tl.where(is_query, q_gain_ptr, k_gain_ptr)
            eps = tl.where(is_query, q_eps, k_eps)
            factor = tl.rsqrt((tl.sum(x1 * x1, 0) + tl.sum(x2 * x2, 0)) / D + eps)
            x1 = x1 * factor
            x2 = x2 * factor
            if ROUNDS:
                x1 = _rounded(x1, q_out_ptr)
                x2 = _rounded(x2, q_out_ptr)
            gain1 = tl.load(gain_ptr + at, mask=inside, other=0.0).to(tl.float32) + shift
            gain2 = tl.load(gain_ptr + half + at, mask=inside, other=0.0).to(tl.float32) + shift
            x1 = _product(x1, gain1, q_out_ptr)
            x2 = _product(x2, gain2, q_out_ptr)
        y1 = _product(x1, cos1, q_out_ptr) + _product(-x2, sin1, q_out_ptr)
        y2 = _product(x2, cos2, q_out_ptr) + _product(x1, sin2, q_out_ptr)
        tl.store(target + at, y1.to(q_out_ptr.dtype.element_ty), mask=inside)
        tl.store(target + half + at, y2.to(q_out_ptr.dtype.element_ty), mask=inside)
        if REST:
            _copy(source + D, target + D, rest, REST)


@triton.jit
def route_kernel(
    logit_ptr,
    weight_ptr,
    id_ptr,
    E,
    stride,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
    FIRST: tl.constexpr,
    RENORMALIZED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Top-K of each token's E logits, and their weights. Grid (T,). PLACES: a power of two, at least K."""
    _wait_for_launch_before(DEPENDENT)
    t = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < E
    v = tl.load(logit_ptr + t * stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    top = tl.max(v, 0)
    total = tl.sum(tl.exp(v - top), 0)
    place = tl.arange(0, PLACES)
    best = tl.full((PLACES,), float("-inf"), tl.float32)
    ids = tl.zeros((PLACES,), tl.int32)
    v = tl.where(inside, tl.maximum(v, -3.0e38), float("-inf"))  # the first among equal logits is taken
    for j in tl.static_range(K):
        largest = tl.max(v, 0)
        first = tl.min(tl.where(v == largest, at, BLOCK), 0)
        best = tl.where(place == j, largest, best)
        ids = tl.where(place == j, first, ids)
        v = tl.where(at == first, float("-inf"), v)
    weights = tl.exp(best - top)
    if FIRST:
        weights = weights / total
    if RENORMALIZED or not FIRST:
        weights = weights / tl.sum(weights, 0)
    tl.store(weight_ptr + t * K + place, weights.to(weight_ptr.dtype.element_ty), mask=place < K)
    tl.store(id_ptr + t * K + place, ids.to(tl.int64), mask=place < K)


@triton.jit
def _widened(v, WIDEN: tl.constexpr):
    if WIDEN:
        v = v.to(tl.float32)
    return v


@triton.jit(do_not_specialize=["S", "q_s", "mask_s"])
def attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    part_ptr,
    stat_ptr,
    scale,
    G,
    R,
    L,
    D,
    q_b,
    q_g,
    q_r,
    k_b,
    k_g,
    k_l,
    v_b,
    v_g,
    v_l,
    mask_b,
    span,
    S,
    q_s,
    mask_s,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
    WIDEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Flash decoding, part one: R queries of a head group and a span of keys: sum of values, maximum, denominator.

    Grid (spans, B * G * S), S: tokens computed separately, each with its mask. part [B * G * S, spans, R, D] and stat
    [B * G * S, spans, 2, R] are fp32; a span without keys gives a maximum of -inf and leaves its part uninitialized.
    WIDEN: multiply in fp32 whatever the dtype.
    """
    _wait_for_launch_before(DEPENDENT)
    pair = tl.program_id(1).to(tl.int64)
    s = pair % S
    b = pair // S // G
    g = pair // S % G
    part = pair * tl.num_programs(0) + tl.program_id(0)
    q_ptr += s * q_s
    mask_ptr += s * mask_s
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    rows = (row < R)[:, None] & (column < D)[None, :]
    q = tl.load(q_ptr + b * q_b + g * q_g + row[:, None] * q_r + column[None, :], mask=rows, other=0.0)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    first = tl.program_id(0) * span
    for begin in range(first, tl.minimum(first + span, L), KEYS):
        key = begin + tl.arange(0, KEYS)
        seen = key < L
        if MASKED:
            seen = seen & (tl.load(mask_ptr + b * mask_b + key, mask=seen, other=0) != 0)
        if tl.max(seen.to(tl.int32), 0) > 0:
            inside = seen[:, None] & (column < D)[None, :]
            at = key.to(tl.int64)[:, None]
            k = tl.load(k_ptr + b * k_b + g * k_g + at * k_l + column[None, :], mask=inside, other=0.0)
            v = tl.load(v_ptr + b * v_b + g * v_g + at * v_l + column[None, :], mask=inside, other=0.0)
            scores = tl.dot(_widened(q, WIDEN), tl.trans(_widened(k, WIDEN)), input_precision="ieee") * scale
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp(scores - higher[:, None])
            fade = tl.exp(top - higher)
            total = total * fade + tl.sum(weights, 1)
            v = _widened(v, WIDEN)  # not before k's last use: both would lie in shared memory
            sums = sums * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            top = higher
    tl.store(stat_ptr + part * 2 * R + row, top, mask=row < R)
    tl.store(stat_ptr + (part * 2 + 1) * R + row, total, mask=row < R)
    tl.store(part_ptr + (part * R + row[:, None]) * D + column[None, :], sums, mask=rows)


@triton.jit(do_not_specialize=["S", "y_s"])
def gather_kernel(
    part_ptr,
    stat_ptr,
    y_ptr,
    G,
    R,
    D,
    spans,
    y_b,
    y_g,
    y_r,
    S,
    y_s,
    SPANS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Flash decoding, part two: combine one query's spans. Grid (R, B * G * S); SPANS: a power of two."""
    _wait_for_launch_before(DEPENDENT)
    r = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    span = tl.arange(0, SPANS)
    column = tl.arange(0, COLUMNS)
    inside = span < spans
    stat = (pair * spans + span) * 2 * R + r
    top = tl.load(stat_ptr + stat, mask=inside, other=float("-inf"))
    total = tl.load(stat_ptr + stat + R, mask=inside, other=0.0)
    highest = tl.max(top, 0)
    weights = tl.where(top > float("-inf"), tl.exp(top - highest), 0.0)
    total = tl.sum(weights * total, 0)
    parts = part_ptr + ((pair * spans + span) * R + r)[:, None] * D + column[None, :]
    sums = tl.sum(tl.load(parts, mask=inside[:, None] & (column < D)[None, :], other=0.0) * weights[:, None], 0)
    y = tl.where(total > 0.0, sums / total, 0.0)
    at = y_ptr + (pair // S // G) * y_b + (pair // S % G) * y_g + (pair % S) * y_s + r * y_r + column
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=column < D)
