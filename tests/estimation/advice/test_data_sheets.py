"""Data sheets: figures that agree with each other, and names by which users and torch know a GPU."""

import pytest

import vbrt
from vbrt.errors import ArgumentError
from vbrt.estimation.advice.data_sheets import find_sheet, named_sheet, sheets
from vbrt.estimation.advice.machine_rates import rates_of_sheet

#: 16-bit tensor operations with fp32 sums per clock and multiprocessor; GeForce cards have half of their fp16 rate
PER_CLOCK = {(7, 5): 1024, (8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192, (12, 0): 1024}


@pytest.mark.parametrize("name", sheets())
def test_tensor_and_fp32_rates_follow_from_multiprocessors_and_clock(name):
    sheet = sheets()[name]
    clocks = sheet.multiprocessors * sheet.boost_mhz * 1e-6  # 10^12 a second
    per_clock = PER_CLOCK[sheet.capability] / (2 if "GeForce" in sheet.torch_name else 1)
    assert sheet.tflops == pytest.approx(per_clock * clocks, rel=0.08)  # H100's tensor rate is at a lower clock
    assert sheet.fp32_tflops == pytest.approx((128 if sheet.capability < (8, 6) else 256) * clocks, rel=0.02)
    assert bool(sheet.fp8_tflops) == (sheet.capability >= (8, 9))
    assert not sheet.fp8_tflops or sheet.fp8_tflops == pytest.approx(2 * sheet.tflops, rel=0.02)


@pytest.mark.parametrize("name", sheets())
def test_memory_link_and_shared_memory_are_of_one_card(name):
    sheet = sheets()[name]
    assert 0.85 * sheet.memory_gib < sheet.free_bytes / (1 << 30) < sheet.memory_gib
    assert sheet.link_gb_s < {3: 0.985, 4: 1.969, 5: 3.938}[sheet.pcie[0]] * sheet.pcie[1]  # GB/s of a lane
    assert sheet.shared_kib[1] <= sheet.shared_kib[0] and sheet.l2_mib > 0


def test_all_names_are_of_one_gpu_and_at_least_the_cards_that_people_own_are_there():
    names = [name.lower() for sheet in sheets().values() for name in (sheet.name, sheet.torch_name, *sheet.other_names)]
    assert len(names) == len(set(names)) and len(sheets()) >= 25
    assert find_sheet("NVIDIA GeForce RTX 4070 SUPER").name == "RTX 4070 Super"
    assert named_sheet("geforce rtx 3060").multiprocessors == 28
    assert find_sheet("Tesla T4") is find_sheet("NVIDIA T4") is find_sheet("t4")
    assert find_sheet("A100-SXM4-40GB").memory_gib == 40
    assert find_sheet("NVIDIA GeForce RTX 4090 Laptop GPU") is None
    with pytest.raises(ArgumentError, match="no data sheet of a GPU 'RTX 4090 Laptop GPU'; there are RTX 2080 Ti, T4"):
        named_sheet("RTX 4090 Laptop GPU")


def test_rates_say_where_they_come_from_and_which_gpus_have_no_bf16():
    rates = vbrt.data_sheet("RTX 4060 Ti")
    assert (rates.link_gb_s, rates.memory_gb_s, rates.fp8, rates.source) == (
        12.5,
        288,
        True,
        "data sheet",
    )  # eight lanes
    assert rates_of_sheet(named_sheet("T4")).source == "data sheet, fp16 as its tensor cores have no bf16"
