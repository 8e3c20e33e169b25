"""Multi-token prediction heads: read from checkpoints, computed as their formula says, drafts from accepted tokens."""

import contextlib
import copy
import json
import random
import types
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers

import vbrt
from tests.generation.speculation.mtp_models import FAMILIES, LAYERS, Written, written
from vbrt.errors import CheckpointError, WrapError
from vbrt.generation.capture.exact_attention import as_captured
from vbrt.generation.speculation.heads import Heads, heads_for
from vbrt.generation.speculation.pass_states import PassStates, hidden_states_fed
from vbrt.generation.speculation.sampling_noise import Noise, greedy
from vbrt.generation.speculation.sequences import Sequences
from vbrt.libraries.transformers_api import DynamicCache
from vbrt.model.attachment import attached_to
from vbrt.saves.load.mtp_checkpoint import head_names, mtp_checkpoint

CPU = {"gpu": {"enabled": False}}
LAST = f"model.layers.{LAYERS}."


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(family, tmp_path_factory) -> Written:
    return written(family, tmp_path_factory.mktemp(family), shards=family == "glm4_moe")


def loaded(directory) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(directory).eval()


@pytest.fixture(scope="module")
def wrapped(checkpoint) -> vbrt.VBModelWrapper:
    """Dense weights in the tiers, with the head."""
    vb = vbrt.wrap(loaded(checkpoint.directory), "dense", tiers=CPU)
    vbrt.load_heads(vb)
    return vb


def head_of(vb) -> nn.Module:
    return attached_to(vb.vbrt.module).head


