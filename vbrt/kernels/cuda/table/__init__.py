"""Weights whose codes are looked up in a table: nf4 and quantile."""

__all__: list[str] = []
