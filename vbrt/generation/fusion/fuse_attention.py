"""Fusion around attention: rotary embedding with head norms and KV cache writes, and attention itself."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.fx import Node

from vbrt.generation.fusion.deterministic_attention import MOST_COLUMNS
from vbrt.generation.fusion.step_graph import StepGraph
from vbrt.kernels.cuda.step_ops import MOST_QUERIES
from vbrt.kernels.operator_trace import root_of
from vbrt.kernels.step import Part, attended, normed, rotated, rotated_into

__all__ = ["join_attention", "join_cache_writes", "join_rotary", "share_heads"]

_aten = torch.ops.aten


class _Rotary(NamedTuple):
    """Operands and result of one rotary embedding."""

    y: Node
    x: Node
    cos: Node
    sin: Node


# -- rotary embeddings ------------------------------------------------------------------------------------------------


def join_rotary(step: StepGraph) -> None:
    """Fuse x cos + rotate_half(x) sin of queries and keys into one call, with the head norms before it."""
    found, places = defaultdict(list), step.places()
    for node in step.calls(_aten.add.Tensor):
        rotary = _whole(next(_rotaries(node), None))
        if rotary is not None and _is_rotary(step, rotary):
            found[rotary.cos, rotary.sin].append(rotary)
    for rotaries in found.values():
        while rotaries:
            pair = rotaries[:2]
            if len(pair) > 1 and not _can_pair(pair, places):
                pair = pair[:1]
            del rotaries[: len(pair)]
            _rotate(step, pair)


def _rotaries(node: Node) -> Iterator[_Rotary]:
    """Yield the rotary embedding that a sum is, if it is one."""
    if node.kwargs or len(node.args) != 2:
        return
    for straight, turned in (node.args, node.args[::-1]):
        if not (_is_call(straight, _aten.mul.Tensor) and _is_call(turned, _aten.mul.Tensor)):
            continue
        for x, cos in (straight.args, straight.args[::-1]):
            for half, sin in (turned.args, turned.args[::-1]):
                if _turns(half, x) and all(_is_call(a, _aten.unsqueeze.default) and a.args[1] == 1 for a in (cos, sin)):
                    yield _Rotary(node, x, cos.args[0], sin.args[0])


def _whole(rotary: _Rotary | None) -> _Rotary | None:
    """Extend a partial rotary embedding by the head's pass-through columns, if it has any."""
    if rotary is None or len(rotary.y.users) != 1:
        return rotary
    (y,), d, last = rotary.y.users, rotary.x.meta["val"].shape[-1], len(rotary.x.meta["val"].shape) - 1
    is_part = _is_call(rotary.x, _aten.slice.Tensor) and rotary.x.args[1:] == (last, 0, d)
    head = rotary.x.args[0] if is_part else rotary.x  # the trace has no slice for all columns
    if not _is_call(y, _aten.cat.default) or y.args[1:] not in ((-1,), (last,)):
        return rotary
    parts = y.args[0]
    rest = parts[1] if len(parts) == 2 and parts[0] is rotary.y else None
    if not _is_call(rest, _aten.slice.Tensor) or rest.args[:3] != (head, last, d):
        return rotary
    return rotary._replace(y=y, x=head) if y.meta["val"].shape == head.meta["val"].shape else rotary


def _is_call(node: Any, target: Any) -> bool:
    return isinstance(node, Node) and node.target is target


def _turns(node: Any, x: Any) -> bool:
    """True if a node is rotate_half(x): cat(-second half, first half)."""
    if not _is_call(node, _aten.cat.default) or not isinstance(x, Node):
        return False
    last, half = len(x.meta["val"].shape) - 1, x.meta["val"].shape[-1] // 2
    parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    if dim not in (-1, last) or len(parts) != 2 or not _is_call(parts[0], _aten.neg.default):
        return False
    second, first = parts[0].args[0], parts[1]
    if not (_is_call(second, _aten.slice.Tensor) and _is_call(first, _aten.slice.Tensor)):
        return False
    return first.args == (x, last, 0, half) and second.args[:3] == (x, last, half) and second.args[3] >= 2 * half


def _is_rotary(step: StepGraph, rotary: _Rotary) -> bool:
    """True if the kernel supports it: 4 dimensions, contiguous head columns."""
    x, cos, sin, y = (node.meta["val"] for node in (rotary.x, rotary.cos, rotary.sin, rotary.y))
    if len(x.shape) != 4 or cos.shape != sin.shape or cos.strides != sin.strides or len(cos.shape) != 3:
        return False
    batch, _, tokens, d = x.shape
    turned = cos.shape[-1]
    alike = cos.dtype == x.dtype == sin.dtype == y.dtype and cos.shape[1] == tokens and turned % 2 == 0 < turned <= d
    dense = x.strides[-1] == cos.strides[-1] == 1 and cos.shape[0] in (1, batch)
    return alike and dense and d <= MOST_COLUMNS and step.is_fixed(rotary.x, rotary.cos, rotary.sin, rotary.y)


