"""Other people's libraries: each module here needs one that vbrt itself does without."""

__all__: list[str] = []
