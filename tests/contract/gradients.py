"""What autograd and torch.func do."""

import threading

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.contract.holdings import Subject
from tests.contract.operation import ROUNDED, Refused, operation

GRADIENTS, FUNC, CHECKPOINTS = "Gradients", "torch.func", "Checkpointing"


def loss_of(y: Tensor) -> Tensor:
    return y.float().square().sum()


def frozen_weights(s: Subject) -> Subject:
    """Both sides without gradients of weights, which VB layers in tiers do not have."""
    for layer in (s.model.a, s.model.b, s.model.c):
        if layer._parameters["weight"] is not None:
            layer._parameters["weight"].requires_grad_(False)
    return s


@operation(GRADIENTS, "`loss.backward()`: gradients of input and biases")
def backward(s: Subject):
    loss_of(s.whole(s.x.requires_grad_())).backward()
    return s.x.grad, [layer.bias.grad for layer in (s.model.a, s.model.b, s.model.c)]


@operation(GRADIENTS, "gradients of weights that train", only={"state": "trained"})
def gradients_of_weights(s: Subject):
    loss_of(s.whole(s.x)).backward()
    return [layer.weight.grad for layer in (s.model.a, s.model.b, s.model.c)]


@operation(GRADIENTS, "an optimizer's step over `parameters()`: what has moved")
def an_optimizers_step(s: Subject):
    s.whole(s.x)
    biases = [p for name, p in s.model.named_parameters() if name.endswith("bias")]
    optimizer = torch.optim.SGD(biases, lr=0.125)
    loss_of(s.whole(s.x)).backward()
    optimizer.step()
    return [b.detach() for b in biases], s.whole(s.x)


@operation(GRADIENTS, "only the input, or only a bias, requires grad")
def backward_to_some(s: Subject):
    frozen_weights(s)
    for layer in (s.model.a, s.model.b, s.model.c):
        layer.bias.requires_grad_(False)
    loss_of(s.whole(s.x.requires_grad_())).backward()
    s.layer.bias.requires_grad_(True)
    loss_of(s.whole(s.x.detach())).backward()
    return s.x.grad, s.layer.bias.grad


@operation(GRADIENTS, "`requires_grad` and `is_leaf` of an output of frozen inputs, weights and biases")
def an_output_that_needs_no_graph(s: Subject):
    frozen_weights(s)
    s.layer.bias.requires_grad_(False)
    y, z = s.layer(s.h), s.layer(s.random(2, 3, 96))
    return y.requires_grad, y.is_leaf, z.requires_grad, z._is_view() and z._base is not None and z._base.requires_grad


@operation(GRADIENTS, "backward of 1 and 3 dimensions, transposed, expanded and empty inputs")
def backward_of_any_shape(s: Subject):
    grads = []
    for x in (s.random(96), s.random(2, 5, 96), s.random(2, 96, 5).mT, s.random(1, 96).expand(4, 96), s.random(0, 96)):
        if s.holding.kind == "Conv1D" and x.dim() == 3:  # the plain one takes no strides that a view cannot have
            x = x.contiguous()
        x = x.detach().requires_grad_()
        loss_of(s.layer(x)).backward()
        grads.append(x.grad)
    return grads, s.layer.bias.grad


@operation(GRADIENTS, "`backward(retain_graph=True)` twice")
def backward_twice_through_one_graph(s: Subject):
    loss = loss_of(s.whole(s.x.requires_grad_()))
    loss.backward(retain_graph=True)
    loss.backward()
    return s.x.grad


@operation(GRADIENTS, "a gradient penalty: backward through `grad(..., create_graph=True)`")
def gradient_penalty(s: Subject):
    x = s.x.requires_grad_()
    (dx,) = torch.autograd.grad(loss_of(s.whole(x)), x, create_graph=True)
    dx.float().square().sum().backward()
    return dx, x.grad, s.layer.bias.grad


@operation(GRADIENTS, "`torch.autograd.functional.hessian`", sample=3)
def hessian_of_autograd(s: Subject):
    return torch.autograd.functional.hessian(lambda x: loss_of(s.whole(x)), s.x[0])


