"""A progress bar for work on one layer after another."""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from vbrt.residency.plan import format_bytes

__all__ = ["with_progress"]

_LARGE_BYTES = 64 << 20  # layers that the bar names

T = TypeVar("T")


def with_progress(title: str, items: Mapping[str, T], nbytes: Callable[[T], int], *, show: bool) -> Iterator[T]:
    """Yield the items under a bar on stderr that counts them and names the large ones."""
    if not show:
        yield from items.values()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[item]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=len(items), item="")
        for name, item in items.items():
            size = nbytes(item)
            bar.update(task, item=f"{name} ({format_bytes(size)})" if size >= _LARGE_BYTES else "")
            yield item
            bar.advance(task)
