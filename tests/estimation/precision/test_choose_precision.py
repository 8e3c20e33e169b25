"""`vbrt.choose_precision` and `weights.formats`: what is chosen, what it costs, and that nothing changes on the way."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import vbrt
from tests.models import TOKENS, config, llama, mlp, wrap
from vbrt.config import VBConfig, load_config
from vbrt.config.toml_text import toml_text
from vbrt.errors import ArgumentError, ConfigError, WrapError
from vbrt.estimation.precision.choose_precision import confirmed
from vbrt.estimation.precision.knapsack import least_loss
from vbrt.estimation.precision.precision_report import Way
from vbrt.estimation.precision.sensitivity import batches_of, rounded

X = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(1))


def uneven() -> nn.Sequential:
    """An mlp whose third layer loses most in 4 bits: the others have weights of about one size."""
    model = mlp(depth=4)
    with torch.no_grad():
        for at in (0, 2, 6):
            model[at].weight.copy_(model[at].weight.sign() / 8 + model[at].weight / 50)
    return model


def test_the_last_pattern_that_matches_says_how_a_layer_is_held_through_toml_and_a_save(tmp_path):
    model = mlp(dtype=torch.bfloat16)
    asked = load_config(config("nvfp4", formats={"*": "dense", "[24]": "exact", "4": "mxfp4", "nothing.*": "nf4"}))
    (tmp_path / "a.toml").write_text(toml_text(asked))
    vb = vbrt.wrap(model, VBConfig.from_toml(tmp_path / "a.toml"))
    held = {swap.name: (swap.format, swap.fine) for swap in vb.plan.swaps}
    dense = ("dense", "none")
    assert held == dict.fromkeys(["0", "6", "8", "10"], dense) | {"2": ("nvfp4", "exact"), "4": ("mxfp4", "none")}
    assert any("'nothing.*', which no swapped layer matches" in note for note in vb.plan.notes)
    x = X.bfloat16()
    expected = vb(x)
    vb.save(tmp_path / "saved")
    again = vbrt.load(tmp_path / "saved", mlp(dtype=torch.bfloat16))
    assert {swap.name: (swap.format, swap.fine) for swap in again.plan.swaps} == held
    assert torch.equal(again(x), expected)
    other = config("nvfp4", formats={"*": "nf4"})
    with pytest.raises(
        ConfigError, match=r"weights.formats = \{'\*': 'nf4'\}, and .*saved was saved with \{'\*': 'dense'"
    ):
        vbrt.load(tmp_path / "saved", mlp(dtype=torch.bfloat16), other)
    asked = config("nvfp4", formats=dict(vb.settings.weights.formats))
    assert torch.equal(vbrt.load(tmp_path / "saved", mlp(dtype=torch.bfloat16), asked)(x), expected)


def test_the_layer_that_loses_most_takes_more_bytes_first_and_the_model_is_as_it_was():
    model = uneven().train()
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    choice = vbrt.choose_precision(model, X, "10 bits", config("nvfp4"))
    assert model.training and all(
        p.data_ptr() == before[n][0] and torch.equal(p, before[n][1]) for n, p in model.named_parameters()
    )
    assert max(choice.layers, key=lambda layer: layer.loss).name == "4"
    assert {layer.name: layer.held for layer in choice.layers if layer.chosen} == {"4": "mxint8"}
    assert choice.loss == pytest.approx(choice.loss_in_4_bits - sum(a.loss - a.left for a in choice.layers if a.chosen))
    assert choice.nbytes == vbrt.make_plan(model, choice.config).page_bytes <= choice.budget_bytes
    ranked = [line.split()[0] for line in str(choice).splitlines()[5:]]
    assert ranked == [layer.name for layer in sorted(choice.layers, key=lambda layer: -layer.loss_per_byte)]
    assert [layer.lossless for layer in choice.within("32 bits").layers] == [True] * 4
    assert choice.within("10 bits") == choice


def ways(*kinds: tuple[str, int, float]) -> vbrt.LayerPrecision:
    every = tuple(Way(held, nbytes, loss, lossless=not loss) for held, nbytes, loss in kinds)
    return vbrt.LayerPrecision(SimpleNamespace(name="a"), 1, every)


def test_a_way_that_saves_little_for_its_bytes_is_passed_over():
    step = ways(("nvfp4", 100, 1.0), ("mxint8", 200, 0.01), ("exact", 300, 0.0))
    assert [at for _, at in step.steps()] == [1, 2] and step.loss_per_byte == 0.99 / 100
    assert [at for _, at in ways(("nvfp4", 100, 1.0), ("mxint8", 290, 0.9), ("dense", 300, 0.0)).steps()] == [2]
    assert not list(ways(("nvfp4", 100, 0.0), ("mxint8", 200, 0.1), ("exact", 300, 0.0)).steps())


def test_the_sum_of_losses_is_the_least_that_fits_and_not_what_the_best_byte_leads_to(monkeypatch):
    items = [[(0, 1.0), (10, 0.5)], [(0, 1.0), (7, 0.6)], [(0, 1.0), (7, 0.62), (12, 0.1)]]  # best a byte: the last
    assert least_loss([[(0, 1.0), (6, 0.3)], *([[(0, 1.0), (5, 0.45)]] * 2)], 10) == [0, 1, 1]
    for room in range(31):
        held = least_loss(items, room)
        every = (c for c in itertools.product(*(range(len(ways)) for ways in items)) if _sizes(items, c) <= room)
        assert _sizes(items, held) <= room
        assert _losses(items, held) == pytest.approx(min(_losses(items, c) for c in every)), room
    monkeypatch.setattr(
        "vbrt.estimation.precision.knapsack._CELLS", 3
    )  # bytes in coarse units, and still within the room
    assert all(_sizes(items, least_loss(items, room)) <= room for room in range(31))
    assert least_loss(items, 29) == [1, 1, 2]


def _sizes(items, held) -> int:
    return sum(ways[at][0] for ways, at in zip(items, held, strict=True))


def _losses(items, held) -> float:
    return sum(ways[at][1] for ways, at in zip(items, held, strict=True))


def test_of_two_choices_the_one_is_taken_that_loses_less_as_a_whole():
    model = uneven()
    own = [p.detach().clone() for p in model.parameters()]
    choice = vbrt.choose_precision(model, X, "10 bits", config("nvfp4"))
    batches = batches_of(X, torch.device("cpu"))
    proxy = [{"nvfp4": float(layer.name == "0"), "mxint8": 0.0} for layer in choice.layers]
    worse = confirmed(choice, model, batches, proxy)
    assert worse.config == choice.config and [method for method, _ in worse.together] == ["kl", "hessian"]
    wrong = choice.by_losses(proxy)
    assert {layer.name: layer.held for layer in wrong.layers if layer.chosen} == {"0": "mxint8"}
    better = confirmed(wrong, model, batches, [{way.held: way.loss for way in each.ways} for each in choice.layers])
    assert better.config == choice.config and better.together[0] == ("hessian", worse.together[0][1])
    assert "as hessian chooses, measured together; " in str(better) and not better.within("10 bits").together
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), own, strict=True))
    assert confirmed(choice, model, batches, None) is choice


def test_what_was_measured_is_what_the_wrapped_model_computes(tmp_path, plain_torch):
    model = uneven()
    choice = vbrt.choose_precision(model, X, "15 bits", config("nvfp4"))
    reference = model(X).log_softmax(-1)
    (tmp_path / "my.toml").write_text(choice.to_toml())
    (alone,) = [layer for layer in choice.layers if layer.name == "2"]
    vb = wrap(model, "dense", formats={"2": "nvfp4"})
    kl = nn.functional.kl_div(vb(X).log_softmax(-1), reference, reduction="sum", log_target=True) / 18
    assert kl.item() == pytest.approx(alone.loss, rel=1e-3)
    assert VBConfig.from_toml(tmp_path / "my.toml") == choice.config


def test_the_diagonal_hessian_ranks_by_squared_inputs_times_squared_errors():
    model = uneven()
    choice = vbrt.choose_precision(model, X, "15 bits", config("nvfp4"), method="hessian")
    (first, *_) = choice.layers
    own = model[0].weight.detach().clone()
    with rounded(model, first.swap, "nvfp4"):
        error = model[0].weight.detach() - own
    expected = (error.square() @ X.flatten(0, 1).square().mean(0)).sum()
    assert first.loss == pytest.approx(expected.item(), rel=1e-4)
    assert not model[0]._forward_pre_hooks


def test_experts_and_embeddings_are_measured_and_named_layers_stay():
    pytest.importorskip("transformers")
    from tests.models import qwen3_moe

    model = qwen3_moe()
    asked = config("nvfp4", embeddings=True, formats={"*.q_proj": "dense"})
    choice = vbrt.choose_precision(model, TOKENS, "10 bits", asked)
    kinds = {layer.swap.kind for layer in choice.layers if layer.loss > 0}
    assert len(kinds) == 3 and "Linear" in kinds and "Embedding" in kinds
    assert not choice.own and not any("q_proj" in layer.name for layer in choice.layers)
    assert choice.nbytes == vbrt.make_plan(model, choice.config).page_bytes <= choice.budget_bytes
    with pytest.raises(ArgumentError, match="knows linear layers only"):
        vbrt.choose_precision(model, TOKENS, "10 bits", asked, method="hessian")


def test_a_weight_comes_back_after_an_interrupt(monkeypatch):
    model, own = uneven(), uneven()[0].weight
    calls = iter(range(100))

    def interrupted(*_: object) -> None:
        if next(calls) == 3:
            raise KeyboardInterrupt

    model[6].register_forward_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        vbrt.choose_precision(model, X, "15 bits", config("nvfp4"))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), uneven().parameters(), strict=True))
    assert torch.equal(model[0].weight, own)


def test_auto_wraps_a_model_that_writes_text_and_is_refused_by_name_elsewhere():
    pytest.importorskip("transformers")
    auto = config("auto", budget="15 bits")
    vb = vbrt.wrap(llama(), auto)
    assert {swap.format for swap in vb.plan.swaps} == {"nvfp4", "mxint8", "dense"}
    assert vb.plan.page_bytes * 8 <= 15 * sum(swap.site.parameters for swap in vb.plan.swaps)
    with pytest.raises(ConfigError, match=r'weights.format = "auto" measures samples .*give `sequences`'):
        vbrt.wrap(mlp(), auto)
    with pytest.raises(ConfigError, match=r'"auto" is settled by running the model .*vbrt precision'):
        vbrt.make_plan(mlp(), load_config(auto))


def test_auto_begins_with_3_bits_where_4_do_not_fit():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))).eval()
    x, auto = torch.randn(2, 8, 256), config("auto", budget="4 bits")
    choice = vbrt.choose_precision(model, x, config=auto)
    assert [way.held for way in choice.layers[0].ways] == ["t3", "nvfp4", "mxint8", "dense"]
    assert {layer.held for layer in choice.layers} == {"t3", "nvfp4"} and choice.loss < choice.loss_in_4_bits
    assert vbrt.make_plan(model, choice.config).page_bytes == choice.nbytes <= choice.budget_bytes
    assert "the others t3" in str(choice) and "with all in 3 bits" in str(choice)
    assert vbrt.choose_precision(model, x, "5 bits", auto).config.weights.format == "nvfp4"
    with pytest.raises(ConfigError, match="in 3 bits the layers take"):
        vbrt.choose_precision(model, x, "3 bits", auto)


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"budget": "3 bits"}, ConfigError, r"in 4 bits the layers take .* KiB too little"),
        ({"budget": "40%"}, ConfigError, 'budget = "40%"; expected bits a weight, e.g. "5 bits", or bytes'),
        ({"budget": None}, ConfigError, "weights.budget = None; expected bits a weight"),
        ({"sequences": []}, ArgumentError, "sequences is empty"),
        ({"sequences": [1, 2]}, ArgumentError, "sequences has the number 1; expected sequences"),
        ({"method": "fast"}, ArgumentError, 'method = \'fast\'; expected "kl" or "hessian"'),
        ({"weights": {"format": "dense"}}, ConfigError, 'weights.format = "dense"; expected a format of 3 or 4 bits'),
        ({"weights": {"format": "mxint8"}}, ConfigError, 'weights.format = "mxint8"; expected a format of 3 or 4 bits'),
    ],
)
def test_wrong_use_is_named(asked, error, words):
    with pytest.raises(error, match=words):
        vbrt.choose_precision(mlp(), **{"sequences": X, "budget": "8 bits", "config": config("nvfp4"), **asked})


def test_a_budget_that_is_too_small_is_refused_before_anything_is_measured():
    model = mlp()
    model.register_forward_pre_hook(lambda *_: pytest.fail("it runs"))
    with pytest.raises(ConfigError, match="KiB too little"):
        vbrt.choose_precision(model, X, "3 bits", config("nvfp4"))


def test_nan_is_an_error_and_no_loss_of_nothing():
    model = mlp()
    with pytest.raises(ArgumentError, match="returns NaN or Inf for these sequences"):
        vbrt.choose_precision(model, X * float("nan"), "15 bits", config("nvfp4"))
    model[2].weight.data[0, 0] = float("nan")
    with pytest.raises(vbrt.FormatError, match=r"^2: nvfp4: .* 1 NaN .*weights.exclude"):
        with rounded(model, vbrt.make_plan(model, load_config(config("nvfp4"))).swaps[1], "nvfp4"):
            pass


def test_wrapped_models_and_models_without_data_are_refused():
    with pytest.raises(WrapError, match="VB layer already"):
        vbrt.choose_precision(wrap(mlp(), "dense").module, X, "8 bits")
    with pytest.raises(WrapError, match="meta device"):
        vbrt.choose_precision(mlp().to("meta"), X, "8 bits")
