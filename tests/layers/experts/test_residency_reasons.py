"""Why the host decides which experts are resident."""

from types import SimpleNamespace

import pytest
import torch

from vbrt.formats import get_format
from vbrt.formats.joint_planes import join_layouts
from vbrt.kernels.cuda.experts import row_experts
from vbrt.kernels.entries import KERNELS
from vbrt.layers.experts import residency_reasons


@pytest.mark.parametrize(
    ("down", "why"),
    [
        ("superblock32", ""),
        ("superbytes16", ""),
        ("levels16-float32", ""),
        ("t3", ""),
        (
            "zeros16-float16-ordered",
            "some.experts: the triton kernels of zeros16-float16-ordered do not take pages by address here",
        ),
    ],
)
def test_kernels_of_all_parts_must_take_pages_by_address(monkeypatch, down, why):
    def resolve(op, backend, device, format):
        of_gpus = [kernel for kernel in KERNELS if kernel.op == op and kernel.backend == "triton"]
        own = [kernel for kernel in of_gpus if format in (kernel.formats or ())]
        return (own or [kernel for kernel in of_gpus if kernel.formats is None])[0]

    monkeypatch.setattr(residency_reasons, "resolve", resolve)
    monkeypatch.setattr(row_experts.devices, "serves", lambda *args: True)
    formats = {"up": "superblock32", "down": down}
    layout = join_layouts({part: get_format(of).layout((64, 256), torch.bfloat16) for part, of in formats.items()})
    first = SimpleNamespace(dense=False, lossless=False, backend="auto", format="superblock32", label="superblock32")
    spec = SimpleNamespace(name="some.experts", first=first, down_format="" if down == "superblock32" else down)
    handle = SimpleNamespace(spec=spec, planes=1, pages=[SimpleNamespace(layout=layout)], device=torch.device("cuda"))
    assert residency_reasons.why_host(handle) == why
