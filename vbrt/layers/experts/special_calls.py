"""Experts classes with a call signature other than (hidden states, ids, routing weights).

Each class here converts its module's call to that one, [T, H], [T, k], [T, k], and defines how rows are computed:

    own_rows(view, x, ids, weights): as the module computes them, on a view of it with some of its experts
    rows_of_pages(layer, ops, routed, pages): by the ops on pages
    beside_experts(layer, routed): what is added to them

Legend: T tokens, k experts a token, E experts, H hidden, N outputs.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from vbrt.kernels.experts import ExpertPages
from vbrt.kernels.frozen_product import as_autocast
from vbrt.kernels.observers import is_bare
from vbrt.kernels.uncompiled import uncompiled
from vbrt.layers.experts.experts_layer import VBExperts
from vbrt.layers.experts.gates import act_gate
from vbrt.layers.experts.library_experts import ExpertsView
from vbrt.layers.experts.run_experts import plain_forward
from vbrt.layers.experts.touched_experts import Routed
from vbrt.layers.experts.unread_stack import Unread
from vbrt.layers.weights.linear_product import pass_precision

if TYPE_CHECKING:
    from vbrt.layers.experts.experts_handle import ExpertOps

__all__ = ["VBGivenExperts", "VBParallelExperts", "VBSharedExperts", "VBSortedExperts", "VBZeroExperts"]


class _VBCalledOtherwise(VBExperts):
    """Base of experts whose call is converted to the common one."""

    def _vb_forward(self, *args: Any) -> Tensor:
        if not is_compiling() and not self.materialized and not self._is_given():
            self.materialize_()
        return super()._vb_forward(*self._routed(*args))

    def _routed(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


class VBSortedExperts(_VBCalledOtherwise):
    """Llama 4: every expert is given all tokens, [E * T, H], those that are not routed to it as zeros.

    Without a bias zeros give zeros, so that an expert whose rows are all zero is neither leased nor computed; of the
    others, 4 bits compute the rows that are not. Where gradients are asked for, all rows are computed.
    """

    _apply_gate = act_gate

    def _routed(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_TH, experts = hidden.reshape(-1, hidden.shape[-1]), self._vb_handle.spec.experts
        own_E1 = torch.arange(experts, dtype=torch.int64, device=x_TH.device).view(-1, 1)
        ids_ET = own_E1.expand(experts, len(x_TH) // experts)
        if not (torch.is_grad_enabled() and hidden.requires_grad):
            some_ET = (x_TH != 0).any(dim=1).view_as(ids_ET)
            if self._vb_handle.spec.lossless:  # the module's product takes as many rows of each expert
                some_ET = some_ET.any(dim=1, keepdim=True)
            ids_ET = torch.where(some_ET, ids_ET, experts)
        return x_TH, ids_ET.reshape(-1, 1), x_TH.new_ones(len(x_TH), 1)

    @staticmethod
    def own_rows(view: Any, x_TH: Tensor, ids_T1: Tensor, weights_T1: Tensor) -> Tensor:
        """All rows of all experts of the view; zeros for those of others."""
        names = ("gate_up_proj", "down_proj")
        count, held = view.gate_up_proj.shape[0], {name: getattr(view, name) for name in names}
        here_T = (ids_T1 < count).squeeze(1)
        x_pH, module = x_TH[here_T], getattr(view, "_layer", view)
        if count == 1 < module.num_experts:  # torch multiplies a batch of one in another order
            held, x_pH = {name: weight[[0, 0]] for name, weight in held.items()}, x_pH.repeat(2, 1)
        y_pH = type(module).plain_class().forward(ExpertsView(module, held, None), x_pH)
        out_TH = y_pH.new_zeros(len(x_TH), y_pH.shape[1])
        out_TH[here_T] = y_pH[: int(here_T.sum())]
        return out_TH


class VBZeroExperts(_VBCalledOtherwise):
    """LongCat Flash: ids behind those of the experts give the token itself.

    Everybody else sees such an id as a sentinel: it is moved behind all for which there is a matrix.
    """

    _apply_gate, own_name, only_in_turn = act_gate, None, True

    def _routed(self, x_TH: Tensor, ids_Tk: Tensor, weights_Tk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x_TH, ids_Tk + self.zero_expert_num * (ids_Tk >= self.num_routed_experts), weights_Tk

    @staticmethod
    def own_rows(view: Any, x_TH: Tensor, ids_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """The module's own sums, over ids as it knows them."""
        module = getattr(view, "_layer", view)
        ids_Tk = ids_Tk - module.zero_expert_num * (ids_Tk >= module.total_experts)
        if ids_Tk.shape[1] == 1:  # which the module does not take: the token itself, times zero
            ids_Tk = torch.cat([ids_Tk, torch.full_like(ids_Tk, module.total_experts)], dim=1)
            weights_Tk = torch.cat([weights_Tk, torch.zeros_like(weights_Tk)], dim=1)
            view = ExpertsView(view, {"total_experts": module.total_experts + 1}, None)
        return type(module).plain_class().forward(view, x_TH, ids_Tk, weights_Tk)

    def beside_experts(self, routed: Routed) -> Tensor:
        """The tokens themselves, weighed."""
        weights_T1 = routed.weights.masked_fill(routed.ids < self.total_experts, 0.0).sum(dim=1, keepdim=True)
        return routed.x * weights_T1


