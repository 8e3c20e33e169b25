"""Reads and writes of `.weight` and `.data`, flags, pruning, parametrizations, ties."""

import copy

import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.testing._internal.two_tensor import TwoTensor

from tests.contract.holdings import Subject
from tests.contract.operation import FROZEN, ROUNDED, Documented, Refused, operation

READS, WRITES, FLAGS, SHAPES, TIES = "Reading weights", "Writing weights", "Flags", "Reparametrizing", "Ties"

NO_PARAMETERS = "a weight in the tiers is not a parameter"
NOT_REPLACED = "cannot be removed or computed from something else"
IN_TIERS = Refused(FROZEN, "not possible while it lives in the tiers")
TORCHS_OWN = (Refused(FROZEN, "weakref associated with it", RuntimeError),)
NOT_LISTED = "`parameters()` contains only biases, norms and unswapped weights"
LEFT_OUT = (Documented(FROZEN, NO_PARAMETERS, NOT_LISTED, lambda got, plain: got != plain),)
NO_TRACE = Documented(
    ROUNDED,
    "a write through `.data` to a weight in training takes effect at the next step",
    "a write through `parameter.data` is not",
    lambda got, plain: True,
)


def only_biases(got, plain) -> bool:
    """What is left of parameters and their count once weights are encoded."""
    return got[-1] == 256 != plain[-1]


def now(s: Subject):
    """The layer's weight and what the model computes."""
    return s.layer.weight.detach().clone(), s.layer(s.h).detach(), s.whole(s.x).detach()


@operation(READS, "`layer.weight`: values, shape, dtype, device, strides")
def read_the_weight(s: Subject):
    w = s.layer.weight
    return w.detach(), w.stride(), w.device, w.is_contiguous(), w.numel(), layer_shape(s)


def layer_shape(s: Subject):
    return {
        name: getattr(s.layer, name) for name in ("in_features", "out_features", "nx", "nf") if hasattr(s.layer, name)
    }


@operation(
    READS,
    "`isinstance(layer.weight, nn.Parameter)`, `.requires_grad`, `.is_leaf`, `.grad`",
    Documented(
        FROZEN,
        "a weight in the tiers reads as a tensor without grad, not a parameter",
        "a tensor that is not an `nn.Parameter`",
        lambda got, plain: got == (False, False, True, None),
    ),
)
def read_what_the_weight_is(s: Subject):
    w = s.layer.weight
    return isinstance(w, nn.Parameter), w.requires_grad, w.is_leaf, w.grad


@operation(READS, "`layer.weight is layer.weight`, also as a key of a dict")
def read_the_weight_twice(s: Subject):
    return s.layer.weight is s.layer.weight, len({s.layer.weight, s.layer.weight})


@operation(READS, "`nn.Parameter(layer.weight)`, `copy.deepcopy(layer.weight)`, `.t()`, `.to()`, `.numpy()`")
def make_something_of_the_weight(s: Subject):
    w = s.layer.weight
    plain = copy.deepcopy(w)
    return (
        nn.Parameter(w.detach()).detach(),
        nn.Parameter(s.layer.weight).detach(),
        plain.detach(),
        w.t().detach(),
        w.double().detach(),
        w.detach().float().cpu().numpy().sum(1).tolist(),
        (w + 0).detach(),
    )


@operation(READS, "`named_parameters()`: names", *LEFT_OUT)
def names_of_parameters(s: Subject):
    return [name for name, _ in s.model.named_parameters()]


@operation(
    READS,
    "`sum(p.numel() for p in parameters())`, before and after a call",
    Documented(FROZEN, NO_PARAMETERS, NOT_LISTED, only_biases),
)
def count_parameters(s: Subject):
    before = sum(p.numel() for p in s.whole.parameters())
    s.whole(s.x)
    return before, sum(p.numel() for p in s.whole.parameters())


@operation(
    READS,
    "`parameters_to_vector(parameters())`",
    Documented(FROZEN, NO_PARAMETERS, NOT_LISTED, lambda got, plain: got.numel() == 256 != plain.numel()),
)
def parameters_as_a_vector(s: Subject):
    return nn.utils.parameters_to_vector(s.model.parameters()).detach()


# -- writes -----------------------------------------------------------------------------------------------------------


