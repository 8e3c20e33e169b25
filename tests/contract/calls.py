"""Forwards with every kind of input, hooks, and threads."""

import concurrent.futures
import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.contract.holdings import Subject
from tests.contract.operation import operation

CALLS, HOOKS, THREADS = "Calls", "Hooks", "Threads"


class Marked(Tensor):
    """A subclass with nothing of its own."""


@operation(CALLS, "`model(x)`")
def call(s: Subject):
    return s.whole(s.x), s.whole(s.x)


@operation(CALLS, "`with torch.no_grad(): model(x)`")
def call_under_no_grad(s: Subject):
    with torch.no_grad():
        y = s.whole(s.x), s.whole(s.x)
    return y, y[1].requires_grad


@operation(CALLS, "`with torch.no_grad(): model(x)`, x requires grad")
def call_under_no_grad_with_an_input_that_requires_grad(s: Subject):
    with torch.no_grad():
        y = s.whole(s.x.requires_grad_())
    s.x.requires_grad_(False)
    return y, y.requires_grad


@operation(CALLS, "`with torch.inference_mode(): model(x)`, and a call outside of it")
def call_in_inference_mode(s: Subject):
    with torch.inference_mode():
        y = s.whole(s.x)
    return y.clone(), y.is_inference(), s.whole(s.x)


@operation(CALLS, "`layer(x[0])`, a vector")
def call_with_one_dimension(s: Subject):
    return s.layer(s.h[0]), s.layer(s.h[1])


@operation(CALLS, "`layer(x[:0])`, no rows; in 2 and 3 dimensions")
def call_with_no_rows(s: Subject):
    return s.layer(s.h[:0]), s.layer(s.random(2, 0, 96))


@operation(CALLS, "40 rows: more than the kernels for few tokens take")
def call_with_many_rows(s: Subject):
    return s.layer(s.random(40, 96)), s.layer(s.random(2, 20, 96))


@operation(CALLS, "3 and 4 dimensions; transposed, strided and expanded inputs")
def call_with_any_strides(s: Subject):
    wide = s.random(3, 200)
    inputs = (
        s.random(2, 5, 96),
        s.random(2, 96, 5).mT,
        s.random(2, 5, 3, 96).transpose(1, 2),
        wide[:, 4:196:2],
        s.h[:1].expand(7, 96),
    )
    strided = s.holding.kind != "Conv1D"  # the plain one takes no strides that a view cannot have
    return [s.layer(x if strided else x.contiguous()) for x in inputs]


@operation(CALLS, "`layer(input=x)`, by the name that the plain layer gives it")
def call_by_keyword(s: Subject):
    return s.layer(**{"x" if s.holding.kind == "Conv1D" else "input": s.h})


@operation(CALLS, "NaN and Inf in one row: only that row's results are not finite")
def call_with_nonfinite_values(s: Subject):
    x = s.h.clone()
    x[1, 3], x[1, 4] = torch.nan, torch.inf
    return s.layer(x)[[0, 2]], s.layer(x)[1].isfinite()


@operation(CALLS, "`layer(nn.Parameter(x))` and a subclass of Tensor")
def call_with_a_parameter_and_a_subclass(s: Subject):
    y = s.layer(s.h.as_subclass(Marked))
    return s.layer(nn.Parameter(s.h)), y.as_subclass(Tensor), type(y).__name__


@operation(CALLS, "`layer(torch.nested...)`, jagged", only={"kind": ("Linear", "EsmFoldLinear")})
def call_with_a_nested_tensor(s: Subject):
    rows = torch.nested.nested_tensor([s.h, s.h[:1]], layout=torch.jagged)
    return list(s.layer(rows).unbind())


@operation(CALLS, "an input of the wrong width")
def call_with_a_wrong_width(s: Subject):
    return s.layer(s.x)


@operation(CALLS, "an input of another dtype than the weight's")
def call_with_another_dtype(s: Subject):
    return s.layer(s.h.double())