@operation(GRADIENTS, "`torch.autograd.functional.jacobian`, vectorized too, `jvp`, `vhp`", sample=3, bits=False)
def functions_of_autograd(s: Subject):
    f = torch.autograd.functional
    v = s.x[1]
    return (
        f.jacobian(s.whole, s.x[0]),
        f.jacobian(s.whole, s.x[0], vectorize=True),
        f.jvp(s.whole, s.x[0], v)[1],
        f.vhp(lambda x: loss_of(s.whole(x)), s.x[0], v)[1],
    )


@operation(GRADIENTS, "`torch.autograd.forward_ad` duals")
def forward_mode(s: Subject):
    with torch.autograd.forward_ad.dual_level():
        y = s.whole(torch.autograd.forward_ad.make_dual(s.x, s.random(3, 64)))
        return tuple(torch.autograd.forward_ad.unpack_dual(y))


@operation(GRADIENTS, "tensor hooks, `retain_grad()` on outputs of layers")
def tensor_hooks(s: Subject):
    seen = []
    y = s.model.a(s.x.requires_grad_())
    y.retain_grad()
    y.register_hook(lambda g: seen.append(g) or 2 * g)
    loss_of(s.layer(y)).backward()
    return seen, y.grad, s.x.grad


@operation(GRADIENTS, "`with torch.autograd.detect_anomaly()`")
def anomaly_mode(s: Subject):
    with torch.autograd.detect_anomaly(check_nan=True):
        loss_of(s.whole(s.x.requires_grad_())).backward()
    return s.x.grad


@operation(GRADIENTS, "`with torch.autograd.graph.save_on_cpu()`, `saved_tensors_hooks`")
def saved_tensors_hooks(s: Subject):
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(s.whole(s.x.requires_grad_()))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = loss + loss_of(s.layer(s.h.requires_grad_()))
    loss.backward()
    return s.x.grad, s.h.grad


@operation(GRADIENTS, "a backward pass in another thread, after another forward")
def backward_in_another_thread(s: Subject):
    loss = loss_of(s.whole(s.x.requires_grad_()))
    s.whole(2 * s.x.detach())
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return s.x.grad


@operation(GRADIENTS, "autocast, forward and backward", computed_in=torch.bfloat16)
def backward_under_autocast(s: Subject):
    with torch.autocast(s.holding.device, torch.bfloat16):
        loss = loss_of(s.whole(s.x.requires_grad_()))
    loss.backward()
    return s.x.grad, s.layer.bias.grad


@operation(GRADIENTS, "a forward in inference mode, then one that is differentiated")
def backward_after_inference_mode(s: Subject):
    with torch.inference_mode():
        s.whole(s.x)
    loss_of(s.whole(s.x.requires_grad_())).backward()
    return s.x.grad


# -- checkpointing ----------------------------------------------------------------------------------------------------


@operation(CHECKPOINTS, "`torch.utils.checkpoint.checkpoint`, reentrant")
def reentrant_checkpointing(s: Subject):
    loss_of(checkpoint(s.whole, s.x.requires_grad_(), use_reentrant=True)).backward()
    return s.x.grad, s.layer.bias.grad


@operation(
    CHECKPOINTS,
    "`checkpoint(..., use_reentrant=False)`, early stop on and off, nested, under autocast",
    computed_in=torch.bfloat16,
)
def checkpointing(s: Subject):
    x = s.x.requires_grad_()
    for early_stop in (True, False):
        with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
            loss_of(checkpoint(s.whole, x, use_reentrant=False)).backward()
    nested = checkpoint(
        lambda x: checkpoint(s.model.b, checkpoint(s.model.a, x, use_reentrant=False), use_reentrant=False),
        x,
        use_reentrant=False,
    )
    loss_of(nested).backward()
    with torch.autocast(s.holding.device, torch.bfloat16):
        loss = loss_of(checkpoint(s.whole, x, use_reentrant=False))
    loss.backward()
    return x.grad, s.layer.bias.grad


@operation(CHECKPOINTS, "`checkpoint_sequential` over the layers")
def sequential_checkpointing(s: Subject):
    layers = nn.Sequential(s.model.a, nn.Tanh(), s.model.b, nn.Tanh(), s.model.c)
    loss_of(checkpoint_sequential(layers, 2, s.x.requires_grad_(), use_reentrant=False)).backward()
    return s.x.grad, s.layer.bias.grad


