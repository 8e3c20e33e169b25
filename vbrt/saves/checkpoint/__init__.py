"""Training checkpoints: fp32 weights, optimizer state and counters; readable with any tiers, and by plain torch."""

__all__: list[str] = []
