"""Copies, pickles, state dicts, casts, files and processes."""

import copy
import io
import os
import pickle

import torch
import torch.multiprocessing as mp
from torch import nn

import vbrt
from tests.contract.holdings import KINDS, Chain, Subject, model_of
from tests.contract.operation import FROZEN, ROUNDED, Documented, Refused, operation
from vbrt.errors import FormatError

COPIES, STATES, CASTS, PROCESSES = "Copies", "State dicts", "Casts", "Processes"


def other_weights(s: Subject):
    """A state dict of weights that are not the model's, which its format holds as they are."""
    return {
        name: s.rows(value) if name.endswith("weight") else 2 * value
        for name, value in without_history(s.whole.state_dict()).items()
    }


def without_history(state):
    """A state dict as the plain model has it: layers in training keep scales beside their weight."""
    return {name: value for name, value in state.items() if "separation" not in name}


def both_ways(s: Subject, clone: nn.Module):
    """The copy and the original, with a weight written to each."""
    y = clone(s.x), s.whole(s.x)
    model_of(clone).b.weight = nn.Parameter(s.rows(s.layer.weight))
    changed = clone(s.x), s.whole(s.x)
    s.layer.weight = nn.Parameter(torch.zeros_like(s.layer.weight))
    return y, changed, clone(s.x), s.whole(s.x)


def gone(clone: nn.Module) -> None:
    if isinstance(clone, vbrt.VBModelWrapper):
        clone.close()


@operation(COPIES, "`copy.deepcopy(model)`; each is changed without the other")
def deepcopy(s: Subject):
    clone = copy.deepcopy(s.whole)
    result = both_ways(s, clone)
    gone(clone)
    return result


@operation(COPIES, "`copy.deepcopy(model)`, then the original is closed or unwrapped", calls_after=False)
def deepcopy_and_close_the_original(s: Subject):
    clone, second = copy.deepcopy(s.whole), copy.deepcopy(s.whole)
    y = s.unwrap()(s.x)
    s.close()
    z = clone(s.x), second(s.x)
    gone(clone)
    result = y, z, second(s.x)
    gone(second)
    return result


@operation(COPIES, "`copy.deepcopy(model)`, then the copy is closed or unwrapped")
def deepcopy_and_close_the_copy(s: Subject):
    clone, second = copy.deepcopy(s.whole), copy.deepcopy(s.whole)
    gone(clone)
    y = second.unwrap()(s.x) if isinstance(second, vbrt.VBModelWrapper) else second(s.x)
    return y, s.whole(s.x), s.whole(s.x)


@operation(COPIES, "`copy.deepcopy` of a copy, after calls, of one layer")
def deepcopy_of_a_copy(s: Subject):
    first = copy.deepcopy(s.whole)
    y = first(s.x)
    second, layer = copy.deepcopy(first), copy.deepcopy(model_of(first).b)
    result = y, second(s.x), layer(s.h), layer.weight.detach().clone()
    gone(first)
    gone(second)
    return result


@operation(COPIES, "`copy.copy(layer)`, a shallow one: computes the same")
def shallow_copy(s: Subject):
    clone = copy.copy(s.layer)
    return clone(s.h), s.layer(s.h), clone.weight.detach().clone()


@operation(COPIES, "`pickle.loads(pickle.dumps(model))`, and of one layer")
def pickle_(s: Subject):
    layer = pickle.loads(pickle.dumps(s.layer))
    clone = pickle.loads(pickle.dumps(s.whole))
    result = both_ways(s, clone), layer.bias.detach()
    gone(clone)
    return result


@operation(
    COPIES, "`torch.save(model)`, `torch.load(weights_only=False)`; the original is closed by then", calls_after=False
)
def torch_save(s: Subject):
    file = io.BytesIO()
    torch.save(s.whole, file)
    file.seek(0)
    s.close()
    clone = torch.load(file, weights_only=False)
    y = clone(s.x)
    gone(clone)
    return y


@operation(COPIES, "`unwrap()`: the plain model, of the plain class", calls_after=False)
def unwrap(s: Subject):
    model = s.unwrap()
    layer = model.b
    return (
        model(s.x),
        type(layer).__name__,
        layer.weight.detach(),
        isinstance(layer.weight, nn.Parameter),
        layer.weight.requires_grad,
        sorted(layer.__dict__),
        list(model.state_dict()),
    )


# -- state dicts ------------------------------------------------------------------------------------------------------


@operation(STATES, "`state_dict()`: names, values, order; it shares no memory that a later write changes")
def state_dict(s: Subject):
    state = without_history(s.whole.state_dict())
    s.whole(s.x)
    return {**state}, without_history(s.model.state_dict())


@operation(STATES, '`state_dict(keep_vars=True)`, `state_dict(prefix="p.")`, of a layer')
def state_dict_with_options(s: Subject):
    return [
        without_history(state)
        for state in (s.whole.state_dict(keep_vars=True), s.whole.state_dict(prefix="p."), s.layer.state_dict())
    ]


@operation(STATES, "`load_state_dict(state_dict())`")
def load_ones_own_state(s: Subject):
    keys = s.whole.load_state_dict(s.whole.state_dict())
    return list(keys.missing_keys), list(keys.unexpected_keys), s.whole(s.x), s.layer.weight.detach().clone()


@operation(STATES, "`load_state_dict(another model's)`")
def load_another_state(s: Subject):
    s.whole.load_state_dict(other_weights(s))
    return s.whole(s.x), s.layer.weight.detach().clone()


@operation(STATES, "`load_state_dict(another model's, assign=True)`")
def load_by_assigning(s: Subject):
    s.whole.load_state_dict(other_weights(s), assign=True)
    return s.whole(s.x), s.layer.weight.detach().clone()


