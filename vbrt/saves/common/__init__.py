"""Parts that saves and checkpoints share: the manifest, renaming, compatibility of a model with files, assignment of
tensors.
"""

__all__: list[str] = []
