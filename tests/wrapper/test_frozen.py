"""A wrapped layer's weight is frozen and no parameter of an optimizer's, from `wrap` on; a pass encodes what it calls
or reads."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import vbrt
from tests.models import config, dtype_of, llama, mlp, qwen3_moe, wrap
from vbrt.errors import FormatError


class Reader(nn.Module):
    """Computes with the weights of two layers that it never calls, as Mamba, WavLM and swin do; and calls one."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.read, self.called, self.unused = (nn.Linear(64, 64, dtype=dtype) for _ in range(3))
        self.norm = nn.LayerNorm(64, dtype=dtype)

    def forward(self, x):
        return self.called(self.norm(F.linear(x, self.read.weight, self.read.bias)))


def originals(model):
    """Weak references to the dense weights of a model's Linear layers."""
    return [weakref.ref(module.weight) for module in model.modules() if isinstance(module, nn.Linear)]


def living(weights):
    gc.collect()
    return sum(ref() is not None for ref in weights)


def shell_bytes(vb):
    """Bytes of dense weights that wait to be encoded."""
    return sum(layer.handle.spec.weight_bytes for layer in vb.registry.values() if not layer.materialized)


# -- parameters --------------------------------------------------------------------------------------------------------


def test_a_wrapped_model_lists_the_same_parameters_before_and_after_its_first_pass():
    for model, x in (
        (mlp(), torch.randn(2, 64)),
        (llama(), torch.arange(6)[None]),
        (qwen3_moe(), torch.arange(6)[None]),
    ):
        vb = wrap(model)
        before = {name: id(parameter) for name, parameter in vb.named_parameters()}
        swapped = {site.tensor for swap in vb.plan.swaps for site in swap.sites}
        assert swapped and not swapped & set(before) and set(before) < set(vb.state_dict())
        with torch.no_grad():
            vb(x)
        assert {name: id(parameter) for name, parameter in vb.named_parameters()} == before


@pytest.mark.parametrize("make", ["optimizer", "average"])
def test_who_takes_the_parameters_before_the_first_pass_keeps_no_dense_weight_alive(make):
    model = mlp()
    dense = originals(model)
    vb = wrap(model)
    taken = torch.optim.AdamW(vb.parameters()) if make == "optimizer" else AveragedModel(vb.module)
    vb(torch.randn(2, 64)).sum().backward()
    if make == "optimizer":
        taken.step()
    else:
        taken.update_parameters(vb.module)
        assert len(list(taken.module.parameters())) == len(list(vb.parameters())) == 6
    assert living(dense) == 0


def test_the_trainer_takes_no_dense_weight_before_the_first_pass(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = llama()
    dense = originals(model)[:-1]  # the head stays
    vb = wrap(model)
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], max_steps=1)
    trainer = transformers.Trainer(model=vb, args=args)
    optimizer = trainer.create_optimizer()
    with torch.no_grad():
        vb(torch.arange(6)[None])
    taken = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert living(dense) == 0 and taken == {id(parameter) for parameter in vb.parameters()}


