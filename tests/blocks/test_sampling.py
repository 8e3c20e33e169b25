"""gumbel_max_sample against softmax, in the bulk and in the tails."""

import pytest
import torch

import vbrt
from tests.matrix import matrix
from vbrt import gumbel_max_sample
from vbrt.blocks import sampling
from vbrt.errors import ArgumentError

INF = float("inf")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def draws(logits, count, temperature=1.0, seed=0):
    return gumbel_max_sample(logits.expand(count, -1), temperature, generator(seed))


def chi_squared_z(counts, p):
    """How many standard deviations χ² lies above its mean; bins that expect fewer than 10 are merged into one."""
    expected = p * counts.sum()
    rare = expected < 10
    if rare.any():
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    freedom = len(counts) - 1
    chi2 = ((counts - expected) ** 2 / expected).sum().item()
    return (chi2 - freedom) / (2 * freedom) ** 0.5


@matrix(temperature=[0.3, 0.7, 1.0, 2.5], dtype=[torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_draws_follow_softmax(temperature, dtype):
    logits = (torch.randn(50, generator=generator(1)) * 2).to(dtype)
    drawn = draws(logits, 40_000, temperature)
    p = (logits.double() / temperature).softmax(-1)
    assert drawn.dtype == torch.int64
    assert chi_squared_z(drawn.bincount(minlength=50).double(), p) < 4


@pytest.mark.sample(1)
@pytest.mark.parametrize("temperature", [0.8, 1.0, 1.5])
def test_draws_follow_a_long_tailed_distribution(temperature):
    """Zipf: the thousandth token has a thousandth of the first one's probability, and they add up."""
    logits = -torch.arange(1, 1001).double().log()
    drawn = draws(logits, 10_000, temperature)
    p = (logits / temperature).softmax(-1)
    assert chi_squared_z(drawn.bincount(minlength=1000).double(), p) < 4


@pytest.mark.parametrize(
    ("vocabulary", "gap"), [(32_768, 13.6), pytest.param(131_072, 15.0, marks=pytest.mark.exhaustive)]
)
def test_a_large_flat_vocabulary_beside_one_likely_token(vocabulary, gap):
    """Tokens that are e^-gap as likely as the first: together 4 %, each 1.2e-6 or 3e-7."""
    logits = torch.full((vocabulary + 1,), -gap)
    logits[0] = 0
    rare = sum((draws(logits, 50, seed=seed) != 0).sum().item() for seed in range(20))
    share = vocabulary * torch.tensor(-gap).exp().item()
    expected = 1000 * share / (1 + share)
    assert abs(rare - expected) < 4 * expected**0.5


def test_noise_reaches_beyond_what_float32_uniforms_can(monkeypatch):
    """A token 20 nats below the rest is drawn when its exponential is 1e-10, as happens once in 1e10 times."""

    def exponential(self, generator=None):
        return self.copy_(torch.tensor([1.0, 1e-10]))

    monkeypatch.setattr(torch.Tensor, "exponential_", exponential)
    assert gumbel_max_sample(torch.tensor([0.0, -20.0])) == 1


def test_noise_of_exactly_zero_stays_finite(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda self, generator=None: self.zero_())
    logits = torch.tensor([0.0, 1.0, -INF])
    assert sampling._perturbed(logits, logits.amax(), 1.0, torch.zeros(3).double())[:2].isfinite().all()
    assert gumbel_max_sample(logits) == 1


def test_temperature_zero_is_argmax():
    logits = torch.randn(3, 5, 17, generator=generator())
    assert torch.equal(gumbel_max_sample(logits, 0), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e-300, 1e-6])
def test_a_tiny_temperature_does_not_overflow(temperature):
    logits = torch.tensor([[1e30, -1e30, 3.0], [-INF, 2.0, 1.0]])
    assert gumbel_max_sample(logits, temperature).tolist() == [0, 1]


@pytest.mark.parametrize("temperature", [0, 0.5, 1e6])
def test_masked_tokens_are_never_drawn(temperature):
    logits = torch.randn(20, generator=generator())
    logits[::2] = -INF
    assert (draws(logits, 5000, temperature) % 2 == 1).all()


def test_leading_dimensions_stay():
    logits = torch.randn(2, 3, 11)
    assert gumbel_max_sample(logits).shape == (2, 3)
    assert gumbel_max_sample(logits[0, 0]).shape == ()
    assert gumbel_max_sample(logits[:0]).shape == (0, 3)


def test_a_generator_makes_it_reproducible():
    logits = torch.zeros(100, 50)
    first = gumbel_max_sample(logits, generator=generator(3))
    assert torch.equal(first, gumbel_max_sample(logits, generator=generator(3)))
    assert not torch.equal(first, gumbel_max_sample(logits, generator=generator(4)))


def test_logits_are_left_as_they_are():
    logits = torch.randn(4, 9, dtype=torch.float64)
    before = logits.clone()
    gumbel_max_sample(logits)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [-1, -1e-9, float("nan"), INF, "hot"])
def test_an_impossible_temperature_is_named(temperature):
    with pytest.raises(ArgumentError, match="temperature = "):
        gumbel_max_sample(torch.zeros(3), temperature)


@pytest.mark.parametrize(("bad", "named"), [(float("nan"), "NaN"), (INF, r"\+inf"), (-INF, "nothing .* all masked")])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_row_without_a_distribution_is_named(bad, named, temperature):
    logits = torch.zeros(2, 3, 4)
    logits[1, 2] = bad
    with pytest.raises(ArgumentError, match=f"row 5 of 6 holds {named}"):
        gumbel_max_sample(logits, temperature)
    drawn = gumbel_max_sample(logits, temperature, check=False)
    assert drawn[1, 2] == -1
    assert (drawn.flatten()[:5] >= 0).all()


@pytest.mark.parametrize("logits", [torch.zeros(2, 0), torch.tensor(1.0), torch.zeros(3, dtype=torch.int64)])
def test_logits_of_another_kind_are_named(logits):
    with pytest.raises(vbrt.VBError, match="logits"):
        gumbel_max_sample(logits)


@pytest.mark.gpu
def test_a_gpu_draws_without_being_waited_for():
    logits = torch.zeros(4, 1000, device="cuda")
    logits[2] = -INF
    gumbel_max_sample(logits)
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = gumbel_max_sample(logits)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [index >= 0 for index in drawn.tolist()] == [True, True, False, True]
    with pytest.raises(ArgumentError, match="all masked"):
        gumbel_max_sample(logits, check=True)