@operation(STATES, "`load_state_dict(assign=True)`, then a write to the tensor that was given")
def write_to_what_was_assigned(s: Subject):
    state = other_weights(s)
    s.whole.load_state_dict(state, assign=True)
    state["b.bias"].zero_()
    return s.whole(s.x)


@operation(STATES, "`load_state_dict` of float32 values")
def load_a_state_of_another_dtype(s: Subject):
    s.whole.load_state_dict({name: value.double() for name, value in other_weights(s).items()})
    return s.whole(s.x), s.layer.weight.detach().clone()


@operation(
    STATES,
    "`load_state_dict(assign=True)` of float64 values: the model has their dtype",
    Refused(ROUNDED, "weight is torch.float64", FormatError),
    calls_after=False,
    only={"place": "resident"},
)
def assign_a_state_of_another_dtype(s: Subject):
    s.whole.load_state_dict({name: value.double() for name, value in other_weights(s).items()}, assign=True)
    y = s.whole(s.x.double()), s.layer.weight.dtype
    s.whole.to(s.holding.dtype)
    return y


@operation(STATES, "`load_state_dict` with missing, unexpected and misshapen entries")
def load_a_wrong_state(s: Subject):
    state = other_weights(s)
    state["b.weight"] = state["b.weight"][:5]
    state["new"] = state.pop("c.bias")
    s.whole.load_state_dict(state)


@operation(STATES, "`load_state_dict(strict=False)` of one entry")
def load_a_part(s: Subject):
    keys = s.whole.load_state_dict({"b.weight": other_weights(s)["b.weight"]}, strict=False)
    return sorted(keys.missing_keys), s.whole(s.x)


@operation(STATES, "`with torch.inference_mode(): load_state_dict(...)`, `state_dict()`")
def load_in_inference_mode(s: Subject):
    with torch.inference_mode():
        s.whole.load_state_dict({name: value.clone() for name, value in other_weights(s).items()})
    return s.whole(s.x)


@operation(STATES, "`torch.save(state_dict())`, loaded with `weights_only=True` into a plain model")
def state_dict_in_a_file(s: Subject):
    file = io.BytesIO()
    torch.save(without_history(s.whole.state_dict()), file)
    file.seek(0)
    plain = Chain(KINDS[s.holding.kind]).to(s.holding.device, s.holding.dtype).eval()
    plain.load_state_dict(torch.load(file, weights_only=True))
    return plain(s.x)


# -- casts ------------------------------------------------------------------------------------------------------------


@operation(
    CASTS,
    "`model.float()`, `.double()`, `.bfloat16()`: outputs of the wide ones, dtypes of all",
    Refused(ROUNDED, "weight is torch.float64", FormatError),
    calls_after=False,
)
def cast(s: Subject):
    y = [s.whole.float()(s.x.float()), s.layer.weight.dtype, s.whole.double()(s.x.double()), s.layer.weight.dtype]
    s.whole.to(s.holding.dtype)
    return y, s.layer.weight.dtype, s.whole(s.x)


@operation(CASTS, "`model.to(device)`, `.cpu()`, `model.to(memory_format=...)`")
def move_to_where_it_is(s: Subject):
    s.whole.to(s.holding.device)
    return s.whole(s.x), s.layer.weight.device


@operation(
    CASTS,
    '`model.to("meta")`: the weights are gone',
    Documented(
        FROZEN,
        "pages stay in their tiers",
        "moves only unswapped tensors; pages stay in their tiers",
        lambda got, plain: got[0].type != "meta" == got[1].type,
    ),
    calls_after=False,
)
def move_to_meta(s: Subject):
    s.whole.to("meta")
    return s.layer.weight.device, s.layer.bias.device


@operation(CASTS, "`model.share_memory()`", only={"device": "cpu"})
def share_memory(s: Subject):
    s.whole.share_memory()
    return s.whole(s.x)


# -- processes --------------------------------------------------------------------------------------------------------


def in_a_child(s: Subject) -> torch.Tensor:
    """What a forked process computes."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            with os.fdopen(writer, "wb") as out, torch.no_grad():
                pickle.dump(s.whole(s.x).float().numpy(), out)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        y = torch.from_numpy(pickle.load(pipe))
    os.waitpid(child, 0)
    return y.to(s.holding.dtype)


@operation(PROCESSES, "`os.fork()`: the child computes, the parent goes on", sample=4, only={"device": "cpu"})
def fork(s: Subject):
    first = in_a_child(s)
    s.whole(s.x)
    return first, in_a_child(s), s.whole(s.x)


def _compute(queue, model, x) -> None:
    with torch.no_grad():
        queue.put(model(x).float().numpy())


@operation(
    PROCESSES, "passed to a process of `torch.multiprocessing`, started by spawn", sample=1, only={"device": "cpu"}
)
def spawn(s: Subject):
    y = s.whole(s.x)
    if not s.wrapped:
        return y, y
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=_compute, args=(queue, s.whole, s.x))
    process.start()
    y = queue.get()
    process.join()
    return torch.from_numpy(y).to(s.holding.dtype), s.whole(s.x)


@operation(PROCESSES, "`vb.save(directory)`, `vbrt.load` into a new model", sample=5)
def save_and_load(s: Subject):
    if not s.wrapped:
        return s.whole(s.x), list(s.whole.state_dict())
    s.whole.save(s.path / "saved")
    model = Chain(KINDS[s.holding.kind]).to(s.holding.dtype).eval()
    tiers = {"gpu": {"enabled": s.holding.device == "cuda"}}
    with vbrt.load(s.path / "saved", model, tiers=tiers) as vb:
        return vb(s.x), list(vb.state_dict())
