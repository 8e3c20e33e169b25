"""What users of transformers and of Python expect of a wrapped model: counts, errors, announcements."""

import copy
import pickle
import warnings

import pytest
import torch

import vbrt
from tests.models import llama
from vbrt.errors import ArgumentError, CheckpointError, ConfigError, VBError, WrapError
from vbrt.host import accelerator
from vbrt.layers.weights import weight_encoding

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:vbrt.wrap:UserWarning", "ignore:unwrap:UserWarning")
TOKENS = torch.tensor([[1, 2, 3]], device="cpu")


@pytest.mark.parametrize("preset", ["fp4", "exact", "dense"])
def test_parameters_and_footprint_count_weights_in_the_tiers(preset):
    plain = llama()
    whole, inner = plain.num_parameters(), plain.num_parameters(exclude_embeddings=True)
    nbytes = plain.get_memory_footprint()
    vb = vbrt.wrap(plain, preset, weights={"min_parameters": 1, "embeddings": True, "keep_head": False})
    assert vb.num_parameters() == vb.module.num_parameters() == whole > sum(p.numel() for p in vb.parameters())
    assert vb.num_parameters(exclude_embeddings=True) == inner < whole
    assert vb.get_memory_footprint() == nbytes  # nothing is encoded yet
    vb.materialize()
    assert vb.num_parameters() == whole and vb.num_parameters(only_trainable=True) < whole
    pages = sum(sum(layer.plane_bytes.values()) for layer in vb.stats().layers.values())
    kept = sum(t.nbytes for t in (*vb.module.parameters(), *vb.module.buffers()))
    assert vb.get_memory_footprint() == pages + kept
    for copied in (copy.deepcopy(vb), pickle.loads(pickle.dumps(vb))):
        assert copied.num_parameters() == whole and copied.get_memory_footprint() == pages + kept
        copied.close()
    model = vb.unwrap()
    assert "num_parameters" not in vars(model) and "get_memory_footprint" not in vars(model)
    assert model.num_parameters() == whole and model.get_memory_footprint() == nbytes


@pytest.mark.parametrize("held", [True, False])
@torch.no_grad()
def test_ties_stay_where_a_library_ties_weights_again(held):
    """lm-eval's HFLM does, and PEFT's resizing."""
    plain = llama(tied=True).eval()
    want = plain(TOKENS).logits
    vb = vbrt.wrap(plain, "dense", weights={"min_parameters": 1, "embeddings": held, "keep_head": not held})
    tables = {"model.embed_tokens", "lm_head"} & set(vb.plan.skipped)
    assert tables == (set() if held else {"model.embed_tokens", "lm_head"})
    for model in (vb, vb.module, copied := copy.deepcopy(vb)):
        model.tie_weights()
        assert torch.equal(model(TOKENS).logits, want)
    copied.close()
    model = vb.unwrap()
    model.tie_weights()
    assert "tie_weights" not in vars(model) and model.lm_head.weight is model.model.embed_tokens.weight


def test_a_refused_wrap_leaves_no_count_behind():
    model = llama()
    with pytest.raises(VBError):
        vbrt.wrap(model, "fp4", tiers={"cpu": {"budget": 1}})
    assert "num_parameters" not in vars(model)


def test_one_line_generates():
    assert vbrt.wrap(llama()).generate(TOKENS, max_new_tokens=2, do_sample=False).shape == (1, 5)


@pytest.mark.parametrize("given", ["The sea", ["The sea"], [1, 2]])
def test_a_text_is_answered_with_how_to_make_tokens_of_it(given):
    vb = vbrt.wrap(llama())
    for call in (vb.generate, vb, vb.module.generate):
        with pytest.raises(ArgumentError, match=r"expected token ids as a tensor \[batch, tokens\]: tokenizer"):
            call(given)


@pytest.mark.skipif(accelerator.is_used(), reason="there is a device to move to")
def test_moving_to_a_device_that_is_not_there_says_that_nothing_need_be_moved():
    vb = vbrt.wrap(llama())
    for move in (lambda: vb.to("cuda"), vb.cuda):
        with pytest.raises(WrapError, match="Leave it out: the model computes where its tiers are, on cpu"):
            move()
    assert vb.to("cpu") is vb


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda path: vbrt.from_pretrained(path), VBError),
        (lambda path: vbrt.load(path, llama()), CheckpointError),
        (lambda path: vbrt.wrap(llama(), path / "my.toml"), ConfigError),
    ],
    ids=["from_pretrained", "load", "config"],
)
def test_a_missing_path_is_a_file_not_found_error_too(call, kind, tmp_path):
    with pytest.raises(FileNotFoundError, match="no such") as caught:
        call(tmp_path / "nothing")
    assert isinstance(caught.value, kind) and isinstance(caught.value, VBError)
    assert str(tmp_path) in str(caught.value) and "Errno" not in str(caught.value)


def test_the_first_rounding_is_said_once_a_process(monkeypatch, capsys):
    monkeypatch.setattr(weight_encoding, "_announced", [])
    vbrt.wrap(llama(), "exact").materialize()
    assert capsys.readouterr().err == ""
    for _ in range(2):
        vbrt.wrap(llama(), "nf4").materialize()
    assert capsys.readouterr().err == (
        'vbrt: weights are rounded to 4 bits (nf4, relative error about 8.6 %); the preset "exact" keeps every bit\n'
    )


def test_unwrap_warns_of_rounded_weights_alone():
    rounded, untouched, exact = vbrt.wrap(llama(), "fp4").materialize(), vbrt.wrap(llama()), vbrt.wrap(llama(), "exact")
    exact.materialize()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        untouched.unwrap()
        exact.unwrap()
    with pytest.warns(UserWarning, match="rounded to nvfp4; their original bits are gone"):
        rounded.unwrap()


def test_printed_stats_are_as_wide_as_columns(monkeypatch):
    vb = vbrt.wrap(llama(), "dense").materialize()
    for width in (60, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        table = str(vb.stats()).splitlines()
        end = max(number for number, line in enumerate(table) if line.startswith("─"))
        assert max(map(len, table[: end + 2])) <= width
    monkeypatch.delenv("COLUMNS")
    assert max(map(len, str(vb.stats()).splitlines())) <= 100


def test_an_error_in_the_first_pass_is_the_users_own(monkeypatch):
    """torch walks over the hooks themselves then, of which one that removed itself hid the error."""
    monkeypatch.setenv("VBRT_PROGRESS", "1")
    vb = vbrt.wrap(llama())
    with pytest.raises(IndexError, match="out of range"):
        vb(TOKENS + 1000)
    assert not vb.module._forward_hooks and not vb.module._forward_hooks_always_called
    assert vb(TOKENS).logits.isfinite().all()