def states(vb, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Hidden states [B, T, D] after the final norm, as transformers returns them."""
    return vb(ids, attention_mask=mask, use_cache=False, output_hidden_states=True).hidden_states[-1]


def of_ids(ids: Tensor, draw=greedy) -> Sequences:
    """Sequences of a call that draws so."""
    config = types.SimpleNamespace(return_dict_in_generate=False, _pad_token_tensor=None)
    return Sequences(ids, [], [], config, None, draw)


def ids_of(rows: int, tokens: int) -> Tensor:
    return torch.randint(1, 97, (rows, tokens))


# -- the reader -------------------------------------------------------------------------------------------------------


def tensors_of(directory) -> dict[str, Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_every_tensor_of_the_head_is_read_and_none_of_the_model(checkpoint, family):
    held = tensors_of(checkpoint.directory)
    names = head_names(checkpoint.directory, held, LAYERS)
    own = {name for name in held if name.startswith(("mtp.", LAST))}
    shared = {f"{LAST}embed_tokens.weight", f"{LAST}shared_head.head.weight"}
    assert set(names) == own - shared
    assert len(set(names.values())) == len(names)


def test_the_heads_weights_are_those_of_the_files(checkpoint):
    vb = vbrt.wrap(loaded(checkpoint.directory), "dense", tiers=CPU)
    found = vbrt.load_heads(vb).unwrap().state_dict()
    last = checkpoint.model.model.layers[LAYERS]
    wanted = {f"layers.0.{name}": tensor for name, tensor in last.state_dict().items()}
    wanted |= {f"{name}.weight": tensor for name, tensor in checkpoint.extra.items()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    vb.close()


def changed(checkpoint: Written, directory, change) -> None:
    """A copy of the checkpoint with other tensors."""
    (directory / "config.json").write_text((checkpoint.directory / "config.json").read_text())
    save_file(change(tensors_of(checkpoint.directory)), directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("what", ["self_attn.o_proj.weight", "mlp.experts.3.up_proj.weight"])
def test_a_missing_tensor_of_the_head_is_named(what, checkpoint, tmp_path):
    (name,) = (n for n in tensors_of(checkpoint.directory) if n.startswith(("mtp.", LAST)) and n.endswith(what))
    changed(checkpoint, tmp_path, lambda held: {n: tensor for n, tensor in held.items() if n != name})
    with vbrt.wrap(loaded(tmp_path), "dense", tiers=CPU) as vb:
        with pytest.raises(CheckpointError, match="o_proj" if "o_proj" in what else r"mlp\.experts"):
            vbrt.load_heads(vb)
        assert attached_to(vb.vbrt.module).head is None and len(vb.runtime.attachments) == 1
        vb(ids_of(1, 3))  # as usable as before


def test_a_tensor_that_the_head_has_no_use_for_is_named(checkpoint, family, tmp_path):
    lead = "mtp.layers.0." if family == "qwen3_next" else LAST
    changed(checkpoint, tmp_path, lambda held: held | {f"{lead}gate.weight": torch.zeros(3)})
    with (
        vbrt.wrap(loaded(tmp_path), "dense", tiers=CPU) as vb,
        pytest.raises(CheckpointError, match=r"unexpected: layers\.0\.gate\.weight"),
    ):
        vbrt.load_heads(vb)


def in_fp8(held: dict[str, Tensor]) -> dict[str, Tensor]:
    """Projections in blocks of 128 x 128, as DeepSeek-V3 is published; the tiny ones are a block each."""
    out = {name: tensor.to(torch.bfloat16) for name, tensor in held.items()}
    for name, tensor in held.items():
        if "_proj" in name and "eh_proj" not in name:
            scale = tensor.abs().max() / 448
            out[name], out[f"{name}_scale_inv"] = (tensor / scale).to(torch.float8_e4m3fn), scale.reshape(1, 1)
    return out


def test_a_head_in_fp8_keeps_its_bits(checkpoint, family, tmp_path, monkeypatch):
    if family != "deepseek_v3":
        pytest.skip("published in bfloat16")
    changed(checkpoint, tmp_path, in_fp8)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    kind = transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3PreTrainedModel
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{LAYERS}\."])
    vb = vbrt.from_pretrained(tmp_path, "exact", tiers=CPU)
    own = vbrt.load_heads(vb, config="dense")
    assert any(note.startswith("9 layers: FP8 in blocks, taken as floatbytes") for note in own.vbrt.plan.notes)
    head, ids = own.vbrt.module, ids_of(1, 9)
    hidden_BTD = states(vb, ids)[:, :-1]
    got = head(ids[:, 1:], hidden_BTD, None, torch.arange(8)[None], DynamicCache())
    wanted = by_formula(checkpoint, family, ids[:, 1:], hidden_BTD.float())
    assert nn.functional.cosine_similarity(got.float(), wanted, dim=-1).min() > 0.99
    vb.close()


def test_what_is_no_head_or_several_is_said(tmp_path):
    names = ["model.layers.1.enorm.weight", "model.embed_tokens.weight"]
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.2\.enorm\.weight"):
        head_names(tmp_path, names, 2)
    with pytest.raises(CheckpointError, match=r"2 multi-token prediction heads \(model\.layers\.2\.\*"):
        head_names(tmp_path, [f"model.layers.{n}.enorm.weight" for n in (1, 2, 3)], 2)
    with pytest.raises(CheckpointError, match="saves and GGUF files hold none"):
        mtp_checkpoint(tmp_path, 2)


# -- the module -------------------------------------------------------------------------------------------------------


def by_formula(checkpoint: Written, family: str, ids: Tensor, hidden_BTD: Tensor) -> Tensor:
    """g [B, T, D] of t_i+1 and h_i, for whole sequences."""
    own, epsilon = checkpoint.extra, checkpoint.model.config.rms_norm_eps
    around = 1 if family == "qwen3_next" else 0  # its norms multiply by 1 + weight

    def normed(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * (own[name] + around)

    embedded_BTD = checkpoint.model.model.embed_tokens.weight[ids]
    x_BTD = torch.cat([normed(embedded_BTD, "enorm"), normed(hidden_BTD, "hnorm")], -1) @ own["eh_proj"].T
    return normed(checkpoint.layered(x_BTD), "norm")


def test_the_heads_logits_are_those_of_the_formula(wrapped, checkpoint, family):
    ids, head = ids_of(2, 12), head_of(wrapped)
    hidden_BTD = states(wrapped, ids)[:, :-1]
    g_BTD = by_formula(checkpoint, family, ids[:, 1:], hidden_BTD)
    places, cache = torch.arange(11)[None], DynamicCache()
    for begin, end in ((0, 7), (7, 10), (10, 11)):
        got = head(ids[:, begin + 1 : end + 1], hidden_BTD[:, begin:end], None, places[:, begin:end], cache)
        torch.testing.assert_close(got, g_BTD[:, begin:end], rtol=1e-5, atol=1e-5)
    wanted = g_BTD[:, -1] @ checkpoint.model.lm_head.weight.T
    torch.testing.assert_close(head.logits(got[:, -1]), wanted, rtol=1e-5, atol=1e-5)


def test_the_head_agrees_with_that_of_transformers(wrapped, checkpoint, family):
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel") or not hasattr(wrapped.config, "num_mtp_layers"):
        pytest.skip("this transformers has no head for this family")
    model = loaded(checkpoint.directory)
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}\."]
    theirs = layers.MtpModel.from_pretrained(model)
    ids, places = ids_of(1, 9), torch.arange(8)[None]
    hidden_BTD = states(wrapped, ids)[:, :-1]
    wanted = theirs.forward_layer(
        0, hidden_BTD, places, transformers.cache_utils.MtpCache(config=model.config.get_mtp_config()), ids[:, 1:]
    )
    got = head_of(wrapped)(ids[:, 1:], hidden_BTD, None, places, DynamicCache())
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_streamed_head_drafts_as_a_resident_one(wrapped, checkpoint, tmp_path):
    model = loaded(checkpoint.directory)
    room = vbrt.make_plan(model, vbrt.load_config("dense", tiers=CPU)).page_bytes // 2
    tiers = {"gpu": {"enabled": False}, "cpu": {"budget": room}, "ssd": {"enabled": True, "path": str(tmp_path)}}
    with vbrt.wrap(model, "dense", tiers=tiers) as vb:
        own = vbrt.load_heads(vb)
        assert own.plan.home_bytes("ssd") > 0
        ids = ids_of(2, 9)
        assert torch.equal(drafts(vb, ids, 3), drafts(wrapped, ids, 3))


def test_the_head_is_in_the_models_tiers_and_ends_with_it(checkpoint):
    vb = vbrt.wrap(loaded(checkpoint.directory), "fp4", tiers=CPU)
    own = vbrt.load_heads(vb)
    assert own.runtime is vb.runtime and {swap.format for swap in own.plan.swaps} == {"nvfp4"}
    assert {"eh_proj", "layers.0.mlp.experts", "layers.0.self_attn.o_proj"} <= own.registry.keys()
    with pytest.raises(WrapError, match="has its head already"):
        vbrt.load_heads(vb)
    own.close()
    again = vbrt.load_heads(vb, checkpoint.directory, "dense")
    assert again.lossless
    vb.close()
    assert again.stack.closed


# -- drafts -----------------------------------------------------------------------------------------------------------


def drafts(vb, ids: Tensor, k: int, *, mask: Tensor | None = None, draw=greedy) -> Tensor:
    """Drafts of a drafter that is fed all states at once."""
    heads = Heads(head_of(vb), mask)
    read = mask if mask is None else nn.functional.pad(mask, (0, ids.shape[1] - 1 - mask.shape[1]), value=1)
    heads.feed(0, states(vb, ids[:, :-1], read))
    return heads.propose(of_ids(ids, draw), k)


def test_drafts_feed_the_heads_own_state_back(wrapped, checkpoint, family):
    ids = ids_of(2, 9)
    hidden_BTD = states(wrapped, ids)[:, :-1]
    wanted = ids
    for _ in range(4):
        g_BTD = by_formula(checkpoint, family, wanted[:, 1:], hidden_BTD)
        hidden_BTD = torch.cat([hidden_BTD, g_BTD[:, -1:]], 1)
        tokens = (g_BTD[:, -1] @ checkpoint.model.lm_head.weight.T).argmax(-1)
        wanted = torch.cat([wanted, tokens[:, None]], 1)
    assert torch.equal(drafts(wrapped, ids, 4), wanted[:, 9:])
    assert drafts(wrapped, ids, 1).shape == (2, 1)


@pytest.mark.sample(3)
@pytest.mark.parametrize("draw", [greedy, Noise(3).draw], ids=["greedy", "sampled"])
def test_drafts_after_partial_acceptance_are_those_from_scratch(wrapped, draw):
    ids, k = ids_of(2, 7), 4
    heads = Heads(head_of(wrapped))
    heads.feed(0, states(wrapped, ids[:, :-1]))
    for accepted in (0, 2, 4, 1, 3):
        proposed = heads.propose(of_ids(ids, draw), k)
        assert torch.equal(proposed, drafts(wrapped, ids, k, draw=draw))
        assert torch.equal(heads.propose(of_ids(ids, draw), k), proposed)  # leaves no trace
        rows = states(wrapped, torch.cat([ids, proposed], 1))
        heads.feed(ids.shape[1] - 1, rows[:, ids.shape[1] - 1 :])  # those of rejected drafts as well
        ids = torch.cat([ids, proposed[:, :accepted], ids_of(2, 1)], 1)  # the last is what verification has drawn
    heads.feed(0, states(wrapped, ids[:, :-1]))  # with those that the head has read already
    assert torch.equal(heads.propose(of_ids(ids, draw), k), drafts(wrapped, ids, k, draw=draw))
    assert heads.one_time == 1
    heads.close()


def test_rows_with_padding_draft_as_alone(wrapped):
    ids = ids_of(2, 8)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    together = drafts(wrapped, ids, 3, mask=mask[:, :6])
    assert torch.equal(together[:1], drafts(wrapped, ids[:1, 3:], 3))
    assert torch.equal(together[1:], drafts(wrapped, ids[1:], 3))


def test_a_long_prompt_is_read_in_parts(wrapped, monkeypatch):
    ids = ids_of(2, 11)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    wanted = drafts(wrapped, ids, 3), drafts(wrapped, ids, 3, mask=mask)
    monkeypatch.setattr("vbrt.generation.speculation.heads._CHUNK", 4)
    assert torch.equal(drafts(wrapped, ids, 3), wanted[0])
    assert torch.equal(drafts(wrapped, ids, 3, mask=mask), wanted[1])


def test_after_a_gap_the_head_reads_on(wrapped):
    ids = ids_of(1, 12)
    hidden_BTD = states(wrapped, ids)
    heads = Heads(head_of(wrapped))
    assert heads.propose(of_ids(ids[:, :6]), 3).shape == (1, 0)  # nothing was fed
    heads.feed(0, hidden_BTD[:, :5])
    assert heads.propose(of_ids(ids[:, :6]), 3).shape == (1, 3)
    assert heads.propose(of_ids(ids[:, :8]), 3).shape == (1, 0)  # states 5 and 6 were not fed
    heads.feed(8, hidden_BTD[:, 8:11])
    assert heads.propose(of_ids(ids), 3).shape == (1, 3)


def test_passes_of_generate_are_fed_in_order(wrapped):
    ids, fed = ids_of(2, 5), []
    with hidden_states_fed(wrapped.vbrt.module, lambda start, hidden_BTD: fed.append((start, hidden_BTD))):
        out = wrapped.vbrt.module.__class__.generate(
            wrapped.vbrt.module, ids, max_new_tokens=3, do_sample=False, pad_token_id=0
        )
    assert [start for start, _ in fed] == [0, 5, 6]
    wanted = states(wrapped, out[:, :-1])
    torch.testing.assert_close(torch.cat([hidden_BTD for _, hidden_BTD in fed], 1), wanted, rtol=1e-4, atol=1e-4)


def test_passes_under_capture_are_not_fed(wrapped):
    with hidden_states_fed(wrapped.vbrt.module, lambda start, hidden_BTD: pytest.fail("fed")), as_captured():
        wrapped(ids_of(1, 3), use_cache=True)


def test_a_call_gets_its_drafter_or_the_reason(checkpoint):
    ids = ids_of(1, 4)
    with vbrt.wrap(loaded(checkpoint.directory), "dense", tiers=CPU) as vb:
        attachment = attached_to(vb.vbrt.module)
        assert "vbrt.load_heads(vb)" in heads_for(attachment, ids, None, load=False)
        assert "in a cache" in heads_for(attachment, ids, torch.ones(1, 6), load=True)
        assert isinstance(heads_for(attachment, ids, None, load=True), Heads)
        assert isinstance(heads_for(attachment, ids, torch.ones(1, 4), load=False), Heads)


# -- in generate ------------------------------------------------------------------------------------------------------

TOKENS = 20
GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "temperature": 1.2, "seed": 5}


def padded_prompts() -> dict[str, Tensor]:
    ids, mask = ids_of(2, 6), torch.ones((2, 6), dtype=torch.int64)
    mask[1, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


def run(vb, prompts: dict[str, Tensor], **kwargs):
    settings = {"max_new_tokens": TOKENS, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
    return vb.generate(**prompts, **settings, **kwargs)


class Seen:
    """What heads are fed and propose, with the first drafts of most rounds replaced by right ones.

    Attributes:
        fed: (start, states) of each feed.
        asked: (sequences, drafts) of each proposal.
        sizes: tokens whose states are held after a pass.
    """

    def __init__(self, tokens: Tensor) -> None:
        """tokens: of plain decoding."""
        self._tokens, self.sizes = tokens, set[int]()
        self.fed: list[tuple[int, Tensor]] = []
        self.asked: list[tuple[Sequences, Tensor]] = []

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        dice, feed, propose, note = random.Random(4), Heads.feed, Heads.propose, PassStates.note

        def fed(heads, start: int, hidden_BTD: Tensor) -> None:
            self.fed.append((start, hidden_BTD.clone()))
            feed(heads, start, hidden_BTD)

        def proposed(heads, sequences: Sequences, k: int) -> Tensor:
            drafts = propose(heads, sequences, k)
            self.asked.append((copy.copy(sequences), drafts))
            right, place = dice.randint(0, drafts.shape[1]), sequences.length
            return torch.cat([self._tokens[:, place : place + right], drafts[:, right:]], 1)

        def noted(found: PassStates, start: int, hidden_BTD: Tensor) -> None:
            note(found, start, hidden_BTD)
            self.sizes.add(found._hidden.shape[1])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PassStates, "note", noted)
            patch.setattr(Heads, "feed", fed)
            patch.setattr(Heads, "propose", proposed)
            yield

    @property
    def states(self) -> Tensor:
        """All states that were fed, in order, none twice."""
        starts, states = zip(*self.fed, strict=True)
        ends = [start + piece.shape[1] for start, piece in self.fed]
        assert [0, *ends[:-1]] == list(starts)
        return torch.cat(states, 1)


def assert_plain(got, plain) -> None:
    assert torch.equal(got.sequences, plain.sequences)
    assert len(got.logits) == len(plain.logits) and all(map(torch.equal, got.logits, plain.logits))


def states_of_steps(vb, prompts: dict[str, Tensor], how: dict) -> Tensor:
    """States of eager passes of one token after the prompt's."""
    fed: list[Tensor] = []
    with hidden_states_fed(vb.vbrt.module, lambda start, hidden_BTD: fed.append(hidden_BTD)):
        run(vb, prompts, **how)
    return torch.cat(fed, 1)


@pytest.fixture(params=["deepseek_v3", "glm4_moe"])
def of_family(request, tmp_path):
    written(request.param, tmp_path)
    return tmp_path


@pytest.fixture
def short_buckets(monkeypatch):
    monkeypatch.setattr("vbrt.generation.static.length_buckets.BLOCK", 4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_heads_draft_for_captured_steps(how, of_family, short_buckets):
    with vbrt.wrap(loaded(of_family), "fp4", tiers=CPU) as vb:
        prompts = padded_prompts()
        plain = run(vb, prompts, **how)
        seen = Seen(plain.sequences)
        with seen.during():
            assert_plain(run(vb, prompts, **how, speculate=2, drafter="heads"), plain)  # loads them, and captures anew
        counted = vb.stats().speculation.by_drafter["heads"]
        assert counted["rounds"] > 4 and 0 < counted["accepted"] < counted["drafted"]
        assert not vb.stats().fallbacks and not vb.stats().steps.eager
        assert vb.stats().steps.recordings == 4  # two buckets without a head, and two with one
        assert_plain(run(vb, prompts, **how), plain)
        assert not vb.vbrt.module.get_decoder()._forward_hooks
        assert (
            {3, 6} <= seen.sizes <= {6, 1, 2, 3}
        )  # the prompt's, a step's, and those of a round with one draft or two
        ids, mask = plain.sequences, nn.functional.pad(prompts["attention_mask"], (0, TOKENS - 1), value=1)
        wanted = states(vb, ids[:, :-1], mask)
        torch.testing.assert_close(seen.states * mask[..., None], wanted * mask[..., None], rtol=1e-4, atol=1e-4)
        assert len(seen.asked) == counted["rounds"]
        for sequences, proposed in seen.asked:
            heads = Heads(head_of(vb), prompts["attention_mask"])
            heads.feed(0, wanted[:, : sequences.length - 1])
            assert torch.equal(proposed, heads.propose(sequences, proposed.shape[1])) and proposed.shape[1] in (1, 2)


def in_bfloat16(directory) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_heads_draft_for_exact_steps_that_are_captured(how, tmp_path, request):
    written("glm4_moe", tmp_path)  # DeepSeek's attention is not captured with its bits
    with vbrt.wrap(in_bfloat16(tmp_path), "exact", tiers=CPU) as vb:
        prompts = padded_prompts()
        wanted = states_of_steps(vb, prompts, how)
        request.getfixturevalue("recorded")
        plain = run(vb, prompts, **how)
        seen = Seen(plain.sequences)
        with seen.during():
            assert_plain(run(vb, prompts, **how, speculate=2, drafter="heads"), plain)
        assert vb.stats().speculation.by_drafter["heads"]["rounds"] > 4 and vb.stats().steps.captured > 0
        assert torch.equal(seen.states, wanted)


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_heads_draft_for_exact_steps_that_are_eager(how, tmp_path):
    written("glm4_moe", tmp_path, first_k_dense_replace=LAYERS + 1)  # experts run in no row-wise pass
    with vbrt.wrap(in_bfloat16(tmp_path), "exact", tiers=CPU) as vb:
        prompts = padded_prompts()
        wanted, plain = states_of_steps(vb, prompts, how), run(vb, prompts, **how)
        seen = Seen(plain.sequences)
        with seen.during():
            assert_plain(run(vb, prompts, **how, speculate=2, drafter="heads"), plain)
        counted = vb.stats().speculation.by_drafter["heads"]
        assert counted["rounds"] > 4 and 0 < counted["accepted"] < counted["drafted"]
        assert torch.equal(seen.states, wanted)


@pytest.mark.sample(1)
def test_heads_draft_for_passes_that_keep_the_distribution(of_family):
    with vbrt.wrap(in_bfloat16(of_family), "exact", tiers=CPU) as vb:
        prompts = padded_prompts()
        wanted, plain = states_of_steps(vb, prompts, GREEDY), run(vb, prompts, **GREEDY)
        seen = Seen(plain.sequences)
        with seen.during():
            got = run(vb, prompts, **GREEDY, speculate=2, drafter="heads", exactness="distribution")
        counted = vb.stats().speculation.by_drafter["heads"]
        assert counted["rounds"] > 4 and counted["accepted"] > 0 and not vb.stats().fallbacks
        alike = (got.sequences == plain.sequences).all(0).long().cumprod(0)[:-1].bool()  # rounding may change a token
        assert alike.sum() > 8
        near = nn.functional.cosine_similarity(seen.states[:, alike].float(), wanted[:, alike].float(), dim=-1)
        assert (near > 0.98).float().mean() > 0.9  # it may change experts


@pytest.mark.sample(1)
def test_heads_draft_unasked_once_they_are_loaded(of_family):
    with vbrt.wrap(loaded(of_family), "fp4", tiers=CPU) as vb:
        prompts, calls = padded_prompts(), GREEDY | {"speculate": 2}
        run(vb, prompts, **calls)
        assert attached_to(vb.vbrt.module).head is None and not vb.stats().fallbacks
        assert "heads" not in vb.stats().speculation.by_drafter
        vbrt.load_heads(vb)
        run(vb, prompts, **calls)
        assert vb.stats().speculation.by_drafter["heads"]["rounds"] > 4
        captured, attachment = vb.stats().steps.recordings, attached_to(vb.vbrt.module)
        run(vb, prompts, **calls)
        assert vb.stats().steps.recordings == captured
        head, attachment.head = attachment.head, None
        run(vb, prompts, **calls)
        assert vb.stats().steps.recordings > captured  # without a result that nothing reads
        assert not attached_to(head).closed


def test_heads_that_cannot_be_loaded_are_named(of_family):
    with vbrt.wrap(loaded(of_family), "fp4", tiers=CPU) as vb:
        vb.vbrt.module.config._name_or_path = ""
        prompts = padded_prompts()
        with pytest.warns(UserWarning, match="not loaded from files"):
            run(vb, prompts, **GREEDY, speculate=2, drafter="heads")
        assert any("not loaded from files" in reason for reason in vb.stats().fallbacks)


def test_a_model_that_came_from_nowhere_has_no_head():
    config = transformers.LlamaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=97, num_attention_heads=4)
    with vbrt.wrap(transformers.LlamaForCausalLM(config), "dense", tiers=CPU) as vb:
        assert "not loaded from files" in heads_for(attached_to(vb.vbrt.module), ids_of(1, 4), None, load=True)
    with vbrt.wrap(nn.Sequential(nn.Linear(64, 64)), "dense", tiers=CPU) as vb:
        with pytest.raises(WrapError, match="needs a decoder's layers"):
            vbrt.load_heads(vb)