@operation(WRITES, "`layer.weight = nn.Parameter(w)`")
def assign_a_weight(s: Subject):
    s.layer.weight = nn.Parameter(s.rows(s.layer.weight))
    return now(s)


@operation(WRITES, "`layer.weight = nn.Parameter(w)` again and again, without a call between")
def assign_a_weight_twice(s: Subject):
    w = s.layer.weight.detach().clone()
    s.layer.weight = nn.Parameter(torch.zeros_like(w))
    s.layer.weight = nn.Parameter(s.rows(w))
    return now(s)


@operation(WRITES, '`layer.register_parameter("weight", nn.Parameter(w))`')
def register_a_weight(s: Subject):
    s.layer.register_parameter("weight", nn.Parameter(s.rows(s.layer.weight)))
    return now(s)


@operation(WRITES, "`layer.weight.data = w`")
def assign_data(s: Subject):
    s.layer.weight.data = s.rows(s.layer.weight)
    return now(s)


@operation(WRITES, "`layer.weight.data += layer.weight.data`")
def add_to_data_and_assign(s: Subject):
    s.layer.weight.data += s.layer.weight.data
    return now(s)


@operation(WRITES, "`layer.weight.data.copy_(w)`")
def copy_into_data(s: Subject):
    s.layer.weight.data.copy_(s.rows(s.layer.weight))
    return now(s)


@operation(WRITES, "`layer.weight.data.mul_(2)`, `.data.add_(...)`", NO_TRACE, calls_after=False)
def write_into_data(s: Subject):
    s.layer.weight.data.mul_(2)
    first = now(s)
    s.layer.weight.data.add_(s.layer.weight.data)
    return first, now(s)


@operation(
    WRITES, "`layer.weight.data[0] = 0`, `layer.weight.data[0].zero_()`, `.data.fill_(1)`", NO_TRACE, calls_after=False
)
def write_parts_of_data(s: Subject):
    s.layer.weight.data[:, :] = s.rows(s.layer.weight)
    first = now(s)
    s.layer.weight.data.view(-1).fill_(1)
    return first, now(s)


@operation(WRITES, "`with torch.no_grad(): layer.weight.mul_(2)`, `.copy_(w)`")
def write_in_place(s: Subject):
    with torch.no_grad():
        s.layer.weight.mul_(2)
        first = now(s)
        s.layer.weight.copy_(s.rows(s.layer.weight))
    return first, now(s)


@operation(WRITES, "`with torch.no_grad(): layer.weight[...] = w`, `layer.weight *= 2`")
def write_by_index(s: Subject):
    with torch.no_grad():
        s.layer.weight[...] = s.rows(s.layer.weight)
        first = now(s)
        s.layer.weight *= 2
    return first, now(s)


@operation(WRITES, "`torch.add(a, b, out=layer.weight)`")
def write_as_out(s: Subject):
    with torch.no_grad():
        w = s.layer.weight.detach().clone()
        torch.add(w, w, out=s.layer.weight)
    return now(s)


@operation(WRITES, "`layer.weight.detach().mul_(2)`, `.view(-1)`, `.t()` in place")
def write_into_a_view(s: Subject):
    s.layer.weight.detach().mul_(2)
    first = now(s)
    with torch.no_grad():
        s.layer.weight.t().mul_(2)
    return first, now(s)


@operation(
    WRITES,
    "`layer.weight.detach().numpy()[...] = w`",
    Refused(FROZEN, "read-only", ValueError),
    only={"device": "cpu", "format": ("mxfp4", "nf4", "quantile", "dense fp32", "exact fp16")},
)
def write_through_numpy(s: Subject):
    s.layer.weight.detach().numpy()[...] *= 2
    return now(s)


@operation(WRITES, "`torch.from_dlpack(layer.weight.detach()).mul_(2)`", IN_TIERS)
def write_through_dlpack(s: Subject):
    torch.from_dlpack(s.layer.weight.detach()).mul_(2)
    return now(s)


@operation(
    WRITES,
    "`nn.init.zeros_(layer.weight)`, `nn.init.constant_`",
    only={"format": ("nvfp4", "mxfp4", "nf4", "dense", "dense fp32", "exact bf16", "exact fp16")},
)
def initialize_the_weight(s: Subject):
    nn.init.zeros_(s.layer.weight)
    first = now(s)
    nn.init.constant_(s.layer.weight, 0.5)
    return first, now(s)


