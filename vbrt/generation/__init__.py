"""Decoding: captured steps, static and quantized KV caches, kernel fusion, and speculation for transformers'
`generate`."""

__all__: list[str] = []
