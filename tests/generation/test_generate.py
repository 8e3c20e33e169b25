"""The `generate` on a model's instance: where it is, what it looks like, how it goes."""

import copy
import gc
import inspect
import pickle
import weakref

import pytest
import torch

from tests import models
from tests.generation.families import PROMPT, tiny
from vbrt.generation.capture.session import KEEPS_BITS
from vbrt.report.stats import StepCounts

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:vbrt.wrap")


def tokens(model) -> list:
    return model.generate(PROMPT[1:], max_new_tokens=6, do_sample=False).tolist()


def test_lossless_weights_on_a_cpu_are_decoded_by_transformers_own_generate():
    plain, vb = tiny("llama"), models.wrap(tiny("llama"))
    assert vb.stats().steps == StepCounts()
    assert tokens(vb) == tokens(vb.module) == tokens(plain)
    assert vb.stats().steps == StepCounts(eager=10, reasons={KEEPS_BITS: 10})
    assert inspect.signature(vb.module.generate) == inspect.signature(plain.generate)


def test_unwrap_and_close_leave_nothing_on_the_instance():
    model = tiny("llama")
    vb = models.wrap(model)
    assert "generate" in vars(model)
    vb.unwrap()
    assert "generate" not in vars(model)
    models.wrap(model).close()
    assert "generate" not in vars(model)


def test_copies_and_pickles_generate_by_themselves(tapes):
    vb = models.wrap(tiny("llama"))
    want = tokens(vb)
    copied = copy.deepcopy(vb)
    bare = copy.deepcopy(vb.module)
    assert tokens(copied) == tokens(bare) == tokens(pickle.loads(pickle.dumps(vb.module))) == want
    assert copied.stats().steps.captured == 5
    vb.close()
    assert tokens(copied) == want


def test_a_model_that_nobody_holds_is_freed_at_once(tapes):
    vb = models.wrap(tiny("llama"))
    tokens(vb)
    assert any(tape.made for tape in tapes)
    gone = weakref.ref(vb.module)
    gc.disable()
    try:
        del vb
        assert gone() is None
    finally:
        gc.enable()


def test_recordings_end_with_the_wrapper(tapes):
    vb = models.wrap(tiny("llama"))
    tokens(vb)
    vb.unwrap()
    assert not any(tape.made for tape in tapes)


def test_models_in_a_model_generate_by_recordings_too(tapes):
    """PEFT's models, and pipelines of models, call the generate of a model within."""

    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.language_model = tiny("llama")

        def forward(self, ids):
            return self.language_model(ids)

    vb = models.wrap(Holder())
    assert tokens(vb.language_model) == tokens(tiny("llama"))
    assert vb.stats().steps.captured == 5


def test_adapters_that_are_switched_off_or_scaled_are_recorded_again(tapes):
    peft = pytest.importorskip("peft")

    def adapted(model):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.1)
        return peft.get_peft_model(model, config).eval()

    def generated(model):
        return model.generate(input_ids=PROMPT[1:], max_new_tokens=6, do_sample=False).tolist()

    vb = models.wrap(tiny("llama"))
    plain, mine = adapted(tiny("llama")), adapted(vb.module)
    assert generated(mine) == generated(plain)
    with plain.disable_adapter(), mine.disable_adapter():
        assert generated(mine) == generated(plain)
    for model in (plain, mine):
        model.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"] = 9.0
    assert generated(mine) == generated(plain)
    steps = vb.stats().steps
    assert (steps.captured, steps.eager) == (15, 0)
    assert steps.recordings == 3