def _can_pair(pair: list[_Rotary], places: dict[Node, int]) -> bool:
    """True if query and key have the same tokens, and both exist before either is rotated."""
    first, second = pair
    (b, _, s, d), (other_b, _, other_s, other_d) = first.x.meta["val"].shape, second.x.meta["val"].shape
    place = places.get(second.x)
    return (b, s, d) == (other_b, other_s, other_d) and place is not None and place < places[first.y]


def _rotate(step: StepGraph, pair: list[_Rotary]) -> None:
    y, cos, sin = pair[0].y, pair[0].cos, pair[0].sin
    parts = _with_norms(step, pair) or tuple(Part(rotary.x) for rotary in pair)
    call = step.call(y, rotated, (parts, cos, sin), tuple(rotary.y.meta["val"] for rotary in pair))
    for at, rotary in enumerate(pair):
        step.replace(rotary.y, step.item(call, at))
    step.joined["rotary"] += 1


def _with_norms(step: StepGraph, pair: list[_Rotary]) -> tuple[Part, ...] | None:
    """Fold head norms into the rotary call, if all parts have the same rule and nothing else reads the normed heads."""
    rules = []
    for rotary in pair:
        turned = rotary.x
        if not _is_call(turned, _aten.transpose.int) or turned.args[1:] != (1, 2):
            return None
        norm = turned.args[0]
        if norm.target is not normed or len(norm.users) > 1 or norm.args[1].gain is None:
            return None
        if rotary.cos.meta["val"].shape[-1] != turned.meta["val"].shape[-1]:
            return None
        rules.append((norm.args[0], norm.args[1]))
    if len({(rule.shift, rule.rounds) for _, rule in rules}) > 1 or any(
        x.meta["val"].strides[-1] != 1 for x, _ in rules
    ):
        return None
    step.joined["norm of heads, by rotary"] += len(rules)
    return tuple(Part(_turned(step, rotary, x), rule) for rotary, (x, rule) in zip(pair, rules, strict=True))


def _turned(step: StepGraph, rotary: _Rotary, x: Node) -> Node:
    """x [B, S, H, D] as [B, H, S, D]."""
    node = step.call(rotary.x, _aten.transpose.int, (x, 1, 2), rotary.x.meta["val"])
    node.meta["root"] = root_of(x)
    return node


# -- the cache --------------------------------------------------------------------------------------------------------


def join_cache_writes(step: StepGraph) -> None:
    """Fuse KV cache writes into the rotary call: it writes rotated keys, and the values too."""
    for call in step.calls(rotated):
        places = step.places()
        items = {node.args[1]: node for node in call.users}
        key, query = items.get(1), items.get(0)
        if key is None or query is None or len(call.args[0]) != 2:
            continue
        writes = _writes_of(key, places)
        if writes is None:
            step.kept["rotated keys not written to a static cache"] += 1
            continue
        _write_behind(step, call, (query, key), writes, places)


def _writes_of(key: Node, places: dict[Node, int]) -> tuple[Node, Node] | None:
    """Return the key and value index_copy_ nodes at the same cache positions; None if there is no such pair."""
    (write, *more) = [*key.users, None]
    if more != [None] or not _is_call(write, _aten.index_copy_.default) or write.args[1] != 2:
        return None
    values = _copy_behind(write, places)
    if values is None or values.args[3].meta["val"].shape != key.meta["val"].shape:
        return None
    if values.args[3].meta["val"].strides[-1] != 1:
        return None
    caches = [node.args[0].meta["val"] for node in (write, values)]
    alike = all(c.strides[-1] == 1 and c.dtype == key.meta["val"].dtype for c in caches)
    return (write, values) if alike and root_of(write) is not root_of(values) else None


def _copy_behind(write: Node, places: dict[Node, int]) -> Node | None:
    """Return the next write to the same cache positions; several layers may share the index."""
    at = write.args[2]
    copies = [n for n in at.users if _is_call(n, write.target) and n.args[1:3] == (2, at) and places[n] > places[write]]
    return min(copies, key=places.__getitem__, default=None)


