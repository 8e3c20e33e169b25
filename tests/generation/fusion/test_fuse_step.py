"""Recorded steps with joined launches: the same results, by fewer operators, or the step itself and a reason."""

import itertools

import pytest
import torch

import vbrt
from tests.matrix import matrix
from vbrt.generation.fusion.fuse_step import PATTERNS, Pattern, joined
from vbrt.kernels.operator_trace import recorder

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MIXED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
AROUND = ("rotary", "cache writes, by rotary", "attention")
MODELS = {  # a class, its config, and what must be joined in each of the two layers
    "Llama": ({}, AROUND),
    "Qwen3": ({}, (*AROUND, "norm of heads, by rotary")),
    "Gemma": ({}, AROUND),
    "Olmo2": ({}, ("attention",)),
    "Qwen3Moe": (MIXED, (*AROUND, "router")),
    "Mixtral": ({"num_local_experts": 4}, (*AROUND, "router")),
    "Phi3": ({"pad_token_id": 0}, AROUND),
    "GPTNeoX": ({"rotary_pct": 0.5}, AROUND),
    "GPT2": ({"n_embd": 32, "n_head": 4, "n_layer": 2}, ("attention",)),
}


def built(name, dtype=torch.float32, **more):
    torch.manual_seed(0)
    head = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    given = {"vocab_size": 64} if name == "GPT2" else SMALL
    config = getattr(transformers, f"{name}Config")(**given | MODELS[name][0] | more)
    model = getattr(transformers, head)(config).to(dtype).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2) if parameter.dim() > 1 else parameter.data.uniform_(0.5, 1.5)
    model.config._experts_implementation = "batched_mm"
    return model


class Steps:
    """One token after another behind a prompt of two rows, on a static cache."""

    def __init__(self, model, config):
        self.model, self.cache = model, transformers.StaticCache(config=config, max_cache_len=16)
        self.ids, self.position = torch.ones(2, 1, dtype=torch.int64), torch.tensor([[5]])
        with torch.no_grad():
            model(input_ids=torch.arange(10).view(2, 5), past_key_values=self.cache, use_cache=True)

    def step(self):
        return self.model(
            input_ids=self.ids, position_ids=self.position, past_key_values=self.cache, use_cache=True
        ).logits

    def run(self, step, tokens=(7, 3, 9)):
        """The logits of some tokens."""
        rows = []
        for token in tokens:
            self.ids.fill_(token)
            with torch.no_grad():
                rows.append(step().clone())
            self.position += 1
        return torch.stack(rows)


def both(model, config, **options):
    """(a joined step, what the step and the joined one give for the same tokens)."""
    ours, theirs = Steps(model, config), Steps(model, config)
    ours.ids.fill_(7)
    run = joined(ours.step, **options)
    ours.position += 1
    want = theirs.run(theirs.step)
    return run, want, torch.cat((run.first[None], ours.run(run, (3, 9))))


@matrix(name=list(MODELS), dtype=[torch.float32, torch.bfloat16])
def test_a_joined_step_is_the_step(name, dtype):
    model = built(name, dtype)
    run, want, got = both(model, model.config, same_bits=False)
    assert torch.equal(got, want) and run.report.error == 0.0  # on a CPU torch computes what replaces its operators
    assert run.report.operators[1] < run.report.operators[0] and not run.report.refused
    assert all(run.report.joined[what] >= 2 for what in MODELS[name][1]), run.report.joined
    norms = run.report.joined.get("norm", 0) + run.report.joined.get("sum and norm", 0)
    assert norms >= (0 if name.startswith("GPT") else 5)


def test_layers_of_a_wrapped_model_stay_one_piece_and_say_which_bits_may_change():
    for preset, exact in (("dense", True), ("fp4", False)):
        vb = vbrt.wrap(built("Qwen3Moe", torch.bfloat16), preset, weights={"min_parameters": 1}).materialize()
        run, want, got = both(vb, vb.module.config)
        assert torch.equal(got, want) and run.report.operators[1] < run.report.operators[0]
        assert ("norm" not in run.report.joined) is exact  # a norm of ours sums in another order on a GPU
        vb.close()


