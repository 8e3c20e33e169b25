# %% [markdown]
# # Ray Serve: replicas of a model behind one address
#
# Two replicas of the actor of `ray_batch.py`, with their planes in memory once. Requests that come together are one
# batch. `vb.stats()` says whether a replica still has its pages: Ray replaces one that has not, or whose process ends.
#
#     python examples/ray_serve.py
#     serve run --app-dir examples ray_serve:app

# %%
import asyncio
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import ray
from ray import serve
from ray_batch import AT_ONCE, PLANES, PROMPTS, Answerer


class Service:
    """A replica: POST {"prompt": text} to / for {"text": ...}; GET /stats."""

    def __init__(self, directory: str | None = None, planes: str = PLANES) -> None:
        self.answerer = Answerer(directory, planes)
        self.pages = self.pages_at_home()

    def pages_at_home(self) -> int:
        """Return how many pages the tiers have."""
        return sum(tier.home_pages for tier in self.answerer.vb.stats().tiers.values())

    def check_health(self) -> None:
        """Ray calls this every few seconds, and replaces a replica that raises."""
        if self.pages_at_home() < self.pages:
            raise RuntimeError(f"{self.pages_at_home()} of {self.pages} pages are left")

    def __del__(self) -> None:
        """Ray calls this before it ends a replica; nothing else of Python's end runs there."""
        self.answerer.vb.close()

    @serve.batch(max_batch_size=AT_ONCE, batch_wait_timeout_s=0.02)
    async def answer(self, texts: list[str]) -> list[str]:
        return await asyncio.to_thread(self.answerer.answers, texts)  # so that health is answered meanwhile

    async def __call__(self, request) -> dict:
        if request.url.path == "/stats":
            return self.answerer.vb.stats().to_dict()
        return {"text": await self.answer((await request.json())["prompt"])}


app = serve.deployment(Service, num_replicas=2, health_check_period_s=2).bind()


def ask(prompt: str, url: str = "http://localhost:8000/") -> str:
    """Return the answer of a replica."""
    request = urllib.request.Request(url, json.dumps({"prompt": prompt}).encode())
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())["text"]


# %%
if __name__ == "__main__":
    ray.init(log_to_driver=False, include_dashboard=False)
    serve.run(app)
    with ThreadPoolExecutor(16) as users:
        texts = list(users.map(ask, PROMPTS * 2))
    assert texts[: len(PROMPTS)] == texts[len(PROMPTS) :]
    print(*(f"{prompt!r}: {text!r}" for prompt, text in zip(PROMPTS, texts, strict=False)), sep="\n")
    with urllib.request.urlopen("http://localhost:8000/stats") as reply:
        print("tiers of a replica:", json.loads(reply.read())["tiers"])
    serve.shutdown()
    ray.shutdown()
