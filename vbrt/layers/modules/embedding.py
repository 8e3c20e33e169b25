"""VBEmbedding: an nn.Embedding whose table lives as planes in a tier stack.

A forward reads and decodes the rows of its tokens in the tier of the table's pages: GPU, host memory (if it is
page-locked, a GPU's kernels read it in place) or a file. The table itself does not move (`tiers/stack/row_lookup.py`).
With a tied output head, both share one set of pages, which the head leases like any linear layer.

The table is frozen: there are no gradients, and arguments that only affect them (padding_idx, scale_grad_by_freq,
sparse) have no effect. Autocast ignores lookups, as in torch.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.compiler import is_compiling
from torch.fx import Proxy

from vbrt.errors import WrapError
from vbrt.formats import get_format
from vbrt.formats.format import WeightPlanes
from vbrt.formats.row_decoding import Rows, by_chunks, coarse_rows, exact_rows
from vbrt.host.accelerator import is_device
from vbrt.kernels.cuda.host_rows import gather_rows, serves
from vbrt.kernels.observers import dispatch_modes, is_altered, is_memory, is_watched, traced_call, unwatched
from vbrt.kernels.operator_trace import recorder
from vbrt.layers.modules.compiled_forward import refuse_given_in_graph
from vbrt.layers.modules.vb_layer import VBLayer
from vbrt.layers.weights.kernel_selection import Kernels
from vbrt.layers.weights.linear_product import kernels_of_pass, resting_product
from vbrt.layers.weights.state import Weight
from vbrt.layers.weights.weight_operators import TAGS, library, materialized
from vbrt.tiers.stack.row_lookup import Gather, PageRows, page_rows

__all__ = ["VBEmbedding"]

_MANY = 16  # number of indices from which deduplication pays


class VBEmbedding(VBLayer, nn.Embedding):
    """nn.Embedding with its table in a tier stack. Made by `vbrt.wrap`, not by hand."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return rows [..., embedding_dim] for indices [...] of int32 or int64.

        Raises:
            IndexError: an index that the table does not have (on a GPU: a failed assertion of the device, as torch's).
            TierError: a page cannot be read or verified.
            FormatError: (first forward) the table cannot be encoded.
        """
        if type(input) is not torch.Tensor and isinstance(input, Proxy):
            return traced_call(self, input)
        if is_compiling():
            return _compiled(self, input)
        if self._vb_handle.product is None or self._parameters["weight"] is not None:
            given = self._settled_or_given()
            if given is not None:
                return F.embedding(
                    input, given, self.padding_idx, None, self.norm_type, self.scale_grad_by_freq, self.sparse
                )
        return _lookup(self._vb_handle, input)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "max_norm" and value is not None:
            raise WrapError(
                f"{self._vb_handle.spec.name}: max_norm rescales rows as they are read, and pages stay as they "
                "are: set it before wrapping, which leaves the table dense, or unwrap() first"
            )
        super().__setattr__(name, value)

    def reset_parameters(self) -> None:
        """Draw a new random table, as nn.Embedding does."""
        if self.materialized:
            self.weight = self._vb_handle.empty_parameter()
        super().reset_parameters()

    def extra_repr(self) -> str:
        """Return nn.Embedding's, and how the table is held."""
        return f"{super().extra_repr()}, format={self._vb_handle.spec.label}"


# -- eager calls ------------------------------------------------------------------------------------------------------


def _lookup(handle: Weight, ids: torch.Tensor) -> torch.Tensor:
    """Return the rows [..., K] of indices [...], counted as a forward."""
    step = recorder()
    if step is not None:
        return step.leaf(_counted_rows, handle, ids)
    if is_watched() or not is_memory(ids):
        return _watched_rows(handle, ids)
    return _counted_rows(handle, ids)


def _watched_rows(handle: Weight, ids: torch.Tensor) -> torch.Tensor:
    """Lookup as an operator; active dispatch modes also see the plain layer's call, on the requested rows."""
    token = handle.token_at(handle.generation) if dispatch_modes() else handle.token
    rows = torch.ops.vbrt.rows(ids, token, handle.spec.shape[1], handle.dtype)
    if not is_altered():
        return rows
    places = torch.arange(ids.numel(), dtype=torch.int64, device=rows.device).view(ids.shape)
    return F.embedding(places, rows.reshape(-1, rows.shape[-1]))


def _counted_rows(handle: Weight, ids: torch.Tensor) -> torch.Tensor:
    handle.forwards += 1
    if handle.separation is not None:
        handle.separation.tick()
    n, k = handle.spec.shape
    if ids.dtype not in (torch.int64, torch.int32):
        return torch.embedding(torch.empty(1, k, dtype=handle.dtype, device=ids.device), ids)  # torch says why not
    if ids.is_cpu and 0 < ids.numel() < _MANY:
        resting = resting_product(handle)
        if resting is not None and resting[0].decode_rows is not None and not resting[0].lossless:
            return _few_rows(handle, *resting, ids)
    index_T = ids.reshape(-1).to(handle.device, torch.int64)
    _check_range(index_T, n)
    rows_TK = _rows_once(handle, kernels_of_pass(handle), index_T)
    return rows_TK.to(ids.device, handle.dtype).view(*ids.shape, k)


def _check_range(index_T: torch.Tensor, n: int) -> None:
    """Raise IndexError for an index that is not below n; on a GPU a device-side assertion, without a sync."""
    inside = ((index_T >= 0) & (index_T < n)).all()
    if is_device(inside):
        torch._assert_async(inside, "index out of range in self")
    elif not inside:
        raise IndexError("index out of range in self")  # torch's words


def _few_rows(handle: Weight, kernels: Kernels, planes: WeightPlanes, ids: torch.Tensor) -> torch.Tensor:
    """Rows of a table whose planes rest in the CPU's memory, without the Python of a row reader, which a decoding step
    finds cold in the CPU's caches."""
    places, n = ids.reshape(-1).tolist(), planes.shape[0]
    if not 0 <= min(places) <= max(places) < n:
        raise IndexError("index out of range in self")  # torch's words
    handle.pages[0].hits += 1
    return kernels.decode_rows(planes, places).view(*ids.shape, planes.shape[1])


# -- rows of planes ---------------------------------------------------------------------------------------------------


def _rows_once(handle: Weight, kernels: Kernels, index_T: torch.Tensor) -> torch.Tensor:
    """`_rows`; on a CPU each distinct row is decoded once. On a GPU deduplication would need a sync."""
    if is_device(index_T) or len(index_T) < _MANY or kernels.spec.dense:
        return _rows(handle, kernels, index_T)
    index_U, place_T = index_T.unique(return_inverse=True)
    return _rows(handle, kernels, index_U)[place_T]


def _rows(handle: Weight, kernels: Kernels, index_T: torch.Tensor) -> torch.Tensor:
    """Return stored rows [T, K], in the handle's dtype or, if lossless, in the stored dtype."""
    spec = kernels.spec
    keys = handle.keys[:1] if kernels.precision == "coarse" else handle.keys
    if not keys:
        handle.lease()  # says why
    in_place = handle.spec.by_rows and is_device(index_T) and serves(index_T.device)
    gather = Gather(gather_rows, handle.owner.claim) if in_place else None
    pages = [page_rows(handle.stack, key, gather) for key in keys]
    if not len(index_T):
        return torch.empty(0, spec.shape[1], dtype=handle.dtype, device=index_T.device)
    if spec.dense:
        return pages[0].take("weight", index_T)
    if spec.fine:
        coarse, fine = map(_rows_of, pages)
        return exact_rows(_as_encoded(kernels, coarse), fine, get_format(spec.format), spec.shape, spec.dtype, index_T)
    return _coarse(handle, kernels, pages[0], index_T)


def _rows_of(page: PageRows) -> Rows:
    return Rows(page.page.layout, page.take)


def _as_encoded(kernels: Kernels, rows: Rows) -> Rows:
    """Return a coarse plane in its format's order; its page may be in a kernel's order, with several rows per entry."""
    if not kernels.packs(rows.layout):
        return rows
    spec, order = kernels.spec, kernels.packing

    def take(field: str, index_T: torch.Tensor) -> torch.Tensor:
        entries = coarse_rows(rows, index_T // order.rows)
        found = order.unpack(entries, (order.rows * len(index_T), spec.shape[1]))[field]
        if found.dim() == 1:  # once for all rows
            return found
        plain = found.view(torch.uint8).view(len(index_T), order.rows, -1)
        return plain[_each(index_T), index_T % order.rows].view(found.dtype)

    return Rows(get_format(spec.format).layout(spec.shape, spec.dtype), take)


def _coarse(handle: Weight, kernels: Kernels, page: PageRows, index_T: torch.Tensor) -> torch.Tensor:
    """Decode rows of a 4-bit plane, in the format's order or in a kernel's, whose entries hold several rows each."""
    k, rows = kernels.spec.shape[1], _rows_of(page)
    high = kernels.packing.rows if kernels.packs(rows.layout) else 1

    def decode(chunk_T: torch.Tensor) -> torch.Tensor:
        fields = coarse_rows(rows, chunk_T if high == 1 else chunk_T // high)
        planes = WeightPlanes(kernels.spec.format, (high * len(chunk_T), k), handle.dtype, fields)
        decoded = kernels.decode(planes)
        return decoded if high == 1 else decoded.view(-1, high, k)[_each(chunk_T), chunk_T % high]

    return by_chunks(decode, index_T, high * k)


def _each(index_T: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(index_T), dtype=torch.int64, device=index_T.device)


# -- in compiled graphs -----------------------------------------------------------------------------------------------


def _compiled(layer: VBEmbedding, ids: torch.Tensor) -> torch.Tensor:
    """Lookup under torch.compile: one opaque operator."""
    refuse_given_in_graph(layer)
    handle = layer._vb_handle
    return torch.ops.vbrt.rows(ids, handle.token, handle.spec.shape[1], handle.dtype)


library.define("rows(Tensor ids, Tensor token, SymInt columns, ScalarType dtype) -> Tensor", tags=TAGS)


@torch.library.impl(library, "rows", "CompositeExplicitAutograd")
def _rows_op(ids: torch.Tensor, token: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows [..., K] of the table that `token` names."""
    with unwatched():
        return _counted_rows(materialized(token), ids)


@torch.library.register_fake("vbrt::rows", lib=library)
def _(ids: torch.Tensor, token: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return ids.new_empty((*ids.shape, columns), dtype=dtype)


@torch.library.register_vmap("vbrt::rows", lib=library)
def _(info: Any, in_dims: tuple, ids: torch.Tensor, token: torch.Tensor, columns: int, dtype: torch.dtype):
    ids = ids.movedim(in_dims[0], 0)
    return torch.ops.vbrt.rows(ids, token, columns, dtype), 0
