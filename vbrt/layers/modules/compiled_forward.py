"""Forward of a VB layer under torch.compile."""

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from vbrt.errors import WrapError
from vbrt.kernels import TILES, page_of
from vbrt.kernels.frozen_product import as_autocast
from vbrt.kernels.reference import wants_grad
from vbrt.layers.modules.vb_layer import VBLayer
from vbrt.layers.weights.graph_planes import GraphForm, GraphTiles
from vbrt.layers.weights.linear_product import pass_precision
from vbrt.layers.weights.state import Weight

__all__ = ["compiled_linear", "refuse_given_in_graph", "tiles_of_pass"]

FEW_TOKENS = 16  # on every GPU and for every dtype this many go to the fused kernel


def compiled_linear(layer: VBLayer, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Forward of a VB layer under torch.compile, with autocast's cast of x.

    With resident planes and without gradients it is the kernel's op on the planes, which CUDA graphs can capture.
    Otherwise it is one opaque op that leases at run time, outside of CUDA graphs. For few tokens, where host overhead
    counts, the kernel's op is found without touching the handle.
    """
    refuse_given_in_graph(layer)
    cast, x, bias = torch.is_autocast_enabled(x.device.type), as_autocast(x), as_autocast(bias)
    frozen = not wants_grad(x, bias) and (bias is None or bias.dtype == x.dtype)
    form = layer._vb_form
    if frozen and form is not None and x.numel() <= FEW_TOKENS * x.shape[-1]:
        # a GraphForm, parsed here: each function of another file that dynamo goes through is guarded at every call
        page, (format, n, _, dtype, _) = layer._vb_page, form.split()
        fits = bias is None or bias.shape == (int(n),)
        if fits and x.dtype == getattr(torch, dtype) and x.device == page.device:
            return torch.ops.vbrt.fp4_linear(x, page, None, bias, format, int(n), "none")
    handle = layer._vb_handle
    if frozen and (bias is None or bias.shape == handle.spec.shape[:1]):
        planes = handle.graph_planes
        if planes is not None and x.dtype == handle.dtype and x.device == handle.stack.device:
            return handle.kernels.linear(x, planes, bias)
    return torch.ops.vbrt.linear(x, bias, handle.token, handle.spec.shape[0], cast, wants_grad(x, bias))


def tiles_of_pass(handle: Weight) -> GraphTiles | None:
    """Tiles that a captured pass may hold at this thread's precision: a compiled graph's tiles or, in a coarse pass of
    an `exact` weight, its coarse page's if that is at home in the top tier. None: the pass leases."""
    if not handle.spec.fine or pass_precision() == "full":
        return handle.graph_tiles
    page = handle.pages[0] if handle.pages else None
    slot = handle.stack.levels[0].slots.get(handle.keys[0]) if page is not None and not page.home else None
    if slot is None or TILES not in slot.tensors or handle.dtype is not handle.spec.dtype:
        return None
    tiles, scale = slot.tensors[TILES], slot.tensors["tensor_scale"]
    form = GraphForm(handle.spec.format, *handle.spec.shape, handle.dtype, str(tiles.device))
    return GraphTiles(page_of(tiles, scale), form.encode())


def refuse_given_in_graph(layer: VBLayer) -> None:
    """Raise WrapError if functional_call replaced a layer's weight inside a function that dynamo traces."""
    if is_dynamo_compiling():
        from torch._dynamo.comptime import comptime  # takes two seconds to import, only needed with torch.compile

        comptime(_refuse_given)


def _refuse_given(context: Any) -> None:
    """Raise WrapError if functional_call, inside a traced function, replaced the weight of `layer`.

    Looked up in dynamo's own table: reading the parameter would guard it at every call.
    """
    trace = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    layer = trace.symbolic_locals["layer"].value
    table = trace.output.side_effects.id_to_variable.get(id(layer._parameters))
    items = {} if table is None else {key.vt.as_python_constant(): value for key, value in table.items.items()}
    weight = items.get("weight")
    if weight is None or not weight.is_realized() or weight.is_python_constant():  # the last: None, as it should be
        return
    raise WrapError(
        f"{layer._vb_handle.spec.name}: functional_call gives it another weight within a function that "
        "torch.compile traces, where a VB layer's weight is fixed; call it outside of the function, or "
        "unwrap() first"
    )
