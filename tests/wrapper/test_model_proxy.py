"""What a wrapper is to the rest of the world: attributes, hooks, names, protocols and copies are its model's."""

import copy
import inspect
import pickle
from collections.abc import Iterable, Sized

import pytest
import torch
from torch import nn

import vbrt
from tests.matrix import matrix
from tests.models import TOKENS, config, llama, mlp, wrap
from vbrt.errors import WrapError
from vbrt.wrapper.model_proxy import Facade

X = torch.linspace(-1, 1, 128).reshape(2, 64)


def train(model):
    return vbrt.wrap(model, config("nvfp4"), mode="train")


# -- attributes --------------------------------------------------------------------------------------------------------


def test_what_is_set_on_a_wrapper_is_the_models():
    vb = wrap(llama())
    ours, head, norm = copy.deepcopy(vb.generation_config), nn.Linear(64, 128, bias=False), nn.Parameter(torch.ones(3))
    ours.max_new_tokens = 3
    vb.generation_config, vb.lm_head, vb.gain, vb.note = ours, head, norm, "mine"
    model = vb.module
    assert (model.generation_config, model.lm_head, model.gain, model.note) == (ours, head, norm, "mine")
    assert vb.generation_config is ours and vb.lm_head is head and vb.note == "mine"
    assert vb.generate(TOKENS, do_sample=False).shape[1] == TOKENS.shape[1] + 3
    assert torch.equal(vb(TOKENS).logits, head(model.model(TOKENS).last_hidden_state))
    del vb.gain, vb.note
    assert not hasattr(model, "gain") and not hasattr(model, "note") and not hasattr(vb, "note")
    with pytest.raises(AttributeError, match="nonsense"):
        del vb.nonsense


def test_modules_parameters_and_buffers_that_are_registered_are_the_models():
    vb = wrap(mlp())
    vb.register_buffer("scale", torch.ones(2), persistent=False)
    vb.register_parameter("gain", nn.Parameter(torch.ones(2)))
    vb.add_module("extra", nn.ReLU())
    vb.register_module("other", nn.ReLU())
    assert {"scale"} == dict(vb.module.named_buffers()).keys() and "gain" in vb.state_dict()
    assert vb.module.extra is vb.extra and vb.other is vb.module.other and "scale" not in vb.state_dict()


def test_the_wrappers_own_attributes_stay_its_own():
    model = llama()
    vb = wrap(model)
    assert vb.config is model.config
    assert vb.module is model
    for name in ("module", "plan", "settings", "stack", "stats", "save"):
        with pytest.raises(WrapError, match=rf"vb\.{name} belongs to the wrapper.*vb\.vbrt\.module\.{name}"):
            setattr(vb, name, mlp())
        with pytest.raises(WrapError, match=rf"vb\.{name} belongs to the wrapper"):
            delattr(vb, name)
    with pytest.raises(AttributeError):
        vb.device = "cpu"
    vb.forward = lambda *args, **kwargs: "replaced"
    assert vb(TOKENS) == "replaced" and model(TOKENS).logits.isfinite().all()
    del vb.forward
    assert vb(TOKENS).logits.isfinite().all()
    assert not {"runtime", "settings", "plan", "stack", "_attachment"} & vars(model).keys()


def test_a_whole_life_leaves_nothing_on_the_model(tmp_path):
    model = llama()
    before = set(vars(model))
    vb = wrap(model)
    vb(TOKENS)
    vb.set_budget("cpu", "1GiB")
    with vb.timeline(tmp_path / "timeline.json"):
        vb(TOKENS)
    vb.save(tmp_path / "saved")
    vb.stats()
    assert vb.unwrap() is model and set(vars(model)) == before and not model._forward_pre_hooks


@pytest.mark.parametrize("make", [wrap, train])
def test_training_and_eval_mode_are_the_models(make):
    vb = make(mlp().eval())
    assert vb.training is False
    vb.module.train()
    assert vb.training is True
    vb.eval()
    assert (vb.training, vb.module.training, vb.module[0].training) == (False, False, False)
    vb.train(vb.training)  # what leaves a block in which a model was in eval mode
    assert not vb.module.training


