"""Figures in sentences of README are those of the committed results, and docs/benchmarks.md is what the results give.

Each row below is a sentence of a page with places for figures, and the figures, as the results have them.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from scripts import bench_page, experts_table, format_tables, readme_figures
from tests.docs.pages import PAGES, ROOT


@cache
def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def row(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    (found,) = (row for row in rows if wanted.items() <= row.items())
    return found


def generated(case: str, batch: int = 1) -> dict[str, Any]:
    return row(results("generate-nvidia-h200")["rows"], case=case, batch=batch)


def streamed(case: str) -> tuple[float, float]:
    """GB of the GPU, ms of a forward of one token."""
    found = row(results("stream-nvidia-h200")["rows"], case=case)
    return found["gpu_peak_bytes"] / 1e9, found["T1_ms"]


def budgeted(case: str) -> list[float]:
    """GB and ms a token at each budget, the largest first."""
    rows = [row for row in results("memory-nvidia-h200")["rows"] if row["case"] == case]
    return [value for row in reversed(rows) for value in (row["peak_gb"], row["ms"])]


def experts(case: str) -> dict[str, Any]:
    return row(results("experts-decode-nvidia-h200")["rows"], case=case)


def trained(way: str) -> tuple[float, float]:
    """GB of the GPU, tokens a second in hundreds."""
    full = results("full-nvidia-h200")
    found = row(full["peers"] + full["full"], way=way)
    return found["peak_bytes"] / 1e9, round(found["tokens_per_s"], -2)


def large() -> dict[str, Any]:
    """The 8B shape, trained from the tiers."""
    return row(results("full-nvidia-h200")["large"]["rows"], tokens=16384)


def typed(tokens: str) -> tuple[float, ...]:
    """transformers' own model trained from the tiers: tokens a second in hundreds, of resident; GB, and resident."""
    full = results("typed-training-models-nvidia-h200")["full"]
    ours, resident = (full[way][tokens] for way in ("vbrt, recomputed", "resident, recomputed"))
    speed = resident["seconds"] / ours["seconds"]
    first = full["Trainer, resident, recomputed"][tokens]  # of a process: later ones hold what it has left
    return round(ours["tokens_per_s"], -2), speed, ours["peak_bytes"] / 1e9, first["peak_bytes"] / 1e9


def typed_8b() -> tuple[float, ...]:
    """The 8B shape of transformers, trained from the tiers on 24 GB: seconds a step, of its passes; GB."""
    ways = results("typed-training-8b-nvidia-h200")["full8b"]
    passes, ours = (ways[way]["32768"] for way in ("forward and backward, resident, recomputed", "vbrt, offloaded"))
    return ours["seconds"], passes["seconds"], ours["peak_bytes"] / 1e9


def adapted(way: str) -> tuple[float, float]:
    """Ms of a LoRA step of 2,048 tokens, GB of the GPU."""
    found = results("typed-training-lora-nvidia-h200")["lora"][way]["2048"]
    return found["seconds"] * 1e3, found["peak_bytes"] / 1e9


def gradients(*keys: str) -> list[float]:
    """Least and most speed of gradients to inputs of 1,024 tokens, of bf16's matmul."""
    rows = [row for row in results("kernels-gradients-nvidia-h200")["gradients"] if row["m"] == 1024]
    return [of(row[key] for row in rows) for key in keys for of in (min, max)]


def compiled_lora(tokens: str) -> float:
    """Time of a LoRA step with compiled blocks in 4 bits, of bf16's."""
    ways = results("typed-training-lora-nvidia-h200")["lora"]
    return ways["vbrt fp4, compiled blocks"][tokens]["seconds"] / ways["bf16, compiled blocks"][tokens]["seconds"]


