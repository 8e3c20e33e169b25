"""Record what a function computes as a graph of torch's operators, while it computes it.

    recorder = StepRecorder()
    with recorder:
        y = step()
    recorder.finish(y)
    recorder.graph          # torch.fx.Graph: a node for each operator that ran, in order

Each tensor that the function did not make is a placeholder of the graph, bound to that very tensor: parameters,
buffers, caches and inputs. Operators that write in place are recorded as they are. What must stay one piece is a
*leaf*: a call of a Python function, which runs unseen and whose result is the node's. Layers of vbrt are leaves,
because their kernels read memory by its address, and so is attention.

The road not taken: `make_fx`, which takes twenty times as long for the same nodes.
"""

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode

from vbrt.kernels.observers import dispatch_modes
from vbrt.libraries.torch_api import TorchDispatchMode, disable_current_modes, dispatch_mode_at, is_any_autocast_enabled

__all__ = ["Form", "StepRecorder", "form_of", "kind_of", "recorder", "root_of"]

_aten = torch.ops.aten
#: what runs as one piece, though torch takes it apart: kernels of attention are chosen by mask, dtype and layout
LEAVES = {F.scaled_dot_product_attention}
#: functions that give Python the numbers in a tensor past the dispatcher
_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}
#: devices whose sums over ranks are recorded: by Gloo and NCCL, which were seen to replay
SUMS_ON = {"cpu", "cuda"}
#: operators that give Python what it may know: nothing of the numbers in a tensor
_METADATA = ("aten::sym_", "aten::is_same_size", "aten::size", "aten::stride")
#: operators that may be repeated: they write the same to the same place
_REPEATABLE = {_aten.index_copy_.default, _aten.index_put_.default}
_DRAWS, _BY_DATA = torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape


@dataclass(frozen=True, slots=True)
class Form:
    """What is known of a tensor without having it: what passes over graphs ask of `meta["val"]`."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "Form":
        """The form of a tensor."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def numel(self) -> int:
        """The number of elements."""
        return self.shape.numel()

    def is_contiguous(self) -> bool:
        """True if rows lie one behind the other."""
        return self.strides == _dense_strides(self.shape)

    def new_empty(self, *shape: int, dtype: torch.dtype | None = None) -> "Form":
        """The form of a new tensor beside this one."""
        return Form(torch.Size(shape), _dense_strides(shape), dtype or self.dtype, self.device)


def _dense_strides(shape: Any) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def form_of(node: Node) -> Any:
    """The Form of a node's result, or a tuple of them."""
    return node.meta["val"]


def root_of(node: Node) -> Node:
    """The node whose memory a node's result shares; itself if it has its own."""
    return node.meta.get("root", node)


class _Kind(NamedTuple):
    """What an operator does to its tensors, by its schema."""

    writes: tuple[int | str, ...]  # arguments, by place or name
    views: bool  # the result shares the memory of the first argument
    collective: bool = False  # it sends tensors to other processes


_KINDS: dict[Any, _Kind] = {}


class StepRefused(Exception):
    """A step ended where it was found that it cannot be recorded."""


