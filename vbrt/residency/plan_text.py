"""Text form of a plan: a bar chart of bytes per tier, then a line per kind of layer.

print(vb.plan)

224 layers, bfloat16 -> nvfp4+exact, computing on the gpu
the model  ████████████████████████████████████████  15.0 GiB
gpu        ▓▓▓▓▓▓▓▓▓▓▓░░░░░░                          5.9 GiB: coarse 3.9 GiB, kept 2.0 GiB; budget 8.0 GiB
cpu        ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒                      8.0 GiB: fine 8.0 GiB; budget 48.0 GiB
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from vbrt.residency.byte_text import format_bytes
from vbrt.residency.name_patterns import common_prefix, grouped, label_of, pattern_of
from vbrt.residency.plan_data import PlanData, Skip, Swap

__all__ = ["picture_lines", "plan_lines"]

_FILLS = {"dense": "█", "coarse": "▓", "fine": "▒", "kept": "░"}
_BAR, _SHORT = 40, 16  # characters of the longest bar; if fewer than _SHORT fit, text goes below
_NAMES = 3  # modules listed per reason; the rest is counted
_SKIPS = 6  # reasons listed; the rest is counted


def plan_lines(plan: PlanData, width: int = 80, *, each: bool = False) -> Iterator[str]:
    """Yield the lines of a plan, at most `width` long except for names.

    Args:
        each: one line per layer instead of per kind.
    """
    yield _title(plan)
    yield from picture_lines(plan, width)
    if plan.swaps:
        yield ""
        yield from _swap_lines(plan.swaps, each=each)
    if plan.skipped:
        yield ""
        yield from _skip_lines(plan.skipped, width, each=each)
    if plan.notes:
        yield ""
        yield from (f"note: {note}" for note in plan.notes)


def _title(plan: PlanData) -> str:
    if not plan.swaps:
        return f"nothing is swapped, computing on the {plan.compute_tier}"
    formats = sorted({swap.label for swap in plan.swaps})
    dtypes = sorted({swap.dtype for swap in plan.swaps})
    layers = f"{len(plan.swaps)} layer{'s' if len(plan.swaps) > 1 else ''}"
    return f"{layers}, {'/'.join(dtypes)} -> {'/'.join(formats)}, computing on the {plan.compute_tier}"


def picture_lines(plan: PlanData, width: int = 80) -> Iterator[str]:
    """Yield a bar chart: the dense model, and the bytes at home in each tier by plane."""
    tiers = _bytes_by_tier(plan)
    longest = max(1, plan.dense_bytes, *(sum(of.values()) for of in tiers.values()))
    names = max(map(len, ("the model", *tiers)))
    rows = [("the model", {"dense": plan.dense_bytes}, format_bytes(plan.dense_bytes))]
    for tier, of in tiers.items():
        parts = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in of.items() if nbytes)
        budget = f"; budget {format_bytes(plan.budgets[tier])}" if plan.budgets.get(tier) else ""
        rows.append((tier, of, f"{parts or 'empty'}{budget}"))
    room = width - names - 4 - max(len(text) for _, _, text in rows)
    room = min(_BAR, room if room >= _SHORT else max(8, width // 2))
    for name, of, text in rows:
        head = f"{name:<{names}}  {_bar(of, longest, room):<{room}}"
        if len(head) + 2 + len(text) <= width:
            yield f"{head}  {text}"
        else:
            yield head.rstrip()
            yield from _folded(text, width)


def _bytes_by_tier(plan: PlanData) -> dict[str, dict[str, int]]:
    tiers: dict[str, Counter[str]] = {tier: Counter() for tier in plan.budgets}
    for page in (page for swap in plan.swaps for page in swap.pages):
        tiers.setdefault(page.home, Counter())[page.plane] += page.nbytes
    if plan.mode == "train":
        tiers[plan.compute_tier]["dense"] += plan.swapped_bytes
    tiers[plan.compute_tier]["kept"] += plan.kept_bytes
    return {tier: {kind: of[kind] for kind in _FILLS if kind in of} for tier, of in tiers.items()}


def _bar(parts: Mapping[str, int], longest: int, room: int) -> str:
    """Return a bar of up to `room` characters whose parts end where they should, to half a character; what there is, is
    seen."""
    bar, total = "", 0
    for kind, nbytes in parts.items():
        total += nbytes
        bar += _FILLS[kind] * max(1 if nbytes else 0, round(room * total / longest) - len(bar))
    return bar[:room]


def _swap_lines(swaps: Sequence[Swap], *, each: bool) -> Iterator[str]:
    kinds = [[swap] for swap in swaps] if each else grouped(swaps, lambda s: (pattern_of(s.name), s.shape, s.format))
    labels = [label_of([swap.name for swap in of]) for of in kinds]
    prefix = common_prefix(labels)
    rows = [(f"swapped in {prefix[:-1]}" if prefix else "swapped", "layers", "dense", "pages", "home")]
    for label, of in zip(labels, kinds, strict=True):
        homes = Counter(page.home for swap in of for page in swap.pages)
        where = next(iter(homes)) if len(homes) == 1 else ", ".join(f"{n} {home}" for home, n in homes.items())
        sizes = (sum(swap.dense_bytes for swap in of), sum(swap.page_bytes for swap in of))
        rows.append((label.removeprefix(prefix), str(len(of)), *map(format_bytes, sizes), where))
    yield from _table(rows)


def _skip_lines(skipped: Mapping[str, Skip], width: int, *, each: bool) -> Iterator[str]:
    by_reason = grouped(list(skipped.items()), lambda item: item[1].reason)
    by_reason.sort(key=lambda of: -sum(skip.nbytes for _, skip in of))
    shown = by_reason if each else by_reason[:_SKIPS]
    yield f"stays as it is: {format_bytes(sum(skip.nbytes for skip in skipped.values()))}"
    for of in shown:
        names = [label_of([name for name, _ in part]) for part in grouped(of, lambda item: pattern_of(item[0]))]
        more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES and not each else ""
        size = format_bytes(sum(skip.nbytes for _, skip in of))
        yield from _folded(f"{', '.join(names if each else names[:_NAMES])}{more}: {size}, {of[0][1].reason}", width)
    if len(by_reason) > len(shown):
        yield f"  and {len(by_reason) - len(shown)} more reasons (plan.skipped)"


def _folded(text: str, width: int) -> Iterator[str]:
    """Wrap a text with a hanging indent."""
    line = " "
    for word in text.split(" "):
        if len(line) + 1 + len(word) > width and line.strip():
            yield line
            line = "   "
        line += f" {word}"
    yield line


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows as an aligned table: numbers to the right, the first and last column to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *numbers, last in rows:
        middle = "  ".join(text.rjust(width) for text, width in zip(numbers, widths[1:-1], strict=True))
        yield f"{first:<{widths[0]}}  {middle}  {last}"