def test_accelerate_takes_no_dense_weight_before_the_first_pass():
    accelerate = pytest.importorskip("accelerate")
    model = mlp(depth=2)
    dense = originals(model)
    vb = wrap(model)
    ready, optimizer = accelerate.Accelerator(cpu=True).prepare(vb.module, torch.optim.SGD(vb.parameters(), lr=0.1))
    ready(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    assert living(dense) == 0 and shell_bytes(vb) == 0


def test_unwrap_before_the_first_pass_gives_back_the_very_parameters():
    for model in (mlp(), llama(tied=True), qwen3_moe()):
        before = dict(model.named_parameters(remove_duplicate=False))
        held = wrap(model).unwrap()
        after = dict(held.named_parameters(remove_duplicate=False))
        assert held is model and after.keys() == before.keys()
        assert all(after[name] is parameter and parameter.requires_grad for name, parameter in before.items())


def test_a_wrap_that_fails_gives_back_the_very_parameters(monkeypatch):
    model = mlp()
    before = dict(model.named_parameters())
    monkeypatch.setattr("vbrt.model.attachment.activations_of", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        wrap(model)
    assert all(after is before[name] for name, after in model.named_parameters()) and len(before) == 12
    assert all(type(module) in (nn.Linear, nn.Tanh) for module in model) and not model._forward_hooks


@pytest.mark.parametrize("thaw", ["layer", "weight", "model"])
def test_a_shell_trains_once_it_is_asked_to_and_is_as_it_was_where_it_is_frozen(thaw):
    vb, x = wrap(mlp(depth=2), "nvfp4"), torch.randn(2, 64)
    first = vb.module[0]
    before = first.weight.detach().clone()
    with pytest.warns(UserWarning, match=r"requires_grad_\(True\): 0 .*left the tiers"):
        {"layer": first, "weight": first.weight, "model": vb.module}[thaw].requires_grad_(True)
    assert type(first) is nn.Linear and torch.equal(first.weight, before)
    assert "0.weight" in dict(vb.named_parameters())
    vb(x).sum().backward()
    assert first.weight.grad is not None
    frozen = wrap(mlp(depth=2)).requires_grad_(False).unwrap()
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


def test_casts_loads_and_copies_between_wrap_and_the_first_pass_count():
    source, x = mlp(depth=2), torch.randn(2, 64)
    source.requires_grad_(False)[0].weight.fill_(0.5)
    vb = wrap(mlp(depth=2))
    held = vb.module[0].weight
    vb.load_state_dict(source.state_dict())
    clone = copy.deepcopy(vb)
    vb.double()
    assert held is vb.module[0].weight and held.dtype is torch.float64 and (held == 0.5).all()
    assert torch.equal(vb(x.double()), source.double()(x.double()))
    assert torch.equal(clone(x), source.float()(x)) and not (clone.model[0].weight != 0.5).any()


# -- PEFT --------------------------------------------------------------------------------------------------------------


def trained(peft, model, x, y, **adapter):
    """Losses of a few steps of an adapter with a module that is trained and saved as a whole; what is saved."""
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0"], **adapter))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (adapted(x) - y).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, peft.get_peft_model_state_dict(adapted)


def test_a_layer_that_peft_saves_of_a_model_before_its_first_pass_learns_as_the_plain_one(format):
    peft, dtype = pytest.importorskip("peft"), dtype_of(format)
    x, y = torch.randn(16, 64, dtype=dtype), torch.randn(16, 64, dtype=dtype)
    expected, _ = trained(peft, mlp(depth=2, dtype=dtype), x, y, modules_to_save=["2"])
    before = mlp(depth=2, dtype=dtype)[2].weight
    with pytest.warns(UserWarning, match="left the tiers to train"):
        got, saved = trained(peft, wrap(mlp(depth=2, dtype=dtype), format).module, x, y, modules_to_save=["2"])
    assert got == (pytest.approx(expected, rel=0.05) if format == "nvfp4" else expected)
    assert expected[2] < 0.8 * expected[0]
    assert not torch.equal(saved["base_model.model.2.weight"], before)


# -- weights that are read ---------------------------------------------------------------------------------------------


def test_a_weight_that_a_pass_reads_is_encoded_by_it_and_the_first_output_is_that_of_later_ones(format):
    model, x = Reader(dtype_of(format)).eval(), torch.randn(2, 64, dtype=dtype_of(format))
    dense = originals(model)
    vb = wrap(model, format)
    with torch.no_grad():
        first = vb(x)
    layers = vb.stats().layers
    assert layers["read"].materialized and layers["called"].materialized and not layers["unused"].materialized
    assert living(dense) == 1 and shell_bytes(vb) == model.unused.handle.spec.weight_bytes
    with torch.no_grad():
        assert torch.equal(vb(x), first)


def test_a_weight_that_is_read_beside_a_pass_is_encoded_when_the_pass_ends():
    vb, x = wrap(Reader()), torch.randn(2, 64)
    held = vb.module.unused.weight
    assert held.data_ptr() == vb.module.unused.dense.data_ptr(), "nothing is copied to read a shell"
    assert not vb.module.unused.materialized, "and nothing is encoded"
    before = held.clone()
    vb(x)
    assert vb.module.unused.materialized and vb.module.unused.weight is held and torch.equal(held, before)


def test_a_weight_that_was_written_to_and_is_only_read_is_encoded_again(format):
    model, x = Reader(dtype_of(format)).eval(), torch.randn(2, 64, dtype=dtype_of(format))
    vb = wrap(model, format)
    with torch.no_grad():
        vb(x)
        model.read.weight.mul_(2)
        assert not model.read.materialized
        y = vb(x)
        assert model.read.materialized and torch.equal(vb(x), y)


def test_after_a_forward_that_failed_a_shell_is_read_as_it_is():
    model = mlp(depth=2)
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    vb, x = wrap(model, "nvfp4"), torch.randn(2, 64)
    with pytest.raises(FormatError, match=r"^2: "):
        vb(x)
    with torch.no_grad():
        model[2].weight[0, 0] = 0
        assert vb(x).isfinite().all()


@pytest.mark.parametrize("kind", ["of parts", "of the model", "failing"])
def test_a_call_of_a_wrapper_with_another_forward_is_one_pass(kind):
    vb, x = wrap(Reader(), "nvfp4"), torch.randn(2, 64)
    original = vb.forward

    def parts(x):  # as TRL's fused head runs a backbone, and reads the head's weight
        return F.linear(vb.called(vb.norm(x)), vb.read.weight, vb.read.bias)

    def failing(x):
        parts(x)
        raise KeyError("its own")

    vb.forward = {"of parts": parts, "of the model": lambda x: original(x), "failing": failing}[kind]
    for passes in (1, 2):
        if kind == "failing":
            with pytest.raises(KeyError, match="its own"):
                vb(x)
        else:
            vb(x)
        assert vb.stats().passes == passes
    assert vb.registry["read"].materialized and vb.registry["called"].materialized
    assert not vb.registry["unused"].materialized and not vb.stack.shells.in_pass
    del vb.forward
    vb(x)
    vb.module(x)
    assert vb.stats().passes == 4


def test_a_copy_of_a_wrapper_with_another_forward_counts_its_own_passes():
    vb, x = wrap(Reader()), torch.randn(2, 64)
    vb.forward = Reader.forward.__get__(vb)
    again = copy.deepcopy(vb)
    again(x)
    assert (vb.stats().passes, again.stats().passes) == (0, 1) and again.registry["read"].materialized


def test_rounding_a_weight_that_others_hold_leaves_theirs_as_it_is():
    model, x = mlp(depth=1), torch.randn(2, 64)
    own, before = model[0].weight, model[0].weight.detach().clone()
    vb = wrap(model, "nvfp4")
    held, state = vb.module[0].weight, vb.state_dict()
    with torch.no_grad():
        vb(x)
    assert vb.module[0].weight is held and torch.equal(held, vb.module[0].handle.weight())
    assert torch.equal(own, before) and torch.equal(state["0.weight"], before) and not torch.equal(held, before)


MODELS = {
    "wavlm": lambda t: t.WavLMModel(
        t.WavLMConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            conv_dim=(16, 16),
            conv_stride=(4, 4),
            conv_kernel=(4, 4),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
        )
    ),
    "mamba": lambda t: t.MambaModel(t.MambaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, state_size=8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_transformers_whose_weights_are_only_read_are_in_the_tiers_after_a_pass(name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = MODELS[name](transformers).eval()
    x = torch.randn(1, 800) if name == "wavlm" else torch.arange(12)[None]
    with torch.no_grad():
        plain = model(x)[0]
        vb = wrap(model)
        assert torch.equal(vb(x)[0], plain) and torch.equal(vb(x)[0], plain)
    reads = [name for name, layer in vb.stats().layers.items() if not layer.forwards]
    assert reads and not vb.module._forward_hooks and all(layer.materialized for layer in vb.stats().layers.values())
    assert shell_bytes(vb) == 0


# -- several processes -------------------------------------------------------------------------------------------------


def test_distributed_data_parallel_over_a_model_before_its_first_pass_trains(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        vb, x = wrap(mlp(depth=2)), torch.randn(2, 64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parallel = DistributedDataParallel(vb.module.train())
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = parallel(x).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses == sorted(losses, reverse=True) and len(set(losses)) == 3
        dist.barrier()  # Gloo's threads are done with the gradients: else they may want the lock that ending them holds
    finally:
        dist.destroy_process_group()


# -- heads -------------------------------------------------------------------------------------------------------------


class FusedLoss(nn.Module):
    """A loss that takes the head's weight, as fused cross entropies do, and trains whatever requires grad."""

    def __init__(self):
        super().__init__()
        self.model = llama()

    def forward(self, ids):
        hidden = self.model.model(ids).last_hidden_state
        return F.cross_entropy(F.linear(hidden[0, :-1], self.model.lm_head.weight), ids[0, 1:])


def test_a_head_whose_weight_a_fused_loss_reads_does_not_train_whether_it_is_encoded_or_not():
    ids, losses = torch.arange(12)[None], []
    for materialized in (False, True):
        vb = vbrt.wrap(FusedLoss(), config("dense", keep_head=False))
        if materialized:
            vb.materialize()
        optimizer = torch.optim.SGD(vb.parameters(), lr=0.5)
        found = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = vb(ids)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(found)
        assert vb.module.model.lm_head.materialized
    assert losses[0] == losses[1] and losses[0][1] < losses[0][0]
