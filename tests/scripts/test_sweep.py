"""A sample of the zoo: architectures chosen for how they break "swap nn.Linear". `scripts/sweep` runs all of them."""

from pathlib import Path

import pytest
import torch

from tests.zoo import zoo
from tests.zoo.bits import difference
from tests.zoo.checks import check

#: break what others of the sample break, or what tests/layers/experts breaks, in two seconds each
_LONG = {
    *(
        "dbrx",
        "gpt_oss",
        "jamba",
        "llama4_text",
        "longcat_flash",
        "mixtral",
        "muse_spark_text",
        "nemotron_h",
        "qwen2_moe",
    ),
    "step3p7",
}
#: tables that a model computes with: positions that it resizes
_READ_WHOLE = {"step3p7": ("vision_model.embeddings.position_embedding",)}
_SAMPLE = [
    pytest.param(kind, name, id=f"{kind}-{name}", marks=pytest.mark.exhaustive if name in _LONG else ())
    for kind, name in zoo.SAMPLE
]


@pytest.mark.parametrize(("kind", "name"), _SAMPLE)
def test_wrapped_outputs_equal_the_unwrapped_ones_bit_for_bit(kind: str, name: str, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums have one order
    try:
        result = check(kind, name, tmp_path)
    finally:
        torch.set_num_threads(threads)
    assert result.reason == "", f"does not run unwrapped: {result.reason}"
    assert result.failures == {}
    assert result.verdicts["dense-ssd"] == "ok"  # xlnet cannot run in bf16, wrapped or not
    assert result.swapped > 0
    assert (result.tables_used > 0) == (result.tables > 0), "no table or head in the tiers ran"
    assert result.decoded == _READ_WHOLE.get(name, ()), "a lookup decodes its table whole"
    assert result.misses > 0, "nothing came from the ssd, so nothing was tested"
    assert not list(tmp_path.rglob("*.page")), "page files are left behind"


def test_zoo_builds_the_same_model_twice() -> None:
    first, second = (zoo.forward(*zoo.build("causal", "llama")) for _ in range(2))
    assert difference(first, second) == ""


def test_difference_sees_one_bit_and_the_sign_of_zero() -> None:
    one = {"x": torch.tensor([1.0, 0.0])}
    assert "not bit-identical" in difference(one, {"x": torch.tensor([1.0, -0.0])})
    assert "not bit-identical" in difference(one, {"x": torch.nextafter(one["x"], torch.tensor(2.0))})
    assert "became" in difference(one, {"x": torch.tensor([1, 0])})
    assert difference(one, {"y": one["x"]}).startswith("outputs differ")
    assert difference({"x": torch.tensor(float("nan"))}, {"x": torch.tensor(float("nan"))}) == ""


def test_an_architecture_that_cannot_run_is_refused_with_its_reason() -> None:
    with pytest.raises(zoo.Unbuildable, match="no forward"):
        zoo.build("base", "bark")


def test_every_override_names_an_architecture() -> None:
    from transformers import CONFIG_MAPPING

    assert [name for name in zoo.OVERRIDES if name not in CONFIG_MAPPING] == []
