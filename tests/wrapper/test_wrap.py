"""vbrt.wrap: what it changes, what it refuses, and what unwrap() and close() give back."""

import contextlib
import gc
import os
import re
import time
import warnings
import weakref

import pytest
import torch
from torch import nn

import vbrt
from tests.models import config, dtype_of, llama, mlp, wrap, wrap_streamed
from vbrt.config import load_config
from vbrt.errors import ConfigError, KernelError, TierError, WrapError
from vbrt.layers import VBLinear
from vbrt.model.machine_memory import release_host_memory
from vbrt.tiers import TierStack
from vbrt.training import TrainedLinear

# -- wrap --------------------------------------------------------------------------------------------------------------


def test_wrap_moves_no_byte_and_keeps_every_object():
    model = llama()
    modules = list(model.modules())
    before = {(id(p), p.data_ptr(), p._version) for p in model.parameters()}
    vb = wrap(model, "nvfp4", keep_head=False)
    held = [*vb.module.parameters(), *(layer.dense for layer in vb.registry.values())]
    assert {(id(p), p.data_ptr(), p._version) for p in held} == before
    assert list(vb.module.modules()) == modules and vb.module is model
    assert vb.stats().tiers["cpu"].held_bytes == 0 and not any(x.materialized for x in vb.registry.values())


@pytest.mark.parametrize("given", ["dense", {"weights": {"format": "dense"}}, load_config("dense")])
def test_a_config_may_be_a_preset_a_dict_or_an_object(given):
    vb = vbrt.wrap(mlp(), given)
    assert vb.settings.weights.format == "dense" and len(vb.registry) == 6
    assert vbrt.wrap(mlp(), given, weights={"exclude": ["0"]}).plan.skipped["0"].reason == "weights.exclude has '0'"


def test_a_config_may_be_a_file(tmp_path):
    (tmp_path / "my.toml").write_text('[weights]\nformat = "nf4"\n')
    for given in (tmp_path / "my.toml", str(tmp_path / "my.toml")):
        assert vbrt.wrap(mlp(), given).settings.weights.format == "nf4"


def test_the_default_is_nvfp4():
    assert vbrt.wrap(mlp()).settings.weights.format == "nvfp4"


def test_everything_of_the_model_is_reachable():
    model = llama()
    vb = wrap(model)
    assert vb.config is model.config and vb.generation_config is model.generation_config
    assert vb.dtype is torch.float32 and vb.get_input_embeddings() is model.get_input_embeddings()
    assert vb.num_parameters() == model.num_parameters() and isinstance(vb, nn.Module)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = vb.nonsense


def test_what_is_no_plain_model_is_refused_by_name():
    vb = wrap(mlp())
    with pytest.raises(WrapError, match="wrapped already"):
        vbrt.wrap(vb)
    with pytest.raises(WrapError, match=r"VB layer already.*unwrap"):
        vbrt.wrap(vb.module)
    with pytest.raises(WrapError, match=r"ScriptModule: layers of TorchScript are compiled; wrap the model"):
        vbrt.wrap(torch.jit.script(nn.Linear(8, 8)))
    with pytest.raises(WrapError, match=r"list; expected a torch\.nn\.Module"):
        vbrt.wrap([vb])


def test_a_refused_wrap_leaves_the_model_and_the_disk_as_they_were(tmp_path):
    model = mlp()
    settings = config("dense")
    settings["tiers"] |= {"cpu": {"budget": 3 * 16384}, "ssd": {"enabled": True, "path": str(tmp_path)}}
    with pytest.raises(KernelError, match="triton"):
        vbrt.wrap(model, settings, compute={"backend": "triton"})
    with pytest.raises(ConfigError):
        vbrt.wrap(model, settings, weights={"format": "fp3"})
    assert all(type(layer) is nn.Linear for layer in model[::2]) and not any(tmp_path.iterdir())
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("accident", [RuntimeError, KeyboardInterrupt])
def test_a_wrap_that_fails_half_way_gives_the_model_back_and_closes_the_tiers(mode, accident, tmp_path, monkeypatch):
    model, stacks = mlp(), []
    before = [(type(layer), dict(vars(layer))) for layer in model]
    swapped = {"infer": VBLinear, "train": TrainedLinear}[mode]
    adopt, close = swapped.adopt_, TierStack.close

    def fail_at_the_fourth(cls, module, handle):
        if module is model[6]:
            raise accident("no")
        return adopt.__func__(cls, module, handle)

    monkeypatch.setattr(swapped, "adopt_", classmethod(fail_at_the_fourth))
    monkeypatch.setattr(TierStack, "close", lambda stack: (stacks.append(stack), close(stack)))
    settings = config("dense") | {"mode": mode}
    settings["tiers"] |= {"cpu": {"budget": 4 * 16384}, "ssd": {"enabled": True, "path": str(tmp_path)}}
    with pytest.raises(accident, match="no"):
        vbrt.wrap(model, settings)
    assert [(type(layer), dict(vars(layer))) for layer in model] == before and not model._forward_pre_hooks
    assert [stack.closed for stack in stacks] == [True] and not any(tmp_path.iterdir())


