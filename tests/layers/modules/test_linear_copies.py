"""State dicts, copies and ties of VBLinear."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import vbrt
from tests.layers.holdings import dense_twin, dtype_of, inputs, tied
from tests.models import FORMATS, config, mlp, wrap
from vbrt.errors import FormatError, TierError

#: the few tests that compare the bits of 4-bit layers with torch's matmul; all others run on the kernels that users get
torchs_bits = pytest.mark.usefixtures("plain_torch")


# -- state dict --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("materialized", [False, True])
def test_state_dict_has_the_keys_shapes_and_order_of_the_dense_model(some_vb, materialized):
    if materialized:
        some_vb.materialize()
    plain = mlp(dtype=some_vb.module[0].weight.dtype).state_dict()
    got = [(name, value.shape, value.dtype) for name, value in some_vb.state_dict().items()]
    assert got == [(name, value.shape, value.dtype) for name, value in plain.items()]
    assert list(some_vb.module.state_dict(prefix="a.")) == [f"a.{k}" for k in plain]
    assert type(some_vb.state_dict()["0.weight"]) is torch.Tensor


def test_a_state_dict_shares_no_memory_with_pages(some_vb):
    x = inputs(some_vb)
    y = some_vb(x)
    for value in some_vb.state_dict().values():
        if value.dim() == 2:
            value.zero_()
    assert torch.equal(some_vb(x), y)


@pytest.mark.sample(6)
@torchs_bits
@pytest.mark.parametrize("materialized", [False, True])
def test_loading_another_models_state_gives_its_outputs(vb, format, materialized):
    if materialized:
        vb.materialize()
    x = inputs(vb)
    torch.manual_seed(99)
    other = mlp(dtype=x.dtype)
    for parameter in other.parameters():
        nn.init.normal_(parameter, std=0.1)
    result = vb.load_state_dict(other.state_dict())
    assert not result.missing_keys and not result.unexpected_keys
    assert torch.equal(vb(x), dense_twin(vb)(x))
    assert torch.equal(vb(x), other(x)) or format == "nvfp4"


@pytest.mark.parametrize("format", [*FORMATS, "mxfp4", "nf4"])
def test_loading_ones_own_state_changes_nothing(format):
    model = mlp(dtype=dtype_of(format))
    vb, x = wrap(model, format), torch.randn(3, 64, dtype=dtype_of(format))
    y = vb(x)
    state = vb.state_dict()
    for _ in range(2):
        vb.load_state_dict(state)
        assert all(torch.equal(a, b) for a, b in zip(vb.state_dict().values(), state.values(), strict=True))
    assert torch.equal(vb(x), y)


@torchs_bits
def test_a_state_dict_of_another_dtype_is_cast(some_vb):
    some_vb.materialize()
    state = {k: v.to(torch.float16) for k, v in mlp().state_dict().items()}
    dtype = some_vb.module[0].weight.dtype
    some_vb.load_state_dict(state)
    assert some_vb.module[0].weight.dtype is dtype
    assert torch.equal(some_vb(inputs(some_vb)), dense_twin(some_vb)(inputs(some_vb)))


def test_missing_unexpected_and_misshapen_keys_are_reported_as_by_a_dense_model(some_vb):
    some_vb.materialize()
    plain, x = mlp(dtype=some_vb.module[0].weight.dtype), inputs(some_vb)
    y = some_vb(x)
    state = some_vb.state_dict()
    del state["2.weight"], state["4.bias"]
    state["0.weight"], state["nobody.weight"], state["2.wait"] = torch.zeros(3, 3), torch.zeros(1), torch.zeros(1)
    kept = dict(state)
    messages = []
    for model in (some_vb, plain):
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(state)
        messages.append(sorted(str(caught.value).replace("\t", "").splitlines()[1:]))
    assert messages[0] == messages[1]
    assert state.keys() == kept.keys() and torch.equal(some_vb(x), y)
    del state["0.weight"]
    got, expected = some_vb.load_state_dict(state, strict=False), plain.load_state_dict(state, strict=False)
    assert set(got.missing_keys) == set(expected.missing_keys) == {"0.weight", "2.weight", "4.bias"}
    assert set(got.unexpected_keys) == set(expected.unexpected_keys)


def test_loading_nan_is_refused_by_name_and_the_old_weight_stays():
    vb, x = wrap(mlp(), "nvfp4"), torch.randn(2, 64)
    y = vb(x)
    state = vb.state_dict()
    state["2.weight"] = torch.full((64, 64), float("nan"))
    with pytest.raises(FormatError, match=r"^2: "):
        vb.load_state_dict(state)
    assert vb.module[2].materialized and torch.equal(vb(x), y)


def test_loading_needs_no_room_beside_the_old_pages(format):
    model = mlp(dtype=dtype_of(format))
    vb = wrap(model, format).materialize()
    held = vb.stats().tiers["cpu"].held_bytes
    vb.unwrap()
    slack = 8192 if format == "exact" else 0  # its side lists differ in length from weight to weight
    budget = max(held, vb.plan.page_bytes) + slack
    vb = vbrt.wrap(model, config(format) | {"tiers": {"gpu": {"enabled": False}, "cpu": {"budget": budget}}})
    vb.materialize()
    torch.manual_seed(1)
    for _ in range(2):
        vb.load_state_dict({k: torch.randn_like(v) for k, v in vb.state_dict().items()})
    assert vb.stats().tiers["cpu"].peak_bytes <= budget and all(layer.materialized for layer in vb.registry.values())


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "materialized"), [("wrapper", False), ("wrapper", True), ("model", True)])
def test_a_deep_copy_computes_the_same_and_is_independent(some_vb, materialized, how):
    x = inputs(some_vb)
    if materialized:
        some_vb.materialize()
    clone = copy.deepcopy(some_vb) if how == "wrapper" else copy.deepcopy(some_vb.module)
    clone_layers = clone.module if how == "wrapper" else clone
    y = some_vb(x)
    assert torch.equal(clone(x), y) and clone_layers[0].materialized
    state = {k: torch.zeros_like(v) for k, v in some_vb.state_dict().items()}
    clone.load_state_dict(state)
    some_vb.module[2].weight = torch.eye(64, dtype=x.dtype)
    clone_layers[2].weight = 2 * torch.eye(64, dtype=x.dtype)
    some_vb(x), clone(x)
    assert torch.equal(some_vb.module[2].weight, torch.eye(64, dtype=x.dtype))
    assert torch.equal(clone_layers[2].weight, 2 * torch.eye(64, dtype=x.dtype))
    assert not clone_layers[0].weight.any() and some_vb.module[0].weight.any()


@torchs_bits
def test_a_copy_can_go_without_hurting_the_original_and_the_reverse(vb, format):
    x = inputs(vb)
    y = vb(x)
    first, second, third = copy.deepcopy(vb), copy.deepcopy(vb.module), copy.deepcopy(vb)
    first.close()
    del second
    gc.collect()
    assert torch.equal(vb(x), y)
    assert torch.equal(copy.deepcopy(vb).unwrap()(x), y)
    vb.close()
    with pytest.raises(TierError, match="closed"):
        vb(x)
    assert torch.equal(third(x), y)
    third.close()


def test_pages_go_when_their_last_owner_goes(some_vb):
    x = inputs(some_vb)
    some_vb(x)
    pages = len(some_vb.stack.pages)
    clone = copy.deepcopy(some_vb.module)
    clone[0].weight = torch.zeros(64, 64, dtype=x.dtype)
    clone(x)
    assert len(some_vb.stack.pages) == pages + len(some_vb.module[0].handle.keys)
    del clone
    gc.collect()
    some_vb(x)
    assert len(some_vb.stack.pages) == pages


@pytest.mark.sample(6)
@pytest.mark.parametrize("materialized", [False, True])
def test_wrapper_and_model_can_be_pickled_and_saved(vb, materialized):
    x = inputs(vb)
    if materialized:
        vb.materialize()
    file = io.BytesIO()
    torch.save(vb.module, file)
    copies = [
        pickle.loads(pickle.dumps(vb)),
        pickle.loads(pickle.dumps(vb.module)),
        torch.load(io.BytesIO(file.getvalue()), weights_only=False),
    ]
    y = vb(x)
    vb.close()
    for clone in copies:
        assert torch.equal(clone(x), y)
    copies[0].stats()
    copies[0].close()
    assert torch.equal(copies[1](x), y) and torch.equal(pickle.loads(pickle.dumps(copies[2]))(x), y)


@torchs_bits
def test_an_unpickled_wrapper_unwraps(some_vb):
    x = inputs(some_vb)
    y = some_vb(x)
    model = pickle.loads(pickle.dumps(some_vb)).unwrap()
    assert type(model[0]) is nn.Linear and torch.equal(model(x), y)


# -- ties --------------------------------------------------------------------------------------------------------------


def test_tied_layers_share_one_page_under_both_names(format):
    model, x = tied(dtype_of(format)), torch.randn(2, 64, dtype=dtype_of(format))
    y = model(x).detach()
    vb = wrap(model, format)
    swap = vb.plan.swaps[0]
    assert (swap.name, swap.aliases, set(vb.registry)) == ("0", ("3",), {"0", "2", "3"})
    assert torch.equal(vb(x), y) or format == "nvfp4"
    assert vb.module[0].handle is vb.module[3].handle
    assert len(vb.stack.pages) == 2 * len(swap.pages)
    assert vb.stats().layers["0"].forwards == 2
    unwrapped = vb.unwrap()
    assert unwrapped[0].weight is unwrapped[3].weight


def test_one_tied_layer_running_frees_the_dense_weight_of_all(format):
    model = tied(dtype_of(format))
    dead = weakref.ref(model[0].weight)
    vb = wrap(model, format)
    with torch.no_grad():
        vb.module[3](torch.randn(1, 64, dtype=dtype_of(format)))
    gc.collect()
    assert dead() is None and vb.module[0].materialized


def test_loading_keeps_a_tie_and_assigning_cuts_it(format):
    vb = wrap(tied(dtype_of(format)), format).materialize()
    vb.load_state_dict(vb.state_dict())
    assert vb.module[0].handle is vb.module[3].handle and len(vb.stack.pages) == 2 * len(vb.plan.swaps[0].pages)
    vb.module[3].weight = torch.zeros(64, 64, dtype=dtype_of(format))
    vb(torch.randn(1, 64, dtype=dtype_of(format)))
    assert vb.module[0].weight.any() and not vb.module[3].weight.any()


def test_a_tie_survives_casts_copies_and_pickles(format):
    vb, x = wrap(tied(dtype_of(format)), format), torch.randn(2, 64, dtype=torch.float16)
    y = vb.half()(x)
    for clone in (copy.deepcopy(vb), pickle.loads(pickle.dumps(vb))):
        assert clone.module[0].handle is clone.module[3].handle and torch.equal(clone(x), y)
