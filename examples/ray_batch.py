# %% [markdown]
# # Ray Data: a file of answers, by the actors of a cluster
#
# Two actors, each with a wrapped model, answer batches of prompts. Processes of one machine have the planes in memory
# once (`tiers.cpu.path`). Where an actor or its node dies, Ray has another one redo its batch. This process alone
# writes the answers, each once; called again, it goes on with what is missing.
#
#     python examples/ray_batch.py out.jsonl [DIRECTORY]
#
# DIRECTORY is one of transformers, or what `vbrt convert` wrote; without it a small trained model answers. Actors take
# the GPUs of the cluster, one each, if it has some; that has not been tried yet.

# %%
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from transformers import AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

import vbrt

ACTORS, AT_ONCE, NEW_TOKENS = 2, 4, 16
PLANES = "/dev/shm/vbrt-ray"  # in the memory of each machine
PROMPTS = [
    "def main(",
    "class Reader:\n",
    "import os\n",
    "for line in",
    "return sum(",
    "if not ",
    "with open(",
    "try:\n",
]


class Bytes:
    """The tokenizer of the small model."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


class Answerer:
    """An actor: a wrapped model, called with a batch of rows."""

    def __init__(self, directory: str | None = None, planes: str = PLANES) -> None:
        tiers = {"cpu": {"path": planes}} if sys.platform == "linux" else {}
        if directory is None:
            import small

            self.tokenizer: Any = Bytes()
            self.vb = vbrt.wrap(small.language_model(), "fp4", tiers=tiers)
        else:
            self.tokenizer = AutoTokenizer.from_pretrained(directory)
            self.vb = vbrt.from_pretrained(directory, tiers=tiers)
        self.vb.materialize()

    def __call__(self, rows: dict) -> dict:
        return {"id": rows["id"], "text": self.answers([str(text) for text in rows["prompt"]])}

    def answers(self, texts: list[str]) -> list[str]:
        """Continue all texts at once, greedily."""
        prompts = [self.tokenizer.encode(text) for text in texts]
        answers = self.vb.generate_batch(
            prompts,
            generation_config=GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=256,
                num_blocks=sum(-(-(len(ids) + NEW_TOKENS) // 256) for ids in prompts),
                max_batch_tokens=512,
                use_cuda_graph=False,
            ),
        )
        return [self.tokenizer.decode(answer.generated_tokens) for answer in answers.values()]


def answer(prompts: Mapping[str, str], out: Path, directory: str | None = None, actor: type = Answerer) -> None:
    """Append a line to `out` for each prompt that has none there yet."""
    done = {json.loads(line)["id"] for line in out.read_text().splitlines()} if out.exists() else set()
    left = [{"id": name, "prompt": text} for name, text in prompts.items() if name not in done]
    if not left:
        return
    answers = ray.data.from_items(left).map_batches(
        actor,
        fn_constructor_args=(directory,),
        batch_size=AT_ONCE,
        compute=ray.data.ActorPoolStrategy(size=ACTORS),
        num_gpus=1 if ray.cluster_resources().get("GPU") else 0,
    )
    with out.open("a") as file:
        for row in answers.iter_rows():
            file.write(json.dumps({"id": row["id"], "text": row["text"]}) + "\n")
            file.flush()


# %%
if __name__ == "__main__":
    ray.init(log_to_driver=False, include_dashboard=False)  # of RAY_ADDRESS, or a cluster of this machine
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "out.jsonl")
    answer({str(number): text for number, text in enumerate(PROMPTS)}, out, *sys.argv[2:3])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(line["id"] for line in lines) == sorted(str(number) for number in range(len(PROMPTS)))
    print(*(f"{line['id']}: {line['text']!r}" for line in lines), sep="\n")
    ray.shutdown()
