"""Pictures of a plan, stats, the live view and a timeline, for the documentation: docs/screenshots.

The plan is that of Qwen3-30B-A3B's config on a described machine; the others are of the committed language model, which
decodes here with room for half of its pages in memory and the rest in files. Texts are drawn as SVG, the page as PNG.
"""

import argparse
import contextlib
import io
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from rich.console import Console
from rich.text import Text

import vbrt
from scripts import committed
from scripts.chromium import screenshot
from scripts.speculate import as_gpt2, prompts_of
from vbrt.cli import main as cli
from vbrt.model.live_sampling import sample
from vbrt.report.live_view import frame_svg

FOLDER = ROOT / "docs" / "screenshots"
WIDTH = 92
MAX_BYTES = 300_000
_PLAN = ["plan", "tests/data/configs/qwen3-30b-a3b.json", "--gpu-memory", "12GiB", "--ram", "64GiB", "--link", "50"]
_EVERY_S = 0.25


def as_svg(text: str, title: str) -> str:
    """Return text as a picture of a terminal."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(text), soft_wrap=True)
    return console.export_svg(title=title)


def without_fonts(svg: str) -> str:
    """Return the picture with the fonts of the machine that shows it, instead of some of another host."""
    return re.sub(r"@font-face\s*\{.*?\}", "", svg, flags=re.S).replace("Fira Code", "DejaVu Sans Mono")


@contextlib.contextmanager
def wrapped() -> Iterator[vbrt.VBModelWrapper]:
    """The committed model with half of its pages in files."""
    model = as_gpt2(committed.dense(), torch.bfloat16)
    half = vbrt.make_plan(model, vbrt.load_config("exact")).page_bytes // 2
    with tempfile.TemporaryDirectory() as pages:
        tiers = {"gpu": {"enabled": False}, "cpu": {"budget": half}, "ssd": {"enabled": True, "path": pages}}
        with vbrt.wrap(model, "exact", tiers=tiers) as vb:
            yield vb


def decode(vb: vbrt.VBModelWrapper, tokens: int) -> None:
    """Continue a piece of held-out text."""
    ids = prompts_of(committed.held_out(), 1)
    vb.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0)


def plan() -> None:
    """`vbrt plan` of a large model."""
    columns = mock.patch.dict("os.environ", COLUMNS=str(WIDTH))
    with columns, contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.chdir(ROOT):
        cli.main(_PLAN)
    write("plan.svg", as_svg(printed.getvalue().rstrip(), "vbrt plan Qwen3-30B-A3B --gpu-memory 12GiB --ram 64GiB"))


def stats() -> None:
    """`print(vb.stats())` after some tokens."""
    with wrapped() as vb:
        decode(vb, 32)
        write("stats.svg", as_svg(vb.stats().table(width=WIDTH), "print(vb.stats())"))


def live() -> None:
    """The frame of `vbrt top` while tokens come."""
    with wrapped() as vb:
        decode(vb, 8)
        worker = threading.Thread(target=decode, args=(vb, 200))
        worker.start()
        samples = [sample(vb.runtime)]
        while worker.is_alive() and len(samples) < 12:
            worker.join(_EVERY_S)
            samples.append(sample(vb.runtime))
        worker.join()
    write("live.svg", frame_svg(samples, width=WIDTH, title="vbrt top"))


def timeline() -> None:
    """The page of a timeline of some tokens."""
    with wrapped() as vb, tempfile.TemporaryDirectory() as folder:
        decode(vb, 8)
        page = Path(folder) / "run.html"
        with vb.timeline(page):
            decode(vb, 6)
        screenshot(page, FOLDER / "timeline.png", size=(1280, 900))


def write(name: str, svg: str) -> None:
    (FOLDER / name).write_text(without_fonts(svg), "utf-8")


#: name on the command line -> what makes the picture; the timeline names the commit, and whether files differ, so first
PICTURES: dict[str, Callable[[], None]] = {one.__name__: one for one in (timeline, plan, stats, live)}


def main() -> int:
    """Make the pictures that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *PICTURES], metavar="NAME", help=", ".join(PICTURES))
    FOLDER.mkdir(exist_ok=True)
    for name in parser.parse_args().names or PICTURES:
        PICTURES[name]()
    large = [path.name for path in FOLDER.iterdir() if path.stat().st_size > MAX_BYTES]
    print(
        *(f"{path.relative_to(ROOT)}: {path.stat().st_size >> 10} KiB" for path in sorted(FOLDER.iterdir())), sep="\n"
    )
    if large:
        print(f"larger than {MAX_BYTES} bytes: {', '.join(large)}", file=sys.stderr)
    return 1 if large else 0


if __name__ == "__main__":
    sys.exit(main())
