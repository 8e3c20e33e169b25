"""Decoding: what `generate` does beside transformers."""

__all__: list[str] = []
