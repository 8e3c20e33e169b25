"""What decoding launches is what was compiled ahead of it, down to what Triton specializes code for."""

import inspect

import pytest
import torch

from tests import models
from tests.generation.families import MASK, PROMPT, tiny
from tests.kernels.cuda.compiling_cases import asked  # noqa: F401  # a fixture
from tests.kernels.cuda.graph_cases import show, wrapped
from vbrt.generation import generate
from vbrt.generation.fusion import fuse_step, precompile_launches
from vbrt.generation.fusion.step_graph import StepGraph
from vbrt.host.host_memory import storage_of
from vbrt.kernels import step
from vbrt.kernels.cuda import compiling
from vbrt.kernels.cuda.e2m1 import fused_linear
from vbrt.kernels.cuda.e2m1 import linear as e2m1_linear
from vbrt.kernels.operator_trace import StepRecorder, root_of

pytest.importorskip("transformers")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 256}


@pytest.fixture
def as_on_a_gpu(asked, recorded, monkeypatch):  # noqa: F811
    """Steps are joined as on a GPU, and their launches asked for; what they give is garbage."""
    on = []

    def gpu(function):
        def called(*args):
            on.append(1)
            try:
                return function(*args)
            finally:
                on.pop()

        return called

    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: bool(on)))
    monkeypatch.setattr(fuse_step, "_kind_of_device", lambda graph: "gpu")
    monkeypatch.setattr(fuse_step, "compile_launches", gpu(precompile_launches.compile_launches))
    monkeypatch.setattr(fuse_step.Joined, "__call__", gpu(fuse_step.Joined.__call__))
    monkeypatch.setattr(fuse_step, "_error_of", gpu(lambda program, recorder, inputs, first: program(*inputs) and 0.0))
    with torch.library._scoped_library("vbrt", "IMPL") as library:
        library.impl("fp4_linear", e2m1_linear._fp4_linear, "CPU")
        library.impl("fp4_gated", fused_linear._gated, "CPU")
        library.impl("fp4_linears", fused_linear._siblings, "CPU")
        library.impl("fp4_residual", fused_linear._residual, "CPU")
        library.impl("normed_sum", fused_linear.normed_sum, "CPU")
        yield asked


def decoded_steps(batch):
    """Launch what the first recorded step of a Llama does; return what stats() says of it."""
    vb = wrapped(tiny("llama", **SIZES))
    for _, _, layer in vb._attachment.registry.swapped():
        if isinstance(layer, torch.nn.Linear):
            show(layer)
    vb.generate(torch.ones(batch, 5, dtype=torch.int64), max_new_tokens=2, do_sample=False)
    return vb.stats().steps


KERNELS = {"norm_kernel", "siblings_kernel", "rotate_kernel", "attend_kernel", "gather_kernel", "gated_kernel"}


@pytest.mark.parametrize(("batch", "more"), [(1, "residual_kernel"), (3, "linear_kernel")])
def test_a_step_launches_nothing_that_was_not_compiled_ahead(batch, more, as_on_a_gpu):
    steps = decoded_steps(batch)
    assert steps.recordings == 1 and steps.joined["attention"] == 2 and not steps.unjoined and not steps.not_ahead
    assert not as_on_a_gpu.by_launches
    assert {launch.how for launch in compiling.FIRST} <= {"ready", "waited", "compiled"}
    assert {launch.name for launch in compiling.FIRST} >= KERNELS | {more}


def test_a_step_of_which_nothing_is_compiled_ahead_compiles_what_it_launches(as_on_a_gpu, monkeypatch):
    def no_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(precompile_launches, "noting", no_memory)
    steps = decoded_steps(1)
    assert steps.recordings == 1 and steps.unjoined == {"nothing was compiled ahead: OutOfMemoryError: no memory": 1}
    assert not as_on_a_gpu.ahead and set(as_on_a_gpu.by_launches) >= KERNELS
    assert {launch.how for launch in compiling.FIRST} == {"unforeseen"}


