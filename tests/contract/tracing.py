"""What looks at a forward instead of running it: compilers, tracers, exporters."""

import copy
import io

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.contract.gradients import loss_of
from tests.contract.holdings import Subject, model_of
from tests.contract.operation import ROUNDED, Refused, operation

TRACING = "Tracing and compiling"
NO_RECORD = Refused(ROUNDED, "cannot record a layer in training")


def compiled(s: Subject, **options):
    torch.compiler.reset()
    return torch.compile(s.whole, **{"backend": "aot_eager", **options})


@operation(TRACING, "`torch.compile`, graphs of autograd included, backward", sample=1)
def compile_(s: Subject):
    run = compiled(s)
    y = run(s.x), run(s.random(5, 64))
    loss_of(run(s.x.requires_grad_())).backward()
    s.x.requires_grad_(False)
    return y, s.layer.bias.grad


@operation(TRACING, "`torch.compile(model, fullgraph=True)`, under no_grad", sample=1)
def compile_as_one_graph(s: Subject):
    with torch.no_grad():
        run = (
            compiled(s, fullgraph=True)
            if not s.wrapped
            else torch.compile(s.model, backend="aot_eager", fullgraph=True)
        )
        return run(s.x), run(s.random(2, 3, 64)), s.whole(s.x)


@operation(TRACING, "`torch.compile(model, dynamic=True)`, under autocast", sample=1)
def compile_with_dynamic_shapes(s: Subject):
    run = compiled(s, dynamic=True)
    with torch.autocast(s.holding.device, torch.bfloat16):
        return [run(s.random(n, 64)) for n in (2, 3, 7)]


@operation(TRACING, "`torch.compile(model)` with its default backend", sample=1, bits=False)
def compile_with_inductor(s: Subject):
    with torch.no_grad():
        run = compiled(s, backend="inductor")
        return run(s.x), run(2 * s.x)


@operation(TRACING, "a compiled model after a new weight, bias and dtype", sample=1)
def change_a_compiled_model(s: Subject):
    run, y = compiled(s), []
    for change in (
        lambda: None,
        lambda: setattr(s.layer, "weight", torch.nn.Parameter(s.rows(s.layer.weight))),
        lambda: s.layer.bias.data.mul_(2),
        lambda: s.whole.load_state_dict(s.whole.state_dict()),
    ):
        change()
        y.append(run(s.x))
    return y


@operation(TRACING, "`torch.jit.trace(model, x)`, then another x", NO_RECORD, sample=5)
def jit_trace(s: Subject):
    traced = torch.jit.trace(s.model, s.x, check_trace=False)
    with torch.no_grad():
        return traced(s.x), traced(2 * s.x)


@operation(TRACING, "`torch.jit.trace`, saved and loaded", NO_RECORD, sample=5)
def jit_trace_and_save(s: Subject):
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(s.layer, s.h, check_trace=False), file)
    file.seek(0)
    return torch.jit.load(file)(2 * s.h)


@operation(
    TRACING,
    "`torch.jit.script(layer)`",
    Refused({}, "torch.jit.script cannot compile"),
    sample=5,
    only={"kind": ("Linear", "EsmFoldLinear")},
)
def jit_script(s: Subject):
    return torch.jit.script(s.layer)(s.h)


@operation(TRACING, "`make_fx(model)(x)`, real and symbolic, then another x", NO_RECORD, sample=5)
def make_fx_(s: Subject):
    with torch.no_grad():
        return [make_fx(s.model, tracing_mode=mode)(s.x)(2 * s.x) for mode in ("real", "symbolic")]


@operation(TRACING, "`torch.fx.symbolic_trace(model)`")
def fx(s: Subject):
    return torch.fx.symbolic_trace(s.whole)(s.x)


@operation(TRACING, "`FakeTensorMode`: shapes without computing")
def fake_tensors(s: Subject):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        y = s.model(mode.from_tensor(s.x))
    return tuple(y.shape), str(y.dtype)


@operation(TRACING, "`torch.export.export(model, (x,))`, run on another x", sample=6)
def export(s: Subject):
    return torch.export.export(s.whole, (s.x,)).module()(2 * s.x)


@operation(TRACING, "`torch.export.export(..., strict=True)`", sample=2)
def export_strictly(s: Subject):
    return torch.export.export(s.model, (s.x,), strict=True).module()(2 * s.x)


@operation(TRACING, "`torch.export.save`, loaded beside another model", sample=3)
def export_and_save(s: Subject):
    file = io.BytesIO()
    torch.export.save(torch.export.export(s.model, (s.x,)), file)
    file.seek(0)
    other = copy.deepcopy(s.whole)
    model_of(other).b.weight = torch.nn.Parameter(torch.zeros_like(model_of(other).b.weight))
    return torch.export.load(file).module()(2 * s.x), other(s.x)