@operation(
    WRITES,
    "`layer.reset_parameters()`: a weight of another seed, which is then used",
    only={"kind": ("Linear", "FalconLinear"), "lossless": True},
)
def reset_parameters(s: Subject):
    torch.manual_seed(3)
    s.layer.reset_parameters()
    return now(s)


@operation(WRITES, "`del layer.weight`", IN_TIERS, Refused(ROUNDED, NOT_REPLACED), calls_after=False)
def remove_the_weight(s: Subject):
    del s.layer.weight
    return hasattr(s.layer, "weight")


@operation(
    WRITES,
    "a weight of another shape, `layer.weight = nn.Parameter(w[:5])`",
    Refused(FROZEN, "expected ("),
    calls_after=False,
)
def assign_another_shape(s: Subject):
    s.layer.weight = nn.Parameter(s.layer.weight.detach()[:5])
    return s.layer.weight.shape


@operation(WRITES, "`layer.weight = None`, a list, a tensor of integers")
def assign_no_weight(s: Subject):
    s.layer.weight = [1.0]


@operation(WRITES, "`layer.bias = nn.Parameter(b)`, `layer.bias.data.mul_(2)`")
def write_the_bias(s: Subject):
    s.layer.bias = nn.Parameter(torch.ones_like(s.layer.bias))
    first = now(s)
    s.layer.bias.data.mul_(2)
    return first, now(s)


@operation(WRITES, "a bias of one value, of a wrong number, of two dimensions, expanded, on meta, and a subclass")
def assign_any_bias(s: Subject):
    bias, found = s.layer.bias.detach().clone(), []
    for given in (
        bias[:1],
        bias[:5],
        bias[None],
        bias[:1].expand(len(bias)),
        bias.repeat(2)[::2],
        bias.to("meta"),
        TwoTensor(bias, bias * 2),
    ):
        s.layer.bias = nn.Parameter(given)
        with torch.no_grad():
            try:
                y = s.layer(s.h)
                found.append([y.a, y.b] if isinstance(y, TwoTensor) else y)
            except RuntimeError as error:
                found.append(type(error).__name__)
    s.layer.bias = nn.Parameter(bias)
    return found


@operation(WRITES, "`layer.bias = None`", only={"kind": ("Linear", "FalconLinear", "EsmFoldLinear")})
def remove_the_bias(s: Subject):
    s.layer.bias = None
    return now(s)


@operation(WRITES, "`torch.utils.swap_tensors(layer.weight, nn.Parameter(w))`", *TORCHS_OWN)
def swap_tensors(s: Subject):
    torch.utils.swap_tensors(s.layer.weight, nn.Parameter(s.rows(s.layer.weight)))
    return now(s)


@operation(
    WRITES,
    "`vector_to_parameters(2 * v, parameters())`",
    Documented(FROZEN, NO_PARAMETERS, NOT_LISTED, lambda got, plain: not torch.equal(got, plain)),
    calls_after=False,
)
def write_parameters_from_a_vector(s: Subject):
    v = nn.utils.parameters_to_vector(s.model.parameters())
    nn.utils.vector_to_parameters(2 * v, s.model.parameters())
    return s.whole(s.x)


@operation(WRITES, "`model.b = nn.Linear(...)`: a plain layer in the place of one")
def replace_a_layer(s: Subject):
    s.model.b = nn.Linear(96, 64, dtype=s.h.dtype, device=s.h.device)
    nn.init.constant_(s.model.b.weight, 0.5)
    nn.init.zeros_(s.model.b.bias)
    return s.whole(s.x)


# -- flags ------------------------------------------------------------------------------------------------------------


@operation(FLAGS, "`model.requires_grad_(False)`: no output requires grad")
def freeze(s: Subject):
    s.whole.requires_grad_(False)
    y = s.whole(s.x)
    return y, y.requires_grad


@operation(FLAGS, "`layer.requires_grad_(True)`, then train the weight", calls_after=False)
def train_a_layer(s: Subject):
    s.layer.requires_grad_(True)
    optimizer = torch.optim.SGD(s.layer.parameters(), lr=0.125)
    s.layer(s.h).float().sum().backward()
    optimizer.step()
    return s.layer.weight.detach().clone()


