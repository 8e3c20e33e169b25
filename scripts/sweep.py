"""Every architecture of tests/zoo.py, each in a worker process that may crash or hang without stopping the sweep.

Prints N of M per check and the reason for each miss; exits 1 when fewer than 99 % of the architectures that run
unwrapped pass every check, 2 when nothing ran.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from vbrt.report.progress import Progress

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"

TIMEOUT_SECONDS = 180
PASS_SHARE = 0.99
CHECKS = ("dense-ssd", "exact-bf16", "generate", "experts", "tables", "one-token", "one-token-bf16", "4-bit", "save")
LOADING_CHECKS = ("from-pretrained", "planes-again", "dense-again", "by-vbrt", "planes-by-vbrt")
READY, UNWRAPPED_DONE = "ready", "unwrapped done"


def work(pipe: Connection, directory: str, loading: bool) -> None:
    """A worker: takes (kind, name), says when the unwrapped model is done, answers a Result as a dict.

    One thread, so that sums have one order.
    """
    warnings.filterwarnings("ignore")
    import torch
    import transformers

    from tests.zoo.checks import check
    from tests.zoo.loading import check_loading

    run = check_loading if loading else check
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # models print
    pipe.send(READY)
    while True:
        kind, name = pipe.recv()
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=directory) as pages:
            result = run(kind, name, Path(pages), unwrapped_done=lambda: pipe.send(UNWRAPPED_DONE))
        result.seconds = round(time.perf_counter() - start, 2)
        pipe.send(result.to_dict())


@dataclass
class Worker:
    """One process and the job it is on; `due` is when it counts as hung."""

    process: multiprocessing.Process
    pipe: Connection
    job: tuple[str, str] | None = None
    due: float = float("inf")
    ready: bool = False
    ours: bool = False  # past the unwrapped model: what goes wrong now is a miss


def start(directory: str, loading: bool) -> Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, directory, loading), daemon=True)
    process.start()
    theirs.close()
    return Worker(process, ours)


def results(jobs: list[tuple[str, str]], workers: int, directory: str, *, loading: bool) -> Iterator[dict]:
    """The results as they come. A crashed or hung worker is replaced; its job is a miss if it was wrapped by then."""
    queue = list(reversed(jobs))
    pool = [start(directory, loading) for _ in range(min(workers, len(jobs)))]
    try:
        while pool:
            wait([w.pipe for w in pool], timeout=1.0)
            for worker in list(pool):
                lost = ""
                if worker.pipe.poll():
                    try:
                        answer = worker.pipe.recv()
                    except EOFError:
                        worker.process.join()
                        lost = f"crashed: the process ended with code {worker.process.exitcode}"
                    else:
                        if answer == UNWRAPPED_DONE:
                            worker.ours = True
                            continue
                        if answer != READY:
                            yield answer
                        worker.ready, worker.ours, worker.job, worker.due = True, False, None, float("inf")
                elif time.monotonic() > worker.due:
                    lost = f"hung: no answer in {TIMEOUT_SECONDS} s"
                if lost:
                    worker.process.kill()
                    pool.remove(worker)
                    if not worker.job:
                        raise SystemExit(f"a worker did not start; it {lost}")
                    yield {
                        "kind": worker.job[0],
                        "name": worker.job[1],
                        "reason": "" if worker.ours else lost,
                        "verdicts": {"process": lost} if worker.ours else {},
                    }
                    if queue:
                        pool.append(start(directory, loading))
                elif worker.ready and worker.job is None:
                    if not queue:
                        worker.process.kill()
                        pool.remove(worker)
                        continue
                    worker.job, worker.due = queue.pop(), time.monotonic() + TIMEOUT_SECONDS
                    worker.pipe.send(worker.job)
    finally:
        for worker in pool:
            worker.process.kill()


def verdict(result: dict) -> str:
    """ "unbuilt", "pass" or "miss"."""
    if result["reason"]:
        return "unbuilt"
    return "pass" if all(v == "ok" or v.startswith("n/a") for v in result["verdicts"].values()) else "miss"


def report(found: list[dict], seconds: float) -> dict:
    """Prints the summary and gives it as plain data."""
    by = {state: [r for r in found if verdict(r) == state] for state in ("pass", "miss", "unbuilt")}
    ran = len(by["pass"]) + len(by["miss"])
    if by["unbuilt"]:
        print("do not run unwrapped here:")
        for r in by["unbuilt"]:
            print(f"  {r['kind']:9} {r['name']:36} {r['reason'][:160]}")
    for r in by["miss"]:
        for check, why in r["verdicts"].items():
            if why != "ok" and not why.startswith("n/a"):
                print(f"MISS {r['kind']:9} {r['name']:36} {check}: {why}")
    counts = {}
    for check in (*CHECKS, *LOADING_CHECKS):
        verdicts = [r["verdicts"][check] for r in by["pass"] + by["miss"] if check in r["verdicts"]]
        counted = [v for v in verdicts if not v.startswith("n/a")]
        if not verdicts:
            continue
        ok, without = counted.count("ok"), len(verdicts) - len(counted)
        counts[check] = {"ok": ok, "of": len(counted), "not_applicable": without}
        print(f"{check:14} {ok}/{len(counted)} ({without} cannot do it unwrapped)")
    routed = [r for r in by["pass"] + by["miss"] if r.get("stacked")]
    if routed:
        classes = {name for r in routed for name in r["classes"]}
        print(f"modules of routed experts swapped, of those that there are, of {len(classes)} classes:")
        for r in routed:
            print(f"  {r['kind']:9} {r['name']:36} {r['experts']}/{r['stacked']} {', '.join(r['classes'])}")
    held = [r for r in by["pass"] + by["miss"] if r.get("tables")]
    if held:
        tables, refused = sum(r["tables"] for r in held), sum(len(r["refused"]) for r in held)
        used = sum(r["tables_used"] for r in held)
        print(f"{tables - refused}/{tables} lookup tables and heads are swapped, of which {used} weights ran; stay:")
        for r in held:
            for name, reason in r["refused"].items():
                print(f"  {r['kind']:9} {r['name']:36} {name}: {reason}")
        print("decoded whole by a forward, which computes with their weight:")
        for r in held:
            if r["decoded"]:
                print(f"  {r['kind']:9} {r['name']:36} {', '.join(r['decoded'])}")
    share = len(by["pass"]) / ran if ran else 0.0
    empty = [r["name"] for r in by["pass"] if not r.get("swapped")]
    print(f"{len(empty)} of those that pass hold no layer that is swapped: {', '.join(empty) or '-'}")
    print(
        f"{len(by['pass'])}/{ran} of the architectures that run unwrapped pass ({100 * share:.1f} %); "
        f"{len(by['unbuilt'])} of {len(found)} do not run unwrapped; {seconds:.0f} s"
    )
    return {
        "passed": len(by["pass"]),
        "ran": ran,
        "unbuilt": len(by["unbuilt"]),
        "without_swaps": empty,
        "checks": counts,
        "routed": len(routed),
        "seconds": round(seconds),
    }


def choose(kind: str, only: list[str], sample: int, *, routed: bool) -> list[tuple[str, str]]:
    """The jobs: (kind, name), evenly spread when a sample is asked for; `routed`: of models that may have experts."""
    from tests.zoo import zoo
    from tests.zoo.experts import may_route

    kinds = zoo.KINDS if kind == "all" else (kind,)
    jobs = []
    for k in kinds:
        names = zoo.names(k)
        if not names:
            print(f"{k}: does not import here, skipped", file=sys.stderr)
        jobs += [(k, n) for n in names if (not only or n in only) and (not routed or may_route(k, n))]
    unknown = [n for n in only if n not in {name for _, name in jobs}]
    if unknown:
        raise SystemExit(f"--only {unknown[0]}: no {kind} architecture of that name")
    return [jobs[i * len(jobs) // sample] for i in range(sample)] if 0 < sample < len(jobs) else jobs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="all", choices=("causal", "base", "timm", "diffusers", "all"))
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these model types only")
    parser.add_argument("--routed", action="store_true", help="only models that may have routed experts")
    parser.add_argument("--loading", action="store_true", help="read each by from_pretrained into planes instead")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="N of them, evenly spread")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="worker processes, one thread each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result there")
    args = parser.parse_args()
    begin, found = time.monotonic(), []
    jobs = choose(args.kind, args.only, args.sample, routed=args.routed)
    bar = Progress("sweep", len(jobs), unit="models")
    with tempfile.TemporaryDirectory(prefix="vbrt-sweep-") as directory, bar:
        for result in results(jobs, max(1, args.jobs), directory, loading=args.loading):
            found.append(result)
            bar.at(f"{result['kind']} {result['name']}")
            bar.done()
    summary = report(found, time.monotonic() - begin)
    if args.json:
        args.json.write_text(json.dumps({**summary, "results": found}, indent=1) + "\n")
    if not summary["ran"]:
        return 2
    return 0 if summary["passed"] >= PASS_SHARE * summary["ran"] else 1


if __name__ == "__main__":
    sys.exit(main())
