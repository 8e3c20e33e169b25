"""Operator trace: records a function as a graph of torch operators while it runs.

    recorder = StepRecorder()
    with recorder:
        y = step()
    recorder.finish(y)
    recorder.graph          # torch.fx.Graph: a node per operator that ran, in order

Tensors that the function did not create (parameters, buffers, caches, inputs) are placeholders bound to those tensors.
In-place operators are recorded as such. A *leaf* is an opaque call of a Python function, recorded as one node: VB
layers are leaves because their kernels read memory by address, and so is attention.

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

from vbrt.host import accelerator
from vbrt.kernels.observers import dispatch_modes
from vbrt.libraries.torch_api import TorchDispatchMode, disable_current_modes, dispatch_mode_at, is_any_autocast_enabled

__all__ = ["Form", "StepRecorder", "form_of", "kind_of", "recorder", "root_of"]

_aten = torch.ops.aten
#: composite functions kept as leaves: attention kernels are selected by mask, dtype and layout
LEAVES = {F.scaled_dot_product_attention}
#: functions that expose a tensor's values to Python past the dispatcher
_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}
#: devices whose all-reduces are recorded: Gloo, and NCCL where there are graphs, whose replay was tested
SUMS_ON = {"cpu", accelerator.TYPE}
#: operators that expose metadata only, no tensor values
_METADATA = ("aten::sym_", "aten::is_same_size", "aten::size", "aten::stride")
#: idempotent in-place operators
_REPEATABLE = {_aten.index_copy_.default, _aten.index_put_.default}
_DRAWS, _BY_DATA = torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape


@dataclass(frozen=True, slots=True)
class Form:
    """Tensor metadata without the tensor: what graph passes need of `meta["val"]`."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "Form":
        """Metadata of a tensor."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    def is_contiguous(self) -> bool:
        """True if row-major without gaps."""
        return self.strides == _dense_strides(self.shape)

    def new_empty(self, *shape: int, dtype: torch.dtype | None = None) -> "Form":
        """Metadata of a new contiguous tensor on the same device."""
        return Form(torch.Size(shape), _dense_strides(shape), dtype or self.dtype, self.device)


def _dense_strides(shape: Any) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def form_of(node: Node) -> Any:
    """Form of a node's result, or a tuple of Forms."""
    return node.meta["val"]


def root_of(node: Node) -> Node:
    """The node that owns the memory of a node's result; itself if not a view."""
    return node.meta.get("root", node)


class _Kind(NamedTuple):
    """An operator's effects on tensors, from its schema."""

    writes: tuple[int | str, ...]  # mutated arguments, by position or name
    views: bool  # the result aliases the first argument
    collective: bool = False  # communicates with other processes


_KINDS: dict[Any, _Kind] = {}


class StepRefused(Exception):
    """A step was aborted because it cannot be captured."""