def slow_link() -> list[float]:
    """Ms of LoRA over a link of half its rate: of the link for a pass, forward, the rest, all of it; of a step."""
    ways = results("typed-training-lora-link-nvidia-h200")["lora"]
    ours, resident = (ways[way]["2048"] for way in ("vbrt fp4, 1 GiB of pages", "vbrt fp4"))
    link_ms, ms = ours["link_s"] * 1e3, resident["seconds"] * 1e3  # two passes, at the whole rate
    return [link_ms, ms / 3, 2 * ms / 3, link_ms + 2 * ms / 3, ours["seconds"] * 1e3]


def story(name: str, *keys: str) -> list[float]:
    return [results("stories-nvidia-h200")[name][key] for key in keys]


#: page, sentence, figures
SENTENCES: tuple[tuple[str, str, Callable[[], list[float] | tuple[float, ...]]], ...] = (
    ("README.md", "ready in {:.0f} s, **{:.0f} ms a token**", lambda: story("generate", "ready_s", "ms")),
    (
        "README.md",
        "about {:.0f} ms are predicted",
        lambda: [round(results("predicted-rtx-4070")["rows"]["32B fp4"]["ms"], -1)],
    ),
    ("README.md", "{:.1f} GB of the GPU in use.", lambda: story("generate", "device_gb")),
    ("README.md", "{:.1f} GB of the GPU in use. The", lambda: story("lora", "device_gb")),
    ("README.md", "**{:.2f} s a step** of {} tokens", lambda: story("lora", "step_s", "tokens_a_step")),
    (
        "README.md",
        "**{:.0f} and {:.0f} tokens a second** with 25 and 10 % of the expert pages on the GPU ({:.1f} and {:.1f} GB)",
        lambda: [
            experts(f"{share}% of the expert pages")[key] for key in ("tokens_s", "peak_gb") for share in (25, 10)
        ],
    ),
    (
        "README.md",
        "{:.2f} of what forward and backward alone would allow with all weights on the GPU, in {:.1f} GB of GPU",
        lambda: [
            results("full-nvidia-h200")["large"]["compute_s"]["16384"] / large()["seconds"],
            large()["peak_bytes"] / 1e9,
        ],
    ),
    ("README.md", "**{:,.0f} tokens a second**", lambda: [round(16384 / large()["seconds"], -2)]),
    ("README.md", "takes {:.1f} s a step of 32,768 tokens where its passes alone take {:.1f}, in {:.1f} GB", typed_8b),
    (
        "README.md",
        (
            "{:,.0f} tokens a second at 16,384 tokens a step, {:.2f} of the resident model's, in {:.1f} GB instead of "
            "{:.1f}; at 8,192 tokens a step {:,.0f}, {:.2f} of the resident model's, in {:.1f} GB instead of {:.1f}."
        ),
        lambda: [*typed("16384"), *typed("8192")],
    ),
    (
        "README.md",
        "a LoRA step of 2,048 tokens takes {:.0f} ms and {:.1f} GB; in 4 bits {:.0f} ms and {:.1f} GB",
        lambda: [*adapted("bf16"), *adapted("vbrt fp4, 1 GiB of pages")],
    ),
    (
        "docs/training.md",
        "with {:.2f} to {:.2f} of the speed of bf16's matmul, decoded first {:.2f} to {:.2f}",
        lambda: gradients("ratio", "decoded_ratio"),
    ),
    (
        "docs/training.md",
        "LoRA in 4 bits takes {:.2f} and {:.2f} times as long as in bf16",
        lambda: [compiled_lora("2048"), compiled_lora("8192")],
    ),
    (
        "docs/training.md",
        (
            "a pass over the others takes {:.0f} ms. The forward's arithmetic, a third of the step's, takes {:.0f} ms, "
            "so that it waits for the link; the backward's, with the forward that it repeats, takes {:.0f} ms and "
            "hides the copies. That makes {:.0f} ms, and a step takes {:.0f}."
        ),
        slow_link,
    ),
    ("docs/experts.md", "on an H200 that is at most {:.2f} pages", lambda: [results("routing-prefetch")["idle_pages"]]),
    (
        "docs/experts.md",
        (
            "names {:.0f} % of the routed experts from what this layer's router saw. With 25 % of the pages on the "
            "GPU, to fetch all missing ones that it names brings {:.1f} pages in vain for each one that is needed, and "
            "costs {:.0f} % of the wait; to fetch the likeliest one alone saves {:.0f} % at best, and nothing where "
            "the link rests for less than {:.2f} pages."
        ),
        lambda: [
            ahead("router")["recall"],
            ahead("router")["vain_per_saved"],
            -100 * ahead("router")["wait_saved"],
            100 * ahead("router, one page")["wait_saved"],
            ahead("router, one page")["break_even"],
        ],
    ),
    ("README.md", "`exact` streams {:.2f} times as fast as on one", lambda: [faster("exact", "T1_ms")]),
)


