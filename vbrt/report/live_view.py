"""Rendering of live samples: frames for a terminal, lines for a pipe, SVG for the documentation."""

import io
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vbrt.report.live_sample import History, LiveSample, Rates, RuntimeNow, TierNow
from vbrt.report.progress import format_seconds
from vbrt.residency.byte_text import format_bytes

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["frame", "frame_lines", "frame_svg", "plain_line"]

_LABEL = 9  # characters of the first column
_WAITS = 4  # number of kinds shown, the longest waits
_NARROWEST = 40
_ASCII = str.maketrans("█░·…×", "#.-~x")


def frame_lines(history: History, width: int, *, ascii_only: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the lines of a frame with their styles, as rich names them; no line is longer than `width`.

    Args:
        width: of the terminal, in characters.
        ascii_only: for terminals without block characters.
    """
    width = max(width, _NARROWEST)
    for line, style in _lines(history, width):
        line = _cut(line, width)
        yield line.translate(_ASCII) if ascii_only else line, style


def _lines(history: History, width: int) -> Iterator[tuple[str, str]]:
    sample = history.last
    yield f"vbrt · process {sample.pid} · {format_seconds(sample.up_s)} · {sample.command}", "bold"
    if not sample.runtimes:
        yield "no model is wrapped", ""
    for number, runtime in enumerate(sample.runtimes):
        yield "", ""
        yield from _runtime_lines(runtime, history.rates(number), width)


def frame(history: History, width: int, height: int = 0, *, ascii_only: bool = False) -> "Text":
    """Return a frame for rich; of at most `height` lines, if that is given."""
    from rich.text import Text

    lines = list(frame_lines(history, width, ascii_only=ascii_only))
    if height and len(lines) > height:
        lines = [*lines[: height - 1], (f"… {len(lines) - height + 1} more lines", "dim")]
    text = Text(no_wrap=True, overflow="crop")
    for number, (line, style) in enumerate(lines):
        text.append("\n" if number else "")
        text.append(line, style or None)
    return text


def frame_svg(samples: Iterable[LiveSample], *, width: int = 80, title: str = "vbrt top") -> str:
    """Return the frame after these samples, oldest first, as SVG."""
    from rich.console import Console

    history = History()
    for sample in samples:
        history.add(sample)
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(frame(history, width))
    return console.export_svg(title=title)


def plain_line(history: History) -> str:
    """Return a one-line summary, for a file or a pipe."""
    sample = history.last
    parts = [f"process {sample.pid}"]
    for number, runtime in enumerate(sample.runtimes):
        rates = history.rates(number)
        parts += [", ".join(runtime.models), *_speeds(runtime, rates)]
        parts += [f"{name} {_held(tier)}" for name, tier in runtime.tiers.items()]
        parts += [] if rates.hit_rate is None else [f"hits {_percent(rates.hit_rate + rates.ahead)}"]
        parts += [f"{link} {_gb(speed)}" for link, speed in rates.bytes_per_s.items()]
        parts += [] if rates.wait_share is None else [f"waiting {_percent(rates.wait_share)}"]
    return " · ".join(filter(None, parts)) if sample.runtimes else f"{parts[0]} · no model is wrapped"


# -- one runtime ------------------------------------------------------------------------------------------------------


def _runtime_lines(now: RuntimeNow, rates: Rates, width: int) -> Iterator[tuple[str, str]]:
    policy = "weights train" if now.policy == "none" else f"{now.policy} policy"
    yield f"{', '.join(now.models) or 'no model'} · {policy}", "bold cyan"
    yield " · ".join(_speeds(now, rates)) or f"{sum(now.models.values()):,} passes so far", "bold green"
    for name, tier in now.tiers.items():
        yield _tier_line(name, tier, width), _fill_style(tier)
    if now.policy != "none":
        yield from _lease_lines(now, rates)
    for link, nbytes in now.moved.items():
        yield f"{link:<{_LABEL}} {_gb(rates.bytes_per_s.get(link, 0.0)):>12}   {format_bytes(nbytes)} so far", ""
    if now.policy != "none":
        yield from _wait_lines(now, rates)
    for name, nbytes in now.caches.items():
        yield f"{'KV cache':<{_LABEL}} {name}: {format_bytes(nbytes)}", ""


def _speeds(now: RuntimeNow, rates: Rates) -> list[str]:
    """Return tokens, images, steps and passes per second; passes by model if there are several."""
    speeds = []
    for unit, speed in rates.work_per_s.items():
        noun, _, done = unit.partition(" ")
        speeds.append(f"{_number(speed)} {noun}/s {done}".rstrip())
    named = len(now.models) > 1
    passes = [
        f"{_number(speed)} passes/s {name}" if named else f"{_number(speed)} passes/s"
        for name, speed in rates.passes_per_s.items()
        if now.models[name]
    ]
    return speeds + passes


def _tier_line(name: str, tier: TierNow, width: int) -> str:
    text = f"{_held(tier):<23} {_percent(_share(tier)):>6}  {tier.pages:,} pages"
    room = max(8, width - _LABEL - len(text) - 3)
    full = min(room, round(room * min(1.0, _share(tier))))
    return f"{name:<{_LABEL}} {'█' * full}{'░' * (room - full)} {text}"


def _share(tier: TierNow) -> float:
    return tier.held_bytes / tier.budget_bytes if tier.budget_bytes else 0.0


def _fill_style(tier: TierNow) -> str:
    return "yellow" if _share(tier) >= 0.95 else "green"


def _held(tier: TierNow) -> str:
    return f"{format_bytes(tier.held_bytes)} of {format_bytes(tier.budget_bytes)}"


def _lease_lines(now: RuntimeNow, rates: Rates) -> Iterator[tuple[str, str]]:
    every = now.hits + now.misses
    if rates.hit_rate is not None:
        ahead = f", {_percent(rates.ahead)} by prefetch" if rates.ahead else ""
        ready = _percent(rates.hit_rate + rates.ahead)
        yield f"{'hits':<{_LABEL}} {ready:>12}   of {_number(rates.leases_per_s)} leases/s{ahead}", ""
    elif every:
        yield f"{'hits':<{_LABEL}} {_percent((now.hits + now.prefetched) / every):>12}   of {every:,} leases so far", ""
    if now.unseen:
        layers = "1 layer" if now.unseen == 1 else f"{now.unseen} layers"
        yield f"{'':<{_LABEL}} without {layers} of experts, whose hits the GPU counts (vb.stats() has them)", "dim"
    if now.leases:
        yield f"{'leases':<{_LABEL}} {now.leases}", "dim"


def _wait_lines(now: RuntimeNow, rates: Rates) -> Iterator[tuple[str, str]]:
    total = format_seconds(now.wait_us / 1e6)
    style = "yellow" if rates.wait_share and rates.wait_share >= 0.1 else ""
    yield f"{'waiting':<{_LABEL}} {_percent(rates.wait_share):>12}   of the time, {total} so far", style
    for name, share in list(rates.waits.items())[:_WAITS]:
        yield f"{'':<{_LABEL}} {_percent(share):>12}   {name}", "dim"


# -- numbers ----------------------------------------------------------------------------------------------------------


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 1]}…"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.1f} MB/s"


def _number(value: float) -> str:
    """Return a number in short: 0.05, 3.1, 48.2, 1,204."""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 1 or value == 0:
        return f"{value:.1f}"
    return f"{value:.{min(4, 1 - math.floor(math.log10(value)))}f}"