def _write_behind(
    step: StepGraph, call: Node, items: tuple[Node, Node], writes: tuple[Node, Node], places: dict[Node, int]
) -> None:
    """Move the rotary call to the later write, unless something reads its results or the caches before that."""
    first, last = sorted(writes, key=places.__getitem__)
    query, _ = items
    key_write, value_write = writes
    readers = [*query.users, *key_write.users, *value_write.users]
    between = [node for node, at in places.items() if places[call] < at < places[last] and node.meta.get("effect")]
    read = {root_of(node) for node in (key_write, value_write, key_write.args[2], value_write.args[3])}
    if any(places[node] < places[last] for node in readers) or any(
        node not in writes and "val" in node.meta and not isinstance(node.meta["val"], tuple) and root_of(node) in read
        for node in between
    ):
        step.kept["a cache read between its key and value writes"] += 1
        return
    parts, cos, sin = call.args
    caches = [write.args[0] for write in writes]
    args = (parts, cos, sin, value_write.args[3], *caches, key_write.args[2])
    new = step.call(last, rotated_into, args, tuple(n.meta["val"] for n in (query, *writes)), effect=True)
    for at, node in enumerate((query, *writes)):
        item = step.item(new, at)
        item.meta["root"] = root_of(node) if at else item
        step.replace(node, item)
    for node in (last, first, *items, call):
        step.graph.erase_node(node)
    step.joined["cache writes, by rotary"] += 1


# -- attention --------------------------------------------------------------------------------------------------------


def join_attention(step: StepGraph) -> None:
    """Replace attention of few queries by split-K attention (flash decoding), which reads GQA heads unrepeated."""
    for node in step.calls(F.scaled_dot_product_attention):
        given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), node.args, strict=False))
        given |= node.kwargs
        why = _join_one(step, node, given)
        if why:
            step.kept[f"attention: {why}"] += 1


def _join_one(step: StepGraph, node: Node, given: dict[str, Any]) -> str:
    q, k, v, mask = given["query"], *(_once(given[name]) for name in ("key", "value")), given.get("attn_mask")
    heads, groups = q.meta["val"].shape[1], k.meta["val"].shape[1]
    queries, d = q.meta["val"].shape[-2:]
    if given.get("dropout_p") or given.get("is_causal"):
        return "dropout or is_causal"
    if len(q.meta["val"].shape) != 4 or heads % groups or (heads != groups and queries != 1):
        return "grouped-query heads with several queries"
    if heads // groups * queries > MOST_QUERIES or d > MOST_COLUMNS or v.meta["val"].shape != k.meta["val"].shape:
        return "more queries, or wider heads, than the kernel takes"
    if len({n.meta["val"].dtype for n in (q, k, v)}) > 1 or any(n.meta["val"].strides[-1] != 1 for n in (q, k, v)):
        return "mixed dtypes, or a head dimension that is not contiguous"
    if mask is not None and not _is_row_mask(mask.meta["val"], q.meta["val"].shape[0], k.meta["val"].shape[2]):
        return "a mask that is not bool [B, 1, 1, L]"
    scale = given.get("scale")
    args = (q, k, v, mask, d**-0.5 if scale is None else scale)
    value = node.meta["val"]
    step.replace(node, step.call(node, attended, args, value.new_empty(*value.shape)))
    step.joined["attention"] += 1
    return ""


def share_heads(step: StepGraph) -> None:
    """Read keys and values unrepeated in batch-invariant attention, whose bits do not depend on it."""
    for node in step.calls(attended):
        q, k, v, *others = node.args
        once = [_once(of) for of in (k, v)]
        fits = {n.meta["val"].shape for n in once}
        if others[-1] is True and len(fits) == 1 and once[0] is not k:
            heads, groups = q.meta["val"].shape[1], once[0].meta["val"].shape[1]
            if heads // groups <= MOST_QUERIES and all(n.meta["val"].strides[-1] == 1 for n in once):
                node.args = (q, *once, *others)
                step.joined["keys of several heads"] += 1


def _is_row_mask(mask: Any, batch: int, length: int) -> bool:
    row = len(mask.shape) == 4 and mask.shape[1:] == (1, 1, length) and mask.shape[0] in (1, batch)
    return row and mask.dtype is torch.bool and mask.strides[-1] == 1


def _once(node: Node) -> Node:
    """Return unrepeated keys [B, G, L, D] behind a GQA repeat to [B, H, L, D], or the node itself."""
    inner, repeated = node, False
    while isinstance(inner, Node) and inner.target in (
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.clone.default,
        _aten.expand.default,
        _aten.unsqueeze.default,
    ):
        repeated = repeated or (inner.target is _aten.unsqueeze.default and inner.args[1] == 2)
        inner = inner.args[0]
    if not repeated or len(inner.meta["val"].shape) != 4:
        return node
    (b, g, *rest), (outer_b, h, *outer_rest) = inner.meta["val"].shape, node.meta["val"].shape
    return inner if (b, rest) == (outer_b, outer_rest) and h % g == 0 else node
