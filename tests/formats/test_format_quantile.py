import gc

import pytest
import torch

from vbrt.errors import FormatError
from vbrt.formats import Separation, get_format
from vbrt.formats.quantile import magnitude_quantiles


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantiles_of_16_bit_weights_are_exact(dtype):
    w = gaussian(77, 130).to(dtype)
    magnitude = w.abs().flatten().sort().values.float()
    p = [0.0, 0.001, 0.25, 0.5, 0.9, 0.999, 1.0]
    rank = [max(1, -int(-(q * w.numel()) // 1)) for q in p]
    assert torch.equal(magnitude_quantiles(w, p), magnitude[torch.tensor(rank) - 1])


def test_quantiles_of_fp32_weights_are_within_bf16_rounding():
    w = gaussian(300, 200)
    expected = torch.quantile(w.abs().flatten(), torch.tensor([0.1, 0.5, 0.9]))
    torch.testing.assert_close(magnitude_quantiles(w, [0.1, 0.5, 0.9]), expected, rtol=1 / 128, atol=0)
    torch.testing.assert_close(magnitude_quantiles(w.T, [0.1, 0.5, 0.9]), expected, rtol=1 / 128, atol=0)


def test_quantiles_work_above_two_to_the_24_elements():
    w = torch.zeros(1, dtype=torch.bfloat16).expand(4097, 4097)
    assert magnitude_quantiles(w, [0.5]).tolist() == [0.0]
    assert magnitude_quantiles(w.float(), [0.5]).tolist() == [0.0]


def test_the_codebook_follows_the_layer():
    fmt = get_format("quantile")
    uniform, peaked = fmt.fit(torch.rand(64, 256) * 2 - 1), fmt.fit(gaussian(64, 256) ** 3)
    for levels in (uniform, peaked):
        assert levels.shape == (8,) and levels[-1] == 1 and (levels.diff() > 0).all() and levels[0] >= 0
    assert (uniform > peaked)[:-1].all()


def test_a_fitted_codebook_beats_nf4_on_other_shapes_than_gaussian():
    w = torch.rand(128, 512, generator=torch.Generator().manual_seed(0)) * 2 - 1

    def noise(name):
        fmt = get_format(name)
        return (w - fmt.decode(fmt.encode(w), (128, 512), w.dtype)).square().sum()

    assert noise("quantile") < 0.7 * noise("nf4")


def test_constant_and_zero_weights_have_a_codebook():
    fmt = get_format("quantile")
    for w in (torch.zeros(2, 70), torch.full((2, 70), -3.0), torch.eye(64) * 5):
        decoded = fmt.decode(fmt.encode(w), tuple(w.shape), torch.float32)
        torch.testing.assert_close(decoded, w, rtol=0.04, atol=0.04 * 5)


def test_the_first_encode_fits_and_the_next_ones_hit():
    engine = Separation()
    w = gaussian(16, 128)
    first = engine.encode(w)
    assert engine.counters.refreshes == 1 and engine.counters.hits == 0
    second = engine.encode(w)
    assert engine.counters.refreshes == 1 and engine.counters.hits == 1
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_an_unchanged_weight_is_never_refitted():
    engine = Separation(refresh_every=3)
    w = gaussian(16, 128)
    engine.encode(w)
    for _ in range(10):
        engine.tick()
        engine.encode(w)
    assert engine.counters.refreshes == 1 and engine.counters.hits == 10


@pytest.mark.parametrize("change", ["in place", "replaced"])
def test_a_changed_weight_is_refitted_when_the_forwards_have_passed(change):
    engine = Separation(refresh_every=3)
    w = gaussian(16, 128)
    engine.encode(w)
    w = w.mul_(1.01) if change == "in place" else w * 1.01
    for expected in (1, 1, 2, 2, 2, 3):
        engine.tick()
        engine.encode(w)
        assert engine.counters.refreshes == expected
        if expected == 2:
            w.mul_(1.01)  # the count of forwards starts anew at each fit


def test_clipping_refreshes_early():
    engine = Separation(refresh_every=1_000_000)
    engine.encode(torch.rand(32, 256, generator=torch.Generator().manual_seed(0)) * 2 - 1)
    heavy_tailed = gaussian(32, 256, seed=1) ** 5
    assert engine.counters.refreshes == 1
    engine.encode(heavy_tailed)
    assert engine.counters.refreshes == 2
    assert engine.counters.clipped_share < 1e-3
    engine.encode(heavy_tailed)
    assert engine.counters.refreshes == 2 and engine.counters.hits == 1


def test_a_small_change_keeps_the_codebook():
    engine = Separation(refresh_every=1_000_000)
    engine.encode(gaussian(32, 256))
    engine.encode(gaussian(32, 256, seed=1) * 3)
    assert engine.counters.refreshes == 1 and engine.counters.hits == 1


def test_fewer_levels_are_used_when_asked_for():
    engine = Separation(levels=3)
    coarse = engine.encode(gaussian(16, 128))
    assert len(coarse["levels"].unique()) == 3


def test_cached_tensors_are_detached_and_do_not_pile_up():
    engine = Separation(refresh_every=1)
    w = torch.nn.Parameter(gaussian(16, 128))

    def alive():
        gc.collect()
        return sum(type(o) in (torch.Tensor, torch.nn.Parameter) for o in gc.get_objects())

    engine.encode(w)
    before = alive()
    for _ in range(20):
        with torch.no_grad():
            w.mul_(1.001)
        engine.tick()
        engine.encode(w)
    assert engine.counters.refreshes == 21 and alive() == before
    assert not engine._codebook.requires_grad and engine._codebook.numel() == 8


def test_inference_tensors_are_encoded():
    engine = Separation(refresh_every=1)
    with torch.inference_mode():
        w = gaussian(4, 64)
    engine.encode(w)
    engine.tick()
    engine.encode(w)
    assert engine.counters.hits == 1


def test_a_refused_weight_leaves_the_codebook():
    engine = Separation(refresh_every=1)
    engine.encode(gaussian(4, 64))
    engine.tick()
    with pytest.raises(FormatError, match="NaN"):
        engine.encode(torch.full((4, 64), float("nan")))
    assert engine.counters.refreshes == 1


@pytest.mark.parametrize("wrong", [{"levels": 1}, {"levels": 9}, {"refresh_every": 0}])
def test_engine_settings_out_of_range_are_refused(wrong):
    with pytest.raises(FormatError, match="expected"):
        Separation(**wrong)
