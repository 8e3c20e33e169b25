"""Each class of instructions in the machine and, on a GPU of sm_90, in hardware: the same bits."""

import ctypes
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.emulator.instructions import BOX, CASES, HEADER, MATRIX, STRIDE, WORDS, Case
from tests.emulator.machine import Warp
from tests.emulator.parser import parsed
from tests.emulator.ptx import Described, Machine
from tests.emulator.values import BITS, FLOATS, INTEGERS

FLOW = {"bra", "brx", "ret", "bar", "barrier", "targets", "fence"}  # of `Warp.run`
HELPERS = {"access", "space", "product", "do"}


def matrix() -> torch.Tensor:
    return torch.arange(MATRIX[0] * STRIDE, dtype=torch.int32).to(torch.int16).view(MATRIX[0], STRIDE)


def emulated(case: Case) -> torch.Tensor:
    machine = Machine()
    out = machine.empty(case.threads, WORDS, dtype=torch.int32)
    arguments = [machine.put(case.words()), out]
    if case.matrix:
        held = machine.put(matrix())._replace(shape=MATRIX)
        arguments.append(Described(held, STRIDE, BOX))
    machine.run(case.text, (1, 1), arguments)
    return machine.get(out)


def assemble(source: Path, code: Path) -> None:
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if not tool.exists():
        pytest.skip("this Triton brings no ptxas")
    done = subprocess.run([tool, "-arch=sm_90a", source, "-o", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


# -- in hardware ------------------------------------------------------------------------------------------------------


class Driver:
    """CUDA's driver, on the GPU that torch has chosen."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch.zeros(1, device="cuda")  # makes its context current
        self.library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: object) -> None:
        error = getattr(self.library, name)(*arguments)
        if error:
            text = ctypes.c_char_p()
            self.library.cuGetErrorName(error, ctypes.byref(text))
            raise RuntimeError(f"{name}: {text.value}")

    def run(self, case: Case) -> torch.Tensor:
        given, out = case.words().cuda(), torch.full((case.threads, WORDS), -1, dtype=torch.int32, device="cuda")
        values: list[object] = [ctypes.c_uint64(given.data_ptr()), ctypes.c_uint64(out.data_ptr())]
        if case.matrix:
            held = matrix().cuda()
            described, _memory = self.described(held)
            shape = ctypes.c_uint32(MATRIX[0]), ctypes.c_uint32(MATRIX[1])
            values += [described, *shape, ctypes.c_uint64(STRIDE), ctypes.c_uint64(1)]
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(self.assembled(HEADER + case.text)))
        try:
            self.call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(b"kernel"))
            places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
            torch.cuda.synchronize()
            grid, block = (1, 1, 1), (case.threads, 1, 1)
            numbers = (ctypes.c_uint(number) for number in (*grid, *block, 0))
            self.call("cuLaunchKernel", function, *numbers, ctypes.c_void_p(None), places, ctypes.c_void_p(None))
            torch.cuda.synchronize()
        finally:
            self.call("cuModuleUnload", module)
        return out.cpu()

    def assembled(self, text: str) -> bytes:
        """Machine code by the assembler that Triton brings, whatever PTX the driver knows."""
        source, code = self.folder / "case.ptx", self.folder / "case.cubin"
        source.write_text(text)
        assemble(source, code)
        return code.read_bytes()

    def described(self, held: torch.Tensor) -> tuple[ctypes.Array, ctypes.Array]:
        """(a CUtensorMap of the matrix, at a multiple of 64; the memory that it lies in)."""
        memory = (ctypes.c_uint8 * 256)()
        described = (ctypes.c_uint8 * 128).from_buffer(memory, -ctypes.addressof(memory) % 64)
        sizes, strides = (ctypes.c_uint64 * 2)(*MATRIX[::-1]), (ctypes.c_uint64 * 1)(2 * STRIDE)
        box, steps = (ctypes.c_uint32 * 2)(*BOX[::-1]), (ctypes.c_uint32 * 2)(1, 1)
        words16, plain, swizzle_128 = 1, 0, 3  # CU_TENSOR_MAP_...: UINT16; no interleaving, promotion, filling; 128B
        self.call(
            "cuTensorMapEncodeTiled", described, words16, 2, ctypes.c_void_p(held.data_ptr()), sizes, strides, box,
            steps, plain, swizzle_128, plain, plain,
        )  # fmt: skip
        return described, memory


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Driver:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma and its like are sm_90's")
    return Driver(tmp_path_factory.mktemp("cases"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_the_machine_does_what_a_gpu_does(name, driver):
    case = CASES[name]
    got, want = emulated(case).view(case.kind), driver.run(case).view(case.kind)
    if case.kind.is_floating_point:
        torch.testing.assert_close(got, want, rtol=case.near, atol=0, equal_nan=True)
    else:
        assert torch.equal(got, want), (got != want).nonzero().tolist()


# -- without one ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_the_machine_runs(name, late, monkeypatch):
    """Also with copies that arrive at once: what a kernel gives does not depend on that."""
    case = CASES[name]
    out = emulated(case)
    assert out.any()
    monkeypatch.setattr(Machine, "late", late)
    assert torch.equal(emulated(case), out)


def test_every_instruction_that_the_machine_knows_is_in_a_case():
    written = {".".join(i.parts) for case in CASES.values() for i in parsed(case.text)[0]}
    first = {one.split(".")[0] for one in written}
    methods = {name: getattr(Warp, name) for name in dir(Warp) if re.fullmatch("_[a-z0-9]+", name)}
    known = {name[1:] for name, method in methods.items() if method.__code__.co_varnames[1:2] == ("parts",)} - HELPERS
    known |= {one.split(".")[0] for table in (BITS, FLOATS, INTEGERS) for one in table}
    assert known - first == set() and first - known == FLOW


def test_the_cases_assemble_for_a_gpu(tmp_path):
    kernels = (case.text.replace("kernel", f"kernel{number}") for number, case in enumerate(CASES.values()))
    (tmp_path / "cases.ptx").write_text(HEADER + "".join(kernels))
    assemble(tmp_path / "cases.ptx", tmp_path / "cases.cubin")
