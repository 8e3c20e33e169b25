"""Part of `vbrt demo`: search with a trained sentence encoder, plain and wrapped, side by side."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vbrt.cli.screen import add_row, table_of
from vbrt.residency.plan import format_bytes

if TYPE_CHECKING:
    from vbrt.integrations.minilm import DemoResult

__all__ = ["print_search"]


def print_search(console: Console, queries: Sequence[str], sentences: Sequence[str], result: "DemoResult") -> None:
    """Print what each query finds, and what that took."""
    table = table_of("query, and the best sentence for it", ">dense", ">wrapped", "top 3")
    found = zip(result.dense.results(), result.wrapped.results(), strict=True)
    reordered = 0
    for query, (dense, wrapped) in enumerate(found):
        same = query not in result.changed
        reordered += same and dense != wrapped
        add_row(table, queries[query], "", "", "CHANGED" if not same else "same" if dense == wrapped else "reordered")
        add_row(
            table,
            f"  {sentences[dense[0]]}",
            f"{result.dense.score(query, dense[0]):.3f}",
            f"{result.wrapped.score(query, dense[0]):.3f}",
            "",
        )
        if wrapped[0] != dense[0]:
            add_row(
                table,
                f"  {sentences[wrapped[0]]}",
                f"{result.dense.score(query, wrapped[0]):.3f}",
                f"{result.wrapped.score(query, wrapped[0]):.3f}",
                "now best",
            )
    console.print(table)
    console.print()
    unchanged = len(queries) - len(result.changed)
    verdict = f"{unchanged} of {len(queries)} queries find the same best sentence and the same three best"
    verdict += f" ({reordered} in another order)" if reordered else ""
    cosines, dense, wrapped = result.cosines, result.dense, result.wrapped
    sizes = [result.linear_bytes, result.page_bytes, result.memory_bytes, dense.process_bytes, wrapped.process_bytes]
    linear, pages, held, before, after = map(format_bytes, sizes)
    count = len(result.stats.layers)
    memory = f"{count} linear layers: {linear} dense; {pages} as pages in files, at most {held} of them in memory"
    process = f"{before} of memory with the dense model, {after} with the wrapped one (libraries and all)"
    seconds = f"{dense.seconds:.2f} s dense, {wrapped.seconds:.2f} s wrapped, for all sentences and queries"
    facts = Table.grid(padding=(0, 2))
    add_row(facts, "model", f"{result.model}, {len(sentences)} sentences, {len(queries)} queries")
    facts.add_row("search", Text(verdict, style="bold red" if result.changed else "bold green"))
    add_row(facts, "embeddings", f"cosine with the dense ones: mean {cosines.mean():.4f}, lowest {cosines.min():.4f}")
    for name, fact in (("weights", memory), ("process", process), ("time", seconds)):
        add_row(facts, name, fact)
    console.print(facts)