@pytest.fixture
def accelerate_state():
    """Let a test choose accelerate's precision, which a process has once; Trainer chooses one, too."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate_prepares_a_wrapper_and_hands_it_back_as_it_was(accelerate_state):
    from accelerate import Accelerator

    vb, plain = wrap(llama(dtype=torch.float32)), llama(dtype=torch.float32)
    before, accelerator = set(vars(vb.module)), Accelerator(mixed_precision="bf16", cpu=True)
    prepared = [accelerator.prepare(model) for model in (plain, vb)]
    assert torch.equal(*(model(TOKENS).logits for model in prepared))
    accelerator.unwrap_model(prepared[1], keep_fp32_wrapper=False)
    assert set(vars(vb.module)) - before == {"_is_accelerate_prepared"} and "_original_forward" not in vars(vb)
    assert torch.equal(vb(TOKENS).logits, vb.module(TOKENS).logits)


def test_hooks_run_in_generate_too():
    vb, seen = wrap(llama()), []
    handles = [
        vb.register_forward_pre_hook(lambda *_: seen.append("before")),
        vb.register_forward_hook(lambda *_: seen.append("after")),
    ]
    vb.generate(TOKENS, max_new_tokens=2, do_sample=False)
    vb(TOKENS)
    assert seen == ["before", "after"] * 3
    for handle in handles:
        handle.remove()
    vb(TOKENS)
    assert len(seen) == 6


def test_dir_lists_what_the_model_has():
    assert {"generate", "lm_head", "stats", "set_budget"} <= set(dir(wrap(llama())))


# -- what is looked up on the class ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [wrap, train])
def test_forward_has_the_models_signature(make):
    model = llama()
    expected = inspect.signature(model.forward)
    vb = make(model)
    assert inspect.signature(vb.forward) == expected and "labels" in expected.parameters
    assert inspect.signature(type(vb).forward) == inspect.signature(type(model).forward)
    assert isinstance(vb, vbrt.VBModelWrapper) and type(vb).__name__ == "LlamaForCausalLM"
    assert type(make(llama())) is type(vb)


@pytest.mark.parametrize("make", [wrap, train])
def test_a_wrapped_sequence_has_length_items_and_order(make):
    vb = make(mlp())
    model = vb.module
    assert len(vb) == 12 and bool(vb) and vb[0] is model[0] and vb[-1] is model[-1]
    assert list(vb) == list(model) and list(reversed(list(vb))) == list(model)[::-1]
    assert torch.equal(vb[:2](X), model[1](model[0](X)))
    vb[1] = nn.ReLU()
    assert isinstance(model[1], nn.ReLU)
    del vb[-1]
    vb += nn.Sequential(nn.Identity())
    assert isinstance(vb, vbrt.VBModelWrapper) and len(vb) == len(model) == 12
    layers = make(nn.ModuleDict({"a": nn.Linear(64, 64)}))
    assert "a" in layers and list(layers) == ["a"] and layers["a"] is layers.module["a"]


def test_a_model_that_is_no_container_does_not_become_one():
    vb = wrap(llama())
    assert not isinstance(vb, Iterable | Sized) and bool(vb)
    for use in (len, iter, lambda vb: vb[0]):
        with pytest.raises(TypeError):
            use(vb)


# -- state dicts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [wrap, train])
@pytest.mark.parametrize("model", [llama, mlp, lambda: nn.Linear(64, 64)])
def test_names_are_the_models_in_every_walk(make, model):
    vb = make(model())
    for walk in ("named_buffers", "named_children", "named_modules"):
        assert list(getattr(vb, walk)()) == list(getattr(vb.module, walk)())
    assert list(vb.parameters(recurse=False)) == list(vb.module.parameters(recurse=False))
    names = [name for name, _ in vb.named_parameters()]
    swapped = {site.tensor for swap in vb.plan.swaps for site in swap.sites} if make is wrap else set()
    left = [name for name in vb.state_dict() if not name.endswith("separation") and name not in swapped]
    assert names == left == [name for name, _ in vb.module.named_parameters() if name not in swapped]
    assert all(vb.get_parameter(name) is vb.module.get_parameter(name) for name in names)
    outer = nn.ModuleDict({"net": vb})
    assert [name for name, _ in outer.named_parameters()] == [f"net.{name}" for name in names]


def test_casts_and_walks_reach_a_model_that_is_one_layer():
    vb = wrap(nn.Linear(64, 64)).materialize()
    assert vb.half() is vb and vb(X.half()).dtype is torch.float16 and vb.bias.dtype is torch.float16
    assert [type(module) for module in vb.modules()] == [type(vb.module)] and "in_features=64" in repr(vb)


class Outer(nn.Module):
    """Something larger that holds a wrapper."""

    def __init__(self, net):
        super().__init__()
        self.net, self.head = net, nn.Linear(64, 2)

    def forward(self, x):
        return self.head(self.net(x))


@pytest.mark.parametrize("make", [wrap, train])
@pytest.mark.parametrize("materialized", [False, True])
def test_a_state_dict_of_something_larger_loads_again(make, materialized):
    outer, other = (Outer(make(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).eval())) for _ in range(2))
    if materialized:
        outer.net.materialize(), other.net.materialize()
    state = outer.state_dict()
    assert "net.0.weight" in state and not any("model" in key for key in state)
    keys = other.load_state_dict(state, strict=False)
    assert not keys.missing_keys and not keys.unexpected_keys
    assert torch.equal(other(X), outer(X))
    del state["net.0.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight"):
        other.load_state_dict(state)


# -- its class ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [wrap, train])
def test_a_wrapper_is_an_instance_of_its_models_class_and_of_its_own(make):
    model = llama()
    vb = make(model)
    assert isinstance(vb, type(model)) and vb.__class__ is type(model)
    assert type(vb) is not type(model) and isinstance(vb, Facade)
    for again in (copy.deepcopy(vb), pickle.loads(pickle.dumps(vb))):
        assert type(again) is type(vb) and isinstance(again, type(model))
    with pytest.raises(WrapError, match="wrapped already"):
        vbrt.wrap(vb)


def test_a_class_that_is_set_is_the_models():
    model = mlp()
    vb, plain = wrap(model), type(model)
    vb.__class__ = type("Sharded", (plain,), {"unshard": lambda self: type(self).__name__})
    assert type(model).__name__ == "Sharded" == vb.unshard() and isinstance(vb, Facade)
    vb.__class__ = plain
    assert type(model) is plain and torch.equal(vb(X), model(X))


def test_peft_leaves_out_the_head_of_a_wrapped_model_as_of_a_plain_one():
    peft = pytest.importorskip("peft")
    adapted = [
        sorted(name for name, _ in peft.get_peft_model(model, config).named_parameters() if "lora" in name)
        for model in (llama(), wrap(llama()), wrap(llama(), "dense"))
        for config in [peft.LoraConfig(r=4, target_modules="all-linear")]
    ]
    assert adapted[0] == adapted[1] == adapted[2] and not any("lm_head" in name for name in adapted[0])


@pytest.mark.parametrize("preset", ["dense", "nvfp4"])
def test_trainer_saves_a_wrapped_model_as_a_plain_one_that_loads_without_it(preset, tmp_path):
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    vb = wrap(llama(), preset).eval()
    args = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    Trainer(model=vb, args=args).save_model(tmp_path / "saved")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    state = vb.state_dict()
    assert state.keys() == again.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in again.state_dict().items())


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [wrap, train])
@pytest.mark.parametrize("materialized", [False, True])
def test_copies_are_of_the_same_kind_and_count_for_themselves(make, materialized):
    vb = make(mlp())
    if materialized:
        vb.materialize()
    for again in (copy.deepcopy(vb), pickle.loads(pickle.dumps(vb))):
        assert type(again) is type(vb) and len(again) == 12 and again.module is not vb.module
        assert torch.equal(again(X), vb.module(X))
        again.note = "the copy's"
        assert again.module.note == "the copy's" and not hasattr(vb, "note")
        assert (again.stats().passes, len(again.module._forward_pre_hooks)) == (1, 1)
    assert vb.stats().passes == 2


def test_a_shallow_copy_is_refused_by_name():
    with pytest.raises(WrapError, match=r"copy\.copy.*deepcopy"):
        copy.copy(wrap(mlp()))


# -- transformers' Trainer ---------------------------------------------------------------------------------------------


def peft_of(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


TRAINED = {
    "peft(vb)": lambda: peft_of(wrap(llama(), "dense")),
    "wrap(peft)": lambda: wrap(peft_of(llama()), "dense"),
    "train": lambda: vbrt.wrap(llama(), config("dense"), mode="train"),
}


@matrix(how=list(TRAINED), checkpointing=[False, True])
def test_trainer_trains_evaluates_and_saves_a_wrapped_model(how, checkpointing, tmp_path):
    from transformers import Trainer, TrainingArguments

    model = TRAINED[how]()
    plain = llama() if how == "train" else peft_of(llama())
    data = [{"input_ids": list(range(3 + n, 15 + n)), "labels": list(range(3 + n, 15 + n))} for n in range(4)]
    results = []
    for trained in (model, plain):
        args = TrainingArguments(
            output_dir=str(tmp_path / str(len(results))),
            max_steps=2,
            save_steps=2,
            report_to=[],
            per_device_train_batch_size=2,
            use_cpu=True,
            disable_tqdm=True,
            learning_rate=1e-2,
            gradient_checkpointing=checkpointing,
        )
        trainer = Trainer(model=trained, args=args, train_dataset=data, eval_dataset=data)
        results.append((trainer.train().training_loss, trainer.evaluate()["eval_loss"]))
    assert results[0] == results[1] and results[0][0] != results[0][1]
    files = {path.name for path in (tmp_path / "0" / "checkpoint-2").iterdir()}
    assert ("model.safetensors" if how == "train" else "adapter_model.safetensors") in files


def test_adapters_pass_between_wrapped_and_plain_models(tmp_path):
    from peft import PeftModel

    saved = {}
    for name, make in (("plain", llama), ("wrapped", lambda: wrap(llama(), "dense"))):
        peft = peft_of(make())
        with torch.no_grad():
            adapters = [value for key, value in peft.named_parameters() if "lora_B" in key]
            for n, value in enumerate(adapters):
                value.copy_(torch.sin(torch.arange(value.numel()) + n).reshape(value.shape))
        peft.save_pretrained(tmp_path / name)
        saved[name] = peft(TOKENS).logits
    assert torch.equal(saved["plain"], saved["wrapped"])
    for folder in saved:
        for make in (llama, lambda: wrap(llama(), "dense")):
            again = PeftModel.from_pretrained(make(), tmp_path / folder)
            assert torch.equal(again(TOKENS).logits, saved["plain"])
