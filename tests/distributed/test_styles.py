"""Every style of transformers' parallel plans, in every format, with the outputs of the plan on decoded weights."""

from pathlib import Path

import pytest
import torch

import vbrt
from tests.distributed import style_cases as cases
from tests.distributed.ranks import Ranks
from tests.matrix import matrix
from tests.models import config

#: along which dimension a style cuts a weight, and into how many parts that are cut alike
STYLES = {
    "colwise": (0, 1),
    "colwise_gather_output": (0, 1),
    "packed_colwise": (0, 2),
    "rowwise": (1, 1),
    "rowwise_split_input": (1, 1),
    "replicate": None,
    "replicated_with_grad_allreduce": None,
    "mla_kv_a_proj": None,
}
FORMATS = ("exact", "dense", "nvfp4", "mxfp4", "nf4", "quantile")
LOSSLESS = ("exact", "dense")
EXPERTS = {"cut": {}, "spread": {"ep_size": True}, "sent": {"ep_size": True, "ep_implementation": "all_to_all"}}


def dtype_of(format: str) -> str:
    return "bfloat16" if format in LOSSLESS else "float32"


@pytest.fixture
def ranks(request: pytest.FixtureRequest, count: int) -> Ranks:
    return request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[count])


@matrix(style=tuple(STYLES), format=FORMATS, count=(2, 4))
def test_a_layer_of_every_style_and_format_gives_what_the_plan_gives_on_decoded_weights(
    ranks: Ranks, style: str, format: str, count: int
):
    for r in ranks(cases.one_layer, style=style, format=format, dtype=dtype_of(format)):
        assert r["cut"] == STYLES[style] and r["reads"] == (2, 0)
        assert r["equal"] or format not in LOSSLESS
        assert max(r["error"], r["error_with_grad"], r["error_of_grad"]) < 1e-6


@matrix(style=("colwise", "rowwise"), format=("nvfp4", "exact"))
def test_sizes_that_ranks_do_not_divide_leave_the_last_one_less(four_ranks: Ranks, style: str, format: str):
    shape = (250, 256) if style == "colwise" else (256, 448)
    for r in four_ranks(cases.one_layer, style=style, format=format, dtype=dtype_of(format), shape=shape):
        assert r["equal"] or format not in LOSSLESS
        assert max(r["error"], r["error_with_grad"], r["error_of_grad"]) < 1e-6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    """A model of routed experts on disk by format, and what one process decodes of its planes."""
    folder = tmp_path_factory.mktemp("experts")

    def at(format: str) -> tuple[Path, Path]:
        path, decoded = folder / format, folder / f"{format}-decoded"
        if not path.exists():
            model = cases.routed(getattr(torch, dtype_of(format)))
            model.save_pretrained(path)
            vb = vbrt.wrap(model, config(format)).materialize()
            values = {name: tensor.clone() for name, tensor in vb.state_dict().items()}
            model = vb.unwrap()
            model.load_state_dict(values)
            model.save_pretrained(decoded)
        return path, decoded

    return at


@pytest.mark.sample(2)
@matrix(how=EXPERTS, format=FORMATS, count=(2, 4), at_most=4)
def test_routed_experts_cut_or_spread_over_ranks_give_what_the_plan_gives_on_decoded_weights(
    ranks: Ranks, models, how: dict, format: str, count: int
):
    path, decoded = models(format)
    sizes = {name: count if value is True else value for name, value in how.items()}
    for r in ranks(cases.loaded, path=str(path), decoded=str(decoded), format=format, **sizes):
        assert r["cut"] == (-1 if how else 0, count) and r["reads"] == (1, 0)
        assert r["equal"] or format not in LOSSLESS
        # one process fits a codebook to the first expert and keeps it while it serves
        assert r["error"] < (0.02 if format == "quantile" else 2e-6)


@pytest.mark.parametrize(("count", "spread"), [(2, False), pytest.param(4, True, marks=pytest.mark.exhaustive)])
def test_each_rank_reads_its_part_of_the_files_and_a_share_of_what_is_read_ahead(
    ranks: Ranks, models, count: int, spread: bool
):
    path, _ = models("exact")
    file = next(path.glob("*.safetensors")).stat().st_size
    results = ranks(cases.read, path=str(path), **({"ep_size": count} if spread else {}))
    for r in results:
        again = 3 * 256 * 256 * 2  # of one expert, which is looked at before the others are read
        assert r["taken"] <= r["plain"] + again and r["plain"] < 1.4 * file / count, "parts, and what every rank has"
        assert 0 < r["ahead"] < 1.5 * file / count and r["swapped"] > 4
    assert sum(r["ahead"] for r in results) <= file