@operation(CALLS, "a 16-bit input to fp32 weights and the reverse")
def call_with_a_dtype_of_the_other_width(s: Subject):
    return s.layer(s.h.bfloat16() if s.holding.dtype is torch.float32 else s.h.float())


@operation(CALLS, "an input of integers")
def call_with_integers(s: Subject):
    return s.layer(torch.ones(3, 96, dtype=torch.int64, device=s.h.device))


@operation(CALLS, "an input on the meta device")
def call_with_a_meta_input(s: Subject):
    return s.layer(s.h.to("meta"))


@operation(CALLS, "`torch.set_default_dtype(torch.float64)` around a call")
def call_under_another_default_dtype(s: Subject):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return s.whole(s.x)
    finally:
        torch.set_default_dtype(before)


@operation(CALLS, '`with torch.device("meta")` around a call')
def call_under_another_default_device(s: Subject):
    with torch.device("meta"):
        return s.whole(s.x)


@operation(CALLS, "`with torch.autocast(...)`: outputs, their dtype, and calls after it", computed_in=torch.bfloat16)
def autocast(s: Subject):
    with torch.autocast(s.holding.device, torch.bfloat16):
        y = s.whole(s.x), s.layer(s.h[0]), s.layer(s.random(40, 96))
    return y, s.whole(s.x)


class Halving(TorchFunctionMode):
    """Halves what layers multiply, wherever they do it."""

    OF = (F.linear, torch.addmm, Tensor.matmul, Tensor.__matmul__, torch.matmul)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        y = func(*args, **(kwargs or {}))
        return y / 2 if func in self.OF else y


