"""Pages of routed experts, for tests of kernels."""

import torch

from vbrt.formats import get_format
from vbrt.formats.joint_planes import join_fields, join_layouts
from vbrt.formats.page import pack
from vbrt.kernels.cuda.e2m1 import linear as e2m1_linear
from vbrt.kernels.cuda.experts.pairs import Groups, most_blocks
from vbrt.kernels.experts import ExpertPages, apply_gate


def expert_pages(format, shapes, experts, *, dtype=torch.bfloat16, tiled=False, device="cpu", missing=()):
    """Pages of random experts, and the weights that they hold by part, float64 [E, N, K].

    shapes: (N, K) by part. tiled: in the order of tiles. missing: experts without a page.
    """
    pages, weights = [], {part: [] for part in shapes}
    for _ in range(experts):
        layouts, fields = {}, {}
        for part, shape in shapes.items():
            layouts[part], fields[part], weight = _matrix(format, shape, dtype, tiled, device)
            weights[part].append(weight)
        layout = join_layouts(layouts)
        page = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        pages.append(pack(join_fields(fields), layout, page))
    addresses = torch.tensor([page.data_ptr() for page in pages], device=device)
    for expert in missing:
        pages[expert], addresses[expert] = None, 0
    made = ExpertPages(format, dtype, shapes, layout, pages, addresses)
    return made, {part: torch.stack(of) for part, of in weights.items()}


def _matrix(format, shape, dtype, tiled, device):
    fmt, packing = get_format(format), e2m1_linear.packing(format)
    weight = (torch.randn(shape, device=device) * 0.05).to(dtype)
    if fmt.record.lossless:
        coarse = {"weight": weight}
        return fmt.layout(shape, dtype), coarse, weight.double()
    coarse = fmt.encode(weight)
    if format == "nvfp4":
        coarse["tensor_scale"] *= 1.2345  # published checkpoints: not a power of two
    weight = fmt.decode(coarse, shape, torch.float64)
    if tiled:
        return packing.layout(shape), packing.pack(coarse, shape), weight
    return fmt.layout(shape, dtype), coarse, weight


def routing(tokens, k, experts, *, device="cpu", sentinels=0):
    """Ids int64 [T, k], different ones for a token, some replaced by sentinels, and weights fp32 [T, k]."""
    ids = torch.rand(tokens, experts, device=device).argsort(dim=1)[:, :k].contiguous()
    if sentinels:
        ids.view(-1)[torch.randperm(ids.numel(), device=device)[:sentinels]] = experts
    return ids, torch.rand(tokens, k, device=device).softmax(-1)


def exact_rows(x, ids, weights_ENK, gate, bias=None):
    """The rows of `experts_up` in float64, zeros for sentinels."""
    ids_P, repeats = ids.reshape(-1), ids.numel() // len(x)
    rows = torch.zeros(len(ids_P), weights_ENK.shape[1], dtype=torch.float64, device=x.device)
    for expert, weight in enumerate(weights_ENK):
        at = torch.where(ids_P == expert)[0]
        rows[at] = x[at // repeats].double() @ weight.T + (0 if bias is None else bias[expert].double())
    return rows if gate is None else apply_gate(rows, gate)


def grouped_pairs(ids_Tk, experts, block):
    """`pairs.group_pairs` in plain torch."""
    ids = ids_Tk.flatten()
    group = torch.where((ids >= 0) & (ids < experts), ids, experts)
    counts = group.bincount(minlength=experts + 1)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    blocks = [(e, at) for e in range(experts + 1) for at in range(offsets[e], offsets[e + 1], block)]
    room = most_blocks(len(ids), experts, block) - len(blocks)
    of, first = zip(*blocks, *[(-1, 0)] * room, strict=True)
    return Groups(group.argsort(stable=True).int(), offsets.int(), *torch.tensor([of, first]).int(), block)
