"""Launches are chosen as they were measured: `launch_choices.json` was written by the tables before they became one."""

import itertools
import json
from pathlib import Path

import pytest

from vbrt.kernels.cuda.launch_table import (
    RULES,
    Gpu,
    Launch,
    MmaLaunch,
    PersistentLaunch,
    WideLaunch,
    _mma_times,
    _persistent_times,
    _wide_times,
    are_few,
    choose,
    codes_for,
    fused_limit,
    grouped_mma_pays,
    grouped_mma_tokens,
    launch_for,
    pairs_are_alone,
    persistent_tiles,
    rates_of,
    rows_for,
    token_for,
    turned_for,
    wide_for,
)

SWEEP = json.loads((Path(__file__).parents[3] / "benchmarks" / "results" / "mma-nvidia-h200.json").read_text())
WRITTEN = json.loads(Path(__file__).with_name("launch_choices.json").read_text())
KERNELS = {"linear": 10, "narrow": 100, "gated": 40}  # fewest choices that are compared
_EVERY = 520  # up to here each number of tokens was asked for
PROCESSORS = 132
HOPPER = Gpu(9, PROCESSORS)
SWEPT = Gpu(8, PROCESSORS, bytes_us=4.425e6, clock_mhz=1782)  # an H200 taken for 8.0
OTHERS = {  # as torch describes them, rates of data sheets
    "A100": Gpu(8, 108, 164 << 10, 163 << 10, 1.4e6, 1270, 920, 920),
    "RTX 3060": Gpu(8, 28, 100 << 10, 99 << 10, 0.32e6, 1600, 230, 230),
    "RTX 4090": Gpu(8, 128, 100 << 10, 99 << 10, 0.9e6, 2270, 230, 230),
    "B200": Gpu(10, 148, 228 << 10, 227 << 10, 7.2e6, 1700, 920, 3700),
    "RTX 5090": Gpu(12, 170, 100 << 10, 99 << 10, 1.6e6, 2170, 230, 230),
    "H100 taken for 8.0": Gpu(8, 132, bytes_us=3.0e6, clock_mhz=1780),
}


def label(choice):
    names = {Launch: "narrow", WideLaunch: "wide", PersistentLaunch: "persistent"}
    return " ".join([names[type(choice)], *(str(int(v)) for v in choice)]) if choice else "decode"