def test_what_stands_for_a_view_of_a_cache_is_no_memory_of_its_own():
    whole = torch.zeros(2, 64)
    with torch.no_grad(), StepRecorder() as recorder:
        whole[:, 16:48].add(1)
    graph = StepGraph(recorder, same_bits=False)
    stand_in = precompile_launches._stand_in(graph)
    view = next(node for node in reversed(graph.graph.nodes) if root_of(node) in graph.given)
    (total,) = graph.calls(torch.ops.aten.add.Tensor)
    part, other = stand_in(view), stand_in(total)
    assert (part.shape, part.stride(), storage_of(part)) == ((2, 32), (64, 1), storage_of(whole))
    assert other.shape == (2, 32) and storage_of(other) != storage_of(whole)


def test_every_call_that_joins_make_and_that_launches_is_compiled_ahead():
    functions = {getattr(step, name) for name in step.__all__}
    launching = {each for each in functions if "step_ops." in inspect.getsource(each)}
    assert len(launching) == 6 and launching == precompile_launches._FUNCTIONS
    operators = {f"vbrt::{name}" for name in ("fp4_linear", *fuse_step._LAYER_JOINS)}
    assert operators == set(precompile_launches._OPERATORS)


def test_a_model_that_generates_has_products_of_one_token_compiled_from_the_beginning(tapes, monkeypatch):
    wanted, cuda = [], torch.device("cuda", 0)
    monkeypatch.setattr(generate, "compile_ahead", lambda *given, **how: wanted.append((*given[1:], how)) or [])
    vb = models.wrap(tiny("llama"), "nvfp4", min_parameters=0)
    assert not wanted  # on a CPU
    vb._attachment.follower.end()
    vb._attachment.follower = None
    monkeypatch.setattr(type(vb._attachment.stack), "device", cuda)
    generate.follow(vb._attachment, vb.module)
    assert wanted == [((1,), cuda, {"soon": False})]


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({}, [(10, True), (2, False)]),
        ({"max_new_tokens": 1, "num_beams": 2}, [(20, True), (4, False)]),
        ({"num_return_sequences": 3, "do_sample": True}, [(30, True), (6, False)]),
    ],
)
def test_a_call_says_what_it_will_compute_once(options, first, tapes, monkeypatch):
    wanted, forward = [], []

    def compile_ahead(handles, tokens, device, *, soon):
        wanted.append((*tokens, soon))
        forward.append(len(prompted))
        return []

    prompted, vb = [], models.wrap(tiny("llama"), "nvfp4", min_parameters=0)
    monkeypatch.setattr(generate, "compile_ahead", compile_ahead)
    vb.module.model.register_forward_pre_hook(lambda *given: prompted.append(1))
    given = {"max_new_tokens": 2, "do_sample": False} | options
    for _ in range(2):
        vb.generate(PROMPT, attention_mask=MASK, **given)
    assert wanted == first and forward == [0, 0]


def test_a_call_compiles_for_its_prompt_and_for_its_steps_and_goes_on_without(tapes, monkeypatch):
    wanted = []

    def fails(handles, tokens, device, *, soon):
        wanted.append((*tokens, soon))
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(generate, "compile_ahead", fails)
    vb = models.wrap(tiny("llama"), "nvfp4", min_parameters=0)
    with pytest.warns(UserWarning, match="nothing is compiled ahead, launches compile: OutOfMemoryError: no memory"):
        vb.generate(PROMPT, attention_mask=MASK, max_new_tokens=3, do_sample=False)
    assert wanted == [(10, True), (2, False)] * 2  # by the call, and by its first forward
    steps = vb.stats().steps
    assert steps.captured + steps.eager == 2 and steps.not_ahead == {"OutOfMemoryError: no memory": 4}
    assert "compiled at first launch: 4 (OutOfMemoryError: no memory)" in str(vb.stats(verbose=True))
