"""The benchmark of experts that a CPU computes where they lie, on tiny ones."""

from scripts.missed_rates import measured


def test_every_rate_is_that_of_some_pages():
    rates = measured(hidden=128, inner=64, groups=2, times=1)
    assert list(rates) == ["1 token, rows", "1 token, tiles", "4 tokens, rows", "4 tokens, tiles", "copied"]
    assert min(rates.values()) > 0
