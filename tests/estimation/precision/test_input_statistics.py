"""`weights.calibrate`: which inputs meet which weight, what encoders make of them, and that a model is as it was."""

import json
import pickle

import pytest
import torch
from torch import nn

import vbrt
from tests.models import config, dtype_of, gpt2, llama, mlp, qwen3_moe
from vbrt.config import load_config
from vbrt.errors import ConfigError
from vbrt.estimation.precision.calibration_data import text_of
from vbrt.estimation.precision.input_statistics import input_statistics
from vbrt.estimation.precision.streamed_forward import lent, streamed
from vbrt.saves.convert.convert import convert
from vbrt.saves.load.sources import open_source

IDS = torch.randint(128, (5, 40), generator=torch.Generator().manual_seed(0))
CPU = torch.device("cpu")


@pytest.fixture
def ids(tmp_path):
    (tmp_path / "ids.json").write_text(json.dumps(IDS.tolist()))
    return str(tmp_path / "ids.json")


def inputs_of(model, asked):
    asked = load_config(asked)
    plan = vbrt.make_plan(model, asked)
    return input_statistics(model, plan.swaps, text_of(model, asked), device=CPU)


@pytest.mark.parametrize("make", [lambda: llama(tied=True), gpt2])
def test_squares_are_those_of_the_inputs_that_a_layer_is_called_with(make, ids):
    pytest.importorskip("transformers")
    model, seen = make(), {}
    found = inputs_of(model, config("nvfp4", calibrate=ids))
    for name, module in model.named_modules():
        if name in found:
            module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0].flatten(0, 1)}))
    model(IDS)
    assert len(found) == len(seen) > 7
    for name, (inputs,) in found.items():
        mean_K = seen[name].detach().square().mean(0)
        expected = (mean_K / mean_K.mean() + 0.05) / 1.05
        torch.testing.assert_close(inputs.squares[0], expected, rtol=1e-4, atol=1e-5)
        assert torch.allclose(inputs.moments.diagonal(dim1=1, dim2=2).flatten()[: len(mean_K)], 200 * mean_K, rtol=1e-4)


def test_an_expert_has_the_squares_of_its_own_tokens_and_one_without_those_of_its_layer(ids):
    pytest.importorskip("transformers")
    model, seen = qwen3_moe(dtype=torch.float32), {}
    name = "model.layers.0.mlp.experts"
    experts = model.get_submodule(name)
    with torch.no_grad():
        model.get_submodule("model.layers.0.mlp.gate").weight[7] = -9.0 * model.get_submodule(
            "model.layers.0.mlp.gate"
        ).weight[:7].mean(0)
    experts.register_forward_pre_hook(lambda _, args: seen.update(x=args[0].detach(), ids=args[1]))
    asked = config("nvfp4", calibrate=ids)
    up, down = (inputs.squares for inputs in inputs_of(model, asked)[name])
    assert up.shape == (8, 64) and down.shape == (8, experts.down_proj.shape[-1])
    assert experts.config._experts_implementation == "grouped_mm"
    model(IDS)
    sent = [seen["x"][(seen["ids"] == expert).any(-1)] for expert in range(8)]
    total = torch.cat(sent).square().mean(0)
    for expert, x_TK in enumerate(sent):
        mean = (x_TK.square().sum(0) + 32 * total) / (len(x_TK) + 32)
        torch.testing.assert_close(up[expert], (mean / mean.mean() + 0.05) / 1.05, rtol=1e-3, atol=1e-4)
    assert min(map(len, sent)) < max(map(len, sent)) and not torch.equal(down[0], down[1])


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [llama, lambda: qwen3_moe(dtype=torch.float32)])
def test_wrap_load_and_convert_give_the_same_planes_and_say_so(make, ids, tmp_path):
    pytest.importorskip("transformers")
    plain = config("nvfp4") | {"compute": {"backend": "reference"}}
    asked, model = plain | {"weights": {**plain["weights"], "calibrate": ids}}, make()
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    vb = vbrt.wrap(model, asked)
    assert all(p.data_ptr() == before[n][0] and torch.equal(p, before[n][1]) for n, p in model.named_parameters())
    unpickled = pickle.loads(pickle.dumps(vb))
    out = vb(IDS).logits
    torch.testing.assert_close(unpickled(IDS).logits, out, rtol=1e-4, atol=1e-5)  # by other kernels
    assert all(inputs.moments is None for swap in vb.plan.swaps for inputs in swap.inputs)
    assert not torch.equal(out, vbrt.wrap(make(), plain)(IDS).logits)
    assert {layer.format for layer in vb.stats().layers.values()} == {"nvfp4, calibrated"}
    assert any("encoded by the inputs that 200 tokens of" in note for note in vb.plan.notes)
    make().save_pretrained(tmp_path / "dense")
    with torch.device("meta"):
        models = [make() for _ in range(3)]
    loaded = vbrt.load(tmp_path / "dense", models[0], asked)
    assert torch.equal(loaded(IDS).logits, out) and loaded.plan.notes == vb.plan.notes
    source = open_source(tmp_path / "dense")
    convert(source, models[1], source.config(asked, {}), tmp_path / "saved")
    saved = vbrt.load(tmp_path / "saved", models[2])
    assert torch.equal(saved(IDS).logits, out)