class VBParallelExperts(_VBCalledOtherwise):
    """JetMoE: one matrix an expert; rows come sorted by expert, with the number of each expert's."""

    @uncompiled(reason="the number of each expert's rows is read on the host")
    def _vb_forward(self, *args: Any) -> Tensor:
        return super()._vb_forward(*args)

    def _routed(self, rows: Tensor, sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
        counts = torch.as_tensor(sizes, dtype=torch.int64, device=rows.device)
        experts = torch.arange(len(counts), dtype=torch.int64, device=rows.device)
        ids_T = experts.repeat_interleave(counts)
        return rows, ids_T.view(-1, 1), rows.new_ones(len(rows), 1)

    @staticmethod
    def own_rows(view: Any, x_TK: Tensor, ids_T1: Tensor, weights_T1: Tensor) -> Tensor:
        """The products of the rows of each expert."""
        sizes = torch.bincount(ids_T1.squeeze(1), minlength=view.num_experts).tolist()
        parts = [F.linear(rows, view.weight[e]) for e, rows in enumerate(x_TK.split(sizes)) if len(rows)]
        return torch.cat(parts) if parts else x_TK.new_zeros(0, view.output_size)

    @staticmethod
    def rows_of_pages(layer: VBExperts, ops: "ExpertOps", routed: Routed, pages: ExpertPages) -> Tensor:
        """The products of all rows."""
        return ops.up(routed.x, routed.ids, pages)


class VBGivenExperts(VBExperts):
    """DBRX: another module picks the matrices of an expert out of the parameters, and gives them back with its rows."""

    def _read(self, name: str) -> Tensor:
        if self._is_given() or is_compiling():
            return super()._read(name)
        self.notice_writes()
        self._note_read()
        handle = self._vb_handle
        if handle.dense or handle.temporary(name) is not None:
            return super()._read(name)
        return Unread.of(handle, name, handle.spec.site_of(name).kept_shape)

    @uncompiled(reason="which expert's matrices these are is read from where they lie")
    def _vb_forward(self, x_TH: Tensor, *matrices: Tensor) -> Tensor:
        expert = self._picked(matrices)
        if not self.materialized and not self._is_given():
            self.materialize_()
        if expert is None:
            contents = (m.content() if isinstance(m, Unread) else m for m in matrices)
            return type(self).plain_class().forward(self, x_TH, *contents)
        ids_T1 = torch.full((len(x_TH), 1), expert, dtype=torch.int64, device=x_TH.device)
        return super()._vb_forward(x_TH, ids_T1, x_TH.new_ones(len(x_TH), 1))

    def _picked(self, matrices: Sequence[Tensor]) -> int | None:
        """Return the expert whose matrices these are; None if they are no expert's."""
        sites, picked = self._vb_handle.spec.sites, set()
        for site, matrix in zip(sites, matrices, strict=True):
            held = self._parameters[site.parameter]
            held = self._vb_handle.dense.get(site.parameter) if held is None else held
            if isinstance(matrix, Unread):
                picked.add(matrix.expert if matrix.handle is self._vb_handle else None)
            elif held is not None and matrix.shape == site.matrix_shape and held.is_contiguous():
                offset = (Tensor.data_ptr(matrix) - Tensor.data_ptr(held)) // held.element_size()
                expert, rest = divmod(offset, matrix.numel())
                picked.add(expert if not rest and 0 <= expert < site.matrices else None)
            else:
                picked.add(None)
        return picked.pop() if len(picked) == 1 else None

    @staticmethod
    def own_rows(view: Any, x_TH: Tensor, ids_T1: Tensor, weights_T1: Tensor) -> Tensor:
        """The rows of one expert, to which all go."""
        module, expert = getattr(view, "_layer", view), int(ids_T1[0, 0])
        names, shapes = zip(*((site.parameter, site.matrix_shape) for site in module.handle.spec.sites), strict=True)
        weights = (getattr(view, name) for name in names)
        matrices = [w[expert] if w.dim() == 3 else w.view(-1, *s)[expert] for w, s in zip(weights, shapes, strict=True)]
        return type(module).plain_class().forward(view, x_TH, *matrices)

    @staticmethod
    def rows_of_pages(layer: VBExperts, ops: "ExpertOps", routed: Routed, pages: ExpertPages) -> Tensor:
        """The same for any ids."""
        gate_PI, value_PI = (ops.up(routed.x, routed.ids, pages, part=part) for part in ("gate", "up"))
        return ops.down(layer.activation_fn(gate_PI) * value_PI, routed.ids, routed.weights, pages)


class VBSharedExperts(VBExperts):
    """Inkling's shared experts: every token goes to all, whose matrices "gate", "up" and "down" lie apart."""

    def _vb_forward(self, hidden: Tensor, gammas: Tensor) -> Tensor:
        if is_compiling():  # all experts are read in each pass: a graph decodes them
            return type(self).plain_class().forward(self, hidden, gammas)
        self.notice_writes()
        if not self.materialized and not self._is_given():
            self.materialize_()
        if self._is_given() or not is_bare(hidden):
            return plain_forward(self, hidden, gammas)
        return self._by_lease(hidden, gammas)

    def _by_lease(self, hidden: Tensor, gammas: Tensor) -> Tensor:
        handle, precision = self._vb_handle, pass_precision()
        handle.forwards += 1
        handle.routing.scan(range(handle.spec.experts))
        lossless = handle.spec.lossless and not (handle.spec.fine and precision == "coarse")
        differentiable = torch.is_grad_enabled() and (hidden.requires_grad or gammas.requires_grad)
        with handle.lease(range(handle.spec.experts), precision) as leased:
            if not (lossless or differentiable):
                return self._by_pages(hidden, gammas, leased.pages())
            held = leased.parameters()
            return type(self).plain_class().forward(ExpertsView(self, held, None), hidden, gammas)

    def _by_pages(self, hidden: Tensor, gammas: Tensor, pages: ExpertPages) -> Tensor:
        ops, x_TH = self._vb_handle.coder.ops_of_pass(), as_autocast(hidden.reshape(-1, hidden.shape[-1]))
        experts = torch.arange(pages.experts, dtype=torch.int64, device=x_TH.device)
        ids_TE = experts.expand(len(x_TH), -1).contiguous()
        gate_PI, value_PI = (ops.up(x_TH, ids_TE, pages, part=part) for part in ("gate", "up"))
        h_PI = (self.act_fn(gate_PI) * value_PI * gammas.reshape(-1, 1)).to(x_TH.dtype)
        y_TH = ops.down(h_PI, ids_TE, x_TH.new_ones(ids_TE.shape), pages)
        return y_TH.to(hidden.dtype).view(hidden.shape)
