"""Objects that hold models: one stack for all of them, everything else as it was. The libraries' own are in
tests/integrations/test_pipelines.py."""

import copy

import pytest
import torch
from torch import nn

import vbrt
from tests.models import config, mlp
from vbrt.errors import ConfigError, WrapError
from vbrt.layers import VBLinear
from vbrt.model.live_sampling import runtime_now
from vbrt.wrapper.pipeline_kinds import CallPhases, holder_kind_of

PAGE = 16384  # of a dense layer of `mlp`


class Autoencoder(nn.Module):
    """Called by `decode`, before which its library calls a hook, as diffusers does."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = mlp(depth=1)

    def decode(self, x):
        if hasattr(self, "_hf_hook"):
            self._hf_hook.pre_forward(self)
        return self.decoder(x)


class DiffusionPipeline:
    """What wrap() looks at in a pipeline of diffusers."""

    def __init__(self):
        self.text_encoder, self.text_encoder_2 = mlp(depth=2), mlp(depth=3)
        self.transformer, self.vae = mlp(depth=4), Autoencoder()
        self.scheduler, self.image_encoder = object(), None

    @property
    def components(self):
        return dict(vars(self))

    @torch.no_grad()
    def __call__(self, x, steps=4):
        for _ in "prompt", "negative":
            x = self.text_encoder_2(self.text_encoder(x))
        for _ in range(steps):
            x = self.transformer(x)
        return self.vae.decode(x)

    def to(self, *args):
        return self

    def enable_model_cpu_offload(self):
        return "offloaded"


DiffusionPipeline.__module__ = "diffusers.pipelines.pipeline_utils"


class Flux(DiffusionPipeline):
    pass


def streamed(path, pages):
    return config("dense") | {
        "tiers": {
            "gpu": {"enabled": False},
            "cpu": {"budget": pages * PAGE},
            "ssd": {"enabled": True, "path": str(path)},
        }
    }


def layers_of(pipeline):
    models = [part for part in pipeline.components.values() if isinstance(part, nn.Module)]
    return [module for model in models for module in model.modules() if isinstance(module, nn.Linear)]


def test_text_encoders_give_way_to_the_model_that_takes_the_steps(tmp_path):
    x, pipeline = torch.randn(2, 64), Flux()
    want = pipeline(x)
    vb = vbrt.wrap(pipeline, streamed(tmp_path, pages=6))  # of 10
    for _ in range(3):
        assert torch.equal(vb(x), want)
    phases = vb.stats().phases
    assert set(phases) == {
        "text_encoder/prompt",
        "text_encoder_2/prompt",
        "text_encoder/prompt-2",
        "text_encoder_2/prompt-2",
        "transformer/step",
        "vae/image",
    }
    assert phases["transformer/step"].misses <= 3 * 4 and phases["vae/image"].passes == 3  # of 3 * 16
    now = runtime_now(vb.runtime)
    assert (now.work["steps"], now.models["transformer"]) == (phases["transformer/step"].passes,) * 2
    assert now.work["decodes"] == 3 and now.work["images"] == now.work["tokens written"] == 0
    assert vb.stats().tiers["cpu"].peak_bytes <= 6 * PAGE and len(vb.stats().layers) == 10
    assert all(model.runtime is vb.runtime for model in vb.models.values()) and len(vb.models) == 4
    vb.close()


def test_a_wrapped_pipeline_is_the_pipeline_but_for_what_tiers_do():
    pipeline = Flux()
    vb = vbrt.wrap(pipeline, config("dense"))
    vb.scheduler = scheduler = object()
    assert pipeline.scheduler is scheduler and vb.image_encoder is None and vb.transformer is pipeline.transformer
    assert vb.to("cpu") is vb and "enable_model_cpu_offload" in dir(vb) and vb.lossless
    with pytest.raises(WrapError, match=r"Flux\.enable_model_cpu_offload: tiers do that"):
        vb.enable_model_cpu_offload()
    with pytest.raises(WrapError, match=r"vb\.transformer is a wrapped model"):
        vb.transformer = mlp()
    with pytest.raises(WrapError, match=r"vb\.runtime belongs to the wrapper"):
        vb.runtime = None
    with pytest.raises(WrapError, match="wrapped already"):
        vbrt.wrap(vb)
    with pytest.raises(WrapError, match="copies and pickles"):
        copy.copy(vb)
    assert not hasattr(vb, "unheard_of") and not hasattr(vb, "_all_hooks")


def test_unwrap_gives_the_pipeline_back_with_dense_models():
    x, pipeline = torch.randn(2, 64), Flux()
    want, vb = pipeline(x), vbrt.wrap(pipeline, config("dense"))
    assert torch.equal(vb(x), want) and all(isinstance(layer, VBLinear) for layer in layers_of(pipeline))
    assert vb.unwrap() is pipeline and torch.equal(pipeline(x), want) and not hasattr(pipeline.vae, "_hf_hook")
    assert not any(isinstance(layer, VBLinear) for layer in layers_of(pipeline))
    assert vb.enable_model_cpu_offload() == "offloaded" and vb.stack.closed
    with pytest.raises(WrapError, match="closed or unwrapped"):
        vb(x)


def test_budget_and_timeline_are_those_of_all_models(tmp_path):
    x, vb = torch.randn(2, 64), vbrt.wrap(Flux(), streamed(tmp_path, pages=12))
    want = vb(x)
    assert vb.set_budget("cpu", 3 * PAGE) == 3 * PAGE
    with vb.timeline(tmp_path / "run.json") as recorder, vb.phase("other"):
        assert torch.equal(vb(x), want)
    assert {name.partition("/")[0] for name in recorder.timeline.totals.layers} == set(vb.models)
    assert list(vb.models["transformer"].stats().timeline.layers) == ["0", "2", "4", "6"]
    assert vb.stats().phases["transformer/other"].passes == 4
    assert "pages on cpu: " in str(vb.stats(verbose=True)) and "pages on cpu: " not in str(vb.stats())
    vb.close()


def test_if_one_model_cannot_be_wrapped_all_are_as_they_were(tmp_path):
    x, pipeline = torch.randn(2, 64), Flux()
    want = pipeline(x)
    pipeline.transformer[0].weight.data[0, 0] = want.new_tensor(1.0)
    pipeline.huge = nn.Sequential(nn.Linear(512, 512))
    with pytest.raises(ConfigError, match="budget"):
        vbrt.wrap(pipeline, streamed(tmp_path, pages=6))
    with pytest.raises(ConfigError, match='mode = "train" for text_encoder'):
        vbrt.wrap(pipeline, mode="train")
    assert not any(isinstance(layer, VBLinear) for layer in layers_of(pipeline))
    assert not any(model._forward_pre_hooks for model in (pipeline.transformer, pipeline.huge))


def test_what_is_wrapped_already_brings_the_tiers_of_the_pipeline():
    pipeline = Flux()
    one = vbrt.wrap(pipeline.transformer, config("dense"))
    vb = vbrt.wrap(pipeline, {"weights": config("dense")["weights"]})
    assert vb.runtime is one.runtime and len(vb.models) == 4
    second = Flux()
    second.transformer = pipeline.transformer
    two = vbrt.wrap(second.vae, config("dense"))
    with pytest.raises(WrapError, match=r"wrap\(\): \.vae is wrapped already, with tiers of its own"):
        vbrt.wrap(second, {"weights": config("dense")["weights"]})
    two.close()
    vb.close()


class AlignDevicesHook:
    pass


def test_models_that_something_else_moves_are_refused_by_name():
    pipeline = Flux()
    pipeline.transformer[2]._hf_hook = AlignDevicesHook()
    with pytest.raises(WrapError, match=r"Flux\.transformer: AlignDevicesHook of accelerate moves this model already"):
        vbrt.wrap(pipeline)
    del pipeline.transformer[2]._hf_hook
    vbrt.wrap(pipeline.text_encoder[0], config("dense"))
    with pytest.raises(WrapError, match=r"Flux\.text_encoder: a part of this model is wrapped already"):
        vbrt.wrap(pipeline)


class Engine:
    def __init__(self, **parts):
        self.name = "engine"
        vars(self).update(parts)

    def __call__(self, x):
        return self.model(x)


def test_the_one_module_of_any_object_is_found_and_of_several_it_is_said_which():
    x, model = torch.randn(2, 64), mlp()
    with torch.no_grad():
        want = model(x)
        vb = vbrt.wrap(Engine(model=model, same=model), config("dense"))
        assert torch.equal(vb(x), want) and list(vb.models) == ["model"] and vb.name == "engine"
    with pytest.raises(WrapError, match=r"Engine, which holds 2 modules: \.model \(Sequential\), \.draft \(Linear\)"):
        vbrt.wrap(Engine(model=mlp(), draft=nn.Linear(2, 2)))
    with pytest.raises(WrapError, match=r"Engine; expected a torch\.nn\.Module, or an object that has one"):
        vbrt.wrap(Engine())
    with pytest.raises(WrapError, match=r"wrap\(\) got int"):
        vbrt.wrap(3)


def test_only_runs_between_steps_are_numbered():
    phases = CallPhases(holder_kind_of(Flux()))
    names = ["text_encoder", "text_encoder", "text_encoder_2", "text_encoder", "unet", "unet", "text_encoder"]
    assert [phases.name(name, "prompt") for name in names] == [
        *("prompt", "prompt", "prompt", "prompt-2", "step", "step", "prompt")
    ]
