"""Entry points: `wrap`, `load`, and the wrapper that proxies its model."""

__all__: list[str] = []
