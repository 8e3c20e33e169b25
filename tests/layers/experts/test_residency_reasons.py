"""Why the host decides which experts are resident."""

from types import SimpleNamespace

import pytest
import torch

from vbrt.formats import get_format
from vbrt.formats.joint_planes import join_layouts
from vbrt.kernels.cuda.experts import published_experts
from vbrt.layers.experts import residency_reasons


@pytest.mark.parametrize(
    ("down", "why"),
    [
        ("superblock32", ""),
        ("superbytes16", ""),
        ("levels16-float32", "some.experts: the fused kernels of levels16-float32 do not take pages by address here"),
    ],
)
def test_kernels_of_all_parts_must_take_pages_by_address(monkeypatch, down, why):
    kernel = SimpleNamespace(backend="fused", by_address=published_experts.takes_addresses)
    monkeypatch.setattr(residency_reasons, "resolve", lambda *args: kernel)
    monkeypatch.setattr(published_experts.devices, "serves", lambda *args: True)
    formats = {"up": "superblock32", "down": down}
    layout = join_layouts({part: get_format(of).layout((64, 256), torch.bfloat16) for part, of in formats.items()})
    first = SimpleNamespace(dense=False, lossless=False, backend="auto", format="superblock32", label="superblock32")
    spec = SimpleNamespace(name="some.experts", first=first, down_format="" if down == "superblock32" else down)
    handle = SimpleNamespace(spec=spec, planes=1, pages=[SimpleNamespace(layout=layout)], device=torch.device("cuda"))
    assert residency_reasons.why_host(handle) == why
