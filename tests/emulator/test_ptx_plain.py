"""The kernels of published 8-bit codes, and of HQQ's, as they are compiled, run on the CPU: see `ptx`."""

import pytest
import torch

from tests.emulator.test_ptx import gpu  # noqa: F401  # a fixture
from tests.kernels.cuda.gpu_cases import error
from tests.kernels.cuda.test_plain_linear import NAMES, case
from tests.matrix import matrix
from vbrt.config.format_records import FORMATS
from vbrt.formats import get_format
from vbrt.kernels import reference
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.plain import linear as plain_linear

pytest.importorskip("triton.experimental.gluon")


@matrix(name=NAMES, tokens=[1, 2, 3, 7, 17], blocks=[3, 12], at_most=11)
def test_products_and_decoded_weights(name, tokens, blocks, gpu):  # noqa: F811
    """Also with rows that end within a block, and with blocks that no step of a program fills."""
    shape = 19, blocks * FORMATS[name].block - 8
    planes = case(name, shape, torch.bfloat16, "cpu")
    exact = get_format(name).decode(planes.coarse, shape, torch.float64)
    x, bias = torch.randn(2, tokens, shape[1]).bfloat16()[0], torch.randn(shape[0]).bfloat16()
    operands = plain_linear._operands(planes.coarse)
    y = plain_linear._multiply(x, *operands, bias, name)
    assert error(y, x.double() @ exact.T + bias.double()) < 4e-3
    decoded = plain_linear._decode(planes, torch.bfloat16)
    assert torch.equal(decoded, reference.decode_weight(planes))
    few = plain_linear.launch_of(name).summed
    assert gpu == ["sums_kernel" if tokens <= few else "dots_kernel", "decode_kernel"]


@pytest.mark.parametrize("gpu", [80, 90], indirect=True)
def test_every_code_of_e4m3_with_and_without_the_device_s_conversion(gpu):  # noqa: F811
    planes = case("floatbytes128-float32", (2, 256), torch.float32, "cpu")
    planes.coarse["codes"].view(torch.uint8)[0] = torch.arange(256).to(torch.uint8)
    decoded, want = plain_linear._decode(planes, torch.float32), reference.decode_weight(planes)
    assert torch.equal(decoded.nan_to_num(7), want.nan_to_num(7)) and decoded.isnan().sum() == 2
    converts = plain_linear.constants_on(planes.coarse["codes"].device, planes.format)["CONVERTS"]
    assert converts == (devices.capability(0) >= (8, 9))
