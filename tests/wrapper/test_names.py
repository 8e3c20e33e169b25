"""Whose a name is that a wrapper and its model both have, and what finds its way by names: attribute paths, exports."""

import copy
import gc
import logging
import operator
import pickle
import re
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import vbrt
from tests.integrations.test_pipelines import tokenizer
from tests.models import TOKENS, config, llama, mlp, wrap
from vbrt.errors import WrapError
from vbrt.wrapper.full_wrapper import VBFullWrapper
from vbrt.wrapper.model_proxy import FIXED, own_names
from vbrt.wrapper.qat_wrapper import VBTrainingWrapper

X = torch.linspace(-1, 1, 128).reshape(2, 64)
#: all that any kind of wrapper adds
NAMES = frozenset().union(*map(own_names, (vbrt.VBModelWrapper, VBTrainingWrapper, VBFullWrapper)))
YIELDED = sorted(NAMES.difference(FIXED))
ROOT = Path(__file__).parents[2]


def full(model):
    return vbrt.wrap(model, config("dense"), mode="full", optimizer=lambda given: torch.optim.SGD(given, lr=0.1))


class Modules(nn.Module):
    """A model whose children have all the names of a wrapper's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for name in YIELDED:
            self.add_module(name, nn.Linear(64, 64))

    def forward(self, x):
        for name in YIELDED:
            x = torch.tanh(getattr(self, name)(x))
        return x


class Methods(nn.Sequential):
    """A model whose class has them."""


for _name in YIELDED:
    setattr(Methods, _name, lambda self, name=_name: f"the model's {name}")


# -- a line that holds nothing ----------------------------------------------------------------------------------------

ONE_LINE = {
    "generate": lambda vb: vb().generate(TOKENS, max_new_tokens=2, do_sample=False),
    "speculation": lambda vb: vb().generate(TOKENS, max_new_tokens=2, do_sample=False, speculate=2),
    "forward": lambda vb: vb().forward(TOKENS).logits,
    "a method": lambda vb: vb().get_decoder()(TOKENS).last_hidden_state,
    "the model's own part": lambda vb: vb().model(TOKENS).last_hidden_state,
    "state dict": lambda vb: vb().state_dict()["lm_head.weight"],
}


@pytest.mark.parametrize("how", ONE_LINE)
def test_a_wrapper_may_be_made_and_used_in_one_line(how):
    held = wrap(llama())
    assert torch.equal(ONE_LINE[how](lambda: wrap(llama())), ONE_LINE[how](lambda: held))


@pytest.mark.parametrize("save", [lambda to: llama().save_pretrained(to), lambda to: wrap(llama()).save(to)])
def test_from_pretrained_generates_in_one_line(save, tmp_path):
    save(tmp_path)
    greedy = {"max_new_tokens": 3, "do_sample": False}
    want = llama().generate(TOKENS, **greedy)
    got = vbrt.from_pretrained(tmp_path, **config("dense")).generate(
        TOKENS, **greedy
    )  # an assert would keep the wrapper
    assert torch.equal(got, want)


def test_a_method_keeps_its_wrapper_which_ends_with_it():
    vb = wrap(llama())
    generate, runtime, stack, model = vb.generate, *map(weakref.ref, (vb.runtime, vb.stack, vb.module))
    gc.disable()
    try:
        del vb
        assert generate(TOKENS, max_new_tokens=2, do_sample=False).shape == (1, 14)
        assert generate == generate.__self__.generate and stack().pages
        del generate
        assert model() is None and runtime() is None
    finally:
        gc.enable()
    gc.collect()
    assert stack() is None


def test_generate_of_a_model_that_is_gone_says_so():
    generate = wrap(llama()).module.generate
    with pytest.raises(WrapError, match="model is gone; keep it in a variable"):
        generate(TOKENS, max_new_tokens=2)


def test_generate_is_the_models_also_where_it_is_replaced():
    vb = wrap(llama())
    vb.generate = lambda *args: "replaced"
    assert vb.generate(TOKENS) == vb.module.generate(TOKENS) == "replaced"
    del vb.generate
    assert "generate" not in vars(vb.module) and vb.generate(TOKENS, max_new_tokens=2, do_sample=False).shape == (1, 14)
    assert not hasattr(wrap(mlp()), "generate")


# -- the rule ---------------------------------------------------------------------------------------------------------


def test_what_a_models_attributes_are_called_its_wrapper_calls_them():
    model = Modules()
    vb = wrap(model)
    for name in YIELDED:
        assert getattr(vb, name) is getattr(model, name)
    assert vb.vbrt.module is vb.vbrt.model is model and type(vb.vbrt.stats()) is vbrt.Stats
    assert vb.vbrt.materialize() is vb and vb.vbrt.runtime.stack is vb.vbrt.stack
    names = [name for name, _ in vb.named_modules() if name]
    assert names == YIELDED and all(operator.attrgetter(name)(vb) is model.get_submodule(name) for name in names)


def test_a_models_methods_go_before_the_wrappers():
    vb = wrap(Methods(*mlp()))
    assert {getattr(vb, name)() for name in YIELDED} == {f"the model's {name}" for name in YIELDED}
    for name in sorted(own_names(vbrt.VBModelWrapper)):
        ours = getattr(vb.vbrt, name)
        assert ours is not None and not str(ours).startswith("the model's")


def test_the_wrapper_does_its_work_whatever_the_model_calls_its_own(tmp_path):
    plain = Modules()
    vb = wrap(copy.deepcopy(plain))
    with vb:
        assert torch.equal(vb(X), plain(X)) and vb.device.type == "cpu"
        assert "vbrt_passes_total" in vb.vbrt.metrics() and vb.vbrt.set_budget("cpu", "1GiB") == 1 << 30
        with vb.vbrt.live(every_s=60), vb.vbrt.phase("mine"), vb.vbrt.timeline(tmp_path / "timeline.json"):
            vb(X)
        assert vb.vbrt.stats().phases["mine"].passes == 1
        with vbrt.watch_nonfinite(vb) as watch:
            vb(torch.full_like(X, float("nan")))
        assert watch.first.module == YIELDED[0]
        vb.vbrt.save(tmp_path / "saved")
    assert vb.vbrt.stack.closed
    again = vbrt.load(tmp_path / "saved", Modules())
    assert torch.equal(again(X), plain(X)) and again.vbrt.unwrap() is not None


def test_a_model_that_trains_from_the_tiers_may_use_all_names_too(tmp_path):
    plain = Modules()
    vb = full(copy.deepcopy(plain).bfloat16())
    vb(X.bfloat16()).square().sum().backward()
    vb.vbrt.clip_grad_norm_(1.0)
    vb.vbrt.step()
    vb.zero_grad()
    vb.vbrt.settle()
    vb.vbrt.save_checkpoint(tmp_path)
    assert vb.vbrt.load_checkpoint(tmp_path) is None
    after = vb.vbrt.unwrap()
    assert all(not torch.equal(after.get_submodule(name).weight, plain.get_submodule(name).weight) for name in YIELDED)


@pytest.mark.parametrize("make", [wrap, full])
def test_names_that_a_model_leaves_free_are_the_wrappers(make):
    vb = make(mlp())
    assert vb.module is vb.model is vb.vbrt.module and vb.plan is vb.vbrt.plan and vb.stats == vb.vbrt.stats
    assert set(dir(vb.vbrt)) == own_names(type(vb).__base__) <= set(dir(vb))
    with pytest.raises(AttributeError, match=r"vb\.vbrt has no 'nonsense'; it has clip_|vb\.vbrt has no 'nonsense'"):
        vb.vbrt.nonsense  # noqa: B018
    vb.module.plan = "the model's, later"
    assert vb.plan == "the model's, later" and vb.vbrt.plan.swaps
    vb.plan = "set"
    assert vb.module.plan == "set"
    del vb.plan
    assert vb.plan is vb.vbrt.plan


def test_copies_and_pickles_keep_to_the_rule():
    vb = wrap(Modules()).vbrt.materialize()
    for again in (copy.deepcopy(vb), pickle.loads(pickle.dumps(vb))):
        assert type(again) is type(vb) and again.vbrt.module is not vb.vbrt.module and torch.equal(again(X), vb(X))
        assert again.plan is again.vbrt.module.plan and again.vbrt.stats().passes == 1


def test_the_page_lists_the_names():
    page = (ROOT / "docs/wrapping.md").read_text("utf-8")
    section = page.split("## Names that both have")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    listed = [(name, whose.strip()) for names, whose in rows for name in re.findall(r"`(\w+)`", names)]
    assert sorted(name for name, _ in listed) == sorted(NAMES)
    assert sorted(name for name, whose in listed if whose == "vbrt's always") == sorted(FIXED)


# -- what follows names attribute by attribute ------------------------------------------------------------------------


def test_attribute_paths_are_the_names_in_the_state_dict():
    vb = wrap(llama())
    assert (
        vb.model is vb.module.model
        and vb.model.layers[0].self_attn.q_proj is vb.registry["model.layers.0.self_attn.q_proj"]
    )
    for name, module in vb.named_modules():
        assert not name or operator.attrgetter(name)(vb) is module
    vb.materialize()
    for name, value in vb.state_dict().items():
        assert torch.equal(operator.attrgetter(name)(vb), value)


@pytest.mark.parametrize("materialized", [False, True])
def test_a_distributed_checkpoint_of_a_wrapper_loads_again(materialized, tmp_path):
    vb, other = wrap(llama()), wrap(llama())
    with torch.no_grad():
        for parameter in vb.parameters():
            parameter.mul_(1.5)
    if materialized:
        vb.materialize(), other.materialize()
    dcp.save(get_model_state_dict(vb), checkpoint_id=tmp_path)
    plain = llama()
    for model in (other, plain):
        state = get_model_state_dict(model)
        dcp.load(state, checkpoint_id=tmp_path)
        keys = set_model_state_dict(model, state)
        assert not keys.missing_keys and not keys.unexpected_keys
        assert torch.equal(model(TOKENS).logits, vb(TOKENS).logits)


def test_a_wrapped_language_model_is_exported():
    vb, given = wrap(llama()).materialize(), {"use_cache": False}
    exported = torch.export.export(vb, (TOKENS,), given)
    assert torch.equal(exported.module()(TOKENS, **given).logits, llama()(TOKENS, **given).logits)


def test_torch_compile_follows_the_names_that_a_wrapper_has():
    vb, mine = wrap(llama()).materialize(), wrap(mlp()).materialize()
    for run, x in ((lambda x: vb.model(x).last_hidden_state, TOKENS), (lambda x: mine.model(mine.module(x)), X)):
        assert torch.equal(torch.compile(run, backend="eager", fullgraph=True)(x), run(x))


class Scaled(nn.Sequential):
    def forward(self, x, scale=2.0):
        return super().forward(x) * scale


class Open(nn.Sequential):
    def forward(self, x, **others):
        return super().forward(x)


def test_torch_fx_traces_a_wrapper():
    for plain in (mlp(), Scaled(*mlp())):
        traced = torch.fx.symbolic_trace(wrap(copy.deepcopy(plain)).materialize())
        assert torch.equal(traced(X), plain(X))
        assert [node.name for node in traced.graph.find_nodes(op="placeholder")] == [
            node.name for node in torch.fx.symbolic_trace(plain).graph.find_nodes(op="placeholder")
        ]
    with pytest.raises(WrapError, match=r"torch\.fx\.symbolic_trace: .*trace the model, vb\.module"):
        torch.fx.symbolic_trace(wrap(Open(*mlp())))


# -- other libraries --------------------------------------------------------------------------------------------------


def test_sentence_transformers_saves_what_it_loads_again(tmp_path):
    from transformers import BertConfig, BertModel, BertTokenizer

    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.models import Pooling, Transformer

    (tmp_path / "vocab.txt").write_text("\n".join(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat")))
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    BertModel(BertConfig(vocab_size=8, max_position_embeddings=32, **sizes)).save_pretrained(tmp_path / "bert")
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")

    def made():
        return library.SentenceTransformer(modules=[Transformer(str(tmp_path / "bert")), Pooling(64)], device="cpu")

    vb = vbrt.wrap(made(), config("nvfp4"))
    want = vb.encode(["the cat sat"])
    assert vbrt.wrap(made(), config("nvfp4")).encode(["the cat sat"]).tolist() == want.tolist()  # in one line
    vb.save(str(tmp_path / "theirs"))
    again = library.SentenceTransformer(str(tmp_path / "theirs"), device="cpu")
    assert torch.allclose(torch.tensor(again.encode(["the cat sat"])), torch.tensor(want), atol=1e-5)
    vb.vbrt.save(tmp_path / "ours")
    assert vbrt.load(tmp_path / "ours", made()).encode(["the cat sat"]).tolist() == want.tolist()


def test_pipelines_know_a_wrapped_model_by_its_class(caplog, monkeypatch):
    from transformers import BertConfig, BertForSequenceClassification, pipeline

    class Other(BertForSequenceClassification):
        pass

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 96}
    vb = wrap(BertForSequenceClassification(BertConfig(vocab_size=8, **sizes)).eval())
    assert type(vb).__name__ == "BertForSequenceClassification" and isinstance(vb, vbrt.VBModelWrapper)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    for model, said in ((vb, False), (Other(vb.config), True)):
        caplog.clear()
        pipeline("text-classification", model=model, tokenizer=tokenizer(), device="cpu")
        assert ("is not supported" in caplog.text) == said


def test_a_method_that_is_replaced_on_the_wrappers_class_is_replaced_in_all(monkeypatch, tmp_path):
    vb = wrap(mlp())
    monkeypatch.setattr(vbrt.VBModelWrapper, "save", lambda self, directory: (self, directory))
    assert vb.save(tmp_path) == vb.vbrt.save(tmp_path) == (vb, tmp_path)