def ahead(way: str) -> dict[str, Any]:
    """Prefetch of predicted experts, with a quarter of the pages on the GPU."""
    found = results("routing-prefetch")["runs"]["balanced"][way]
    return {"recall": 100 * found["recall"], **found["rooms"][1]}


def faster(what: str, figure: str) -> float:
    return results("ranks-nvidia-h200")[what]["times_faster"][figure] + 1e-9  # 1.945 is written 1.95


@pytest.mark.parametrize(("page", "sentence", "figures"), SENTENCES)
def test_a_sentence_has_the_figures_of_the_results(page, sentence, figures):
    says = sentence.format(*figures())
    text = " ".join(PAGES[page].read_text("utf-8").split())
    assert says in text, f"{page} does not say: {says}"


def test_readmes_table_is_the_one_that_is_generated_and_predicted():
    text = (ROOT / "README.md").read_text("utf-8")
    shown = text.split(readme_figures.MARKS[0])[1].split(readme_figures.MARKS[1])[0]
    assert shown.strip() == readme_figures.table(), "scripts/readme_figures.py writes it"
    name = "8B fp4, 2 GB"
    again = readme_figures.predictions({name: readme_figures.CASES[name]})["rows"][name]
    assert again == pytest.approx(results("predicted-rtx-4070")["rows"][name]), "scripts/readme_figures.py --predict"


def test_the_page_of_benchmarks_is_the_one_that_is_generated():
    assert bench_page.PAGE.read_text("utf-8") == bench_page.page(), "scripts/bench --tables"


def test_each_table_of_it_leads_to_a_section_that_has_all_rows():
    pages = {
        name: (ROOT / "docs" / name).read_text("utf-8") for name in ("measurements.md", "scaling.md", "accuracy.md")
    }
    links = re.findall(r"^\[All rows\]\((\S+\.md)(?:#(\S+))?\)", PAGES["docs/benchmarks.md"].read_text("utf-8"), re.M)
    assert len(links) > 9
    for name, anchor in links:
        titles = re.findall(r"^#+ (.+)$", pages[name], re.M)
        assert not anchor or anchor in map(bench_page.slug, titles), f"{name}#{anchor}"


def test_the_table_of_what_experts_cost_is_the_one_that_is_generated():
    text = experts_table.PAGE.read_text("utf-8")
    assert text == experts_table.written(text), "scripts/experts_table.py writes it"


def test_the_classes_of_experts_are_those_of_the_transformers_that_the_page_names():
    transformers, zoo = pytest.importorskip("transformers"), pytest.importorskip("tests.zoo.experts")
    text = (ROOT / "docs" / "experts.md").read_text("utf-8")
    ((version, classes),) = re.findall(r"transformers (\d+\.\d+): the (\d+) classes", text)
    if not transformers.__version__.startswith(f"{version}."):
        pytest.skip(f"the page is of transformers {version}")
    assert (int(classes), "and six with\ntheir own forward" in text) == (len(zoo.DECORATED), len(zoo.SPECIAL) == 6)


def test_the_table_of_published_layouts_is_the_one_that_is_generated():
    text = format_tables.PAGE.read_text("utf-8")
    assert text == format_tables.written(text), "scripts/format_tables.py writes it"
