"""What the kernels promise of every instruction set, checked through the functions that models call."""

import torch
import torch.nn.functional as F

from tests.kernels.cpu import test_expert_team, test_hosted, test_int8
from tests.kernels.cpu.test_cpu_encode import BLOCKS, check_bits, hard
from tests.kernels.cpu.test_cpu_experts import GATES, bank, routed, rows
from tests.kernels.cpu.test_cpu_linear import BOUND, bits, case, exact_case
from tests.kernels.cpu.test_cpu_tiles import check_products_of_tiles, compare_tiles
from tests.kernels.cpu.test_cpu_update import STEPS, assert_same, moments_of, spread
from tests.kernels.cuda.gpu_cases import error
from vbrt.kernels import reference
from vbrt.kernels import update as updates
from vbrt.kernels.cpu import encode
from vbrt.kernels.cpu import experts as cpu_experts
from vbrt.kernels.cpu import linear as cpu_linear
from vbrt.kernels.cpu import update as cpu_update
from vbrt.kernels.cpu.expert_team import ExpertTeam
from vbrt.kernels.experts import apply_gate

__all__ = ["CALL_CHECKS", "CHECKS", "check_products"]

#: one format of each storage of offsets, and one whose products fp32 rounds
OFFSETS = (
    "superblock32",
    "zeros128-bfloat16",
    "affine32-float16",
    "affine16-float32",
    "signed32-bfloat16",
    "signed16-float32",
)
#: published 8-bit codes: under scales of a block and of a superblock, and with each storage of offsets
EIGHT = ("bytes32-float16", "superbytes16", "superbytes32", "zerobytes64-bfloat16", "offsetbytes16-float32")
EIGHT += ("floatbytes16-bfloat16", "floatbytes128-float32", "unitbytes128")
#: and with zero points between codes, of 4 bits, too
FLOAT_ZEROS = ("floatzeros64-float16", "floatzerobytes16-bfloat16", "floatzeros32-bfloat16", "floatzeros16-float16")
FLOAT_ZEROS += ("floatzerobytes64-float16",)


def check_products(formats):
    """Products are as close as the dtype allows, decoded weights have every bit."""
    for name in formats:
        for shape, tokens in (((23, 50), 1), ((35, 132), 3), ((9, 4112), 7)):
            for dtype, bound in BOUND.items():
                planes, w = case(name, shape, dtype)
                x, bias = torch.randn(tokens, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype)
                y = cpu_linear._multiply(x, planes, bias, dtype)
                assert error(y, F.linear(x.double(), w, bias.double())) <= bound
                x = torch.randn(29, shape[1]).to(dtype)
                assert error(cpu_linear.linear(x, planes), F.linear(x.double(), w)) <= bound
            assert torch.equal(cpu_linear.decode_weight(planes), reference.decode_weight(planes))


def check_linear():
    """All formats' products; merged weights have every bit."""
    check_products((*cpu_linear.FORMATS, *cpu_linear.LEVELS[:2], *OFFSETS, *cpu_linear.BYTES, *EIGHT, *FLOAT_ZEROS))
    for name in cpu_linear.FORMATS:
        for dtype, shape in ((torch.bfloat16, (33, 100)), (torch.float16, (5, 4112)), (torch.bfloat16, (64, 640))):
            planes, w = exact_case(name, shape, dtype)
            assert torch.equal(bits(cpu_linear.decode_weight(planes)), bits(w))
            assert torch.equal(bits(cpu_linear.decode_turned(planes)), bits(w.t()))
    test_int8.check_layers()


def check_experts():
    """Products, gates and sums are as close to float64 as fp32 allows."""
    for format in (
        *cpu_linear.FORMATS,
        *cpu_linear.LEVELS[:1],
        *OFFSETS[:2],
        *cpu_linear.BYTES,
        *EIGHT[1:3],
        *EIGHT[-2:],
        *FLOAT_ZEROS[:2],
    ):
        for tokens in (1, 7):
            pages = bank(format, hidden=144)
            for part, page in ((part, page) for part in pages.shapes for page in pages.pages if page is not None):
                if (unit := pages.offsets(part).get("unit")) is not None:
                    page[unit : unit + 4].view(torch.float32).fill_(1 / 127)
            ids, weights = routed(pages, tokens, 3)
            x = torch.randn(tokens, 144)
            present = (ids.view(-1, 1) >= 0) & (ids.view(-1, 1) < pages.experts)
            for gate in (GATES["silu"], GATES["relu2 ungated"]):
                got = cpu_experts.experts_up(x, ids, pages, gate=gate)
                assert error(got, apply_gate(rows(x, ids, pages, "up"), gate) * present) <= 1e-5
            h = torch.randn(3 * tokens, 22)
            want = (rows(h, ids.view(-1, 1), pages, "down").view(tokens, 3, -1) * weights.double().unsqueeze(-1)).sum(1)
            assert error(cpu_experts.experts_down(h, ids, weights, pages), want) <= 1e-5
    check_products_of_tiles()
    test_int8.check_experts()


def check_team():
    """The bits of the two products one after the other."""
    for name in ("nvfp4", "nf4", "mxint8", "superblock32", "superbytes16"):
        pages, gate = test_expert_team.pages_of(name, {"up": (96, 160), "down": (72, 48)}), GATES["silu"]
        product = test_expert_team.product_of(pages, torch.randn(1, 160), torch.tensor([[1, 3, 4]]), gate)
        team = ExpertTeam(2)
        team.finish(team.post(None, product))
        assert torch.equal(product.out, test_expert_team.expected(product, pages))


def check_hosted():
    """Products through a mailbox are as close as the dtype allows."""
    for name in ("nvfp4", "nf4", "mxint8", "superblock32", "superbytes16"):
        test_hosted.check_products(name, threads=2)


def check_experts_and_team():
    """All that experts.c computes."""
    check_experts()
    check_team()


def check_encode():
    """Planes have the bits of the specification."""
    for name in encode.FORMATS:
        for dtype in BOUND:
            check_bits(name, (torch.randn(37, 130) * torch.exp2(2 * torch.randn(37, 1))).to(dtype))
    for name in BLOCKS:
        check_bits(name, hard((40, 1030), torch.float16, 2.0))


def check_update():
    """Steps and norms have the bits of the reference, which are those of torch's fused optimizers on x86."""
    for name in ("adamw", "adam, far lerp", "sgd, dampened", "lion"):
        for dtype in updates.GRADIENTS:
            for count in (19, 4 * 1024 + 7):
                master, gradient = torch.randn(count), torch.randn(count).to(dtype)
                assert_same(STEPS[name], moments_of(STEPS[name], count), master, gradient)
    moments = {"first": updates.encode_first(spread(1500)), "second": updates.encode_second(spread(1500).square())}
    assert_same(STEPS["adamw"], moments, torch.randn(1500), torch.randn(1500))
    assert not any(cpu_update._differs(step) for step in cpu_update._CASES)


def check_tiles():
    """Bit for bit the format's own order."""
    for format in ("nvfp4", "mxfp4"):
        compare_tiles(format)


#: for an emulator that runs one call at a time: a team's threads live between calls
CALL_CHECKS = {"linear": check_linear, "experts": check_experts, "encode": check_encode, "update": check_update}
CALL_CHECKS |= {"tiles": check_tiles}
#: what a source's library computes, by source
CHECKS = CALL_CHECKS | {"experts": check_experts_and_team, "hosted": check_hosted}
