"""A launcher launches what Triton has compiled, and takes a kernel's constants by name only."""

import types
import warnings

import pytest
import torch

from vbrt.errors import KernelError
from vbrt.kernels.cuda.launcher import Launcher
from vbrt.libraries import probe, torch_api

triton = pytest.importorskip("triton")


class Kernel:
    """A kernel with constants BLOCK and MASKED, on a device that is not there; keeps what it is launched with."""

    __name__ = "kernel"
    params = tuple(
        types.SimpleNamespace(name=name, is_constexpr=name.isupper()) for name in ("x_ptr", "BLOCK", "MASKED")
    )

    def __init__(self):
        self.by_triton, self.direct = [], []

    def __getitem__(self, grid):
        compiled = types.SimpleNamespace(run=lambda *args: self.direct.append(args), function=0, packed_metadata=0)
        return lambda *args, **given: self.by_triton.append((args, given)) or compiled


@pytest.fixture
def kernel(monkeypatch):
    probe._losses.clear()
    monkeypatch.setattr(torch_api, "current_device", lambda: 0)
    monkeypatch.setattr(torch_api, "raw_stream", lambda device: 7)
    yield Kernel()
    probe._losses.clear()


def launch(launcher, x, number=4, warps=4, specialized=(), **constants):
    launcher(
        0, (3, 2), (x,), (number,), warps=warps, specialized=specialized, **{"BLOCK": 64, "MASKED": True} | constants
    )


def test_the_second_launch_goes_around_triton(kernel):
    launcher, x = Launcher(kernel, dependent=True), torch.zeros(64)
    for number in (4, 5, 6):
        launch(launcher, x, number)
    options = {"num_warps": 4, "enable_fp_fusion": True, "launch_pdl": True}
    assert kernel.by_triton == [((x, 4), {"BLOCK": 64, "MASKED": True, **options})]
    address = x.data_ptr()
    assert [args[:4] + args[9:] for args in kernel.direct] == [(3, 2, 1, 7, address, n, 64, True) for n in (5, 6)]


def test_whatever_a_kernel_is_specialized_for_is_compiled_again(kernel):
    launcher, x = Launcher(kernel), torch.zeros(64)
    changes = (
        {},
        {"x": x[1:]},
        {"BLOCK": 32},
        {"MASKED": False},
        {"specialized": (torch.float16,)},
        {"specialized": (5,)},
    )
    for change in (*changes, *changes):
        launch(launcher, **{"x": x} | change)
    assert (len(kernel.by_triton), len(kernel.direct)) == (len(changes), len(changes))


@pytest.mark.parametrize("wrong", [{"BLOCKS": 64}, {"MASKED": True, "BLOCK": 64, "MORE": 1}, {"BLOCK": 64}, {}])
def test_constants_that_are_not_those_of_the_kernel_are_refused(kernel, wrong):
    with pytest.raises(KernelError, match=r"kernel: constants .*; expected BLOCK, MASKED"):
        Launcher(kernel)(0, (1, 1), (torch.zeros(4),), (), warps=4, **wrong)
    assert not kernel.by_triton and not kernel.direct


def test_an_untested_triton_launches_each_kernel_itself_and_that_is_announced_once(kernel, monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    launcher, x = Launcher(kernel), torch.zeros(4)
    with pytest.warns(UserWarning, match=r"Triton 3\.10\.0: .* tested with 3\.6 to 3\.9"):
        launch(launcher, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch(launcher, x)
    assert (len(kernel.by_triton), len(kernel.direct)) == (2, 0)
