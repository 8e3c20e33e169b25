"""What test_ray.py runs on a cluster of this machine: `python -m tests.integrations.ray_cases batch FOLDER`.

The examples are on the path of this process, and so on that of Ray's.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray
import ray_batch
import ray_serve
from ray import serve
from ray.cluster_utils import Cluster

from tests.patience import LONG_S

FOLDER = Path(sys.argv[2])
PLANES = f"/dev/shm/{FOLDER.name}"


class Mortal(ray_batch.Answerer):
    """The first process that has answers is killed before anybody is told; with the second its node goes."""

    def __init__(self, directory):
        super().__init__(directory, PLANES)

    def __call__(self, rows):
        answers = super().__call__(rows)
        for victim, process in (("actor", os.getpid()), ("node", os.getppid())):
            with contextlib.suppress(FileExistsError):
                (FOLDER / victim).touch(exist_ok=False)
                os.kill(process, signal.SIGKILL)
                time.sleep(LONG_S)  # a worker ends with its node
        return answers


class Breakable(ray_serve.Service):
    """GET /who names the process and the files that it has mapped; GET /break takes a replica's pages away."""

    async def __call__(self, request):
        if request.url.path == "/break":
            self.answerer.vb.close()
        if request.url.path in ("/who", "/break"):
            return {"pid": os.getpid(), "mapped": _mapped()}
        return await super().__call__(request)


def _mapped() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[4] for line in lines if PLANES in line})


def batch() -> dict:
    """Answer while an actor and a node are killed; then with one prompt more."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    prompts = {f"p{number}": text for number, text in enumerate(ray_batch.PROMPTS * 2)}
    out = FOLDER / "out.jsonl"
    ray_batch.answer(prompts, out, actor=Mortal)
    first = out.read_text()
    ray_batch.answer(prompts, out, actor=Mortal)
    again = out.read_text()
    ray_batch.answer(prompts | {"more": "import "}, out, actor=Mortal)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    expected = dict(zip(prompts, ray_batch.Answerer(None, PLANES).answers(list(prompts.values())), strict=True))
    nodes = sum(node["Alive"] for node in ray.nodes())
    ray.shutdown()
    cluster.shutdown()
    return {
        "killed": [(FOLDER / victim).exists() for victim in ("actor", "node")],
        "nodes": nodes,
        "same": again == first,
        "ids": [line["id"] for line in lines],
        "right": all(line["text"] == expected[line["id"]] for line in lines[:-1]),
    }


def served() -> dict:
    """Ask two replicas, take one's pages away, and wait for a new one."""
    ray.init(log_to_driver=False, include_dashboard=False, num_cpus=2)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"port": port})
    serve.run(serve.deployment(Breakable, num_replicas=2, health_check_period_s=1).bind(None, PLANES))
    url = f"http://localhost:{port}"
    with ThreadPoolExecutor(20) as users:
        texts = list(users.map(lambda prompt: ray_serve.ask(prompt, url), ray_batch.PROMPTS * 3))
    before = _two_of(url, set())
    broken = _get(f"{url}/break")["pid"]
    after = _two_of(url, {broken})
    text = ray_serve.ask(ray_batch.PROMPTS[0], url)
    serve.shutdown()
    ray.shutdown()
    left = os.listdir(PLANES)
    return {"texts": texts, "before": before, "broken": broken, "after": after, "text": text, "left": left}


def _two_of(url: str, without: set[int]) -> dict[int, list[str]]:
    """Ask until two processes other than `without` have answered, and these no longer."""
    found, end = {}, time.monotonic() + 120
    while len(found) < 2 and time.monotonic() < end:
        for _ in range(20):
            with contextlib.suppress(urllib.error.HTTPError):
                answer = _get(f"{url}/who")
                found[answer["pid"]] = answer["mapped"]
        found = {pid: mapped for pid, mapped in found.items() if pid not in without}
        time.sleep(0.1)
    return found


def _get(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=60) as reply:
        return json.loads(reply.read())


if __name__ == "__main__":
    result = {"batch": batch, "serve": served}[sys.argv[1]]()
    (FOLDER / "result.json").write_text(json.dumps(result))