class StepRecorder(TorchDispatchMode):
    """Records what runs within the `with`, once; what cannot be recorded runs all the same.

    Attributes:
        graph: a node for each operator. `node.meta`: "val", the Form of its result or a tuple of them; "root", see
            `root_of`; "effect", True where it does more than give a result; "constant", True for numbers in host
            memory that no input has a part in: where they go to a device they stay what they are.
        given: placeholder -> the tensor that it stands for.
        written: roots that something has written to.
        saved: tensors that were there before and what was in them, in the order in which they were first written to;
            without those to which repeating the function writes the same.
        random: True if something drew random numbers.
        refused: why the graph is not what the function does; "" if it is.
    """

    def __init__(self, inputs: Iterable[Any] = (), *, before_write: Callable[[Tensor], object] | None = None) -> None:
        """Record what runs within.

        Args:
            inputs: tensors that are others, or hold other numbers, when what is recorded runs again.
            before_write: called with each tensor that was there before, or a view of it, when something is about to
                write to it. Where that cannot be told any more, at a refusal, the run ends with StepRefused.
        """
        super().__init__()
        self._before_write = before_write
        self._inputs = {id(tensor) for tensor in inputs}
        self.graph, self.random, self.refused = Graph(), False, ""
        self.given: dict[Node, Tensor] = {}
        self.written: set[Node] = set()
        self.saved: list[tuple[Tensor, Tensor]] = []
        self._nodes: dict[int, tuple[weakref.ref, Node]] = {}
        self._storages: dict[int, Node] = {}
        self._last_given: Node | None = None
        self._functions = _Leaves(self)

    def __enter__(self) -> "StepRecorder":
        if torch.is_grad_enabled():
            self._refuse("derivatives are wanted: no torch.no_grad()")
        if is_any_autocast_enabled():
            self._refuse("autocast is on")
        self._functions.__enter__()
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._functions.__exit__(*args)

    def finish(self, outputs: Any) -> None:
        """End the graph; `outputs`: a tensor, or tuples, lists and dicts of them and of anything else."""
        self.graph.output(self._argument(outputs))

    def leaf(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function unseen and record the call: it runs again whenever the graph does."""
        with disable_current_modes():
            out = function(*args, **kwargs)
        if not self.refused:
            self._note(function, args, kwargs, out).meta["effect"] = function not in LEAVES
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        if any(cls.__name__ == "DTensor" for cls in types):
            self._refuse(f"{func} of a DTensor, of which torch computes this rank's part out of sight")
        if self.refused:
            return func(*args, **kwargs)
        kind = kind_of(func)
        if kind.collective:
            return self._run_collective(func, args, kwargs)
        if kind.writes:
            return self._run_write(func, kind, args, kwargs)
        out = func(*args, **kwargs)
        if func is _aten.lift_fresh.default or (func is _aten._to_copy.default and self._leaves_host(args[0], out)):
            func, kind, args, kwargs = _aten.clone.default, _Kind((), views=False), (self._constant(out),), {}
        if any(isinstance(part, Tensor) for part in _flat(out)):
            self._note(func, args, kwargs, out, views=kind.views)
        elif out is None:
            self._call(func, args, kwargs).meta["effect"] = True
        elif not func._schema.name.startswith(_METADATA):
            self._refuse(f"{func} gives Python a number out of a tensor, which may decide what is computed")
        return out

    def _leaves_host(self, given: Tensor, out: Tensor) -> bool:
        """True if numbers that Python made are copied to a device; a CUDA graph would find their memory free."""
        if given.device.type != "cpu" or out.device.type == "cpu":
            return False
        node = self.node_of(given)
        return node.meta.get("constant", False) and root_of(node) not in self.written

    def _constant(self, tensor: Tensor) -> Tensor:
        """A copy of numbers that are the same each time, as a placeholder; each run gets a copy, to write to."""
        kept = tensor.clone()
        self.give(kept).meta["constant"] = True
        return kept

    def _refuse(self, why: str) -> None:
        self.refused = self.refused or why
        if self._before_write is not None:
            raise StepRefused(self.refused)

    def _writes(self, tensor: Tensor) -> None:
        """Note that an operator is about to write to a tensor."""
        root = root_of(self.node_of(tensor))
        self.written.add(root)
        if root in self.given and self._before_write is not None:
            self._before_write(tensor)

    # -- nodes --------------------------------------------------------------------------------------------------------

    def node_of(self, tensor: Tensor) -> Node:
        """The node whose result a tensor is; a placeholder for one that was there before."""
        known = self._nodes.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        return self.give(tensor)

    def give(self, tensor: Tensor) -> Node:
        """A placeholder for a tensor, in front of everything that computes."""
        behind = self._last_given or self.graph._root
        with self.graph.inserting_after(behind):
            node = self._last_given = self.graph.placeholder(f"given_{len(self.given)}")
        self.given[node] = tensor
        root = node
        if tensor.layout is torch.strided and not tensor.is_meta:
            root = self._storages.setdefault(tensor.untyped_storage()._cdata, node)
        is_host = tensor.device.type == "cpu" and id(tensor) not in self._inputs
        node.meta.update(val=Form.of(tensor), root=root, constant=is_host)
        self._remember(tensor, node)
        return node

    def _remember(self, tensor: Tensor, node: Node) -> None:
        key, nodes = id(tensor), self._nodes

        def forget(ref: weakref.ref) -> None:
            if nodes.get(key, (None,))[0] is ref:
                del nodes[key]

        nodes[key] = weakref.ref(tensor, forget), node

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.node_of(value)
        if type(value) in (list, tuple):
            return type(value)([self._argument(item) for item in value])
        return {k: self._argument(v) for k, v in value.items()} if type(value) is dict else value

    def _call(self, func: Any, args: Any, kwargs: Any) -> Node:
        tags = getattr(func, "tags", ())
        self.random = self.random or _DRAWS in tags
        if _BY_DATA in tags and not _by_places(func, args):
            self._refuse(f"{func}: the shape of its result depends on numbers in a tensor")
        given = self._argument(args), self._argument(kwargs)  # placeholders come first
        node = self.graph.create_node("call_function", func, name=f"call{len(self.graph.nodes)}")
        node.args, node.kwargs = given  # not above, where torch 2.13 looks through them for symbols
        node.meta["effect"] = _DRAWS in tags
        return node

    def _note(self, func: Any, args: tuple, kwargs: dict, out: Any, *, views: bool = False) -> Node:
        node = self._call(func, args, kwargs)
        root = root_of(node.all_input_nodes[0]) if views else node
        if isinstance(out, Tensor):
            node.meta.update(val=Form.of(out), root=root)
            if out.device.type == "cpu":
                node.meta["constant"] = all(n.meta.get("constant") for n in node.all_input_nodes)
            self._remember(out, node)
            return node
        parts = list(_flat(out))
        if not all(part is None or isinstance(part, Tensor) for part in parts):
            self._refuse(f"{func}: gives {type(out).__name__} to Python")
            return node
        node.meta.update(val=tuple(None if part is None else Form.of(part) for part in parts), root=root)
        for at, part in enumerate(parts):
            if part is not None:
                item = self.graph.call_function(operator.getitem, (node, at))
                item.meta.update(val=Form.of(part), root=root if views else item)
                self._remember(part, item)
        return node

    def _run_collective(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run what sends tensors to other processes: a sum over ranks is recorded as a call that gives its tensor."""
        is_sum = func.overloadpacket is torch.ops.c10d.allreduce_ and len(args[0]) == 1
        is_sum = is_sum and args[0][0].device.type in SUMS_ON
        if not is_sum or not _is_awaited(func, args, kwargs):
            self._refuse(f"{func}: sends tensors to other processes")
            return func(*args, **kwargs)
        (tensor,), before = args[0], self.node_of(args[0][0])
        if root_of(before) is not before or before in self.given:  # others may see what is written there
            self._writes(tensor)
            if root_of(before) in self.given:
                self.saved.append((tensor, tensor.clone()))
        again = partial(_reduced, func=func, rest=args[1:], kwargs=kwargs)
        node = self.graph.create_node("call_function", again, (before,), name=f"reduced{len(self.graph.nodes)}")
        node.meta.update(effect=True, val=Form.of(tensor), root=node)
        out = func(*args, **kwargs)
        self._remember(tensor, node)
        return out

    def _run_write(self, func: Any, kind: _Kind, args: tuple, kwargs: dict) -> Any:
        targets = [args[at] if isinstance(at, int) and at < len(args) else kwargs.get(at) for at in kind.writes]
        tensors = [t for target in targets for t in _flat(target) if isinstance(t, Tensor)]
        node = self._call(func, args, kwargs)
        for tensor in tensors:
            self._writes(tensor)
            if root_of(self.node_of(tensor)) in self.given and func not in _REPEATABLE:
                self.saved.append((tensor, tensor.clone()))
        out = func(*args, **kwargs)
        node.meta["effect"] = True
        if isinstance(out, Tensor) and any(out is t for t in tensors):
            node.meta.update(val=Form.of(out), root=root_of(self.node_of(out)))
            self._remember(out, node)
        elif not all(any(part is t for t in tensors) for part in _flat(out) if part is not None):
            self._refuse(f"{func}: writes in place and gives other tensors")
        return out


def _reduced(tensor: Tensor, func: Any, rest: tuple, kwargs: dict) -> Tensor:
    """Sum a tensor over ranks, in place; on a GPU as a part of the current stream, for which nobody waits."""
    _, work = func([tensor], *rest, **kwargs)
    if tensor.device.type == "cpu":
        work.wait()  # NCCL gives an empty one, which nothing may be asked of
    return tensor


def _is_awaited(func: Any, args: tuple, kwargs: dict) -> bool:
    """True if a collective is over, for the stream that called it, when the call is: not asked for as `async_op`."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return "async_op" in names and not given.get("async_op", True)


def _by_places(func: Any, args: tuple) -> bool:
    """True for an index of whole numbers, whose result has their shape; masks give as many rows as are true."""
    masks = (torch.bool, torch.uint8)
    return func is _aten.index.Tensor and all(i is None or i.dtype not in masks for i in args[1])


def _flat(out: Any) -> Iterator[Any]:
    yield from out if isinstance(out, (list, tuple)) else (out,)


def kind_of(func: Any) -> _Kind:
    """What an operator of torch does to its tensors: `writes`, `views` and whether it is `collective`."""
    return _KINDS.get(func) or _kind(func)


def _kind(func: Any) -> _Kind:
    schema, writes = func._schema, []
    for at, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes.append(argument.name if argument.kwarg_only else at)
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    kind = _KINDS[func] = _Kind(tuple(writes), views, collective=schema.name.startswith("c10d::"))
    return kind


class _Leaves(TorchFunctionMode):
    """Makes a leaf of each call of LEAVES, and sees what the dispatcher does not."""

    def __init__(self, owner: StepRecorder) -> None:
        super().__init__()
        self._owner = owner

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in LEAVES and recorder() is self._owner:
            return self._owner.leaf(func, *args, **(kwargs or {}))
        if func in _READS and recorder() is self._owner:
            self._owner._refuse(f"Tensor.{func.__name__} gives Python the numbers in a tensor, which may decide")
        return func(*args, **(kwargs or {}))


def recorder() -> StepRecorder | None:
    """The recorder that sees what this thread computes, if it is the innermost mode; None otherwise."""
    count = dispatch_modes()
    mode = dispatch_mode_at(count - 1) if count else None
    return mode if isinstance(mode, StepRecorder) else None
