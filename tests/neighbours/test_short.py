"""Short suite for other versions of the libraries around vbrt: what people call, on tiny models made here.

scripts/newest runs it on environments that are not the one of constraints/tested.txt. Each test goes through the calls
of a user, and asserts a counter where a broken path would fall back without a word.
"""

import copy
import inspect
import warnings

import pytest
import torch

import vbrt
from tests.models import gpt2, llama, qwen3_moe, wrap
from vbrt.training import token_loss

transformers = pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM  # noqa: E402 - needs it

BF16 = torch.bfloat16
IDS = torch.arange(3, 27).reshape(2, 12)
MASK = torch.ones_like(IDS)
MASK[0, :4] = 0  # padded on the left
QUIET = {"weights": {"min_parameters": 0}, "tiers": {"gpu": {"enabled": False}}}
#: the argument of `generate` for keys and values, which transformers renamed
CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
GENERATE = {
    "attention_mask": MASK, "max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "pad_token_id": 0,
    "return_dict_in_generate": True, "output_logits": True,
}  # fmt: skip
SAMPLED = {"do_sample": True, "temperature": 1.2, "top_k": 30, "seed": 5}


def generated(model, **given):
    return model.generate(IDS, **GENERATE | given)


def assert_same(got, wanted):
    assert torch.equal(got.sequences, wanted.sequences)
    assert len(got.logits) == len(wanted.logits) and all(map(torch.equal, got.logits, wanted.logits))


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS, attention_mask=MASK).logits


