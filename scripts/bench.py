"""The measurements behind README and docs/measurements.md, one part a function, each in a process of its own.

Peers run in the same process, interleaved with ours; ratios are of medians. Results go to
benchmarks/results/<part>-<cpu|cuda device>.json with machine, commit and versions; docs/measurements.md, with
every row, and docs/benchmarks.md, a summary, are generated from those files and from nothing else.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # scripts are no package
RESULTS = ROOT / "benchmarks" / "results"

from scripts import bench_page, bench_tables, hardware_tables
from scripts.bench_parts import ENVIRONMENT, PARTS
from scripts.measuring import machine
from vbrt.report.progress import Progress


def measure(name: str, work: Progress) -> None:
    """One part in a fresh process: memory and caches of one do not touch the next."""
    with work.paused():
        print(f"{name}: {PARTS[name].__doc__.splitlines()[0]}", flush=True)
    done = subprocess.run(
        [sys.executable, __file__, "--here", name],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env=os.environ | ENVIRONMENT.get(name, {}),
    )
    if done.returncode:
        raise SystemExit(f"bench: part {name} failed")
    result = json.loads(done.stdout.splitlines()[-1])
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}-cpu.json").write_text(json.dumps(result, indent=1) + "\n")
    with work.paused():
        show(result["figures"])


def show(figures: dict) -> None:
    """Print a part's figures."""
    for key, value in figures.items():
        print(f"  {key}: {value:.4g}" if isinstance(value, float) else f"  {key}: {value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="parts to measure (default: all)")
    parser.add_argument(
        "--tables", action="store_true", help="write the pages in docs/ again from the results, measure nothing"
    )
    parser.add_argument("--here", metavar="PART", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        figures = PARTS[args.here]()
        print(json.dumps({"machine": machine(), "figures": figures}))
        return
    if not args.tables:
        parts = args.parts or list(PARTS)
        with Progress("bench", len(parts), unit="parts") as work:
            for name in parts:
                work.at(name)
                measure(name, work)
                work.done()
    bench_tables.DOCS.write_text(bench_tables.tables())
    bench_page.PAGE.write_text(bench_page.page())
    hardware_tables.PAGE.write_text(hardware_tables.page())


if __name__ == "__main__":
    main()