def chosen(kernel, major, tokens, summands, n, columns):
    if kernel == "linear":
        return choose.__wrapped__(Gpu(major, PROCESSORS), tokens, summands, n, columns)
    name = "linear" if kernel == "narrow" else kernel  # of several weights together
    return launch_for.__wrapped__(name, Gpu(major, PROCESSORS), tokens, -(-n // 16), columns)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_shape_has_the_launch_that_it_was_measured_with(kernel):
    checked = 0
    for key, flat in WRITTEN["from_tokens_on"].items():
        written_for, major, summands, n, columns = key.split()
        starts = flat[::2] if written_for == kernel else []
        for at, tokens in enumerate(starts):
            last = starts[at + 1] - 1 if at + 1 < len(starts) else tokens
            for edge in {tokens, last if last < _EVERY else tokens}:
                got = chosen(kernel, int(major), edge, int(summands), int(n), int(columns))
                assert label(got) == WRITTEN["choices"][flat[2 * at + 1]], (key, edge)
                checked += 1
    assert checked >= KERNELS[kernel]


@pytest.mark.parametrize("kernel", ["table", "table wide"])
@pytest.mark.parametrize("processors", [28, 132])
def test_programs_of_few_tokens_by_rows_of_codes_are_resident_at_once_where_that_can_be(kernel, processors):
    warps = 65536 // (64 * 32)  # of 64 registers a thread that a multiprocessor has
    for row_tiles in (processors, 2 * processors, 3 * processors, 4 * processors, 8 * processors):
        launch = launch_for(kernel, Gpu(9, processors), 1, row_tiles, 64)
        assert launch.row_tiles == 1 and row_tiles * launch.k_warps <= warps * processors
        assert launch.k_warps == 16 or row_tiles * 2 * launch.k_warps > warps * processors


@pytest.mark.parametrize("major", [8, 9, 12])
def test_every_configuration_is_one_that_its_kernel_can_run(major):
    for tokens in range(1, fused_limit(major) + 1):
        for row_tiles, columns in itertools.product((1, 256, 513, 1280, 100_000), (32, 64)):
            wide = wide_for(major, tokens, row_tiles, columns)
            if wide is not None:
                assert wide.tokens in (16, 32, 64, 128) and wide.warps in (4, 8, 16)
                assert wide.ring >= 3 and wide.ring * (wide.warps * 32 * 36 + wide.tokens * 256) <= 227 << 10
    assert wide_for(major, fused_limit(major) + 1, 1, 1) is None


@pytest.mark.parametrize("kernel", RULES)
def test_a_table_ends_with_a_rule_for_every_shape_and_refuses_more_tokens(kernel):
    for rules in RULES[kernel].values():
        most = max(rule.tokens for rule in rules)
        assert rules[-1][:3] == (most, None, None)
        assert all(rule.launch.row_tiles in (1, 2, 4) and rule.launch.k_warps in (4, 8, 16) for rule in rules)
        with pytest.raises(ValueError, match=f"{kernel}: {most + 1} tokens; expected at most {most}"):
            launch_for(kernel, HOPPER, most + 1, 1, 1)


SHAPES = [(1024, 8), (1040, 9), (3072, 6), (4096, 32), (4096, 112), (6144, 32), (14336, 32), (28672, 64)]
COUNTS = (1, 17, 65, 100, 128, 200, 300, 777, 1000, 2048, 4096)


def test_every_launch_of_the_persistent_kernel_is_one_that_it_can_run():
    for processors, (n, columns), tokens in itertools.product((132, 114, 78), SHAPES, COUNTS):
        launches = [launch for _, launch in _persistent_times(Gpu(9, processors), tokens, n, columns, True)]
        assert len({launch.tokens for launch in launches}) == min(8, -(-tokens // 32))
        for cut, block, programs, ordered in launches:
            assert ordered
            tiles, pairs = persistent_tiles(tokens, n, block), -(-columns // 2)
            assert block % 32 == 0 and 32 <= block <= 256 and 0 <= cut <= tiles
            if programs:  # each tile by as many of them, each with a range of K
                assert cut == tiles and programs % tiles == 0 and 2 * tiles <= programs <= processors
                assert programs // tiles <= pairs


def test_every_launch_of_the_wide_kernel_is_one_that_it_can_run():
    for processors, (n, columns), tokens in itertools.product((132, 78), SHAPES, COUNTS):
        for _, wide in _wide_times(Gpu(9, processors), tokens, n, columns):
            assert 3 <= wide.ring and wide.ring * (wide.warps * 32 * 36 + wide.tokens * 256) <= 227 << 10
            programs = -(-n // (16 * wide.warps)) * -(-tokens // wide.tokens)
            assert programs * wide.splits <= processors or wide[1:3] == (16, 1)
            assert 2 * wide.splits <= columns or wide.splits == 1
    assert not list(_wide_times(Gpu(9, PROCESSORS), 513, 4096, 32))


def test_tiles_of_the_persistent_kernel_fit_the_tokens():
    gpu = HOPPER
    for (n, columns), tokens in itertools.product(SHAPES, range(256, 1025, 37)):
        launch = choose(gpu, tokens, 1, n, columns)
        if isinstance(launch, PersistentLaunch):
            padded = -(-tokens // launch.tokens) * launch.tokens
            assert padded <= 1.34 * tokens, (n, columns, tokens, launch)


def test_gradients_of_hundreds_of_tokens_are_multiplied_by_a_kernel_and_others_by_the_decoded_weight():
    for k, rows in ((4096, 32), (4096, 112), (14336, 32)):
        launch = turned_for(Gpu(9, 132), 1024, k, rows)
        assert isinstance(launch, PersistentLaunch) and not launch.ordered
        assert turned_for(Gpu(9, 132), 8192, k, rows) is None
        assert not any(turned_for(Gpu(major, 132), 1024, k, rows) for major in (8, 10, 12))


def test_the_persistent_kernel_is_for_its_gpus_and_numbers_of_tokens():
    def is_persistent(major, tokens, n):
        return isinstance(choose(Gpu(major, PROCESSORS), tokens, 1, n, 32), PersistentLaunch)

    assert is_persistent(9, 4096, 14336) and not is_persistent(9, 4097, 14336) and not is_persistent(9, 0, 14336)
    assert not any(is_persistent(major, 2048, 4096) for major in (8, 10, 12))
    assert codes_for(HOPPER, "table", 0, 14336, 32) is None
    assert codes_for(HOPPER, "table", 100, 13824, 40) is not None
    assert codes_for(HOPPER, "table", 4096, 6144, 32) is None  # decoding is a small part then


@pytest.mark.parametrize(
    ("tokens", "n", "k", "warps", "splits", "ring"),
    [
        (64, 14336, 4096, 8, 1, 8),
        (64, 4096, 14336, 8, 4, 7),
        (64, 28672, 8192, 16, 1, 4),
        (32, 14336, 4096, 4, 1, 8),
        (64, 8192, 2048, 4, 1, 8),
        (64, 8192, 8192, 8, 2, 8),  # rows short enough for no split
        (64, 18944, 3584, 8, 1, 4),
        (32, 18944, 3584, 8, 1, 4),
        (32, 28672, 8192, 8, 1, 4),  # more than stand in a row
        (32, 4096, 14336, 8, 4, 7),
        (32, 4096, 4096, 4, 4, 8),
        (16, 4096, 14336, 8, 4, 7),
        (9, 28672, 8192, 16, 1, 6),
    ],
)
def test_programs_that_would_wait_for_others_to_end_take_less_memory(tokens, n, k, warps, splits, ring):
    assert wide_for(9, tokens, n // 16, k // 128)[1:] == (warps, splits, ring)


def test_at_sixteen_tokens_all_programs_run_at_the_same_time():
    for n, k, rows, most in ((14336, 4096, 2, 4), (18944, 3584, 4, 3), (24576, 3584, 4, 3), (27648, 5120, 4, 4)):
        assert wide_for(9, 16, n // 16, k // 128) is None
        assert launch_for("linear", HOPPER, 16, n // 16, k // 128).row_tiles == rows and n / 16 / rows <= 132 * most


def test_routed_experts_of_few_tokens_have_the_launches_that_they_were_measured_with():
    measured = {  # (pairs, experts, row tiles, columns, matrices)
        "qwen3 up": {
            (8, 128, 48, 16, 2): (1, 1, 8),
            (128, 128, 48, 16, 2): (1, 1, 4),
            (512, 128, 48, 16, 2): (1, 1, 4),
        },
        "qwen3 down": {(128, 128, 128, 6, 1): (2, 1, 2), (512, 128, 128, 6, 1): (2, 1, 2)},
        "gpt-oss up": {
            (4, 32, 360, 23, 1): (2, 1, 4),
            (64, 32, 360, 23, 1): (2, 1, 4),
            (256, 32, 360, 23, 1): (2, 2, 4),
        },
        "mixtral up": {(2, 8, 896, 32, 2): (1, 1, 4), (32, 8, 896, 32, 2): (1, 1, 4), (128, 8, 896, 32, 2): (1, 4, 4)},
        "mixtral down": {(32, 8, 256, 112, 1): (2, 1, 8), (128, 8, 256, 112, 1): (2, 2, 4)},
    }
    for cases in measured.values():
        assert {case: rows_for(*case) for case in cases} == cases
    assert [token_for(8, 6), token_for(4, 23), token_for(2, 112)] == [(8, 1, 16, 1), (4, 1, 16, 1), (2, 2, 16, 2)]
    assert [pairs_are_alone(*case) for case in ((1, 2, 8), (4, 32, 128), (5, 40, 128), (2, 4, 8))] == [1, 1, 0, 0]


@pytest.mark.parametrize(("k", "columns"), [*itertools.product((1, 2, 3, 6, 10, 16, 22), (1, 6, 112))])
def test_experts_side_by_side_share_the_warps_evenly(k, columns):
    launch = token_for(k, columns)
    assert launch.k_warps % launch.side_by_side == 0 and launch.side_by_side >= min(k, 16)


# --- GPUs without wgmma -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OTHERS)
def test_other_gpus_take_the_kernel_with_mma_sync_between_few_tokens_and_those_that_the_vendor_multiplies_faster(name):
    gpu = OTHERS[name]
    for n, columns in SHAPES[3:]:
        choices = {tokens: choose(gpu, tokens, 1, n, columns) for tokens in (1, 16, 17, 64, 100_000)}
        assert isinstance(choices[1], Launch) and isinstance(choices[16], Launch)
        assert isinstance(choices[17], MmaLaunch) and isinstance(choices[64], MmaLaunch)
    assert name in ("RTX 3060", "RTX 4090", "RTX 5090") or choices[100_000] is None


@pytest.mark.parametrize("name", OTHERS)
def test_every_launch_of_the_kernel_with_mma_sync_is_one_that_it_can_run(name):
    gpu = OTHERS[name]
    for (n, columns), tokens, summands in itertools.product(SHAPES, COUNTS, (1, 2, 3)):
        launches = [launch for us, launch in _mma_times(gpu, tokens, summands, n, columns) if us > 2]
        assert launches
        for launch in launches:
            assert launch.shared_bytes(288) <= gpu.most_shared_bytes
            assert launch.splits == 1 or columns >= 4 * launch.splits


def test_of_rows_of_codes_nearly_every_choice_is_the_fastest_that_was_measured():
    rows = SWEEP["formats"]
    kinds = {"nf4": "table", "quantile": "table", "mxint8": "int8", "levels32-float16": "levels"}
    for gpu, of in ((SWEPT, rows), (HOPPER, [row for row in rows if kinds[row["format"]] != "table"])):
        ratios = []
        for row in of:
            us = {name: t for name, t in row["us"].items() if name == "decoded" or " ring " in name}
            launch = codes_for(gpu, kinds[row["format"]], row["tokens"], row["n"], row["k"] // 128)
            name = launch and f"{launch.tokens}x{launch.warps}x{launch.row_tiles}/{launch.splits} ring {launch.ring}"
            ratios.append(us[name or "decoded"] / min(us.values()))
        assert max(ratios) < 1.25 and sum(ratio > 1.1 for ratio in ratios) <= 1 < 40 < len(ratios)


def test_experts_take_the_blocks_that_were_the_fastest():
    for row in SWEEP["grouped"]:
        pairs = int(row["mean_pairs"] * 64)
        us = {
            t: sum(row["us"][f"{part} {t}x4x2/1 ring {ring}"] for part in ("up", "down"))
            for t, ring in ((32, 4), (64, 3))
        }
        assert us[grouped_mma_tokens(SWEPT, pairs, 64)] < 1.01 * min(us.values())
        if "few" in row["us"]:
            few_pays = row["us"]["few"] < 1.15 * min(us.values())
            assert are_few(pairs, 64, SWEPT) is few_pays
        assert row["us"]["decoded"] > row["us"]["taken"] and grouped_mma_pays(SWEPT._replace(major=10), pairs, 64)


def test_fewer_multiprocessors_and_less_bandwidth_take_longer():
    fast, slow = OTHERS["RTX 4090"], OTHERS["RTX 3060"]
    for n, columns in SHAPES:
        for tokens in COUNTS[1:]:
            times = [min(us for us, _ in _mma_times(gpu, tokens, 1, n, columns)) for gpu in (fast, slow)]
            assert times[0] < times[1], (n, columns, tokens)


def test_rules_of_rows_are_in_proportion_to_the_multiprocessors():
    small = Gpu(8, PROCESSORS // 4)
    for row_tiles in (66, 128, 264, 400):
        assert launch_for("linear", small, 8, row_tiles, 32) == launch_for("linear", HOPPER, 8, 4 * row_tiles, 32)


def test_rates_are_known_for_every_capability_and_half_for_geforce_cards():
    assert rates_of((9, 0), "NVIDIA H100 80GB HBM3") == (1000, 2048)
    assert rates_of((8, 6), "NVIDIA GeForce RTX 3060") == (230, 230)
    assert rates_of((8, 6), "NVIDIA RTX A6000") == (460, 460)
    assert rates_of((13, 0), "one of the future") == rates_of((12, 1), "NVIDIA GB10")