@operation(FLAGS, "`layer.weight.requires_grad_(True)`, then read its grad")
def train_a_weight(s: Subject):
    s.layer.weight.requires_grad_(True)
    s.layer(s.h).float().sum().backward()
    return s.layer.weight.grad


@operation(FLAGS, "`layer.weight.requires_grad = False`, then a call")
def freeze_a_weight(s: Subject):
    s.layer.weight.requires_grad = False
    return s.layer.weight.requires_grad, s.layer(s.h)


@operation(FLAGS, "`model.train()`, `model.eval()`, `zero_grad()`, `apply(fn)`")
def modes(s: Subject):
    seen = []
    s.whole.train()
    s.whole.zero_grad()
    y = s.whole(s.x)
    s.whole.eval()
    s.model.apply(lambda module: seen.append(module.training))
    return y, s.whole(s.x), seen, s.whole.training


# -- reparametrizing --------------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    """w -> 2 w."""

    def forward(self, w):
        return 2 * w


@operation(
    SHAPES,
    '`prune.custom_from_mask(layer, "weight", mask)`, and `prune.remove`',
    Refused(FROZEN, "cannot take the place of its weight"),
    Refused(ROUNDED, NOT_REPLACED),
    only={"format": tuple(f for f in ("nvfp4", "mxfp4", "nf4", "dense", "dense fp32", "exact bf16", "exact fp16"))},
)
def prune_(s: Subject):
    mask = torch.ones_like(s.layer.weight)
    mask[:3] = 0
    prune.custom_from_mask(s.layer, "weight", mask)
    first = now(s)
    prune.remove(s.layer, "weight")
    return first, now(s), sorted(name for name, _ in s.layer.named_parameters() if name != "weight")


@operation(
    SHAPES, '`prune.l1_unstructured(layer, "bias", 0.5)`', Refused(FROZEN, NOT_REPLACED), Refused(ROUNDED, NOT_REPLACED)
)
def prune_the_bias(s: Subject):
    prune.l1_unstructured(s.layer, "bias", 0.5)
    return s.whole(s.x)


@operation(
    SHAPES,
    '`parametrize.register_parametrization(layer, "weight", module)`, and removing it',
    IN_TIERS,
    Refused(ROUNDED, NOT_REPLACED),
)
def parametrize_(s: Subject):
    parametrize.register_parametrization(s.layer, "weight", Doubled())
    first = now(s)
    parametrize.remove_parametrizations(s.layer, "weight")
    return first, now(s)


@operation(SHAPES, "`nn.utils.parametrizations.weight_norm(layer)`", IN_TIERS, only={"lossless": True})
def weight_norm(s: Subject):
    nn.utils.parametrizations.weight_norm(s.layer)
    return now(s)


@operation(
    SHAPES,
    "`nn.utils.spectral_norm(layer)`, by a hook",
    Refused(FROZEN, "SpectralNorm", ValueError),
    only={"lossless": True},
)
def spectral_norm(s: Subject):
    torch.manual_seed(0)
    nn.utils.spectral_norm(s.layer)
    return s.layer(s.h).detach()


# -- ties -------------------------------------------------------------------------------------------------------------


@operation(TIES, "`c.weight = a.weight`: both compute with it")
def tie(s: Subject):
    s.model.c.weight = s.model.a.weight
    return s.model.c.weight.detach().clone(), s.whole(s.x)


@operation(TIES, "`c.weight is a.weight` of layers that were tied")
def identity_of_a_tie(s: Subject):
    s.model.c.weight = s.model.a.weight
    s.whole(s.x)
    return s.model.c.weight is s.model.a.weight


@operation(TIES, "a write to one of two tied layers reaches the other")
def write_to_a_tie(s: Subject):
    s.model.c.weight = s.model.a.weight
    s.model.a.weight.data.mul_(2)
    return s.model.c.weight.detach().clone(), s.whole(s.x)


@operation(TIES, "tie, call, deepcopy, unwrap: still tied")
def keep_a_tie(s: Subject):
    s.model.c.weight = s.model.a.weight
    s.whole(s.x)
    model = s.unwrap()
    return model.c.weight is model.a.weight, model(s.x)