@pytest.fixture
def nothing_is_outdated():
    """Fails where a library warns of the way that it is called."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    kinds = FutureWarning, DeprecationWarning
    assert [str(one.message) for one in caught if issubclass(one.category, kinds)] == []


@pytest.fixture
def accelerator():
    """An accelerator of its own for each test: it keeps its dtype for the process."""
    state = pytest.importorskip("accelerate.state").AcceleratorState
    yield
    state._reset_state(reset_partial_state=True)


# -- wrap -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_wrapped_model_has_the_logits_of_the_plain_one_and_unwraps_to_it(make):
    plain = make(dtype=BF16)
    wanted, weights = logits(plain), copy.deepcopy(plain.state_dict())
    with wrap(plain, "exact") as vb:
        assert torch.equal(logits(vb), wanted) and torch.equal(logits(vb), wanted)
        assert vb.stats().layers and all(layer.materialized for layer in vb.stats().layers.values())
        back = vb.unwrap().state_dict()
    assert back.keys() == weights.keys() and all(torch.equal(back[name], weights[name]) for name in weights)
    with wrap(make(), "nvfp4") as vb:
        assert 0 < (logits(vb) - logits(make())).abs().max() < 1


# -- generate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_loss_in_chunks_is_transformers_own(make, monkeypatch):
    monkeypatch.setattr(token_loss, "_CHUNK", 16)
    plain = make()
    ids = torch.arange(3, 43)[None]
    wanted = plain(input_ids=ids, labels=ids).loss
    with wrap(copy.deepcopy(plain), "exact") as vb:
        assert isinstance(vb.module.loss_function, token_loss.TokenLoss)
        assert torch.equal(vb(input_ids=ids, labels=ids).loss, wanted)


def test_generate_gives_the_tokens_of_transformers(nothing_is_outdated):
    wanted = generated(llama(dtype=BF16))
    with vbrt.wrap(llama(dtype=BF16), "exact", **QUIET, compute={"captures": False}) as vb:
        assert_same(generated(vb), wanted)
        assert_same(generated(vb), wanted)


def test_steps_are_captured_and_sampling_repeats_with_its_seed(nothing_is_outdated):
    with wrap(llama(), "nvfp4") as vb:
        assert generated(vb, max_new_tokens=30, min_new_tokens=30).sequences.shape == (2, 42)
        assert_same(generated(vb, **SAMPLED), generated(vb, **SAMPLED))
        steps = vb.stats().steps
    assert steps.captured > steps.eager, dict(steps.reasons)


@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_change_no_token(how, nothing_is_outdated):
    with wrap(llama(dtype=BF16), "exact") as vb:
        plain = generated(vb, **how)
        assert_same(generated(vb, **how, speculate=4), plain)
        counted = vb.stats().speculation
    assert counted is not None, vb.stats().fallbacks
    assert counted.rounds < counted.tokens == len(plain.logits) - 1 and counted.accepted > 0


def test_a_cache_in_the_tiers_is_filled_and_drafted_on(nothing_is_outdated):
    with wrap(llama(dtype=BF16), "exact") as vb:
        plain = generated(vb)
        for drafts in ({}, {"speculate": 4}):
            cache = vbrt.KVCache(vb, page=4)
            assert_same(generated(vb, **{CACHE: cache}, **drafts), plain)
            assert cache.get_seq_length() == IDS.shape[1] + 8
        assert vb.stats().speculation.rounds < 8
        short = generated(vb, **{CACHE: vbrt.KVCache(vb, page=4, bits=8)}).sequences
    assert short.shape == plain.sequences.shape


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [llama, qwen3_moe], ids=["dense", "experts"])
def test_a_directory_is_read_into_planes_saved_and_read_again(make, tmp_path):
    make(dtype=BF16).save_pretrained(tmp_path / "plain")
    wanted = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype="auto"))
    with vbrt.from_pretrained(tmp_path / "plain", "exact", **QUIET) as vb:
        assert torch.equal(logits(vb), wanted)
        vb.save(tmp_path / "saved")
    with vbrt.load(tmp_path / "saved", make(dtype=BF16)) as vb:
        assert torch.equal(logits(vb), wanted)
    config = vbrt.QuantizationConfig("exact", **QUIET)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
    assert torch.equal(logits(model), wanted)
    model.save_pretrained(tmp_path / "planes")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "planes")
    assert torch.equal(logits(again), wanted)
    assert vbrt.of(again).registry.keys() == vbrt.of(model).registry.keys()


def test_a_gguf_file_is_read_as_its_library_decodes_it(tmp_path):
    pytest.importorskip("gguf")
    from tests.saves.published.gguf_files import Type, model_of, write

    model = model_of("llama")
    write(tmp_path / "model.gguf", model, "llama", lambda name: Type.F32)
    with vbrt.from_pretrained(tmp_path / "model.gguf", "dense", **QUIET) as vb:
        assert torch.allclose(logits(vb), logits(model), atol=1e-5)


# -- experts ----------------------------------------------------------------------------------------------------------


def test_routed_experts_are_wrapped_and_generate(nothing_is_outdated):
    wanted = logits(qwen3_moe())
    with wrap(qwen3_moe(), "exact") as vb:
        assert torch.equal(logits(vb), wanted)
        assert any(layer.experts for layer in vb.stats(experts=True).layers.values())
        plain = generated(vb)
        assert_same(generated(vb), plain)
    with wrap(qwen3_moe(), "nvfp4") as vb:
        assert generated(vb, speculate=2).sequences.shape == (2, 21)


# -- training ---------------------------------------------------------------------------------------------------------


def rows():
    return [{"input_ids": torch.arange(at, at + 8) % 64, "labels": torch.arange(at, at + 8) % 64} for at in range(8)]


def trained(model, folder, *, optimizer=None, **given):
    """Return the losses of a run of Trainer."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=8, learning_rate=0.05, logging_steps=1,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, **given,
    )  # fmt: skip
    given = {} if optimizer is None else {"optimizers": (optimizer, None)}
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows(), **given)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_adapters_of_peft_learn_in_trainer_and_are_read_again(tmp_path, accelerator):
    peft = pytest.importorskip("peft")
    llama(dtype=BF16).save_pretrained(tmp_path / "plain")

    def load():
        config = vbrt.QuantizationConfig("fp4", **QUIET)
        return AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)

    model = peft.get_peft_model(load(), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    before = {name: model.get_parameter(name).detach().clone() for name in frozen}
    losses = trained(model, tmp_path)
    assert losses[-1] < losses[0]
    assert all(torch.equal(model.get_parameter(name), value) for name, value in before.items())
    model.save_pretrained(tmp_path / "adapters")
    again = peft.PeftModel.from_pretrained(load(), str(tmp_path / "adapters"))
    assert torch.equal(logits(again), logits(model.eval()))


@pytest.mark.parametrize("whose", ["transformers", "vbrt"])
def test_adapters_learn_the_same_with_checkpoints(whose):
    """A block runs a second time in the backward pass: with the cache as it was the first time."""
    peft = pytest.importorskip("peft")

    def gradients(checkpoints):
        activations = "recompute" if checkpoints and whose == "vbrt" else "keep"
        with vbrt.wrap(llama(), "fp4", **QUIET, training={"activations": activations}) as vb:
            torch.manual_seed(0)
            model = peft.get_peft_model(vb.module, peft.LoraConfig(r=4, target_modules=["q_proj"]))
            model.train()
            if checkpoints and whose == "transformers":
                model.enable_input_require_grads()
                model.gradient_checkpointing_enable()
            model(input_ids=IDS, attention_mask=MASK, labels=IDS).loss.backward()
            return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    kept, again = gradients(False), gradients(True)
    assert kept and kept.keys() == again.keys()
    assert all(torch.allclose(kept[name], again[name], atol=1e-6) for name in kept)


@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_recomputed_blocks_give_the_bits_of_kept_ones_for_a_padded_batch(activations):
    def step(how):
        with vbrt.wrap(llama().train(), "fp4", **QUIET, training={"activations": how}) as vb:
            losses = [vb(input_ids=IDS, attention_mask=MASK, labels=IDS).loss for _ in range(2)]
            torch.stack(losses).sum().backward()
            return losses, [p.grad for p in vb.parameters() if p.grad is not None], vb.stats().activations

    losses, gradients, _ = step("keep")
    again, others, counted = step(activations)
    assert counted.modes and counted.passes == 2
    assert all(map(torch.equal, losses, again))
    assert len(gradients) == len(others) > 0 and all(map(torch.equal, gradients, others))


def test_trainer_learns_from_the_tiers_and_recompute_changes_nothing(tmp_path, accelerator):
    runs = []
    for how in ("keep", "recompute"):
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with vbrt.wrap(model, "full", optimizer=optimizer, training={"activations": how}) as vb:
            runs.append(trained(vb, tmp_path, optimizer=optimizer, bf16=True))
    assert runs[0][-1] < runs[0][0] and runs[1] == runs[0]
