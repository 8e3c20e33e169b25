"""Integrations: each module here needs a library that vbrt itself does without."""

__all__: list[str] = []