def test_a_save_keeps_its_planes_and_refuses_another_text(ids, tmp_path):
    pytest.importorskip("transformers")
    vbrt.wrap(llama(), config("nvfp4", calibrate=ids)).save(tmp_path / "saved")
    with torch.device("meta"):
        models = [llama(), llama()]
    with pytest.raises(ConfigError, match=r'weights.calibrate = "other.txt", and .* has planes, which are not'):
        vbrt.load(tmp_path / "saved", models[0], config("nvfp4", calibrate="other.txt"))
    assert vbrt.load(tmp_path / "saved", models[1], config("nvfp4")).plan.swaps[0].inputs == ()


def test_automatic_precision_measures_calibrated_layers_on_the_same_text(ids):
    pytest.importorskip("transformers")
    plain = vbrt.choose_precision(llama(), IDS, "15 bits", config("nvfp4"))
    choice = vbrt.choose_precision(llama(), None, "15 bits", config("nvfp4", calibrate=ids))
    assert not choice.own and choice.config.weights.calibrate == ids
    assert [a.loss for a in plain.layers] != [b.loss for b in choice.layers]
    auto = vbrt.wrap(llama(), config("auto", budget="15 bits", calibrate=ids))
    held = {layer.format for layer in auto.stats().layers.values()}
    assert held == {"nvfp4, calibrated", "mxint8, calibrated", "dense"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[[1, 2], [900]]", "token ids from 1 to 900; expected 0 to 127"),
        ("[]", "it has no tokens"),
        ('{"a": 1}', "expected a list of token ids, or a list of such lists"),
        ("[1,", "not valid JSON"),
        (None, "cannot be read: .*expected a text, a .json with token ids, or"),
    ],
)
def test_a_text_that_does_not_do_is_named_before_anything_is_swapped(content, words, tmp_path):
    pytest.importorskip("transformers")
    path, model = tmp_path / "ids.json", llama()
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"weights.calibrate = .*{words}"):
        vbrt.wrap(model, config("nvfp4", calibrate=str(path)))
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear


def test_what_cannot_be_calibrated_is_refused_by_name(ids, tmp_path):
    (tmp_path / "a.txt").write_text("the sea")
    with pytest.raises(ConfigError, match="a text needs a tokenizer, and Sequential came from no files"):
        vbrt.wrap(mlp(), config("nvfp4", calibrate=str(tmp_path / "a.txt")))
    with pytest.raises(ConfigError, match="Sequential did not run on token ids"):
        vbrt.wrap(mlp(), config("nvfp4", calibrate=ids))
    with pytest.raises(ConfigError, match=r"weights.calibrate = .*no weight is encoded"):
        load_config("dense", weights={"calibrate": ids})
    with pytest.raises(ConfigError, match=r'mode = "train" with weights.calibrate'):
        load_config("train", weights={"format": "nvfp4", "calibrate": ids})


def test_a_model_has_its_own_tensors_back_after_an_error_in_the_middle():
    model = mlp(dtype=dtype_of("exact"))
    own, weight = model[2].weight, torch.ones(64, 64, dtype=torch.bfloat16)
    x = torch.ones(1, 64, dtype=torch.bfloat16)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model[4].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt), streamed(model, CPU, {("2", "weight"): lambda: weight}):
        assert model[2](x)[0, 0] == 64 + model[2].bias[0] and model[2].weight is own
        model(x)
    hook.remove()
    assert model[2].weight is own and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_weights_that_a_budget_has_no_room_for_stay_where_they_are_until_their_module_runs():
    """The other device is meta: nothing is computed, but everything is moved."""
    model, meta = mlp(), torch.device("meta")
    weights = [module.weight for module in model[::2]]
    before, seen = [weight.data_ptr() for weight in weights], []
    with lent(model, meta, 3 * weights[0].nbytes, weights):
        model[10].register_forward_pre_hook(lambda *_: seen.extend(module.weight.device.type for module in model[::2]))
        model(torch.empty(1, 64, device=meta))
        assert model[10].weight is weights[5] and model[0].weight.is_meta
    assert seen == ["meta"] * 3 + ["cpu"] * 2 + ["meta"] and all(
        m.weight is w for m, w in zip(model[::2], weights, strict=True)
    )
    assert [weight.data_ptr() for weight in weights] == before
