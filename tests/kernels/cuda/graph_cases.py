"""What the tests of compiled models share: layers whose planes never move, on the CPU."""

import torch
import torch.nn.functional as F

import vbrt
from vbrt.formats import get_format
from vbrt.formats.page import pack, unpack
from vbrt.kernels.cuda.e2m1.tiles import TILES, pack_tiles, page_of, tile_layout
from vbrt.layers.weights.graph_planes import GraphTiles


def written_out(x, gain, eps=1e-6):
    """As in Hugging Face's models."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return gain * wide.to(x.dtype)


def by_torch(x, gain, eps=1e-6):
    return F.rms_norm(x, gain.shape, gain, eps)


def wrapped(model):
    model = model.to(torch.bfloat16).eval()
    config = {"weights": {"keep_head": False, "min_parameters": 1}, "tiers": {"gpu": {"enabled": False}}}
    return vbrt.wrap(model, "fp4", **config).materialize()


def ran(run, *given):
    """What a compiled model gives the second time, and how often it calls each operator of ours."""
    run(*given)
    with torch.profiler.profile() as profiler:
        got = run(*given)
    return got, {event.key: event.count for event in profiler.key_averages() if event.key.startswith("vbrt::")}


def show(layer, format="nvfp4"):
    """As if the planes of the layer stayed on a GPU."""
    (n, k), weight = layer.handle.spec.shape, layer.handle.weight()
    layout = tile_layout(format, (n, k))
    memory = torch.empty(layout.nbytes, dtype=torch.uint8)  # as on a GPU: the page is where its memory begins
    page = pack(pack_tiles(format, get_format(format).encode(weight.float()), (n, k)), layout, memory)
    planes, form = unpack(page, layout), f"{format} {n} {k} {str(weight.dtype).removeprefix('torch.')} cpu"
    layer.handle.show_to_graphs(GraphTiles(page_of(planes[TILES], planes["tensor_scale"]), form))


class Decoder(torch.nn.Module):
    """What stands around one norm and the next in a model like Llama."""

    first_norm = staticmethod(written_out)

    def __init__(self, k=1024, n=2048):
        super().__init__()
        self.out, self.down = torch.nn.Linear(k, k, bias=False), torch.nn.Linear(n, k, bias=False)
        self.gate, self.up = (torch.nn.Linear(k, n, bias=False) for _ in range(2))
        self.key, self.value = (torch.nn.Linear(k, k // 4, bias=False) for _ in range(2))
        self.gains = torch.nn.ParameterList(torch.rand(k) + 0.5 for _ in range(2))

    def forward(self, x, residual):
        x = residual + self.out(x)
        y = self.first_norm(x, self.gains[0])
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        y = written_out(x, self.gains[1])
        return x, self.key(y), self.value(y)