@operation(CHECKPOINTS, "selective checkpointing: a policy that keeps products", sample=6)
def selective_checkpointing(s: Subject):
    policy = torch.utils.checkpoint.CheckpointPolicy
    keep = lambda ctx, op, *args, **kwargs: (  # noqa: E731
        policy.MUST_SAVE if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) else policy.PREFER_RECOMPUTE
    )
    contexts = lambda: torch.utils.checkpoint.create_selective_checkpoint_contexts(keep)  # noqa: E731
    loss_of(checkpoint(s.whole, s.x.requires_grad_(), use_reentrant=False, context_fn=contexts)).backward()
    return s.x.grad, s.layer.bias.grad


# -- torch.func -------------------------------------------------------------------------------------------------------


@operation(FUNC, '`functional_call(layer, {"weight": w})`: the call sees w, calls after it do not')
def functional_call(s: Subject):
    zeros = torch.zeros_like(s.layer.weight)
    other = s.rows(s.layer.weight)
    y = [torch.func.functional_call(s.layer, {"weight": w}, s.h) for w in (zeros, other)]
    return y, s.layer(s.h), s.layer.weight.detach().clone()


@operation(FUNC, "`functional_call(model, all of state_dict())`, and of biases only")
def functional_call_of_a_model(s: Subject):
    state = {name: value for name, value in s.whole.state_dict().items() if "separation" not in name}
    double = {f"b.{name}": 2 * getattr(s.layer, name).detach() for name in ("weight", "bias")}
    biases = {name: 2 * value for name, value in state.items() if name.endswith("bias")}
    return [torch.func.functional_call(s.model, given, s.x) for given in (state, double, biases)]


@operation(FUNC, "gradients of a weight that `functional_call` puts in")
def gradients_through_functional_call(s: Subject):
    w = s.layer.weight.detach().clone().requires_grad_()
    y = torch.func.functional_call(s.layer, {"weight": w}, s.h.requires_grad_())
    return torch.autograd.grad(loss_of(y), (w, s.h))


@operation(FUNC, "`torch.func.grad`, `vjp`, `jvp`")
def grad_vjp_and_jvp(s: Subject):
    x, v = s.x, s.random(3, 64)
    y, pull = torch.func.vjp(s.whole, x)
    return torch.func.grad(lambda x: loss_of(s.whole(x)))(x), pull(y)[0], torch.func.jvp(s.whole, (x,), (v,))


@operation(FUNC, "`torch.func.jacrev`, `jacfwd`", bits=False)
def jacobians(s: Subject):
    return torch.func.jacrev(s.whole)(s.x[0]), torch.func.jacfwd(s.whole)(s.x[0])


@operation(FUNC, "`torch.func.hessian`", bits=False)
def hessian(s: Subject):
    return torch.func.hessian(lambda x: loss_of(s.whole(x)))(s.x[0])


@operation(FUNC, "`torch.vmap`, over any dimension, in grad mode and under no_grad, over `torch.func.grad`", bits=False)
def vmap(s: Subject):
    x = s.random(4, 3, 96)
    y = torch.vmap(s.layer)(x), torch.vmap(s.layer, in_dims=1, out_dims=1)(x), torch.vmap(s.layer)(x[0])
    with torch.no_grad():
        z = torch.vmap(s.layer)(x)
    return y, z, torch.vmap(torch.func.grad(lambda x: loss_of(s.layer(x))))(x)


@operation(FUNC, "`torch.vmap` in grad mode, differentiated outside", bits=False)
def backward_through_vmap(s: Subject):
    x = s.random(4, 96).requires_grad_()
    loss_of(torch.vmap(s.layer)(x)).backward()
    return x.grad, s.layer.bias.grad


@operation(FUNC, "per-sample gradients of a bias: `vmap(grad(functional_call))`", bits=False)
def per_sample_gradients(s: Subject):
    def loss(bias: Tensor, x: Tensor) -> Tensor:
        return loss_of(torch.func.functional_call(s.layer, {"bias": bias}, x))

    return torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(s.layer.bias.detach(), s.h)


@operation(
    FUNC,
    "`torch.func.linearize`, `torch.func.functionalize`",
    Refused(ROUNDED, "cannot record a layer in training"),
    sample=6,
)
def linearize_and_functionalize(s: Subject):
    y, push = torch.func.linearize(s.whole, s.x)
    return y, push(s.random(3, 64)), torch.func.functionalize(s.whole)(s.x)