class StepRecorder(TorchDispatchMode):
    """Traces what runs in the `with` block, once; untraceable operations still run.

    Attributes:
        graph: a node per operator. `node.meta`: "val", the Form of its result or a tuple of them; "root", see
            `root_of`; "effect", True for side effects; "constant", True for host values independent of the inputs:
            copies of them to a device are constants, too.
        given: placeholder -> its tensor.
        written: roots that were mutated.
        saved: pre-existing tensors and their contents before the first write, in order; without idempotent writes.
        random: True if random numbers were drawn.
        refused: why the graph does not represent the function; "" if it does.
    """

    def __init__(self, inputs: Iterable[Any] = (), *, before_write: Callable[[Tensor], object] | None = None) -> None:
        """Trace what runs in the block.

        Args:
            inputs: tensors that may be replaced, or hold other values, in later runs.
            before_write: called with each pre-existing tensor, or view of one, that is about to be mutated. At a
                refusal, when later writes can no longer be reported, the run is aborted with StepRefused.
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
            self._refuse("gradients are enabled; expected torch.no_grad()")
        if is_any_autocast_enabled():
            self._refuse("autocast is on")
        self._functions.__enter__()
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._functions.__exit__(*args)

    def finish(self, outputs: Any) -> None:
        """Complete the graph; `outputs`: tensors, in tuples, lists and dicts with anything else."""
        self.graph.output(self._argument(outputs))

    def leaf(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function untraced and record the call as one node, with side effects."""
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
            self._refuse(f"{func} of a DTensor, whose local computation cannot be traced")
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
            self._refuse(f"{func} reads a tensor's value into Python, which may control what is computed")
        return out

    def _leaves_host(self, given: Tensor, out: Tensor) -> bool:
        """True for an H2D copy of a Python-made constant; a CUDA graph would read its freed host memory."""
        if given.device.type != "cpu" or out.device.type == "cpu":
            return False
        node = self.node_of(given)
        return node.meta.get("constant", False) and root_of(node) not in self.written

    def _constant(self, tensor: Tensor) -> Tensor:
        """Add a constant as a placeholder; each run gets a clone, which it may write to."""
        kept = tensor.clone()
        self.give(kept).meta["constant"] = True
        return kept

    def _refuse(self, why: str) -> None:
        self.refused = self.refused or why
        if self._before_write is not None:
            raise StepRefused(self.refused)

    def _writes(self, tensor: Tensor) -> None:
        """Record that an operator is about to mutate a tensor."""
        root = root_of(self.node_of(tensor))
        self.written.add(root)
        if root in self.given and self._before_write is not None:
            self._before_write(tensor)

    # -- nodes --------------------------------------------------------------------------------------------------------

    def node_of(self, tensor: Tensor) -> Node:
        """Node whose result a tensor is; a new placeholder for a pre-existing tensor."""
        known = self._nodes.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        return self.give(tensor)

    def give(self, tensor: Tensor) -> Node:
        """Add a placeholder for a tensor, before all calls."""
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
            self._refuse(f"{func}: its result's shape depends on a tensor's values")
        given = self._argument(args), self._argument(kwargs)  # placeholders are created first
        node = self.graph.create_node("call_function", func, name=f"call{len(self.graph.nodes)}")
        node.args, node.kwargs = given  # set afterwards: torch 2.13's create_node searches arguments for symbols
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
            self._refuse(f"{func}: returns {type(out).__name__} to Python")
            return node
        node.meta.update(val=tuple(None if part is None else Form.of(part) for part in parts), root=root)
        for at, part in enumerate(parts):
            if part is not None:
                item = self.graph.call_function(operator.getitem, (node, at))
                item.meta.update(val=Form.of(part), root=root if views else item)
                self._remember(part, item)
        return node

    def _run_collective(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run a collective; a synchronous all-reduce is recorded as a call that returns its tensor."""
        is_sum = func.overloadpacket is torch.ops.c10d.allreduce_ and len(args[0]) == 1
        is_sum = is_sum and args[0][0].device.type in SUMS_ON
        if not is_sum or not _is_awaited(func, args, kwargs):
            self._refuse(f"{func}: sends tensors to other processes")
            return func(*args, **kwargs)
        (tensor,), before = args[0], self.node_of(args[0][0])
        if root_of(before) is not before or before in self.given:  # visible through aliases
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
            self._refuse(f"{func}: mutates in place and returns other tensors")
        return out


def _reduced(tensor: Tensor, func: Any, rest: tuple, kwargs: dict) -> Tensor:
    """All-reduce in place; on a GPU ordered by the current stream, without host synchronization."""
    _, work = func([tensor], *rest, **kwargs)
    if tensor.device.type == "cpu":
        work.wait()  # not with NCCL, whose work handle is empty here
    return tensor


def _is_awaited(func: Any, args: tuple, kwargs: dict) -> bool:
    """True for a collective that is complete, in stream order, when the call returns (not `async_op`)."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return "async_op" in names and not given.get("async_op", True)


def _by_places(func: Any, args: tuple) -> bool:
    """True for integer indexing, whose result has the index's shape; masks have data-dependent shapes."""
    masks = (torch.bool, torch.uint8)
    return func is _aten.index.Tensor and all(i is None or i.dtype not in masks for i in args[1])


def _flat(out: Any) -> Iterator[Any]:
    yield from out if isinstance(out, (list, tuple)) else (out,)


def kind_of(func: Any) -> _Kind:
    """Effects of a torch operator: `writes`, `views`, `collective`."""
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
    """Turns calls of LEAVES into leaves, and detects reads past the dispatcher."""

    def __init__(self, owner: StepRecorder) -> None:
        super().__init__()
        self._owner = owner

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in LEAVES and recorder() is self._owner:
            return self._owner.leaf(func, *args, **(kwargs or {}))
        if func in _READS and recorder() is self._owner:
            self._owner._refuse(f"Tensor.{func.__name__} reads a tensor's values into Python, which may decide")
        return func(*args, **(kwargs or {}))


def recorder() -> StepRecorder | None:
    """The recorder that traces this thread, if it is the innermost dispatch mode; else None."""
    count = dispatch_modes()
    mode = dispatch_mode_at(count - 1) if count else None
    return mode if isinstance(mode, StepRecorder) else None