def test_a_pattern_can_be_left_out():
    model = built("Llama")
    run, want, got = both(
        model, model.config, same_bits=False, without={"attention", "gates", "norms", "small products"}
    )
    assert torch.equal(got, want) and set(run.report.joined) == {"rotary", "cache writes, by rotary", "computed again"}


def test_inputs_may_be_other_tensors_than_the_examples():
    weight = torch.randn(4, 4)
    run = joined(lambda x: x @ weight + 1, (torch.ones(2, 4),))
    x = torch.randn(2, 4)
    assert torch.equal(run(x), x @ weight + 1) and torch.equal(run.first, torch.ones(2, 4) @ weight + 1)


def test_a_counter_that_the_step_advances_is_put_back_for_the_check():
    count, seen = torch.zeros(1), torch.zeros(8)

    def step():
        seen.index_copy_(0, count.long(), count + 1)
        count.add_(1)
        return seen * 2

    run = joined(step)
    assert count == 1 and seen.tolist()[:2] == [1, 0]
    assert run()[:3].tolist() == [2, 4, 0] and count == 2


def test_a_tensor_that_python_makes_is_a_new_one_each_time():
    def step():
        return torch.tensor([3.0, 4.0]).add_(torch.ones(2))

    run = joined(step)
    assert [run().tolist() for _ in range(2)] == [[4, 5]] * 2 and run.first.tolist() == [4, 5]


REFUSED = {
    "a number": (lambda x: x * 2 if x.sum() > 0 else x, "reads a tensor's value"),
    "a shape": (lambda x: x[x > 0], "shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_data_decides_is_refused_with_the_reason_and_runs_as_it_is(case):
    step, why = REFUSED[case]
    run = joined(step, (torch.ones(3),))
    assert why in run.report.refused
    assert torch.equal(run(-torch.ones(3)), step(-torch.ones(3))) and torch.equal(run.first, step(torch.ones(3)))


def test_memory_that_is_written_out_of_sight_is_found_by_the_check():
    def step():
        y = torch.empty(4)
        y.untyped_storage().copy_(torch.arange(4.0).untyped_storage())  # as a kernel does that torch has not launched
        return y + 1

    run = joined(step)
    assert "differs" in run.report.refused and run().tolist() == [1, 2, 3, 4]


def test_a_step_that_loses_bits_runs_as_it_is_by_its_record(monkeypatch):
    def spoil(step):
        for node in step.calls(torch.ops.aten.mul.Tensor):
            node.target = torch.ops.aten.add.Tensor

    patterns = (*PATTERNS, Pattern("spoiling", True, spoil))
    monkeypatch.setattr("vbrt.generation.fusion.fuse_step.PATTERNS", patterns)
    monkeypatch.setattr("vbrt.generation.fusion.fuse_step._ALL", frozenset(p.name for p in patterns))
    state = torch.zeros(3)
    run = joined(lambda x: state.add_(1) * x, (torch.full((3,), 3.0),))
    assert not run.report.refused and "differs" in str(run.report.unjoined) and state[0] == 1
    assert torch.equal(run(torch.full((3,), 5.0)), torch.full((3,), 10.0))


def test_a_step_without_bits_of_its_own_is_joined_within_what_they_vary():
    count = itertools.count()

    def drawn():
        return torch.ones(3) * (1 + 1e-6 * next(count))

    def step():
        return (drawn() if recorder() is None else recorder().leaf(drawn)) + 1

    run = joined(step, same_bits=True)
    assert not run.report.refused and "from run to run" in str(run.report.kept)


def test_derivatives_and_autocast_are_refused():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast" in joined(lambda: torch.ones(2)).report.refused
