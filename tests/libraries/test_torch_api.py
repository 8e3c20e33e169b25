"""What is private to torch's compiler is there in the installed version, and missing it is announced or refused."""

import types
import weakref

import pytest
import torch
from torch._dynamo.source import LocalSource
from torch._guards import Guard

from vbrt.errors import KernelError
from vbrt.libraries import probe, torch_api


@pytest.fixture(autouse=True)
def announced_anew(monkeypatch):
    monkeypatch.setattr(probe, "_losses", {})


def test_an_inductor_without_what_graph_passes_need_is_an_error_that_says_what_works(monkeypatch):
    from torch._inductor import config, custom_graph_pass

    assert issubclass(torch_api.graph_pass_base(), object) and hasattr(config, torch_api.PASS_OPTION)
    assert torch_api.options_of_mode("default") == {}
    monkeypatch.delattr(custom_graph_pass, "CustomGraphPass")
    with pytest.raises(KernelError, match=r"CustomGraphPass.*expected torch 2\.11 to .*without these options"):
        torch_api.graph_pass_base()


def test_an_inductor_that_cannot_be_told_of_an_operator_is_announced(monkeypatch):
    from torch._inductor import lowering

    op = torch.ops.aten.add.Tensor
    monkeypatch.setattr(lowering, "lowerings", {})
    monkeypatch.delattr(lowering, "make_fallback")
    with pytest.warns(UserWarning, match=r"tested with 2\.11 to .*may take minutes"):
        torch_api.never_lower(op)


def test_guards_of_an_attribute_are_found_by_name_and_one_without_is_an_error():
    named = [
        types.SimpleNamespace(name=f"L['self'].{attribute}", orig_guard=types.SimpleNamespace())
        for attribute in ("_vb_page", "_vb_pages")
    ]
    assert torch_api.guards_beside(named, "_vb_page") == [False, True]
    with pytest.raises(KernelError, match="has no attribute 'name'"):
        torch_api.guards_beside([types.SimpleNamespace(orig_guard=types.SimpleNamespace())], "_vb_page")


def test_guards_of_objects_that_a_property_makes_anew_are_built_twice():
    class View:
        """What transformers' `config.per_layer_config` returns."""

    guard = Guard(LocalSource("config"), lambda builder, guard: None)
    first, second = View(), View()
    guard.set_export_info("TYPE_MATCH", None, [], weakref.ref(first))
    entry = types.SimpleNamespace(name="L['config'].per_layer_config", orig_guard=guard)
    assert torch_api.guards_beside([entry], "_vb_page") == [True]
    guard.set_export_info("TYPE_MATCH", None, [], weakref.ref(second))  # an AssertionError of torch's without it


def test_frames_are_skipped_whatever_the_version_and_where_they_cannot_be_it_is_announced(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert torch_api.skip_frames_of(lambda: None)
    monkeypatch.delattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy")
    with pytest.warns(UserWarning, match=r"torch 2\.99\.0: .*set_code_exec_strategy.*tested with 2\.11.*two seconds"):
        assert not torch_api.skip_frames_of(lambda: None)


def test_arguments_of_frames_that_changed_are_announced(monkeypatch):
    monkeypatch.setattr(torch._C._dynamo.eval_frame, "_FrameExecStrategy", lambda: None)
    with pytest.warns(UserWarning, match="takes 0 positional arguments but 2 were given.*two seconds"):
        assert not torch_api.skip_frames_of(lambda: None)


@pytest.mark.parametrize("lacks", ["nothing", "_keeps_graph", "_storage_uses"])
@pytest.mark.parametrize("holds", ["nothing", "the tensor", "a view", "the graph"])
def test_a_saved_tensor_may_be_overwritten_where_nothing_else_can_read_it(holds, lacks, monkeypatch):
    class Saved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.detach())
            return x * 1

        @staticmethod
        def backward(ctx, dy):
            told.append(torch_api.may_overwrite(*ctx.saved_tensors))
            return dy

    if lacks != "nothing":
        monkeypatch.setattr(torch_api, lacks, None)
    told, x = [], torch.zeros(4, requires_grad=True) * 1
    y, held = Saved.apply(x), {"the tensor": x, "a view": x.detach()[:2]}.get(holds)
    del x
    y.sum().backward(retain_graph=holds == "the graph")
    assert told == [holds == lacks == "nothing"] and (held is None) is (holds in ("nothing", "the graph"))