def test_a_bare_linear_can_be_wrapped(format):
    layer, x = nn.Linear(64, 32, dtype=dtype_of(format)).eval(), torch.randn(2, 64, dtype=dtype_of(format))
    y = layer(x)
    vb = wrap(layer, format)
    assert list(vb.registry) == ["(root)"] and type(layer) is VBLinear
    assert torch.equal(vb(x), y) or format == "nvfp4"
    assert type(vb.unwrap()) is nn.Linear


def test_a_model_without_linears_is_wrapped_and_says_that_nothing_was_swapped():
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(), torch.randn(1, 3, 8, 8)
    with pytest.warns(UserWarning, match=r"nothing is swapped.*no linear layers; its largest part is 0 \(Conv2d"):
        vb = wrap(model)
    assert torch.equal(vb(x), model(x)) and "nothing is swapped" in vb.plan.notes[0]
    assert vb.stats().hit_rate is None and vb.materialize().unwrap() is model


def test_a_model_of_which_nothing_is_swapped_warns_once_with_the_most_frequent_reason():
    model = mlp(depth=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            vbrt.wrap(model, config("dense", min_parameters=5000, exclude=["0"])).unwrap()
    (warning,) = caught
    assert "4 of 5 linear layers stay because: 4096 parameters; weights.min_parameters = 5000" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.filterwarnings("error")
def test_wrap_and_load_note_that_much_is_not_swapped_and_warn_of_nothing(tmp_path):
    says = r"65.8 KiB of the model's 425.8 KiB are not swapped .* the largest part is model\.embed_tokens"
    vb = wrap(llama(), "nvfp4")
    vb.save(tmp_path)
    for wrapped in (vb, vbrt.load(tmp_path, llama())):
        assert any(re.match(says, note) for note in wrapped.plan.notes) and not wrapped.plan.warnings


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_wrap_refuses_to_do_without_the_gpu_that_was_asked_for():
    model = mlp()
    with pytest.raises(ConfigError, match=r"tiers\.gpu\.enabled = true; this machine has no GPU"):
        vbrt.wrap(model, tiers={"gpu": {"enabled": True}})
    for given in ({"budget": "6GiB"}, {"enabled": "auto"}):
        assert vbrt.wrap(model, tiers={"gpu": given}).unwrap() is model


@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize("how", ["a file", "below a file", "no drive", "a name that is too long"])
def test_an_ssd_path_that_cannot_be_written_is_refused_at_wrap_needed_or_not(how, needed, tmp_path):
    (tmp_path / "file").write_text("mine")
    path = {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "pages",
        "no drive": "/proc/vbrt",
        "a name that is too long": tmp_path / ("x" * 300),
    }[how]
    model, settings = mlp(), config("dense")
    settings["tiers"] |= {"ssd": {"enabled": True, "path": str(path)}}
    settings["tiers"] |= {"cpu": {"budget": 4 * 16384}} if needed else {}
    with pytest.raises(TierError, match=f"tier ssd: cannot write in .*{os.path.basename(path)}"):
        vbrt.wrap(model, settings)
    assert type(model[0]) is nn.Linear and [path.name for path in tmp_path.iterdir()] == ["file"]


def test_trying_an_ssd_path_leaves_no_directory(tmp_path):
    settings = config("dense")
    settings["tiers"] |= {"ssd": {"enabled": True, "path": str(tmp_path / "a" / "b")}}
    vb = vbrt.wrap(mlp(), settings)
    assert vb.plan.home_bytes("ssd") == 0 and not any(tmp_path.iterdir())


def test_giving_memory_back_collects_no_garbage():
    collections = []
    gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
    try:
        release_host_memory()  # runs in the second forward: a full collection takes 0.4 s where transformers is loaded
    finally:
        gc.callbacks.pop()
    assert 2 not in collections


# -- unwrap and close --------------------------------------------------------------------------------------------------


def test_unwrap_gives_the_same_objects_classes_flags_and_bits_back(wrapped, format):
    vb, original, x = wrapped
    model, layers = vb.module, list(vb.module)
    layers[2].weight.requires_grad_(False)
    y = vb(x)
    unwrapped = vb.unwrap()
    assert unwrapped is model and list(unwrapped) == layers and not unwrapped._forward_pre_hooks
    assert [type(layer) for layer in unwrapped] == [type(layer) for layer in original]
    assert [layer.weight.requires_grad for layer in unwrapped[::2]] == [True, False, True, True, True, True]
    assert layers[0].__dict__.keys() == original[0].__dict__.keys()
    dense = unwrapped(x)
    if format == "nvfp4":
        torch.testing.assert_close(dense, y)  # the kernel sums in another order
    else:
        assert torch.equal(dense, y)
        for name, value in original.state_dict().items():
            assert torch.equal(unwrapped.state_dict()[name], value)
    assert vb.stats().layers == {} and torch.equal(vb(x), dense)
    again = wrap(unwrapped, format)
    torch.testing.assert_close(again(x), y, **({} if format == "nvfp4" else {"rtol": 0, "atol": 0}))


def test_unwrapping_shells_gives_the_very_parameters_back(wrapped):
    vb, _, _ = wrapped
    before = [id(p) for layer in vb.module[::2] for p in (layer.dense, layer.bias)]
    assert [id(p) for p in vb.unwrap().parameters()] == before


def test_unwrap_trains_again():
    model = wrap(mlp().train(), "dense").unwrap()
    model(torch.randn(2, 64)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_after_close_a_forward_is_an_error_that_says_what_to_do(wrapped):
    vb, _, x = wrapped
    vb(x)
    vb.close()
    vb.close()
    for use in (lambda: vb(x), vb.state_dict, vb.unwrap, lambda: vb.module[0].weight):
        with pytest.raises(TierError, match="closed"):
            use()
    assert vb.stats().tiers["cpu"].held_bytes == 0


def test_what_a_closed_or_unwrapped_model_cannot_do_is_refused_by_name(tmp_path):
    for end in ("close", "unwrap"):
        for vb in (wrap(mlp()), wrap(mlp()).materialize()):
            getattr(vb, end)()
            for use in (
                lambda vb=vb: vb.set_budget("cpu", "1GiB"),
                lambda vb=vb: vb.save(tmp_path / "saved"),
                lambda vb=vb: vb.timeline(tmp_path / "x.html"),
                vb.__enter__,
            ):
                with pytest.raises(WrapError, match="closed or unwrapped"):
                    use()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("preset", "dtype", "lossless"),
    [
        ("dense", torch.float32, True),
        ("exact", torch.bfloat16, True),
        ("exact", torch.float32, True),
        ("nvfp4", torch.float32, False),
    ],
)
def test_lossless_says_whether_unwrap_gives_the_original_bits(preset, dtype, lossless):
    model, original = mlp(dtype=dtype), mlp(dtype=dtype).state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vb = wrap(model, preset).materialize()
        assert vb.lossless is lossless
        with contextlib.nullcontext() if lossless else pytest.warns(UserWarning, match="rounded to nvfp4; their orig"):
            given_back = vb.unwrap().state_dict()
    assert all(torch.equal(given_back[name], value) for name, value in original.items()) is lossless
    assert vb.lossless is lossless and vbrt.wrap(mlp(), config("nvfp4"), mode="train").lossless


def test_leaving_the_context_closes_and_removes_the_files(tmp_path):
    with wrap_streamed(mlp(), "dense", tmp_path) as vb:
        vb(torch.randn(1, 64))
        assert list(tmp_path.rglob("*.page"))
    assert vb.stack.closed and not any(tmp_path.iterdir())
    with pytest.raises(ValueError, match="mine"), wrap_streamed(mlp(), "dense", tmp_path) as vb:
        vb(torch.randn(1, 64))
        raise ValueError("mine")
    assert not any(tmp_path.iterdir())


def test_a_dropped_wrapper_frees_pages_files_and_threads(tmp_path):
    vb = wrap_streamed(mlp(), "dense", tmp_path)
    for _ in range(3):
        vb(torch.randn(1, 64))
    stack, layer = weakref.ref(vb.stack), weakref.ref(vb.module[0])
    del vb
    gc.collect()
    assert layer() is None
    until = time.monotonic() + 10  # a read ahead may be under way in a worker, which holds the stack until it is done
    while any(tmp_path.iterdir()) and time.monotonic() < until:
        time.sleep(0.01)
    assert stack() is None and not any(tmp_path.iterdir())