class HalvingBelow(TorchDispatchMode):
    """The same, of torch's dispatcher."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        y = func(*args, **(kwargs or {}))
        return y / 2 if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default) else y


@operation(CALLS, "a `TorchFunctionMode` and a `TorchDispatchMode` that alter products, with and without gradients")
def call_under_modes(s: Subject):
    found = []
    for mode in (Halving, HalvingBelow):
        with mode(), torch.no_grad():
            found.append(s.whole(s.x))
        x = s.x.detach().requires_grad_()
        with mode():
            y = s.whole(x)
        found += [y, torch.autograd.grad(y.float().sum(), x)]
    return found


@operation(CALLS, "autocast under no_grad, float32 inputs to 16-bit weights", computed_in=torch.bfloat16)
def autocast_without_grad(s: Subject):
    with torch.no_grad(), torch.autocast(s.holding.device, torch.bfloat16):
        return s.whole(s.x.float()), s.layer(s.h)


@operation(CALLS, "`nn.Sequential(layer, nn.ReLU(inplace=True))`, `y += 1`, `y[[0]] += 1`, grad mode on")
def in_place_on_outputs(s: Subject):
    y, z, v = s.layer(s.h), s.layer(s.random(2, 3, 96)), s.layer(s.h[0])
    y[[0]] += 1
    v.mul_(2)
    return y.relu_(), z.add_(1).relu_(), v, nn.Sequential(s.layer, nn.ReLU(inplace=True))(s.random(2, 3, 96))


@operation(CALLS, "in place on the output of a layer whose bias and input are frozen")
def in_place_on_outputs_without_grad(s: Subject):
    s.layer.bias.requires_grad_(False)
    y, z = s.layer(s.h), s.layer(s.random(2, 3, 96))
    y[[0]] += torch.ones(64, device=y.device, dtype=y.dtype, requires_grad=True)
    return y, z.relu_()


@operation(CALLS, "`F.linear(x, layer.weight, layer.bias)`, `x @ layer.weight`")
def compute_with_the_weight(s: Subject):
    w = s.layer.weight
    w = w.t() if s.holding.kind == "Conv1D" else w
    return F.linear(s.h, w, s.layer.bias), s.h @ w.t(), torch.einsum("mk,nk->mn", s.h, w)


# -- hooks ------------------------------------------------------------------------------------------------------------


@operation(HOOKS, "`register_forward_pre_hook` and `register_forward_hook` that change input and output")
def forward_hooks_on_a_layer(s: Subject):
    before = s.layer.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    after = s.layer.register_forward_hook(lambda module, args, y: y + 1)
    y = s.whole(s.x)
    before.remove()
    after.remove()
    return y, s.whole(s.x)


@operation(HOOKS, "`register_forward_hook(..., with_kwargs=True, always_call=True)` around a call that raises")
def hooks_that_are_always_called(s: Subject):
    seen = []
    hook = s.layer.register_forward_hook(
        lambda module, args, kwargs, y: seen.append(y is None), with_kwargs=True, always_call=True
    )
    with contextlib.suppress(RuntimeError):
        s.layer(s.x)
    s.layer(s.h)
    hook.remove()
    return seen


@operation(HOOKS, "`register_full_backward_hook`, `register_full_backward_pre_hook`")
def backward_hooks(s: Subject):
    seen = []
    hooks = [
        s.layer.register_full_backward_hook(lambda module, dx, dy: seen.extend([*dx, *dy])),
        s.layer.register_full_backward_pre_hook(lambda module, dy: (2 * dy[0],)),
    ]
    s.whole(s.x.requires_grad_()).float().square().sum().backward()
    for hook in hooks:
        hook.remove()
    return seen, s.x.grad


@operation(HOOKS, "forward hooks on the model and on the wrapper")
def hooks_on_the_model(s: Subject):
    seen = []
    hooks = [
        s.whole.register_forward_hook(lambda module, args, y: seen.append(y)),
        s.model.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
    ]
    y = s.whole(s.x)
    for hook in hooks:
        hook.remove()
    return y, seen


@operation(HOOKS, "`register_module_forward_hook`, for all modules: what the layers returned")
def global_hooks(s: Subject):
    seen = []
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, y: seen.append(y.detach()))
    try:
        s.whole(s.x)
    finally:
        hook.remove()
    return seen[:3]


@operation(HOOKS, "a hook of a layer survives `unwrap()`")
def hooks_and_unwrap(s: Subject):
    seen = []
    s.layer.register_forward_hook(lambda module, args, y: seen.append(y))
    y = s.whole(s.x)
    model = s.unwrap()
    return y, model(s.x), seen


@operation(HOOKS, "`register_state_dict_post_hook`, `register_load_state_dict_pre_hook` and others of state dicts")
def state_dict_hooks(s: Subject):
    seen = []
    s.layer.register_state_dict_pre_hook(lambda module, prefix, keep_vars: seen.append(prefix))
    s.layer.register_state_dict_post_hook(
        lambda module, state, prefix, meta: state.update({prefix + "weight": 2 * state[prefix + "weight"]})
    )
    state = s.whole.state_dict()
    s.layer.register_load_state_dict_pre_hook(
        lambda module, state, prefix, *rest: state.update({prefix + "weight": state[prefix + "weight"] / 2})
    )
    s.whole.load_state_dict(state)
    return state["b.weight"], seen, s.whole(s.x)


# -- threads ----------------------------------------------------------------------------------------------------------


@operation(THREADS, "four threads call one model, its first calls included")
def calls_in_threads(s: Subject):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda i: s.whole(s.x * i), range(8)))


@operation(THREADS, "threads under no_grad, with backward passes in others")
def forwards_and_backwards_in_threads(s: Subject):
    s.whole(s.x)

    def work(i: int) -> Tensor:
        x = (s.x * i).requires_grad_()
        if i % 2:
            with torch.no_grad():
                return s.whole(x)
        return torch.autograd.grad(s.whole(x).float().square().sum(), x)[0]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return list(pool.map(work, range(8)))


@operation(THREADS, "threads that read `.weight` and `state_dict()` while others call")
def reads_in_threads(s: Subject):
    work = {0: lambda: s.layer.weight.detach().clone(), 1: lambda: dict(s.whole.state_dict()), 2: lambda: s.whole(s.x)}
    s.whole(s.x)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda i: work[i % 3](), range(9)))
    return [
        {name: value for name, value in f.items() if "separation" not in name} if isinstance(f, dict) else f
        for f in found
    ]
