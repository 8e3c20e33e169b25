"""Products whose arguments are prepared, beside those of `linear`."""

import pytest
import torch

from tests.kernels.cpu.test_cpu_linear import built, case
from tests.matrix import matrix
from vbrt.kernels.cpu import linear as cpu_linear
from vbrt.kernels.cpu.small_batch_linear import few

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@built
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@matrix(
    tokens=[1, 3, 4], inputs=[50, 4112], name=("nvfp4", "quantile", "mxint8", "affine32-float16", "signed32-bfloat16")
)
def test_one_call_for_several_layers_gives_the_bits_of_a_call_for_each(name, inputs, tokens, dtype):
    planes = [case(name, (outputs, inputs), dtype)[0] for outputs in (130, 7, 24)]
    x, bias = torch.randn(2, tokens // 2 or 1, inputs).to(dtype)[: tokens // 2 or 1], torch.randn(130).to(dtype)
    first, *others = [few(of) for of in planes]
    ys = first.together(others, x, bias)
    for y, of, added in zip(ys, planes, (bias, None, None), strict=True):
        assert torch.equal(y, cpu_linear.linear(x, of, added))


@built
def test_what_it_does_not_serve_is_left_to_linear():
    planes, _ = case("nvfp4", (24, 64))
    served = few(planes)
    assert served(torch.randn(2, 64)).shape == (2, 24)
    wrong = [
        torch.randn(64, 2).t(),
        torch.randn(2, 64).bfloat16(),
        torch.randn(2, 32),
        torch.randn(0, 64),
        torch.randn(cpu_linear.fused_tokens() + 1, 64),
        torch.tensor(1.0),
    ]
    assert [served(x) for x in wrong] == [None] * len(wrong)
    assert served(torch.randn(2, 64), torch.randn(24).bfloat16()) is None


@built
def test_layers_of_other_inputs_do_not_suit():
    ours, same, shorter, other = (
        few(case(*of)[0]) for of in [("nvfp4", (24, 64)), ("nvfp4", (8, 64)), ("nvfp4", (24, 32)), ("mxfp4", (24, 64))]
    )
    assert ours.suits(same) and not ours.suits(shorter) and not ours.suits(other)
